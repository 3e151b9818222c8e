"""From scores to the target: policy shifts, their composition, the residual outcome, the tilt.

Letters: K anchors, N positions, C candidates, O = C + 1 outcomes of which the last is `other`. All values are logs, and
finite scores never give an exact zero (-inf).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_weave.maths.losses import kl

RESIDUAL_FLOOR = 1e-8
"""Smallest mass of `other` in behaviour, target and student."""

LOG_RESIDUAL_FLOOR = math.log(RESIDUAL_FLOOR)


def policy_shift(post_NC: Tensor, pre_NC: Tensor) -> Tensor:
    """Subtract a pre-anchor's log-probs from its post-anchor's (policy-shift, cross-tokenizer-shift)."""
    return post_NC - pre_NC


def compose_shifts(r_KNC: Tensor, valid_KN: Tensor, weights_K: Tensor | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compute the weighted sum of the anchors' shifts where all of them are valid (composed-shift).

    An anchor of weight 0 is ignored in both sum and mask, so an endpoint is the single-anchor run. Values at unused
    positions are ignored, even NaN; the shift of a masked position is 0.
    """
    weights_K = torch.as_tensor(weights_K, dtype=r_KNC.dtype, device=r_KNC.device)
    used_K1 = (weights_K != 0).unsqueeze(-1)
    valid_N = (valid_KN.bool() | ~used_K1).all(dim=0)
    unused_KN = ~(used_K1 & valid_N)
    used_KNC = r_KNC.masked_fill(unused_KN.unsqueeze(-1), 0.0)  # before weighting: 0 * NaN is NaN
    return (weights_K[:, None, None] * used_KNC).sum(dim=0), valid_N


def with_other(logp_NC: Tensor, other_logp_N: Tensor | None = None) -> Tensor:
    """Append the log-mass of all non-candidates, at least log 1e-8.

    Pass `other_logp_N` if it was computed from the non-candidates' logits. The default, 1 minus the candidates' mass,
    loses precision in float32 when it is small. Below the floor its gradient is zero.
    """
    if other_logp_N is None:
        other_logp_N = _log1mexp(torch.logsumexp(logp_NC, dim=-1))
    other_logp_N = other_logp_N.clamp(min=LOG_RESIDUAL_FLOOR)
    return torch.cat([logp_NC, other_logp_N.unsqueeze(-1)], dim=-1)  # (N, C) -> (N, O)


def tilted_target(log_b_NO: Tensor, r_NC: Tensor, alpha: float) -> Tensor:
    """Tilt the behaviour by the composed shift (finite-candidate-target) and return log q.

    The shift of `other` is zero. The residual is floored after normalisation, without normalising again: the candidates
    keep their exact odds, a student can match all outcomes at once, and the total is at most 1 + 1e-8.
    """
    log_q_NO = torch.log_softmax(log_b_NO + pad(r_NC, (0, 1)) / alpha, dim=-1)
    return torch.cat([log_q_NO[..., :-1], log_q_NO[..., -1:].clamp(min=LOG_RESIDUAL_FLOOR)], dim=-1)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 to full precision; x >= 0 (from rounding) counts as just below 0."""
    x = x.clamp(max=-1e-30)
    near_zero = x > -math.log(2)
    far = x.where(~near_zero, -1.0)  # otherwise the infinite slope of the unused branch gives NaN
    return torch.where(near_zero, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(far)))


ALPHA_RANGE = (1e-4, 1e6)  # beyond these the target is deterministic, or the behaviour itself
TOLERANCE = 1e-4  # of the budget


def expected_kl(log_q_NO: Tensor, log_b_NO: Tensor) -> Tensor:
    """Compute KL(target || behaviour) at each position, in nats."""
    return kl(log_q_NO, log_b_NO)


def solve_alpha_for_kl(log_b_NO: Tensor, r_NC: Tensor, budget: float, fixed_NC: Tensor | None = None) -> float:
    """Find the alpha whose target has a mean KL(target || behaviour) of `budget` nats per position.

    Takes valid positions only. KL(q || b) grows with 1/alpha (its derivative is Var_q(r)/alpha), so bisection finds the
    only solution. `fixed_NC` is added to r / alpha, whatever alpha is: then it finds a solution between no r at all and
    the smallest alpha.
    """
    if log_b_NO.shape[0] == 0:
        raise ValueError("no valid position to solve alpha on")
    log_b_NO = log_b_NO.double()
    r_NC = r_NC.double()
    fixed_NC = torch.zeros_like(r_NC) if fixed_NC is None else fixed_NC.double()

    def spent(log_alpha: float) -> float:
        alpha = math.exp(log_alpha)
        return expected_kl(tilted_target(log_b_NO, r_NC + alpha * fixed_NC, alpha), log_b_NO).mean().item()

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
