"""From scores to the target: policy shifts, their composition, the residual outcome, the tilt.

Letters: K anchors, N positions, C candidates, O = C + 1 outcomes of which the last is `other`. Everything is in logs,
and exact zeros (-inf) never arise from finite scores.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

RESIDUAL_FLOOR = 1e-8
"""Smallest mass of `other`, in behaviour, target and student alike."""

LOG_RESIDUAL_FLOOR = math.log(RESIDUAL_FLOOR)


def policy_shift(post_NC: Tensor, pre_NC: Tensor) -> Tensor:
    """Subtract a pre-anchor's log-probs from its post-anchor's (policy-shift, cross-tokenizer-shift)."""
    return post_NC - pre_NC


def compose_shifts(r_KNC: Tensor, valid_KN: Tensor, weights_K: Tensor | Sequence[float]) -> tuple[Tensor, Tensor]:
    """Weigh and add the anchors' shifts where all of them are valid (composed-shift).

    An anchor of weight 0 takes no part, neither in the sum nor in the mask, so an endpoint is the single-anchor run.
    Whatever stands at positions that are not used (NaN included) is ignored; the shift of a masked position is 0.
    """
    weights_K = torch.as_tensor(weights_K, dtype=r_KNC.dtype, device=r_KNC.device)
    takes_part_K1 = (weights_K != 0).unsqueeze(-1)
    valid_N = (valid_KN.bool() | ~takes_part_K1).all(dim=0)
    unused_KN = ~(takes_part_K1 & valid_N)
    used_KNC = r_KNC.masked_fill(unused_KN.unsqueeze(-1), 0.0)  # before weighing: 0 * NaN is NaN
    return (weights_K[:, None, None] * used_KNC).sum(dim=0), valid_N


def with_other(logp_NC: Tensor, other_logp_N: Tensor | None = None) -> Tensor:
    """Append the log-mass of everything that is not a candidate, never less than log 1e-8.

    Give `other_logp_N` where it was computed from the non-candidates' logits; without it, it is 1 minus the candidates'
    mass, which in float32 has few digits left when it is small. Below the floor its gradient is zero.
    """
    if other_logp_N is None:
        other_logp_N = _log1mexp(torch.logsumexp(logp_NC, dim=-1))
    other_logp_N = other_logp_N.clamp(min=LOG_RESIDUAL_FLOOR)
    return torch.cat([logp_NC, other_logp_N.unsqueeze(-1)], dim=-1)  # (N, C) -> (N, O)


def tilted_target(log_b_NO: Tensor, r_NC: Tensor, alpha: float) -> Tensor:
    """Tilt the behaviour by the composed shift (finite-candidate-target) and return log q.

    The shift of `other` is zero. The residual is floored after normalising and nothing is normalised again: the other
    outcomes keep their exact odds, a student can meet all of them at once, and the total is at most 1 + 1e-8.
    """
    log_q_NO = torch.log_softmax(log_b_NO + pad(r_NC, (0, 1)) / alpha, dim=-1)
    return torch.cat([log_q_NO[..., :-1], log_q_NO[..., -1:].clamp(min=LOG_RESIDUAL_FLOOR)], dim=-1)


def _log1mexp(x: Tensor) -> Tensor:
    """Compute log(1 - exp(x)) for x < 0 to full precision; x >= 0 (rounding) counts as just below 0."""
    x = x.clamp(max=-1e-30)
    near_zero = x > -math.log(2)
    far = x.where(~near_zero, -1.0)  # `where` lets through a NaN from the infinite slope of the branch not taken
    return torch.where(near_zero, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(far)))
