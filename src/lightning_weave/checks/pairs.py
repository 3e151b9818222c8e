"""Checks of one pair: can its models follow the student's tokens, to the end of a turn?"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Cache
from lightning_weave.cache.shifts import valid_positions
from lightning_weave.checks.findings import Bounds, Finding, Level, listed, percent, visible
from lightning_weave.models.scorer import ScoreRow
from lightning_weave.models.weights import untrained_special_tokens
from lightning_weave.run import ROLES, Role, Run
from lightning_weave.stages.alignment import Alignment, masked_aliases
from lightning_weave.stages.prompts import planned_prompts
from lightning_weave.store import RowIndex
from lightning_weave.tokens import TokenMap, suggest_alias, unmapped_candidates
from lightning_weave.types import FINISH_REASONS, Rollouts

SAMPLE = 256  # rows: enough for shares to a few percent, quick for any cache
STOP = FINISH_REASONS.index("stop")
FEW_SURVIVE = 0.5  # share of positions below which a pair teaches little for its cost
MASKED_SHARE = 0.05  # of finished rows, above which it is worth a warning


@dataclass(frozen=True)
class CheckedRow:
    """One trajectory. Without a cached reference its tokens are the only candidates known."""

    prompt: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    candidate_ids_TC: NDArray[np.int32]
    finished: bool


@dataclass(frozen=True, eq=False)  # hashed by identity
class CheckedRows:
    """A few trajectories, spread evenly over what there is."""

    kind: Literal["candidates", "rollouts", "prompts", "nothing"]
    rows: list[CheckedRow]
    description: str  # what was looked at, or why there is nothing

    @property
    def is_cached(self) -> bool:
        return self.kind in ("candidates", "rollouts")


@lru_cache(maxsize=1)  # for one preflight
def take_sample(run: Run) -> CheckedRows:
    """Take cached candidates, else rollouts, else prompts with their answers."""
    rollout = run.stage("rollout")
    rows = []
    if not rollout.complete:
        prompts = planned_prompts(run)[0]
        for number in spread(len(prompts), SAMPLE):
            answer = prompts[number].answer or ""
            ids = run.student.tokenizer(answer, add_special_tokens=False)["input_ids"] if answer else []
            ids_T = np.array([*prompts[number].token_ids, *ids], dtype=np.int32)
            rows.append(CheckedRow(number, ids_T[:1], ids_T[1:], ids_T[1:, None], finished=False))
        return CheckedRows("prompts", rows, f"{len(rows)} prompts; rollout/ is {rollout.state()}")
    has_candidates = run.stage("reference").complete
    if has_candidates:
        cache = Cache(rollout, run.stage("reference"))
        blocks = (cache.block([row]) for row in spread(len(cache), SAMPLE))
        cached = [(block.rollouts, block.candidates.ids.flat) for block in blocks]
    else:
        cached = [(row, row.response_ids.flat[:, None]) for row in rollout_rows(run, SAMPLE)]
    for row, ids_TC in cached:
        if len(ids_TC):
            finished = int(row.finish_R[0]) == STOP
            rows.append(CheckedRow(int(row.prompt_R[0]), row.prompt_ids[0], row.response_ids[0], ids_TC, finished))
    kind: Literal["candidates", "rollouts"] = "candidates" if has_candidates else "rollouts"
    return CheckedRows(kind, rows, f"{len(rows)} cached trajectories")


def rollout_rows(run: Run, most: int) -> Iterator[Rollouts]:
    """Read some of the sampled rows, one at a time, spread evenly."""
    stage = run.stage("rollout")
    index = RowIndex.of(stage.require())
    for shard, place in map(index.find, spread(len(index), most)):
        yield stage.open(Rollouts, shard).read(place, place + 1)


def spread(count: int, most: int) -> list[int]:
    """Choose up to `most` numbers below `count`, evenly.

    >>> spread(3, 10), spread(100, 4)
    ([0, 1, 2], [0, 25, 50, 75])
    """
    return [number * count // min(count, most) for number in range(min(count, most))]


def open_alignment(run: Run, anchor: str, role: Role, cached: bool) -> Alignment:
    """Align one side of an anchor with the student; without cached prompts, after the student's own."""
    scored = run.side(anchor, role)
    if not cached:
        scored = scored.with_student_prompts()
    masked: frozenset[int] = frozenset()
    if scored.untrained == "mask":
        masked = masked_aliases(scored, untrained_special_tokens(scored.checkpoint))
    return Alignment.open(run, scored, scored.checkpoint.context_limit, masked)


