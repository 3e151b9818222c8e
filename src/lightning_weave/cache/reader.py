"""Read cached trajectories from memory-mapped shards; what is held never grows with the cache."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.shifts import Shift, ShiftSource
from lightning_weave.errors import CorruptData, InputError, Mismatch
from lightning_weave.store import RowIndex, Shard, Stage
from lightning_weave.types import Candidates, Rollouts, Scores

OPEN_SHARDS = 256  # maps kept open, over all stages
T = TypeVar("T")


class Cache:
    """All trajectories of a run with the shifts of the given sources, addressed by row number.

    `weight_RK` weighs the sources row by row: by tag, or one source alone (the data mixture). `proposal` has
    the same candidates under the model that sampled, where that is not the student of the reference.
    """

    def __init__(
        self,
        rollouts: Stage,
        reference: Stage,
        sources: Sequence[ShiftSource] = (),
        weight_RK: NDArray[np.float32] | None = None,
        proposal: Stage | None = None,
    ) -> None:
        self.rollouts = rollouts
        self.reference = reference
        self.sources = tuple(sources)
        self.weight_RK = weight_RK
        self.proposal = proposal
        own = (rollouts, reference) if proposal is None else (rollouts, reference, proposal)
        stages = (*own, *(stage for source in sources for stage in source.stages))
        for stage in stages:
            stage.require()
        self.rows = RowIndex.of(reference.require())
        by_folder = {stage.folder: stage for stage in stages}
        self._open = lru_cache(OPEN_SHARDS)(lambda folder, kind, shard: by_folder[folder].open(kind, shard))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> list[float]:
        """The weight of each source; 1 where rows have their own weights."""
        return [source.weight if self.weight_RK is None else 1.0 for source in self.sources]

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    def length(self, number: int) -> int:
        """Tokens of one row, prompt and response."""
        shard, place = self.rows.find(number)
        rollouts = self._open(self.rollouts.folder, Rollouts, shard).read(place, place + 1)
        return len(rollouts.prompt_ids.flat) + len(rollouts.response_ids.flat)

    def block(self, rows: Sequence[int]) -> Block:
        """Read rows from every stage, checking CRCs, that all stages mean the same trajectories, and every number."""
        if not len(rows):  # a rank without rows: an empty block with the right shapes
            return self.block([0]).pick([])
        for row in (min(rows), max(rows)):
            if not 0 <= row < len(self):
                raise InputError(f"row {row}: this run has rows 0 to {len(self) - 1}")
        return Block.concatenate([self._read(span) for span in self._spans(rows)])

    def shard_rows(self, shard: int) -> range:
        """The rows of one shard."""
        return range(int(self.rows.starts[shard]), int(self.rows.starts[shard + 1]))

    def _spans(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Group rows that follow one another and can be read together."""

        def key(item: tuple[int, int]) -> tuple[int, int]:
            place, number = item
            return self.rows.find(number)[0], number - place  # constant while the numbers are consecutive

        return ([number for _, number in group] for _, group in groupby(enumerate(rows), key=key))

    def _read(self, span: list[int]) -> Block:
        rollouts = self._part(self.rollouts, Rollouts, span)
        trajectory_R = rollouts.trajectories()
        candidates = self._candidates(self.reference, trajectory_R, span)
        proposal = None if self.proposal is None else self._candidates(self.proposal, trajectory_R, span)
        behaviour = candidates if proposal is None else proposal  # whose entropy a rule may ask for
        shifts = [self._shift(source, behaviour, trajectory_R, span) for source in self.sources]
        block = Block.from_shifts(span, rollouts, candidates, shifts, proposal)
        return block if self.weight_RK is None else block.with_row_weights(self.weight_RK[span])

    def _candidates(self, stage: Stage, trajectory_R: NDArray[np.uint32], span: list[int]) -> Candidates:
        candidates = self._part(stage, Candidates, span)
        self._check_same(trajectory_R, candidates.trajectory_R, stage, span)
        for values in (candidates.logp, candidates.other_logp, candidates.sampled_logp):
            self._check_finite(values.flat, candidates.ids.offsets, stage, span)
        return candidates

    def _shift(
        self, source: ShiftSource, candidates: Candidates, trajectory_R: NDArray[np.uint32], span: list[int]
    ) -> Shift:
        parts = []
        for stage in source.stages:
            scores = self._part(stage, Scores, span)
            self._check_same(trajectory_R, scores.trajectory_R, stage, span)
            # Where a candidate is not mapped its number means nothing, so it is not checked.
            mapped_logp = np.where(scores.mapped.flat, scores.logp.flat, 0)
            self._check_finite(mapped_logp, scores.logp.offsets, stage, span)
            self._check_finite(scores.mass.flat, scores.mass.offsets, stage, span)
            parts.append(scores)
        return source.shift(candidates, parts)

    def _part(self, stage: Stage, kind: type[T], span: list[int]) -> T:
        shard, place = self.rows.find(span[0])
        opened: Shard[T] = self._open(stage.folder, kind, shard)  # type: ignore[arg-type]
        return opened.read(place, place + len(span))

    def _check_same(self, expected_R: NDArray, found_R: NDArray, stage: Stage, span: list[int]) -> None:
        if not np.array_equal(expected_R, found_R):
            number = span[int(np.flatnonzero(expected_R != found_R)[0])]
            raise Mismatch(f"{stage.folder}: row {number} belongs to another trajectory. Rerun: {stage.command}")

    def _check_finite(self, values: NDArray, offsets: NDArray[np.int64], stage: Stage, span: list[int]) -> None:
        """Stop at a number that is not finite: finite logits never give a score of -inf."""
        finite = np.isfinite(values)
        if not finite.all():
            position = int(np.argwhere(~finite)[0, 0])
            number = span[int(np.searchsorted(offsets, position, side="right")) - 1]
            path = stage.shard_path(self.rows.find(number)[0])
            raise CorruptData(
                f"{path}: row {number} has a log-probability that is not finite. Remove the shard (rm {path}) and "
                f"rerun it with: {stage.command}"
            )
