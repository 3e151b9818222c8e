"""`lweave inspect`: one decision as everything cached sees it, from behaviour through shifts to targets."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import exp

import numpy as np
from numpy.typing import NDArray
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from lightning_weave.cache.reader import Cache
from lightning_weave.checks.findings import listed, visible
from lightning_weave.errors import InputError
from lightning_weave.prompts import read_prompts
from lightning_weave.records import as_html
from lightning_weave.runs.caches import anchor_pair, open_cache
from lightning_weave.runs.steps import Steps
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
    targets: dict[str, list[float] | None]  # log-probs; None where the composition is masked
    missing: list[str]  # anchors that are not scored

    def _repr_html_(self) -> str:
        return as_html(partial(show, self))


def run(steps: Steps, row: int, position: int, console: Console, as_json: bool = False) -> Decision:
    """Print one decision."""
    decision = look(steps, row, position)
    if as_json:
        print(json.dumps(asdict(decision), indent=1))
    else:
        show(decision, console)
    return decision


def look(steps: Steps, row: int, position: int) -> Decision:
    """Read one decision from the cache, and compose it as training would."""
    pairs = [anchor_pair(steps, name) for name in steps.recipe.anchors]
    scored = [pair for pair in pairs if all(stage.state() == "done" for stage in pair.stages)]
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), scored)
    _check_range("row", row, len(cache), "this run")
    block = cache.block([row])
    _check_range("position", position, len(block.sampled_P), f"row {row}")
    rollouts = block.rollouts
    candidates = block.candidates
    spelling = Spelling.of(steps.student.tokenizer)
    before = [*rollouts.prompt_ids.flat.tolist(), *block.sampled_P[:position].tolist()]
    ids = candidates.ids.flat[position].tolist()
    return Decision(
        row=row,
        rows=len(cache),
        position=position,
        positions=len(block.sampled_P),
        prompt=read_prompts(steps.prompts_file)[int(rollouts.prompt_R[0])].id,
        response=int(rollouts.response_R[0]),
        finish=FINISH_REASONS[int(rollouts.finish_R[0])],
        before=_text(spelling, before),
        sampled=_text(spelling, [int(block.sampled_P[position])]),
        tokens=[_text(spelling, [id]) for id in ids],
        ids=ids,
        behaviour=[*candidates.logp.flat[position].tolist(), float(candidates.other_logp.flat[position])],
        models=_models(steps, cache.rows.find(row), position),
        shifts={
            pair.name: _with_gaps(block.r_KPC[k, position], block.mapped_KPC[k, position])
            for k, pair in enumerate(scored)
        },
        valid={pair.name: bool(block.valid_KP[k, position]) for k, pair in enumerate(scored)},
        targets=_targets(steps, row, position, [pair.name for pair in scored]),
        missing=[pair.name for pair in pairs if pair not in scored],
    )


def _check_range(what: str, number: int, count: int, where: str) -> None:
    if not 0 <= number < count:
        choice = f"{what}s 0 to {count - 1}" if count else f"no {what}s"
        raise InputError(f"{what} {number}: {where} has {choice}")


def _models(steps: Steps, at: tuple[int, int], position: int) -> dict[str, list[float | None]]:
    """Read each scored model's own log-probs of one decision; `at` is the row's shard and place in it."""
    shard, place = at
    models = {}
    for scored, name in steps.score_names.items():
        stage = steps.store.stage(steps.score(scored))
        if stage.state() == "done":
            scores = stage.open(Scores, shard).read(place, place + 1)
            models[name] = _with_gaps(scores.logp.flat[position], scores.mapped.flat[position])
    return models


def _with_gaps(values_C: NDArray, mapped_C: NDArray[np.bool_]) -> list[float | None]:
    return [float(value) if mapped else None for value, mapped in zip(values_C, mapped_C, strict=True)]


def _targets(steps: Steps, row: int, position: int, scored: list[str]) -> dict[str, list[float] | None]:
    """Tilt the behaviour by each composition whose anchors are scored (finite-candidate-target).

    A sequence has no target of its own, only its legs have.
    """
    targets: dict[str, list[float] | None] = {}
    for name, composition in steps.recipe.compositions.items():
        alpha = steps.alpha(name)
        known = all(anchor in scored for anchor in composition.used)
        if known and alpha is not None and composition.method != "sequential":
            cache = open_cache(steps, name)
            batch = compose(cache.block([row]), cache.weights, alpha)
            here = batch.log_q_NO[batch.places_N == position]
            targets[name] = here[0].tolist() if len(here) else None
    return targets


def _text(spelling: Spelling, ids: list[int]) -> str:
    """Spell tokens; bytes that are no characters are escaped."""
    spelt = (spelling.bytes_of.get(id, spelling.strings.get(id, f"<id {id}>").encode()) for id in ids)
    return b"".join(spelt).decode(errors="backslashreplace")


def show(decision: Decision, console: Console) -> None:
    """Print a decision so that no character of the data is obeyed by the terminal."""
    before = decision.before[-SHOWN_BEFORE:]
    cut = "..." if len(before) < len(decision.before) else ""
    lines = [
        f"row {decision.row} of {decision.rows}: prompt {visible(decision.prompt)}, response {decision.response}, "
        f"finished by {decision.finish}",
        f"position {decision.position} of {decision.positions}, sampled '{visible(decision.sampled)}', after:",
        cut + visible(before),
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    words = [f"{'*' if token == decision.sampled else ' '}'{visible(token)}'" for token in decision.tokens]
    candidates = {"id": [*map(str, decision.ids)], "behaviour": _cells(decision.behaviour, probabilities=True)}
    models = {f"log p {name}": _cells(logp) for name, logp in decision.models.items()}
    shifts = {f"shift {_masked(name, decision.valid[name])}": _cells(r) for name, r in decision.shifts.items()}
    targets = {
        f"target {_masked(name, q is not None)}": _cells(q or [], probabilities=True)
        for name, q in decision.targets.items()
    }
    for columns in ({**candidates, **models}, shifts, targets):
        if columns:
            for line in _table({"candidate": [*words, " other"], **columns}):
                console.print(Text(line), soft_wrap=True)
    for anchor in decision.shifts:
        if not decision.valid[anchor]:
            console.print(Text(f"anchors.{anchor} is masked here: {why_masked(decision, anchor)}"), soft_wrap=True)
    for anchor in decision.missing:
        console.print(Text(f"anchors.{anchor} is not scored yet"))


def why_masked(decision: Decision, anchor: str) -> str:
    """Say why an anchor has no say in a decision."""
    unmapped = [token for token, r in zip(decision.tokens, decision.shifts[anchor], strict=True) if r is None]
    if not unmapped:
        return "a rule of the anchor leaves it out (only_above, mass_floor)"
    if len(unmapped) == len(decision.tokens):
        return "it has no counterpart for any candidate, or cannot read what comes before"
    return f"it has no single token for {listed(repr(visible(token)) for token in unmapped)}"


def _masked(name: str, valid: bool) -> str:
    return name if valid else f"{name} (masked)"


def _table(columns: dict[str, list[str]]) -> Iterator[str]:
    """Lay out columns, however wide: a terminal may break a line, but no figure is cut."""
    rows = len(columns["candidate"])
    cells = [[name, *column, *["-"] * (rows - len(column))] for name, column in columns.items()]
    widths = [max(map(cell_len, column)) for column in cells]
    yield ""
    for line in zip(*cells, strict=True):
        first, *others = (" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=True))
        yield line[0] + first + "".join(f"  {gap}{cell}" for gap, cell in zip(others, line[1:], strict=True))


def _cells(values: Sequence[float | None], probabilities: bool = False) -> list[str]:
    return ["-" if value is None else f"{exp(value):.4f}" if probabilities else f"{value:+.3f}" for value in values]