def find_same_model(run: Run, anchor: str, verdict: Level = "error") -> Iterator[Finding]:
    """Report a pair whose two sides are the same model in the same context."""
    if not run.has_shift(anchor):
        text = "post and pre are the same model, so its shift is zero everywhere"
        yield Finding(f"anchors.{anchor}", "checkpoints", verdict, text, judged=True)


class AlignedSample(NamedTuple):
    """A sample of rows as both sides of an anchor read it."""

    tokens: TokenMap
    rows: list[tuple[ScoreRow, ScoreRow]]  # post, pre
    mapped: list[NDArray[np.bool_]]  # of each row: the candidates that both sides have
    valid_P: NDArray[np.bool_]  # positions of all rows where the pair has a shift


@lru_cache  # for one preflight
def align_sample(run: Run, anchor: str, sample: CheckedRows) -> AlignedSample:
    """Let both sides of an anchor read a sample of rows."""
    post, pre = (open_alignment(run, anchor, role, sample.is_cached) for role in ROLES)
    rows = []
    for row in sample.rows:
        asked = row.prompt, row.prompt_ids, row.response_ids, row.candidate_ids_TC
        rows.append((post.align(*asked), pre.align(*asked)))
    mapped = [of_post.mapped_TC & of_pre.mapped_TC for of_post, of_pre in rows]
    validity = run.recipe.anchors[anchor].validity
    valid_P = np.concatenate([valid_positions(one, validity) for one in mapped] or [np.zeros(0, bool)])
    return AlignedSample(post.tokens, rows, mapped, valid_P)


def judge_positions(run: Run, anchor: str, sample: CheckedRows) -> Finding:
    """Judge the share of positions where a pair has a shift; without the student's candidates it is an upper bound."""
    about = f"anchors.{anchor}"
    valid_P = align_sample(run, anchor, sample).valid_P
    if not len(valid_P):
        return Finding(about, "positions", "note", f"not measured: {sample.description}")
    share = float(valid_P.mean())
    bounds = Bounds(*run.recipe.checks.levels("surviving", FEW_SURVIVE), below=True)
    verdict = bounds.judge(share, len(valid_P))
    most = "" if sample.kind == "candidates" else "at most "
    text = f"{most}{percent(share)} of {len(valid_P):,} positions survive ({sample.description})"
    if verdict == "error":
        text += ". Training cannot use this pair: its tokenizer must be closer to the student's"
    elif verdict == "ok" and share < 1:
        verdict = "note"
    figures = {"share": share, "positions": len(valid_P), "measured_on": sample.kind}
    return Finding(about, "positions", verdict, text, figures, judged=True, bounds=bounds)


@dataclass(frozen=True)
class SuggestedAlias:
    """Aliases with which an anchor can score the student's end of turn."""

    aliases: dict[str, str]  # its own, and the new one
    is_untrained: bool  # the row of the new one looks untrained in the pre-anchor, and the recipe has to keep it

    @property
    def toml(self) -> str:
        """The lines for the table of the anchor."""
        pairs = (" = ".join(json.dumps(text, ensure_ascii=False) for text in pair) for pair in self.aliases.items())
        return f"aliases = {{ {', '.join(pairs)} }}" + '\nuntrained = "keep"' * self.is_untrained

    def __str__(self) -> str:
        caution = "; but that row looks untrained in the pre-anchor, so its shift is arbitrary" * self.is_untrained
        return self.toml.replace("\n", " and ") + caution


def find_alias(run: Run, anchor: str, sampled: Sequence[int] = ()) -> SuggestedAlias | None:
    """Find an alias that supervises stopping: of the stop token that was sampled most, or of the tokenizer's own."""
    section = run.recipe.anchors[anchor]
    student = run.student.tokenizer
    other = run.anchor(anchor, "post").tokenizer
    aliased = {student.convert_tokens_to_ids(text) for text in section.aliases}
    new = suggest_alias(student, other, [id for id in _stops(run, sampled) if id not in aliased])
    if new is None or new[1] in section.aliases.values():
        return None
    untrained = section.untrained is None and other.eos_token_id in untrained_special_tokens(run.anchor(anchor, "pre"))
    return SuggestedAlias(section.aliases | dict([new]), untrained)


