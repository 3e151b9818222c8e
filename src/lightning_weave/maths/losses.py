"""Training losses: one value per position."""

import math

import torch
from torch import Tensor

LOG_FLOOR = math.log(1e-30)
"""Smallest logarithm in a loss; below it the gradient is zero."""


def log_residual_loss(log_pi_NO: Tensor, log_b_NO: Tensor, log_q_NO: Tensor, alpha: float) -> Tensor:
    """Sum squared log-residuals weighted by the behaviour (finite-candidate-loss).

    Value and gradient are zero at the target. Dividing by the candidates' behaviour mass makes the initial gradient
    equal to that of `direct_opd_loss`.
    """
    log_mass_N1 = torch.logsumexp(log_b_NO[..., :-1], dim=-1, keepdim=True).clamp(min=LOG_FLOOR)
    share_NO = torch.exp(log_b_NO - log_mass_N1)
    residual_NO = log_pi_NO.clamp(min=LOG_FLOOR) - log_q_NO.clamp(min=LOG_FLOOR)
    return 0.5 * alpha * (share_NO * residual_NO.square()).sum(dim=-1)


def reverse_kl(log_pi_NO: Tensor, log_q_NO: Tensor, alpha: float) -> Tensor:
    """Compute alpha KL(student || target), on the finite outcomes or the whole vocabulary (maps-loss)."""
    return alpha * kl(log_pi_NO, log_q_NO)


def forward_kl(log_q_NO: Tensor, log_pi_NO: Tensor) -> Tensor:
    """Compute KL(target || student)."""
    return kl(log_q_NO, log_pi_NO)


def total_variation(log_q_NO: Tensor, log_pi_NO: Tensor) -> Tensor:
    """Compute half the sum of the absolute differences in probability."""
    return 0.5 * (log_q_NO.exp() - log_pi_NO.exp()).abs().sum(dim=-1)


def sampled_kl(log_pi_N: Tensor, log_b_N: Tensor) -> Tensor:
    """Estimate KL(student || behaviour) from one sampled token: exp(l) - 1 - l, l = log b - log pi (k3)."""
    gap_N = log_b_N.clamp(min=LOG_FLOOR) - log_pi_N.clamp(min=LOG_FLOOR)
    return torch.expm1(gap_N) - gap_N


def direct_opd_loss(
    logp_NC: Tensor, r_NC: Tensor, sampled_logp_N: Tensor, sampled_log_b_N: Tensor, alpha: float
) -> Tensor:
    """Raise candidates by their shift and penalise the sampled token's KL (naive-offline-dopd).

    The gradient of E_pi[r] is E_pi[r grad log pi]: the expectation is over the candidates, with the student's own
    probabilities renormalised there and detached. Only the gradient is meaningful, not the value.
    """
    share_NC = torch.softmax(logp_NC.detach(), dim=-1)
    push_N = (share_NC * r_NC * logp_NC.clamp(min=LOG_FLOOR)).sum(dim=-1)
    return alpha * sampled_kl(sampled_logp_N, sampled_log_b_N) - push_N


def kl(log_p_NO: Tensor, log_q_NO: Tensor) -> Tensor:
    """Compute KL(p || q); outcomes without mass in p count 0, outcomes without mass in q alone are infinite."""
    p_NO = log_p_NO.exp()
    return (p_NO * torch.where(p_NO > 0, log_p_NO - log_q_NO, 0.0)).sum(dim=-1)
