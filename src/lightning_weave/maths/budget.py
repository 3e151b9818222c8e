"""The distance of a target from the behaviour policy, and the alpha for a given distance."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_weave.maths.losses import kl
from lightning_weave.maths.shifts import tilted_target

ALPHA_RANGE = (1e-4, 1e6)  # beyond these the target is deterministic, or the behaviour itself
TOLERANCE = 1e-4  # of the budget


def expected_kl(log_q_NO: Tensor, log_b_NO: Tensor) -> Tensor:
    """Compute KL(target || behaviour) at each position, in nats."""
    return kl(log_q_NO, log_b_NO)


def solve_alpha_for_kl(log_b_NO: Tensor, r_NC: Tensor, budget: float) -> float:
    """Find the alpha whose target has a mean KL(target || behaviour) of `budget` nats per position.

    Takes valid positions only. KL(q || b) grows with 1/alpha (its derivative is Var_q(r)/alpha), so bisection finds the
    only solution.
    """
    if log_b_NO.shape[0] == 0:
        raise ValueError("no valid position to solve alpha on")
    log_b_NO = log_b_NO.double()
    r_NC = r_NC.double()

    def spent(log_alpha: float) -> float:
        return expected_kl(tilted_target(log_b_NO, r_NC, math.exp(log_alpha)), log_b_NO).mean().item()

    low, high = (math.log(alpha) for alpha in ALPHA_RANGE)
    most = spent(low)
    least = max(spent(high), 0.0)
    if not least < budget < most:
        raise ValueError(
            f"a KL budget of {budget:g} nats per token is out of reach: alpha from {ALPHA_RANGE[1]:g} down to "
            f"{ALPHA_RANGE[0]:g} gives {least:.3g} to {most:.3g}"
        )
    middle = (low + high) / 2
    for _ in range(100):
        gap = spent(middle) - budget
        if abs(gap) <= TOLERANCE * budget:
            break
        if gap > 0:
            low = middle
        else:
            high = middle
        middle = (low + high) / 2
    return math.exp(middle)


def shift_covariance(log_b_NO: Tensor, u_NC: Tensor, v_NC: Tensor) -> Tensor:
    """Compute Cov_b(u, v), the Fisher inner product of two shifts; the shift of `other` is 0."""
    b_NO = torch.softmax(log_b_NO, dim=-1)
    u_NO = pad(u_NC, (0, 1))
    v_NO = pad(v_NC, (0, 1))
    u_NO = u_NO - (b_NO * u_NO).sum(dim=-1, keepdim=True)
    v_NO = v_NO - (b_NO * v_NO).sum(dim=-1, keepdim=True)
    return (b_NO * u_NO * v_NO).sum(dim=-1)
