"""The trajectories that checks look at: cached ones if there are any, else prompts as the student's tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Cache
from lightning_weave.run import Run
from lightning_weave.stages.prompts import planned_prompts
from lightning_weave.store import RowIndex
from lightning_weave.types import FINISH_REASONS, Rollouts

SAMPLE = 256  # rows: enough for shares to a few percent, quick for any cache
STOP = FINISH_REASONS.index("stop")


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
