"""KL budgets of anchors: the weight at which an anchor alone moves the student by so many nats, in every tag.

A fixed weight is a different dose on every kind of prompt, as shifts differ in size; a budget is the same everywhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.block import Cache, outcomes
from lightning_weave.errors import InputError
from lightning_weave.maths import expected_kl, solve_alpha_for_kl, tilted_target

DECISIONS = 100_000  # per tag, on which a budget is solved; all if there are fewer
READ = 64  # rows at a time


@dataclass(frozen=True)
class AnchorShare:
    """What one anchor got on the prompts of one tag."""

    tag: str
    anchor: str
    dose: float  # weight / alpha
    kl: float  # KL(target of this anchor alone || behaviour), nats per kept decision
    budget: float | None

    def __str__(self) -> str:
        asked = "" if self.budget is None else f" of {self.budget:g}"
        return f"{self.anchor}{f' ({self.tag})' if self.tag else ''} {self.dose:.4g}: {self.kl:.4f}{asked} nats"


def solve_budgets(
    cache: Cache,
    tags: Sequence[str],
    budgets: Mapping[str, float | Mapping[str, float]],
    alpha: float | None,
    total: float,
) -> None:
    """Set the row weights of a cache so that each anchor with a budget meets it in every tag, and its alpha.

    `tags` has the tag of each row. Without an alpha, that of the other anchors is solved so that all anchors together
    meet `total`. An anchor without a shift at the decisions of a tag that are read gets the weight 0 there.
    """
    if cache.weight_RK is None:
        cache.weight_RK = np.tile(np.array(cache.weights, np.float32), (len(cache), 1))
    tag_R = np.array(tags)
    inverse_RK = np.ones(cache.weight_RK.shape)  # 1 / alpha of each anchor with a budget
    solved_K = np.array([name in budgets for name in cache.names])
    for tag in np.unique(tag_R).tolist():
        log_b_NO, r_KNC, _ = _read(cache, np.flatnonzero(tag_R == tag))
        for k in np.flatnonzero(solved_K).tolist():
            name = cache.names[k]
            found = np.inf
            if (r_KNC[k] != 0).any():
                try:
                    found = solve_alpha_for_kl(log_b_NO, r_KNC[k], _budget(budgets[name], tag))
                except ValueError as error:
                    raise InputError(f"anchors.{name}.kl_budget{f' (tag {tag})' if tag else ''}: {error}") from None
            inverse_RK[tag_R == tag, k] = 1 / found
    if alpha is None:
        log_b_NO, r_KNC, row_N = _read(cache, np.arange(len(cache)))
        fixed_NC = (r_KNC * torch.from_numpy(inverse_RK[row_N].T)[..., None])[solved_K].sum(dim=0)
        try:
            alpha = solve_alpha_for_kl(log_b_NO, r_KNC[~solved_K].sum(dim=0), total, fixed_NC=fixed_NC)
        except ValueError as error:
            raise InputError(f"kl_budget = {total:g} of the composition, with those of its anchors: {error}") from None
    cache.alpha = alpha
    cache.weight_RK = (cache.weight_RK * np.where(solved_K, alpha * inverse_RK, 1.0)).astype(np.float32)
    cache.shares = []
    for tag in np.unique(tag_R).tolist():
        rows = np.flatnonzero(tag_R == tag)
        log_b_NO, r_KNC, _ = _read(cache, rows)
        for k, name in enumerate(cache.names):
            if len(log_b_NO) and (weight := float(cache.weight_RK[rows[0], k])):
                kl_N = expected_kl(tilted_target(log_b_NO, r_KNC[k], alpha), log_b_NO)
                asked = _budget(budgets[name], tag) if name in budgets else None
                cache.shares.append(AnchorShare(tag, name, weight / alpha, float(kl_N.mean()), asked))


def _budget(budget: float | Mapping[str, float], tag: str) -> float:
    return budget[tag] if isinstance(budget, Mapping) else budget


def _read(cache: Cache, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor, NDArray[np.int64]]:
    """Read kept decisions of these rows, all or DECISIONS of them: the behaviour, the weighted shifts, and the row."""
    rows = np.random.default_rng(0).permutation(rows)
    parts: list[tuple[Tensor, Tensor, NDArray[np.int64]]] = []
    while len(rows) and sum(len(part[-1]) for part in parts) < DECISIONS:
        some, rows = np.sort(rows[:READ]), rows[READ:]
        block = cache.block(some.tolist())
        kept_P = block.kept(cache.weights)
        log_b_PO = outcomes(block.candidates).double()
        row_P = np.repeat(some, block.decisions_R)
        parts.append((log_b_PO[kept_P], torch.from_numpy(block.r_KPC[:, kept_P]).double(), row_P[kept_P]))
    log_b_NO, r_KNC, row_N = zip(*parts, strict=True)
    return torch.cat(log_b_NO), torch.cat(r_KNC, dim=1), np.concatenate(row_N)
