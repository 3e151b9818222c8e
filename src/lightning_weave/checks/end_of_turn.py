"""The end of a turn: often masked across tokenizers by the paper's rule, and with it all supervision of stopping."""

import json
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.reader import Cache
from lightning_weave.cache.sources import valid_positions
from lightning_weave.checks.findings import Bounds, Finding, listed, percent, visible
from lightning_weave.checks.sample import STOP, spread
from lightning_weave.models.untrained import untrained_specials
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps
from lightning_weave.tokens import TokenMap, breaking_tokens, suggest_alias

MASKED_SHARE = 0.05  # of finished rows, above which it is worth a warning
ENDS = 2048  # rows that are looked at


@dataclass(frozen=True)
class Ends:
    """The last decision of each finished row: what was drawn, what could have been, and what the pair can map."""

    sampled_R: NDArray[np.int32]
    candidate_ids_RC: NDArray[np.int32]
    mapped_RC: NDArray[np.bool_]

    @classmethod
    def of(cls, sampled: Sequence[int], candidates: Sequence[NDArray], mapped: Sequence[NDArray], count: int) -> "Ends":
        """Stack what was collected row by row; there may be nothing."""
        shape = (len(sampled), count)
        return cls(
            np.array(sampled, np.int32),
            np.array(candidates, np.int32).reshape(shape),
            np.array(mapped, bool).reshape(shape),
        )

    def supervised(self, validity: str) -> NDArray[np.bool_]:
        """Say which decisions carry a shift; candidate by candidate, it is the sampled one that must."""
        if validity == "position":
            return valid_positions(self.mapped_RC, validity)
        return np.any(self.mapped_RC & (self.candidate_ids_RC == self.sampled_R[:, None]), axis=1)

    def only(self, wanted_R: NDArray[np.bool_]) -> "Ends":
        """Take some of them."""
        return Ends(self.sampled_R[wanted_R], self.candidate_ids_RC[wanted_R], self.mapped_RC[wanted_R])


def scored_ends(steps: Steps, anchor: str) -> Ends:
    """Read the ends of finished rows and where a scored pair is valid."""
    pair = anchor_pair(steps, anchor)
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair])
    sampled = []
    candidates = []
    mapped = []
    for row in spread(len(cache), ENDS):
        block = cache.block([row])
        if block.rollouts.finish_R[0] == STOP and len(block.sampled_P):
            sampled.append(block.sampled_P[-1])
            candidates.append(block.candidates.ids.flat[-1])
            mapped.append(block.mapped_KPC[0, -1])
    return Ends.of(sampled, candidates, mapped, steps.recipe.reference.candidates)


def warn_if_masked(steps: Steps, anchor: str) -> Finding | None:
    """Judge a pair whose two models are scored; None where they are not."""
    if any(steps.store.stage(step).state() != "done" for step in steps.scores_of(anchor)):
        return None
    return judge_ends(steps, anchor, scored_ends(steps, anchor))


def judge_ends(steps: Steps, anchor: str, ends: Ends) -> Finding:
    """Say how many end-of-turn decisions a pair cannot supervise, and the line that changes it."""
    about = f"anchors.{anchor}"
    check = "end of turn"
    finished = len(ends.sampled_R)
    if not finished:
        return Finding(
            about, check, "note", "no sampled row ended on its own, so there is nothing to learn about stopping"
        )
    supervised_R = ends.supervised(steps.recipe.anchors[anchor].validity)
    share = 1 - float(supervised_R.mean())
    figures: dict[str, Any] = {"masked": share, "finished": finished}
    text = f"{percent(share)} of the end-of-turn decisions of {finished:,} finished rows are masked"
    bounds = Bounds(MASKED_SHARE, False)
    if share <= MASKED_SHARE:
        return Finding(about, check, "note" if share else "ok", text, figures, bounds=bounds)
    advice, details = _advice(steps, anchor, ends.only(~supervised_R), finished)
    text = f"{text}: stopping is not supervised there. {advice}"
    return Finding(about, check, "warning", text, figures | details, bounds=bounds)


