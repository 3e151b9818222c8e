"""How far a target moves from the behaviour, and which alpha moves it a given distance."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_weave.maths.losses import kl
from lightning_weave.maths.shifts import tilted_target

ALPHA_RANGE = (1e-4, 1e6)  # beyond these a shift is a hard choice, or nothing
TOLERANCE = 1e-4  # of the budget


def expected_kl(log_q_NO: Tensor, log_b_NO: Tensor) -> Tensor:
    """Measure KL(target || behaviour): how many nats a target asks for at each position."""
    return kl(log_q_NO, log_b_NO)


def solve_alpha_for_kl(log_b_NO: Tensor, r_NC: Tensor, budget: float) -> float:
    """Find the alpha whose target moves by `budget` nats per position on average.

    Give valid positions only. KL(q || b) grows with 1/alpha (its derivative is Var_q(r)/alpha), so halving the interval
    finds the one solution.
    """
    if log_b_NO.shape[0] == 0:
        raise ValueError("no valid position to solve alpha on")
    log_b_NO, r_NC = log_b_NO.double(), r_NC.double()

    def spent(log_alpha: float) -> float:
        return expected_kl(tilted_target(log_b_NO, r_NC, math.exp(log_alpha)), log_b_NO).mean().item()

    low, high = (math.log(alpha) for alpha in ALPHA_RANGE)
    most, least = spent(low), spent(high)
    if not max(least, 0.0) < budget < most:
        raise ValueError(
            f"a KL budget of {budget:g} nats per token is out of reach: alpha from {ALPHA_RANGE[1]:g} down to "
            f"{ALPHA_RANGE[0]:g} spends {max(least, 0.0):.3g} to {most:.3g}"
        )
    middle = (low + high) / 2
    for _ in range(100):
        gap = spent(middle) - budget
        if abs(gap) <= TOLERANCE * budget:
            break
        low, high = (middle, high) if gap > 0 else (low, middle)
        middle = (low + high) / 2
    return math.exp(middle)


def shift_covariance(log_b_NO: Tensor, u_NC: Tensor, v_NC: Tensor) -> Tensor:
    """Measure Cov_b(u, v), the Fisher inner product of two shifts, with `other` at shift 0."""
    b_NO = torch.softmax(log_b_NO, dim=-1)
    u_NO, v_NO = pad(u_NC, (0, 1)), pad(v_NC, (0, 1))
    u_NO = u_NO - (b_NO * u_NO).sum(dim=-1, keepdim=True)
    v_NO = v_NO - (b_NO * v_NO).sum(dim=-1, keepdim=True)
    return (b_NO * u_NO * v_NO).sum(dim=-1)
