"""The trajectories that checks look at: cached ones if there are any, else prompts as the student's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_weave.pipeline.prompts import own_trajectories
from lightning_weave.prompts import build_prompts, read_prompts
from lightning_weave.runs.alignment import student_tokenizer
from lightning_weave.runs.steps import Steps
from lightning_weave.store import RowIndex
from lightning_weave.types import FINISH_REASONS, Candidates, Prompt, Rollouts

ROWS = 256  # of a sample: enough for shares to a few percent, quick for any cache
STOP = FINISH_REASONS.index("stop")


@dataclass(frozen=True)
class SampleRow:
    """One trajectory. Without a cached reference the tokens themselves are the only candidates known."""

    prompt: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    candidate_ids_TC: NDArray[np.int32]
    finished: bool


@dataclass(frozen=True)
class Sample:
    """A few trajectories, spread evenly over what there is."""

    kind: Literal["candidates", "rollouts", "prompts", "nothing"]
    rows: list[SampleRow]
    said: str  # what was looked at, or why there is nothing

    @property
    def positions(self) -> int:
        return sum(len(row.response_ids) for row in self.rows)


def take_sample(steps: Steps) -> Sample:
    """Look for the best that there is: cached candidates, then rollouts, then prompts."""
    if (steps.store.run_dir / "rollout" / "manifest.json").exists():  # else no checkpoint need be hashed
        rollout, reference = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
        if rollout.state() == "done":
            cached = reference.state() == "done"
            rows = [row for row in _cached_rows(steps, cached) if len(row.response_ids)]
            return Sample("candidates" if cached else "rollouts", rows, f"{len(rows)} cached trajectories")
        why = f"rollout/ is {rollout.state()}"
    else:
        why = "nothing is cached yet"
    prompts = some_prompts(steps)
    tokenizer = student_tokenizer(steps)
    rows = [_prompt_row(number, prompt, tokenizer) for number, prompt in enumerate(prompts)]
    return Sample("prompts", rows, f"{len(rows)} prompts; {why}")


def some_prompts(steps: Steps) -> list[Prompt]:
    """Read the prompts of the run, or the first of what they would be made from."""
    tokenizer = student_tokenizer(steps)
    if steps.recipe.rollout.from_ is not None:
        return [group.as_prompt(tokenizer) for group in own_trajectories(steps, tokenizer)][:ROWS]
    settings = steps.recipe.prompts.model_dump()
    take = min(settings.pop("take") or ROWS, ROWS)
    return build_prompts(tokenizer, **settings, take=take)[0]


def spread(count: int, most: int) -> list[int]:
    """Choose up to `most` numbers below `count`, evenly.

    >>> spread(3, 10), spread(100, 4)
    ([0, 1, 2], [0, 25, 50, 75])
    """
    return [number * count // min(count, most) for number in range(min(count, most))]


def places(steps: Steps, most: int) -> Iterator[tuple[int, int]]:
    """Choose rows of the cached rollouts by shard and place in it."""
    index = RowIndex.of(steps.store.stage(steps.rollout).require())
    return map(index.find, spread(len(index), most))


def _cached_rows(steps: Steps, with_candidates: bool) -> Iterator[SampleRow]:
    rollout, reference = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
    for shard, place in places(steps, ROWS):
        rows = rollout.open(Rollouts, shard).read(place, place + 1)
        ids = rows.response_ids[0]
        if with_candidates:
            candidates_TC = reference.open(Candidates, shard).read(place, place + 1).ids[0]
        else:
            candidates_TC = ids[:, None]
        finished = int(rows.finish_R[0]) == STOP
        yield SampleRow(int(rows.prompt_R[0]), rows.prompt_ids[0], ids, candidates_TC, finished)


def _prompt_row(number: int, prompt: Prompt, tokenizer: Any) -> SampleRow:
    answer = tokenizer(prompt.answer, add_special_tokens=False)["input_ids"] if prompt.answer else []
    ids = np.array([*prompt.token_ids, *answer], dtype=np.int32)
    return SampleRow(number, ids[:1], ids[1:], ids[1:, None], finished=False)


def prompts_by_line(steps: Steps) -> list[Prompt]:
    """Read prompts.jsonl of the run."""
    return read_prompts(steps.store.stage(steps.prompts).folder / "prompts.jsonl")
