"""Read the cache a shard at a time, with every anchor's shift: for looking at, not for training."""

from dataclasses import dataclass

import numpy as np

from lightning_weave.cache.reader import check_finite
from lightning_weave.cache.sources import Pair, pair_shift
from lightning_weave.errors import Mismatch
from lightning_weave.report.survey import ShardView
from lightning_weave.runs.steps import Steps
from lightning_weave.store import RowIndex, Stage
from lightning_weave.types import Candidates, Rollouts, Scores


def anchor_pair(steps: Steps, anchor: str, weight: float = 1.0) -> Pair:
    """Find the two scored models of one anchor."""
    post, pre = (steps.store.stage(step) for step in steps.scores_of(anchor))
    return Pair(anchor, post, pre, weight, steps.recipe.anchors[anchor].validity)


def is_scored(pair: Pair) -> bool:
    """Say whether both models are done."""
    return all(stage.state() == "done" for stage in pair.stages)


@dataclass(frozen=True)
class CachedShifts:
    """A finished cache and the anchors whose two models are both scored."""

    rollouts: Stage
    reference: Stage
    anchors: tuple[Pair, ...]
    rows: RowIndex

    @classmethod
    def open(cls, steps: Steps) -> "CachedShifts | None":
        """Open what is done; None where there is no finished reference yet."""
        if not steps.recipe.anchors:
            return None
        rollouts, reference = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
        if rollouts.state() != "done" or reference.state() != "done":
            return None
        pairs = [anchor_pair(steps, name) for name in steps.recipe.anchors]
        return cls(rollouts, reference, tuple(filter(is_scored, pairs)), RowIndex.of(reference.require()))

    @property
    def names(self) -> list[str]:
        return [anchor.name for anchor in self.anchors]

    def read(self, shard: int, start: int = 0, stop: int | None = None) -> tuple[Rollouts, ShardView]:
        """Read some rows of one shard from every stage, and check that all of them mean the same trajectories."""
        rollouts = self.rollouts.open(Rollouts, shard).read(start, stop)
        candidates = self.reference.open(Candidates, shard).read(start, stop)
        trajectory_R = rollouts.trajectories()
        _check_same(trajectory_R, candidates.trajectory_R, self.reference)
        check_finite([candidates.logp.flat, candidates.other_logp.flat], self.reference, shard, "a row")
        shape_PC = candidates.ids.flat.shape
        r_KPC = np.zeros((len(self.anchors), *shape_PC), np.float32)
        mapped_KPC = np.zeros((len(self.anchors), *shape_PC), np.bool_)
        valid_KP = np.zeros((len(self.anchors), shape_PC[0]), np.bool_)
        for k, anchor in enumerate(self.anchors):
            post, pre = (stage.open(Scores, shard).read(start, stop) for stage in anchor.stages)
            _check_same(trajectory_R, post.trajectory_R, anchor.post)
            _check_same(trajectory_R, pre.trajectory_R, anchor.pre)
            for scores, stage in zip((post, pre), anchor.stages, strict=True):
                check_finite([scores.logp.flat[scores.mapped.flat]], stage, shard, "a row")
            mapped_KPC[k] = post.mapped.flat & pre.mapped.flat
            r_KPC[k], valid_KP[k] = pair_shift(post, pre, anchor.validity)
        view = ShardView(
            sampled_P=np.array(rollouts.response_ids.flat),
            ids_PC=np.array(candidates.ids.flat),
            logp_PC=np.array(candidates.logp.flat),
            other_logp_P=np.array(candidates.other_logp.flat),
            r_KPC=r_KPC,
            mapped_KPC=mapped_KPC,
            valid_KP=valid_KP,
        )
        return rollouts, view


def _check_same(expected_R: np.ndarray, found_R: np.ndarray, stage: Stage) -> None:
    if not np.array_equal(expected_R, found_R):
        raise Mismatch(f"{stage.folder} holds other trajectories. Make it again with: {stage.step.command}")
