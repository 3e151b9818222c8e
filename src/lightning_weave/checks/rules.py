"""What the rules of an anchor's shift change, on a sample of the cache, and which values would change little."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Block, Cache, compute_targets
from lightning_weave.cache.shifts import PairSource, ShiftRules, entropy
from lightning_weave.config import ALPHA
from lightning_weave.maths import expected_kl
from lightning_weave.run import Run
from lightning_weave.stages.caches import anchor_pair
from lightning_weave.types import Scores

RARE = 0.001  # share of positions that a suggested clip touches
FEW = 0.01  # share of positions that a suggested floor masks


@dataclass(frozen=True)
class Effect:
    """What one rule changes by itself, of the anchor alone at weight 1 and the paper's alpha."""

    rule: str
    value: float
    positions: float  # share of the positions that were valid without it
    kl_before: float  # KL(target || behaviour), nats per position
    kl_after: float
    changed_P: NDArray[np.bool_] = field(repr=False)  # decisions that it changes

    @property
    def figures(self) -> dict[str, Any]:
        """The numbers, for a finding."""
        return {name: value for name, value in vars(self).items() if name != "changed_P"}

    def __str__(self) -> str:
        return (
            f"{self.rule} = {self.value:g} changes {100 * self.positions:.2f} % of positions, and the KL that the "
            f"anchor asks for from {self.kl_before:.4f} to {self.kl_after:.4f} nats"
        )


def rule_effects(run: Run, anchor: str, rows: Sequence[int]) -> list[Effect]:
    """Measure every rule that an anchor has on some rows of its scored cache."""
    pair = anchor_pair(run, anchor)
    if not pair.rules.active:
        return []
    without = _block(run, pair, rows)
    valid_P = without.valid_KP[0]
    effects = []
    for rule, value in pair.rules.active.items():
        ruled = _block(run, pair, rows, **{rule: value})
        same_P = (without.r_KPC[0] == ruled.r_KPC[0]).all(axis=1) & (valid_P == ruled.valid_KP[0])
        share = float((~same_P)[valid_P].mean()) if valid_P.any() else 0.0
        effects.append(Effect(rule, value, share, _kl(without, without), _kl(ruled, without), ~same_P))
    return effects


def suggestions(run: Run, anchor: str, rows: Sequence[int]) -> dict[str, float]:
    """Name values that would touch few positions of an anchor: a clip, a floor of mass, a floor of entropy."""
    pair = anchor_pair(run, anchor)
    block = _block(run, pair, rows)
    valid_P = block.valid_KP[0]
    if not valid_P.any():
        return {}
    index = Cache(run.stage("rollout"), run.stage("reference")).rows
    scores = [
        [stage.open(Scores, shard).read(at, at + 1) for shard, at in map(index.find, rows)] for stage in pair.stages
    ]
    post_P, pre_P = (np.concatenate([each.mass.flat for each in side]) for side in scores)
    quantiles = {
        "clip": np.quantile(np.abs(block.r_KPC[0]).max(axis=1)[valid_P], 1 - RARE),
        "mass_floor": np.quantile(np.minimum(post_P, pre_P)[valid_P], FEW),
        "only_above": np.quantile(entropy(block.candidates)[valid_P], 0.5),
    }
    return {rule: float(f"{value:.2g}") for rule, value in quantiles.items()}


def _block(run: Run, pair: PairSource, rows: Sequence[int], **rules: float) -> Block:
    """Read rows of one anchor by these rules alone."""
    alone = replace(pair, rules=ShiftRules(pair.rules.validity, **rules))
    return Cache(run.stage("rollout"), run.stage("reference"), [alone]).block(rows)


def _kl(block: Block, among: Block) -> float:
    """Mean KL(target || behaviour) over the positions that `among` has; a masked one asks for nothing."""
    targets = compute_targets(block, [1.0], ALPHA)
    kl_P = expected_kl(torch.from_numpy(targets.log_q_PO), torch.from_numpy(targets.log_b_PO)).numpy()
    counted_P = among.valid_KP[0]
    return float(np.where(targets.valid_P, kl_P, 0.0)[counted_P].mean()) if counted_P.any() else 0.0
