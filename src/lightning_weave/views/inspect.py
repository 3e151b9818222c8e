"""`lweave inspect`: one decision in the cache, from behaviour through shifts to targets."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from lightning_weave.api import as_html
from lightning_weave.cache.block import Cache
from lightning_weave.checks.findings import listed, visible
from lightning_weave.errors import InputError
from lightning_weave.prompts import read_prompts
from lightning_weave.report.survey import NO_END_OF_TURN, NOT_ONE_TOKEN, Reading
from lightning_weave.report.tables import align
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair, open_cache
from lightning_weave.tokens.spelling import Spelling
from lightning_weave.train.data import compose
from lightning_weave.types import FINISH_REASONS, Scores

SHOWN_BEFORE = 400  # characters of context on a terminal; all of it with --json


@dataclass(frozen=True)
class Decision:
    """One position of one trajectory. Lists run over the candidates; behaviour and targets end with `other`."""

    row: int
    rows: int
    position: int
    positions: int
    prompt: str
    response: int
    finish: str
    before: str
    sampled: str
    tokens: list[str]
    ids: list[int]
    behaviour: list[float]  # log-probs
    models: dict[str, list[float | None]]  # log-probs; None where the candidate has no counterpart
    shifts: dict[str, list[float | None]]
    valid: dict[str, bool]
    masked: dict[str, str]  # why an anchor has no shift here
    targets: dict[str, list[float] | None]  # log-probs; None where the composition is masked
    missing: list[str]  # anchors that are not scored

    def _repr_html_(self) -> str:
        return as_html(partial(show, self))


def run(run: Run, row: int, position: int, console: Console, as_json: bool = False) -> Decision:
    """Print one decision."""
    decision = look(run, row, position)
    if as_json:
        print(json.dumps(asdict(decision), indent=1))
    else:
        show(decision, console)
    return decision


def look(run: Run, row: int, position: int) -> Decision:
    """Read one decision from the cache, and compose it as training would (finite-candidate-target)."""
    pairs = [anchor_pair(run, name) for name in run.recipe.anchors]
    scored = {pair.name: pair for pair in pairs if all(stage.complete for stage in pair.stages)}
    cache = Cache(run.stage("rollout"), run.stage("reference"), list(scored.values()))
    _check_range("row", row, len(cache), "this run")
    block = cache.block([row])
    _check_range("position", position, len(block.sampled_P), f"row {row}")
    spelling = Spelling.from_tokenizer(run.student.tokenizer)

    def text(ids: list[int]) -> str:
        """Spell tokens; bytes that are not valid characters are escaped."""
        spelt = (spelling.bytes_of.get(id, spelling.strings.get(id, f"<id {id}>").encode()) for id in ids)
        return b"".join(spelt).decode(errors="backslashreplace")

    def known(values_C: NDArray, mapped_C: NDArray[np.bool_]) -> list[float | None]:
        return [float(value) if mapped else None for value, mapped in zip(values_C, mapped_C, strict=True)]

    models = {}
    shard, place = cache.rows.find(row)
    for side, name in run.score_names.items():
        stage = run.stage("score", side)
        if stage.complete:
            scores = stage.open(Scores, shard).read(place, place + 1)
            models[name] = known(scores.logp.flat[position], scores.mapped.flat[position])
    targets: dict[str, list[float] | None] = {}
    for name, composition in run.recipe.written.items():
        alpha = run.alpha(name)
        # The legs of a sequence have targets; the sequence has none.
        if composition.used.keys() <= scored.keys() and alpha is not None and composition.method != "sequential":
            composed = open_cache(run, name)
            batch = compose(composed.block([row]), composed.weights, alpha)
            here = batch.log_q_NO[batch.places_N == position]
            targets[name] = here[0].tolist() if len(here) else None
    rollouts = block.rollouts
    candidates = block.candidates
    ids = candidates.ids.flat[position].tolist()
    masked = {}
    for k, name in enumerate(scored):
        if not block.valid_KP[k, position]:
            reason = Reading.from_run(run, name).why_masked(block, k, run.student.stop_ids)[position]
            masked[name] = str(reason).removeprefix("masked: ")
            if reason in (NO_END_OF_TURN, NOT_ONE_TOKEN):
                unmapped = [id for id, mapped in zip(ids, block.mapped_KPC[k, position], strict=True) if not mapped]
                masked[name] += f" ({listed(repr(visible(text([id]))) for id in unmapped)})"
    return Decision(
        row=row,
        rows=len(cache),
        position=position,
        positions=len(block.sampled_P),
        prompt=read_prompts(run.prompts_file)[int(rollouts.prompt_R[0])].id,
        response=int(rollouts.response_R[0]),
        finish=FINISH_REASONS[int(rollouts.finish_R[0])],
        before=text([*rollouts.prompt_ids.flat.tolist(), *block.sampled_P[:position].tolist()]),
        sampled=text([int(block.sampled_P[position])]),
        tokens=[text([id]) for id in ids],
        ids=ids,
        behaviour=[*candidates.logp.flat[position].tolist(), float(candidates.other_logp.flat[position])],
        models=models,
        shifts={k: known(block.r_KPC[n, position], block.mapped_KPC[n, position]) for n, k in enumerate(scored)},
        valid={name: bool(block.valid_KP[n, position]) for n, name in enumerate(scored)},
        masked=masked,
        targets=targets,
        missing=[pair.name for pair in pairs if pair.name not in scored],
    )


def _check_range(what: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        choice = f"{what}s 0 to {count - 1}" if count else f"no {what}s"
        raise InputError(f"{what} {number}: {where} has {choice}")


def show(decision: Decision, console: Console) -> None:
    """Print a decision; characters of the data that a terminal would interpret are escaped."""
    before = decision.before[-SHOWN_BEFORE:]
    cut = "..." if len(before) < len(decision.before) else ""
    lines = [
        f"row {decision.row} of {decision.rows}: prompt {visible(decision.prompt)}, response {decision.response}, "
        f"finished by {decision.finish}",
        f"position {decision.position} of {decision.positions}, sampled '{visible(decision.sampled)}', after:",
        cut + visible(before),
    ]

    def cells(values: Sequence[float | None], probabilities: bool = False) -> list[str]:
        return ["-" if one is None else f"{exp(one):.4f}" if probabilities else f"{one:+.3f}" for one in values]

    def title(kind: str, name: str, is_valid: bool) -> str:
        return f"{kind} {name}" if is_valid else f"{kind} {name} (masked)"

    words = [f"{'*' if token == decision.sampled else ' '}'{visible(token)}'" for token in decision.tokens]
    candidates = {"id": [*map(str, decision.ids)], "behaviour": cells(decision.behaviour, probabilities=True)}
    candidates |= {f"log p {name}": cells(logp) for name, logp in decision.models.items()}
    shifts = {title("shift", name, decision.valid[name]): cells(r) for name, r in decision.shifts.items()}
    targets = {title("target", name, q is not None): cells(q or [], True) for name, q in decision.targets.items()}
    for table in (candidates, shifts, targets):
        if table:  # however wide: a terminal may break a line, but no figure is cut off
            columns = [["candidate", *words, " other"]]
            columns += [[name, *column, *["-"] * (len(words) + 1 - len(column))] for name, column in table.items()]
            lines += ["", *align(list(zip(*columns, strict=True)))]
    lines += [f"anchors.{anchor} is masked here: {why}" for anchor, why in decision.masked.items()]
    lines += [f"anchors.{anchor} is not scored yet" for anchor in decision.missing]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