def _stops(run: Run, sampled: Sequence[int] = ()) -> list[int]:
    """The stop tokens, by how often they were sampled, then the tokenizer's own first."""
    drawn = Counter(sampled)
    end = run.student.tokenizer.eos_token_id
    return sorted(run.student.stop_ids, key=lambda id: (-drawn[id], id != end, id))


def judge_stops(run: Run, anchor: str) -> Finding:
    """Before anything is sampled: does the student's end of turn have a counterpart?"""
    about = f"anchors.{anchor}"
    student = run.student.tokenizer
    tokens = TokenMap.between(student, run.anchor(anchor, "post").tokenizer, run.recipe.anchors[anchor].aliases)
    stops = _stops(run)
    mapped = tokens.candidate_map(torch.tensor(stops))[1].tolist()
    alone = [visible(student.convert_ids_to_tokens(id)) for id, found in zip(stops, mapped, strict=True) if not found]
    if not alone:
        return Finding(about, "end of turn", "ok", "every stop token of the student has a counterpart")
    text = f"{listed(alone)} has no counterpart: decisions with it among the candidates are masked"
    alias = find_alias(run, anchor)
    if alias is None:
        return Finding(about, "end of turn", "note", text, {"stops": alone})
    text += f". To supervise stopping, add to [{about}]: {alias}"
    return Finding(about, "end of turn", "note" if mapped[0] else "warning", text, {"alias": alias.toml})


def judge_ends(run: Run, anchor: str, ends: Sequence[tuple[Any, NDArray, NDArray]]) -> Finding:
    """Report how many end-of-turn decisions a pair cannot supervise, what masks them, and the alias that helps.

    Of the last decision of each finished row: the sampled token, the candidates, and which of them the pair maps.
    """
    about = f"anchors.{anchor}"
    section = run.recipe.anchors[anchor]
    if not ends:
        text = "no sampled row ended with a stop token, so there is nothing to learn about stopping"
        return Finding(about, "end of turn", "note", text)
    sampled_R, ids_RC, mapped_RC = (np.array(column) for column in zip(*ends, strict=True))

    def is_masked(mapped_RC: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which decisions have no shift; candidate by candidate, the sampled one must have it."""
        if section.validity == "position":
            return ~valid_positions(mapped_RC, section.validity)
        return ~np.any(mapped_RC & (ids_RC == sampled_R[:, None]), axis=1)

    masked_R = is_masked(mapped_RC)
    share = float(masked_R.mean())
    figures: dict[str, Any] = {"masked": share, "finished": len(ends)}
    text = f"{percent(share)} of the end-of-turn decisions of {len(ends):,} finished rows are masked"
    bounds = Bounds(MASKED_SHARE, False)
    if share <= MASKED_SHARE:
        return Finding(about, "end of turn", "note" if share else "ok", text, figures, bounds=bounds)
    text += ": stopping is not supervised there"
    student = run.student.tokenizer
    other = run.anchor(anchor, "post").tokenizer
    aliases = section.aliases
    if alias := find_alias(run, anchor, sampled_R[masked_R].tolist()):
        aliases = alias.aliases
        aliased_RC = TokenMap.between(student, other, aliases).candidate_map(torch.from_numpy(ids_RC))[1].numpy()
        # Where not one candidate is mapped the context cannot be read, and no alias changes that.
        share = float((masked_R & is_masked(aliased_RC & mapped_RC.any(axis=1, keepdims=True))).mean())
        figures |= {"alias": alias.toml, "masked_with_alias": share}
        text += f". Add to [{about}]: {alias} (then {percent(share)} are masked)"
    if share > MASKED_SHARE:
        breaking = unmapped_candidates(TokenMap.between(student, other, aliases), torch.from_numpy(ids_RC[masked_R]))
        figures["breaking"] = [visible(token) for token, _ in breaking]
        if breaking:
            words = listed(f"'{token}'" for token in figures["breaking"])
            text += f'. These candidates mask them: {words}; validity = "candidate" would mask only them'
        else:
            text += '. An untrained = "mask", a context limit or a token without spelling masks them'
    return Finding(about, "end of turn", "warning", text, figures, bounds=bounds)
