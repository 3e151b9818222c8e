"""The target of a composition at every decision of some rows, for other trainers and for inspection."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.maths import compose_shifts, tilted_target, with_other


@dataclass(frozen=True)
class Targets:
    """Behaviour and target of P decisions over O = C + 1 outcomes, as log-probabilities; the last is `other`.

    Where `valid_P` is false the composition has no shift and the target is the behaviour. The arrays can be written to,
    so `torch.from_numpy` takes them; `block.tensors()` has the rest.
    """

    block: Block
    valid_P: NDArray[np.bool_]
    r_PC: NDArray[np.float32]  # the composed shift
    log_b_PO: NDArray[np.float32]
    log_q_PO: NDArray[np.float32]
    alpha: float


def compute_targets(block: Block, weights: Sequence[float], alpha: float) -> Targets:
    """Weigh the shifts, intersect the masks (composed-shift) and tilt the behaviour (finite-candidate-target)."""
    shifts = torch.from_numpy(block.r_KPC), torch.from_numpy(block.valid_KP)
    r_PC, valid_P = compose_shifts(*shifts, torch.tensor(weights, dtype=torch.float32))
    candidates = block.candidates
    # Copied: the arrays of a cache are read-only maps of its files.
    log_b_PO = with_other(torch.tensor(candidates.logp.flat), torch.tensor(candidates.other_logp.flat))
    log_q_PO = tilted_target(log_b_PO, r_PC, alpha)
    log_q_PO[~valid_P] = log_b_PO[~valid_P]
    return Targets(block, valid_P.numpy(), r_PC.numpy(), log_b_PO.numpy(), log_q_PO.numpy(), alpha)
