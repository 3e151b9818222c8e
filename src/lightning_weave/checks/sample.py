"""The trajectories that checks look at: cached ones if there are any, else prompts as the student's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.reader import Cache
from lightning_weave.prompts import build_prompts
from lightning_weave.runs.prompts import own_trajectories
from lightning_weave.runs.steps import Steps
from lightning_weave.store import RowIndex
from lightning_weave.types import FINISH_REASONS, Prompt, Rollouts

ROWS = 256  # of a sample: enough for shares to a few percent, quick for any cache
STOP = FINISH_REASONS.index("stop")


@dataclass(frozen=True)
class CheckedRow:
    """One trajectory. Without a cached reference the tokens themselves are the only candidates known."""

    prompt: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    candidate_ids_TC: NDArray[np.int32]
    finished: bool


@dataclass(frozen=True)
class CheckedRows:
    """A few trajectories, spread evenly over what there is."""

    kind: Literal["candidates", "rollouts", "prompts", "nothing"]
    rows: list[CheckedRow]
    description: str  # what was looked at, or why there is nothing

    @property
    def positions(self) -> int:
        return sum(len(row.response_ids) for row in self.rows)


def take_sample(steps: Steps) -> CheckedRows:
    """Look for the best that there is: cached candidates, then rollouts, then prompts."""
    if (steps.store.run_dir / "rollout" / "manifest.json").exists():  # else no checkpoint need be hashed
        rollout = steps.store.stage(steps.rollout)
        reference = steps.store.stage(steps.reference)
        if rollout.state() == "done":
            cached = reference.state() == "done"
            rows = [row for row in _cached_rows(steps, cached) if len(row.response_ids)]
            return CheckedRows("candidates" if cached else "rollouts", rows, f"{len(rows)} cached trajectories")
        why = f"rollout/ is {rollout.state()}"
    else:
        why = "nothing is cached yet"
    prompts = some_prompts(steps)
    tokenizer = steps.student.tokenizer
    rows = [_prompt_row(number, prompt, tokenizer) for number, prompt in enumerate(prompts)]
    return CheckedRows("prompts", rows, f"{len(rows)} prompts; {why}")


def some_prompts(steps: Steps) -> list[Prompt]:
    """Read the prompts of the run, or the first of what they would be made from."""
    tokenizer = steps.student.tokenizer
    if steps.recipe.rollout.from_ is not None:
        return [group.as_prompt(tokenizer) for group in own_trajectories(steps)][:ROWS]
    settings = steps.recipe.prompts.model_dump()
    take = min(settings.pop("take") or ROWS, ROWS)
    return build_prompts(tokenizer, **settings, take=take)[0]


def spread(count: int, most: int) -> list[int]:
    """Choose up to `most` numbers below `count`, evenly.

    >>> spread(3, 10), spread(100, 4)
    ([0, 1, 2], [0, 25, 50, 75])
    """
    return [number * count // min(count, most) for number in range(min(count, most))]


def rollout_rows(steps: Steps, most: int) -> Iterator[Rollouts]:
    """Read some of the sampled rows, one at a time, spread evenly."""
    stage = steps.store.stage(steps.rollout)
    index = RowIndex.of(stage.require())
    for shard, place in map(index.find, spread(len(index), most)):
        yield stage.open(Rollouts, shard).read(place, place + 1)


def _cached_rows(steps: Steps, with_candidates: bool) -> Iterator[CheckedRow]:
    if with_candidates:
        cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference))
        blocks = (cache.block([row]) for row in spread(len(cache), ROWS))
        rows_and_ids = ((block.rollouts, block.candidates.ids.flat) for block in blocks)
    else:
        rows_and_ids = ((rows, rows.response_ids.flat[:, None]) for rows in rollout_rows(steps, ROWS))
    for rows, ids_TC in rows_and_ids:
        finished = int(rows.finish_R[0]) == STOP
        yield CheckedRow(int(rows.prompt_R[0]), rows.prompt_ids[0], rows.response_ids[0], ids_TC, finished)


def _prompt_row(number: int, prompt: Prompt, tokenizer: Any) -> CheckedRow:
    answer = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"] if prompt.answer else []
    ids = np.array([*prompt.token_ids, *answer], dtype=np.int32)
    return CheckedRow(number, ids[:1], ids[1:], ids[1:, None], finished=False)
