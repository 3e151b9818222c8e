"""Read the cache a shard at a time, with every anchor's shift: for looking at, not for training."""

from dataclasses import dataclass

import numpy as np

from lightning_weave.errors import Mismatch
from lightning_weave.report.survey import ShardView
from lightning_weave.stages.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Rollouts, Scores


@dataclass(frozen=True)
class AnchorStages:
    """The two scored models of one anchor."""

    name: str
    post: Stage
    pre: Stage
    validity: str


@dataclass(frozen=True)
class CachedShifts:
    """A finished cache and the anchors whose two models are both scored."""

    rollouts: Stage
    reference: Stage
    anchors: tuple[AnchorStages, ...]
    rows: tuple[int, ...]  # of each shard

    @classmethod
    def open(cls, steps: Steps) -> "CachedShifts | None":
        """Open what is done; None where there is no finished reference yet."""
        if not steps.recipe.anchors:
            return None
        rollouts, reference = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
        if rollouts.state() != "done" or reference.state() != "done":
            return None
        anchors = []
        for name, section in steps.recipe.anchors.items():
            post, pre = (steps.store.stage(step) for step in steps.scores_of(name))
            if post.state() == "done" and pre.state() == "done":
                anchors.append(AnchorStages(name, post, pre, section.validity))
        rows = tuple(entry["rows"] for entry in reference.require()["shards"])
        return cls(rollouts, reference, tuple(anchors), rows)

    @property
    def names(self) -> list[str]:
        return [anchor.name for anchor in self.anchors]

    def find(self, row: int) -> tuple[int, int]:
        """Turn a row of the cache into (shard, row of the shard)."""
        starts = np.cumsum([0, *self.rows])
        shard = int(np.searchsorted(starts, row, side="right")) - 1
        return shard, row - int(starts[shard])

    def read(self, shard: int, start: int = 0, stop: int | None = None) -> tuple[Rollouts, ShardView]:
        """Read some rows of one shard from every stage, and check that all of them mean the same trajectories."""
        rollouts = self.rollouts.open(Rollouts, shard).read(start, stop)
        candidates = self.reference.open(Candidates, shard).read(start, stop)
        trajectory_R = rollouts.trajectories()
        _check_same(trajectory_R, candidates.trajectory_R, self.reference)
        shape_PC = candidates.ids.flat.shape
        r_KPC = np.zeros((len(self.anchors), *shape_PC), np.float32)
        mapped_KPC = np.zeros((len(self.anchors), *shape_PC), np.bool_)
        valid_KP = np.zeros((len(self.anchors), shape_PC[0]), np.bool_)
        for k, anchor in enumerate(self.anchors):
            post, pre = (stage.open(Scores, shard).read(start, stop) for stage in (anchor.post, anchor.pre))
            _check_same(trajectory_R, post.trajectory_R, anchor.post)
            _check_same(trajectory_R, pre.trajectory_R, anchor.pre)
            mapped_KPC[k] = post.mapped.flat & pre.mapped.flat
            r_KPC[k] = np.where(mapped_KPC[k], post.logp.flat - pre.logp.flat, 0.0)
            whole = anchor.validity == "position"
            valid_KP[k] = mapped_KPC[k].all(axis=-1) if whole else mapped_KPC[k].any(axis=-1)
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
