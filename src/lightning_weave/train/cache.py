"""Read cached trajectories row by row from memory-mapped shards; what is held never grows with the cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import Anchor
from lightning_weave.errors import CorruptData, Mismatch
from lightning_weave.store import Shard, Stage
from lightning_weave.types import Candidates, Rollouts, Scores

OPEN_SHARDS = 256  # maps kept open, over all stages


@dataclass(frozen=True)
class Pair:
    """One anchor's two scored models and its share of the composed shift."""

    name: str
    post: Stage
    pre: Stage
    weight: float
    validity: str = Anchor.model_fields["validity"].default


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


class Cache:
    """All trajectories of a run with the shifts of the given pairs, addressed by row number."""

    def __init__(self, rollouts: Stage, reference: Stage, pairs: Sequence[Pair]) -> None:
        self.rollouts, self.reference, self.pairs = rollouts, reference, tuple(pairs)
        for stage in (rollouts, *(stage for pair in pairs for stage in (pair.post, pair.pre))):
            stage.require()
        self.starts = np.cumsum([0, *(entry["rows"] for entry in reference.require()["shards"])])
        self._open = lru_cache(OPEN_SHARDS)(self._open_shard)

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def weights(self) -> list[float]:
        """What each pair's shift counts."""
        return [pair.weight for pair in self.pairs]

    def length(self, number: int) -> int:
        """Tokens of one row, prompt and response."""
        shard, place = self._find(number)
        rollouts = self._open(self.rollouts.folder, shard, Rollouts).read(place, place + 1)
        return len(rollouts.prompt_ids.flat) + len(rollouts.response_ids.flat)

    def read(self, number: int) -> Row:
        """Read one row from every stage, checking CRCs and that all of them mean the same trajectory."""
        shard, place = self._find(number)
        rollouts = self._open(self.rollouts.folder, shard, Rollouts).read(place, place + 1)
        candidates = self._open(self.reference.folder, shard, Candidates).read(place, place + 1)
        trajectory = rollouts.trajectories()[0]
        self._check_same(trajectory, candidates.trajectory_R[0], self.reference, number)
        shape_TC = candidates.logp[0].shape
        r_KTC = np.zeros((len(self.pairs), *shape_TC), np.float32)
        valid_KT = np.zeros((len(self.pairs), shape_TC[0]), np.bool_)
        for index, pair in enumerate(self.pairs):
            r_KTC[index], valid_KT[index] = self._shift(pair, shard, place, number, trajectory)
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

    def _find(self, number: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, number - int(self.starts[shard])

    def _shift(
        self, pair: Pair, shard: int, place: int, number: int, trajectory: np.uint32
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """A pair's shift is post minus pre, valid where both its models are (cross-tokenizer-shift)."""
        logps, mapped = [], []
        for stage in (pair.post, pair.pre):
            scores = self._open(stage.folder, shard, Scores).read(place, place + 1)
            self._check_same(trajectory, scores.trajectory_R[0], stage, number)
            logps.append(scores.logp[0])
            mapped.append(scores.mapped[0])
        mapped_TC = mapped[0] & mapped[1]
        r_TC = np.where(mapped_TC, logps[0] - logps[1], 0.0)
        valid_T = mapped_TC.all(axis=-1) if pair.validity == "position" else mapped_TC.any(axis=-1)
        if not np.isfinite(r_TC[valid_T]).all():
            raise CorruptData(
                f"{pair.post.folder} or {pair.pre.folder}: row {number} has a score that is not finite. "
                f"Remove its shard ({shard:05d}.safetensors) there and score again"
            )
        return r_TC, valid_T

    def _check_same(self, expected: np.uint32, found: np.uint32, stage: Stage, number: int) -> None:
        if expected != found:
            raise Mismatch(
                f"{stage.folder}: row {number} belongs to another trajectory. Make it again with: {stage.step.command}"
            )

    def _open_shard(self, folder: object, shard: int, kind: type) -> Shard:
        stages = [self.rollouts, self.reference, *(stage for pair in self.pairs for stage in (pair.post, pair.pre))]
        return next(stage for stage in stages if stage.folder == folder).open(kind, shard)
