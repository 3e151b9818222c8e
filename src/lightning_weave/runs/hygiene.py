"""What the rules of an anchor's shift change, on a sample of the cache, and which values would change little."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.cache.sources import PairSource, ShiftRules, entropy
from lightning_weave.config import ALPHA
from lightning_weave.maths import expected_kl, tilted_target, with_other
from lightning_weave.runs.caches import anchor_pair
from lightning_weave.runs.steps import Steps
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

    def __str__(self) -> str:
        return (
            f"{self.rule} = {self.value:g} changes {100 * self.positions:.2f} % of positions, and the KL that the "
            f"anchor asks for from {self.kl_before:.4f} to {self.kl_after:.4f} nats"
        )


def rule_effects(steps: Steps, anchor: str, rows: Sequence[int]) -> list[Effect]:
    """Measure every rule that an anchor has on some rows of its scored cache."""
    pair = anchor_pair(steps, anchor)
    effects = []
    for rule, without, ruled, changed_P in _each_rule(steps, pair, rows):
        share = float(changed_P[without.valid_KP[0]].mean()) if without.valid_KP[0].any() else 0.0
        value = pair.rules.active[rule]
        effects.append(Effect(rule, value, share, _kl(without, without), _kl(ruled, without)))
    return effects


def touched(steps: Steps, anchor: str, rows: Sequence[int]) -> dict[str, NDArray[np.bool_]]:
    """Say of every rule of an anchor, as it is written, which decisions of some rows it changes by itself."""
    pair = anchor_pair(steps, anchor)
    return {
        f"{rule} = {pair.rules.active[rule]:g}": changed_P for rule, _, _, changed_P in _each_rule(steps, pair, rows)
    }


def _each_rule(
    steps: Steps, pair: PairSource, rows: Sequence[int]
) -> Iterator[tuple[str, Block, Block, NDArray[np.bool_]]]:
    """Read rows without any rule and with each alone: its name, both blocks, and where they differ."""
    if not pair.rules.active:
        return
    without = _block(steps, replace(pair, rules=ShiftRules(pair.rules.validity)), rows)
    for rule, value in pair.rules.active.items():
        alone: dict[str, Any] = {"validity": pair.rules.validity, rule: value}
        ruled = _block(steps, replace(pair, rules=ShiftRules(**alone)), rows)
        same_P = (without.r_KPC[0] == ruled.r_KPC[0]).all(axis=1) & (without.valid_KP[0] == ruled.valid_KP[0])
        yield rule, without, ruled, ~same_P


def suggestions(steps: Steps, anchor: str, rows: Sequence[int]) -> dict[str, float]:
    """Name values that would touch few positions of an anchor: a clip, a floor of mass, a floor of entropy."""
    pair = anchor_pair(steps, anchor)
    block = _block(steps, replace(pair, rules=ShiftRules(pair.rules.validity)), rows)
    valid_P = block.valid_KP[0]
    if not valid_P.any():
        return {}
    size_P = np.abs(block.r_KPC[0]).max(axis=1)[valid_P]
    mass_P = np.minimum(*(_mass(steps, pair, side, rows) for side in (0, 1)))[valid_P]
    quantiles = {
        "shift_clip": np.quantile(size_P, 1 - RARE),
        "mass_floor": np.quantile(mass_P, FEW),
        "only_above": np.quantile(entropy(block.candidates)[valid_P], 0.5),
    }
    return {rule: float(f"{value:.2g}") for rule, value in quantiles.items()}


def _block(steps: Steps, pair: PairSource, rows: Sequence[int]) -> Block:
    return Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), [pair]).block(rows)


def _kl(block: Block, among: Block) -> float:
    """Mean KL(target || behaviour) over the positions that `among` has; a masked one asks for nothing."""
    log_b_PO = with_other(torch.tensor(block.candidates.logp.flat), torch.tensor(block.candidates.other_logp.flat))
    log_q_PO = tilted_target(log_b_PO, torch.tensor(block.r_KPC[0]), ALPHA)
    kl_P = np.where(block.valid_KP[0], expected_kl(log_q_PO, log_b_PO).numpy(), 0.0)
    counted_P = among.valid_KP[0]
    return float(kl_P[counted_P].mean()) if counted_P.any() else 0.0


def _mass(steps: Steps, pair: PairSource, side: int, rows: Sequence[int]) -> NDArray[np.float32]:
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference))
    parts = [pair.stages[side].open(Scores, shard).read(at, at + 1) for shard, at in map(cache.rows.find, rows)]
    return np.concatenate([scores.mass.flat for scores in parts])