def judge_stops(steps: Steps, anchor: str) -> Finding:
    """Say the same before anything is sampled: does the student's end of turn have a counterpart?"""
    student = steps.student.tokenizer
    tokens = TokenMap.between(student, steps.anchor(anchor, "post").tokenizer, steps.recipe.anchors[anchor].aliases)
    stops = _ordered_stops(steps, student, [])
    _, mapped = tokens.candidate_map(torch.tensor(stops))
    alone = [
        visible(student.convert_ids_to_tokens(id))
        for id, found in zip(stops, mapped.tolist(), strict=True)
        if not found
    ]
    about = f"anchors.{anchor}"
    check = "end of turn"
    if not alone:
        return Finding(about, check, "ok", "every stop token of the student has a counterpart")
    line, figures = alias_line(steps, anchor, [])
    text = f"{listed(alone)} has no counterpart: decisions with it among the candidates are masked"
    if line is None:
        return Finding(about, check, "note", text, {"stops": alone})
    verdict: Any = "warning" if not mapped[0] else "note"
    return Finding(
        about, check, verdict, f"{text}. To supervise stopping, add to [anchors.{anchor}]: {_in_words(line)}", figures
    )


def _advice(steps: Steps, anchor: str, masked: Ends, finished: int) -> tuple[str, dict[str, Any]]:
    """Find what masks these decisions, and whether an alias would help."""
    section = steps.recipe.anchors[anchor]
    ids_RC = torch.from_numpy(masked.candidate_ids_RC)
    student = steps.student.tokenizer
    other = steps.anchor(anchor, "post").tokenizer
    tokens = TokenMap.between(student, other, section.aliases)
    line, figures = alias_line(steps, anchor, masked.sampled_R.tolist())
    advice = ""
    if line is not None:
        tokens = TokenMap.between(student, other, tomllib.loads(line)["aliases"])
        # Where not one candidate is mapped, it is the context that cannot be read: no alias changes that.
        readable_R1 = masked.mapped_RC.any(axis=1, keepdims=True)
        after = replace(masked, mapped_RC=tokens.candidate_map(ids_RC)[1].numpy() & readable_R1)
        share = int((~after.supervised(section.validity)).sum()) / finished
        figures["masked_with_alias"] = share
        advice = f"Add to [anchors.{anchor}]: {_in_words(line)} (then {percent(share)} are masked). "
        if share <= MASKED_SHARE:
            return advice.rstrip(), figures
    figures["breaking"] = breaking = [visible(text) for text, _ in breaking_tokens(tokens, ids_RC)]
    if breaking:
        words = listed(f"'{text}'" for text in breaking)
        return f'{advice}These candidates mask them: {words}; validity = "candidate" would mask only them', figures
    return f'{advice}An untrained = "mask", a context limit or a token without spelling masks them', figures


def alias_line(steps: Steps, anchor: str, sampled: list[int]) -> tuple[str | None, dict[str, Any]]:
    """Write the recipe line that supervises stopping, with what the pre-anchor's untrained row makes necessary."""
    section = steps.recipe.anchors[anchor]
    student = steps.student.tokenizer
    other = steps.anchor(anchor, "post").tokenizer
    aliased = {id for text in section.aliases for id in [student.convert_tokens_to_ids(text)]}
    stops = [id for id in _ordered_stops(steps, student, sampled) if id not in aliased]
    suggested = suggest_alias(student, other, stops)
    counterparts = set(section.aliases.values())
    if suggested is None or set(tomllib.loads(suggested)["aliases"].values()) & counterparts:
        return None, {}
    aliases = section.aliases | tomllib.loads(suggested)["aliases"]
    pairs = (
        f"{json.dumps(one, ensure_ascii=False)} = {json.dumps(two, ensure_ascii=False)}" for one, two in aliases.items()
    )
    line = f"aliases = {{ {', '.join(pairs)} }}"
    if section.untrained is None and other.eos_token_id in untrained_specials(steps.anchor(anchor, "pre")):
        line += '\nuntrained = "keep"'
    return line, {"alias": line}


def _in_words(line: str) -> str:
    """Write the lines of a recipe as one line, with a caution where one applies."""
    caution = "; but that row looks untrained in the pre-anchor, so its shift is arbitrary" if "\n" in line else ""
    return line.replace("\n", " and ") + caution


def _ordered_stops(steps: Steps, student: Any, sampled: list[int]) -> list[int]:
    """Order the stop tokens by how often they were drawn, the tokenizer's own first among equals."""
    drawn = Counter(sampled)
    return sorted(steps.student.stop_ids, key=lambda id: (-drawn[id], id != student.eos_token_id, id))
