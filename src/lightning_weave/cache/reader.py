"""Read cached trajectories row by row from memory-mapped shards; what is held never grows with the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.sources import Source
from lightning_weave.errors import CorruptData, Mismatch
from lightning_weave.store import RowIndex, Shard, Stage
from lightning_weave.types import Candidates, Rollouts, Scores

OPEN_SHARDS = 256  # maps kept open, over all stages


@dataclass(frozen=True)
class Row:
    """One trajectory with everything cached about it. T decisions, C candidates, K anchors."""

    number: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    candidate_ids_TC: NDArray[np.int32]
    logp_TC: NDArray[np.float32]
    other_logp_T: NDArray[np.float32]
    sampled_logp_T: NDArray[np.float32]
    r_KTC: NDArray[np.float32]
    valid_KT: NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        """Count prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)


class Rows(Protocol):
    """Trajectories with shifts, by row number: cached, or made a moment ago."""

    @property
    def weights(self) -> list[float]: ...

    def length(self, number: int) -> int: ...

    def read(self, number: int) -> Row: ...


class Cache:
    """All trajectories of a run with the shifts of the given sources, addressed by row number.

    `dealt_R` gives each row to one source alone, at full weight (the data mixture).
    """

    def __init__(
        self,
        rollouts: Stage,
        reference: Stage,
        sources: Sequence[Source],
        dealt_R: NDArray[np.int64] | None = None,
    ) -> None:
        self.rollouts, self.reference, self.sources = rollouts, reference, tuple(sources)
        self.dealt_R = dealt_R
        for stage in (rollouts, *(stage for source in sources for stage in source.stages)):
            stage.require()
        self.rows = RowIndex.of(reference.require())
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> list[float]:
        """What each source's shift counts."""
        return [source.weight for source in self.sources] if self.dealt_R is None else [1.0]

    def length(self, number: int) -> int:
        """Tokens of one row, prompt and response."""
        shard, place = self.rows.find(number)
        rollouts = self._open(self.rollouts.folder, shard, Rollouts).read(place, place + 1)
        return len(rollouts.prompt_ids.flat) + len(rollouts.response_ids.flat)

    def read(self, number: int) -> Row:
        """Read one row from every stage, checking CRCs and that all of them mean the same trajectory."""
        shard, place = self.rows.find(number)
        rollouts = self._open(self.rollouts.folder, shard, Rollouts).read(place, place + 1)
        candidates = self._open(self.reference.folder, shard, Candidates).read(place, place + 1)
        trajectory = rollouts.trajectories()[0]
        self._check_same(trajectory, candidates.trajectory_R[0], self.reference, number)
        said = (candidates.logp, candidates.other_logp, candidates.sampled_logp)
        check_finite([values.flat for values in said], self.reference, shard, f"row {number}")
        shape_TC = candidates.logp[0].shape
        sources = self.sources if self.dealt_R is None else [self.sources[self.dealt_R[number]]]
        r_KTC = np.zeros((len(sources), *shape_TC), np.float32)
        valid_KT = np.zeros((len(sources), shape_TC[0]), np.bool_)
        for index, source in enumerate(sources):
            scores = [self._scores(stage, shard, place, number, trajectory) for stage in source.stages]
            r_KTC[index], valid_KT[index] = source.shift(candidates, scores)
        return Row(
            number,
            rollouts.prompt_ids[0],
            rollouts.response_ids[0],
            candidates.ids[0],
            candidates.logp[0],
            candidates.other_logp[0],
            candidates.sampled_logp[0],
            r_KTC,
            valid_KT,
        )

    def _scores(self, stage: Stage, shard: int, place: int, number: int, trajectory: np.uint32) -> Scores:
        scores = self._open(stage.folder, shard, Scores).read(place, place + 1)
        self._check_same(trajectory, scores.trajectory_R[0], stage, number)
        check_finite([scores.logp.flat[scores.mapped.flat], scores.mass.flat], stage, shard, f"row {number}")
        return scores

    def _check_same(self, expected: np.uint32, found: np.uint32, stage: Stage, number: int) -> None:
        if expected != found:
            raise Mismatch(
                f"{stage.folder}: row {number} belongs to another trajectory. Make it again with: {stage.step.command}"
            )

    def _open_shard(self, folder: object, shard: int, kind: type) -> Shard:
        stages = [self.rollouts, self.reference, *(stage for source in self.sources for stage in source.stages)]
        return next(stage for stage in stages if stage.folder == folder).open(kind, shard)


def check_finite(values: Sequence[NDArray[np.float32]], stage: Stage, shard: int, what: str) -> None:
    """Stop at a number gone bad: a score of -inf is no zero probability, which finite logits never give."""
    if not all(np.isfinite(each).all() for each in values):
        path = stage.shard_path(shard)
        raise CorruptData(
            f"{path}: {what} has a log-probability that is not finite. Remove the shard (rm {path}) and make it "
            f"again with: {stage.step.command}"
        )
