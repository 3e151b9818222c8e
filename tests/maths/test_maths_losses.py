"""Losses and divergences, against loops, finite differences and the paper's propositions."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

import oracle
from lightning_weave.maths import (
    direct_opd_loss,
    forward_kl,
    log_residual_loss,
    reverse_kl,
    sampled_kl,
    tilted_target,
    total_variation,
    with_other,
)

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def one(values: object) -> Tensor:
    """Make one position in float64."""
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)[None]


def student_outcomes(logits_V: Tensor, candidates: list[int]) -> Tensor:
    """Turn whole-vocabulary logits into the outcomes of one position, `other` from the non-candidates."""
    logp_V = logits_V.log_softmax(-1)
    unseen = torch.ones_like(logp_V, dtype=torch.bool)
    unseen[candidates] = False
    return with_other(logp_V[candidates][None], logp_V[unseen].logsumexp(-1)[None])


def shift_of(decision, anchor: int = 0) -> np.ndarray:
    c = decision.candidates
    return np.log(decision.post_KV[anchor, c] / decision.pre_KV[anchor, c])


def outcomes(decision, alpha: float = 2.0) -> tuple[Tensor, Tensor, Tensor]:
    """Build (log pi, log b, log q) of one decision."""
    log_b_NO = with_other(one(np.log(decision.b_V[decision.candidates])))
    log_pi_NO = with_other(one(np.log(decision.pi_V[decision.candidates])))
    return log_pi_NO, log_b_NO, tilted_target(log_b_NO, one(shift_of(decision)), alpha)


# ---- the loss of the paper ----


@dtypes
def test_loss_agrees_with_loops(decision, dtype):
    log_pi_NO, log_b_NO, log_q_NO = outcomes(decision, alpha=1.7)
    pi_O = oracle.bucket(decision.pi_V, decision.candidates)
    b_O = oracle.bucket(decision.b_V, decision.candidates)
    q_O = oracle.finite_target(decision.b_V, decision.candidates, shift_of(decision), 1.7)
    loss_N = log_residual_loss(log_pi_NO.to(dtype), log_b_NO.to(dtype), log_q_NO.to(dtype), 1.7)
    assert loss_N.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert loss_N.tolist() == pytest.approx([oracle.log_residual_loss(pi_O, b_O, q_O, 1.7)], rel=tolerance)


def test_gradient_with_respect_to_logits_agrees_with_differences(decision):
    logits_V = tensor(np.log(decision.pi_V), requires_grad=True)
    _, log_b_NO, log_q_NO = outcomes(decision)
    loss = log_residual_loss(student_outcomes(logits_V, decision.candidates), log_b_NO, log_q_NO, 2.0).sum()
    (slope_V,) = torch.autograd.grad(loss, logits_V)
    b_O, q_O = log_b_NO.exp()[0].tolist(), log_q_NO.exp()[0].tolist()

    def slow(logits: list[float]) -> float:
        return oracle.log_residual_loss(oracle.bucket(oracle.softmax(logits), decision.candidates), b_O, q_O, 2.0)

    assert slope_V.tolist() == pytest.approx(oracle.gradient(slow, logits_V.tolist()), abs=1e-8, rel=1e-7)


@pytest.mark.parametrize("loss", ["log-residual", "reverse-kl", "forward-kl"])
def test_loss_and_gradient_vanish_at_the_target(decision, loss):
    _, log_b_NO, log_q_NO = outcomes(decision)
    # a whole-vocabulary student that meets the target: candidates as q, the rest shares `other` as it likes
    rest = np.delete(decision.pi_V, decision.candidates)
    p_V = np.empty_like(decision.pi_V)
    p_V[decision.candidates] = log_q_NO.exp()[0, :-1].numpy()
    p_V[np.setdiff1d(np.arange(len(p_V)), decision.candidates)] = rest / rest.sum() * log_q_NO.exp()[0, -1].item()
    logits_V = tensor(np.log(p_V) + 3.0, requires_grad=True)
    log_pi_NO = student_outcomes(logits_V, decision.candidates)
    match loss:
        case "log-residual":
            value = log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, 2.0).sum()
        case "reverse-kl":
            value = reverse_kl(log_pi_NO, log_q_NO, 2.0).sum()
        case _:
            value = forward_kl(log_q_NO, log_pi_NO).sum()
    (slope_V,) = torch.autograd.grad(value, logits_V)
    assert abs(value.item()) < 1e-14
    assert slope_V.abs().max().item() < 1e-13


def test_loss_is_zero_only_at_the_target(decision):
    _, log_b_NO, log_q_NO = outcomes(decision)
    for z in range(log_q_NO.shape[-1]):
        nudged_NO = log_q_NO.clone()
        nudged_NO[0, z] += 0.1
        share = (log_b_NO[0, z].exp() / log_b_NO[0, :-1].exp().sum()).item()
        assert log_residual_loss(nudged_NO, log_b_NO, log_q_NO, 2.0).item() == pytest.approx(share * 0.01, rel=1e-9)


def test_candidates_that_hold_almost_nothing_give_a_finite_loss():
    for dtype in (torch.float32, torch.float64):
        log_b_NO = with_other(torch.full((1, 4), -100.0, dtype=dtype))
        log_q_NO = tilted_target(log_b_NO, torch.full((1, 4), 25.0, dtype=dtype), 1.0)
        log_pi_NO = with_other(torch.full((1, 4), math.log(0.25) - 1e-9, dtype=dtype))
        assert log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, 1.0).isfinite().all()


def test_floors_act_in_student_behaviour_and_target_alike():
    logp_NC = tensor(np.log([[0.5, 0.5]]) + math.log1p(-1e-12), requires_grad=True)
    log_b_NO = with_other(logp_NC.detach())
    log_q_NO = tilted_target(log_b_NO, torch.zeros_like(logp_NC), 2.0)
    loss = log_residual_loss(with_other(logp_NC), log_b_NO, log_q_NO, 2.0).sum()
    assert 0 <= loss.item() < 1e-15  # with a residual of 1e-12 in one and 1e-8 in another it would be 1e-6
    # a student whose residual is below the floor is not pulled by it, one above is
    for mass, pulled in ((1e-9, False), (1e-6, True)):
        other_N = tensor([math.log(mass)], dtype=torch.float64, requires_grad=True)
        wide_NO = with_other(tensor(np.log([[0.3, 0.3]])))
        log_residual_loss(with_other(logp_NC.detach(), other_N), wide_NO, wide_NO, 2.0).sum().backward()
        assert other_N.grad is not None
        assert bool(other_N.grad.item() != 0) == pulled


def test_logarithms_below_the_floor_count_as_the_floor():
    log_b_NO = with_other(tensor(np.log([[0.5, 0.4]])))
    at_floor_NO, below_NO = log_b_NO.clone(), log_b_NO.clone()
    at_floor_NO[0, 0], below_NO[0, 0] = math.log(1e-30), -100.0
    below_NO.requires_grad_()
    loss_N = log_residual_loss(below_NO, log_b_NO, log_b_NO, 2.0)
    assert loss_N.equal(log_residual_loss(at_floor_NO, log_b_NO, log_b_NO, 2.0))
    (slope_NO,) = torch.autograd.grad(loss_N.sum(), below_NO)
    assert slope_NO[0, 0] == 0
    assert log_residual_loss(log_b_NO, log_b_NO, below_NO.detach(), 2.0).item() == loss_N.item()


# ---- objective equivalence ----


def test_reverse_kl_is_the_negative_objective_up_to_the_log_partition(decision):
    for weights_K in ([1.0, 0.0, 0.0], decision.weights_K):
        for alpha in (0.5, 2.0):
            shifts_KV = [
                oracle.policy_shift(post, pre) for post, pre in zip(decision.post_KV, decision.pre_KV, strict=True)
            ]
            r_V = oracle.compose(shifts_KV, weights_K)
            log_b_V, r_relative = one(np.log(decision.b_V)), one(np.array(r_V[:-1]) - r_V[-1])
            loss = reverse_kl(one(np.log(decision.pi_V)), tilted_target(log_b_V, r_relative, alpha), alpha)
            log_z = math.log(oracle.partition(decision.b_V, r_V, alpha))
            objective = oracle.local_objective(decision.pi_V, r_V, decision.b_V, alpha)
            assert loss.item() == pytest.approx(-objective + alpha * log_z, abs=1e-12)
            regularised = alpha * oracle.kl(decision.pi_V, decision.b_V) - oracle.expected(decision.pi_V, r_V)
            assert loss.item() == pytest.approx(regularised + alpha * log_z, abs=1e-12)


@dtypes
def test_divergences_agree_with_loops(decision, dtype):
    log_pi_NO, _, log_q_NO = (x.to(dtype) for x in outcomes(decision))
    pi_O = oracle.bucket(decision.pi_V, decision.candidates)
    q_O = oracle.finite_target(decision.b_V, decision.candidates, shift_of(decision), 2.0)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert reverse_kl(log_pi_NO, log_q_NO, 3.0).item() == pytest.approx(3 * oracle.kl(pi_O, q_O), rel=tolerance)
    assert forward_kl(log_q_NO, log_pi_NO).item() == pytest.approx(oracle.kl(q_O, pi_O), rel=tolerance)
    assert total_variation(log_q_NO, log_pi_NO).item() == pytest.approx(oracle.total_variation(q_O, pi_O), rel=1e-5)


def test_tokens_that_cannot_happen_count_nothing():
    log_p_NV = tensor([[math.log(0.5), math.log(0.5), -math.inf]], requires_grad=True)
    log_q_NV = tensor([[math.log(0.9), math.log(0.1), -math.inf]])
    loss = reverse_kl(log_p_NV, log_q_NV, 1.0).sum()
    assert loss.item() == pytest.approx(oracle.kl([0.5, 0.5], [0.9, 0.1]), rel=1e-6)
    (slope_NV,) = torch.autograd.grad(loss, log_p_NV)
    assert slope_NV.isfinite().all()


# ---- the sampled KL and Direct-OPD ----


@dtypes
def test_sampled_kl_is_k3(dtype):
    b_N, pi_N = [0.5, 0.1, 0.3, 1e-3], [0.5, 0.4, 0.2, 0.9]
    kl_N = sampled_kl(tensor(pi_N, dtype=dtype).log(), tensor(b_N, dtype=dtype).log())
    expected = [oracle.sampled_kl(pi, b) for pi, b in zip(pi_N, b_N, strict=True)]
    assert kl_N.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)
    extreme_N = sampled_kl(tensor([-100.0, 0.0, -math.inf], dtype=dtype), tensor([0.0, -100.0, -1.0], dtype=dtype))
    assert extreme_N.isfinite().all()


def test_sampled_kl_on_policy_is_the_kl(decision):
    kl_V = sampled_kl(tensor(np.log(decision.pi_V)), tensor(np.log(decision.b_V)))
    mean = oracle.expected(decision.pi_V, kl_V.tolist())
    assert mean == pytest.approx(oracle.kl(decision.pi_V, decision.b_V), abs=1e-12)


def test_the_cached_surrogate_is_not_stationary_at_the_target():
    """The paper's counterexample: slope log 3 - 20/9 where the tilted objective has slope 0."""
    b_V, r_V = [0.5, 0.5], [math.log(3 / 2), math.log(1 / 2)]
    assert oracle.tilt(b_V, r_V, 1.0) == pytest.approx([0.75, 0.25], rel=1e-15)
    x = tensor(0.75, dtype=torch.float64, requires_grad=True)
    p_NV, b_NV = torch.stack([x, 1 - x])[None], one(b_V)
    cached = (p_NV * one(r_V)).sum() - (b_NV * sampled_kl(p_NV.log(), b_NV.log())).sum()
    (slope,) = torch.autograd.grad(cached, x)
    assert slope.item() == pytest.approx(math.log(3) - 20 / 9, abs=1e-12)

    def slow(point: list[float]) -> float:
        p = [point[0], 1 - point[0]]
        return oracle.expected(p, r_V) - oracle.cached_kl(p, b_V)

    assert oracle.gradient(slow, [0.75], step=1e-3) == pytest.approx([math.log(3) - 20 / 9], abs=1e-8)
    log_p_V = torch.stack([x, 1 - x]).log()[None]
    (tilted_slope,) = torch.autograd.grad(reverse_kl(log_p_V, one(np.log([0.75, 0.25])), 1.0).sum(), x)
    assert abs(tilted_slope.item()) < 1e-15


def test_direct_opd_gradient_agrees_with_differences_of_frozen_shares(decision):
    c, sampled, r_C = decision.candidates, 11, shift_of(decision)
    logits_V = tensor(np.log(decision.pi_V), requires_grad=True)
    logp_V = logits_V.log_softmax(-1)
    log_b_N = tensor([math.log(decision.b_V[sampled])], dtype=torch.float64)
    loss = direct_opd_loss(logp_V[c][None], one(r_C), logp_V[sampled][None], log_b_N, 1.5).sum()
    (slope_V,) = torch.autograd.grad(loss, logits_V)
    shares_C = oracle.renormalised(decision.pi_V, c)

    def slow(logits: list[float]) -> float:
        return oracle.direct_opd_loss(oracle.softmax(logits), c, shares_C, r_C, sampled, decision.b_V, 1.5)

    assert loss.item() == pytest.approx(slow(logits_V.tolist()), rel=1e-12)
    differences = oracle.gradient(slow, logits_V.tolist())
    assert slope_V.tolist() == pytest.approx(differences, rel=1e-6, abs=1e-7 * max(map(abs, differences)))


def test_first_gradient_is_that_of_candidate_renormalised_direct_opd(decision):
    """At the behaviour: tilted loss, Direct-OPD, and the slope of -E_pi[r] on candidates over their mass are one."""
    c, r_C = decision.candidates, shift_of(decision)
    logits_V = tensor(np.log(decision.b_V), requires_grad=True)
    log_pi_NO = student_outcomes(logits_V, c)
    log_b_NO = log_pi_NO.detach()
    loss = log_residual_loss(log_pi_NO, log_b_NO, tilted_target(log_b_NO, one(r_C), 2.0), 2.0)
    (tilted_V,) = torch.autograd.grad(loss.sum(), logits_V)

    mass = math.fsum(decision.b_V[c])

    def reward_over_mass(logits: list[float]) -> float:
        p_V = oracle.softmax(logits)
        return -math.fsum(p_V[a] * r for a, r in zip(c, r_C, strict=True)) / mass

    assert tilted_V.tolist() == pytest.approx(oracle.gradient(reward_over_mass, logits_V.tolist()), abs=1e-9)
    for sampled in (c[0], 11):  # k3 is flat where student and behaviour agree, whatever was sampled
        logp_V = logits_V.log_softmax(-1)
        loss = direct_opd_loss(logp_V[c][None], one(r_C), logp_V[sampled][None], logp_V[sampled][None].detach(), 2.0)
        (direct_V,) = torch.autograd.grad(loss.sum(), logits_V)
        assert_close(direct_V, tilted_V, rtol=1e-10, atol=1e-12)


def test_direct_opd_keeps_pushing_where_the_tilted_loss_rests(decision):
    c, r_C = decision.candidates, shift_of(decision)
    r_V = np.zeros(len(decision.b_V))
    r_V[c] = r_C
    logits_V = tensor(np.log(oracle.tilt(decision.b_V, r_V, 2.0)), requires_grad=True)
    logp_V = logits_V.log_softmax(-1)
    log_b_V = tensor(np.log(decision.b_V))
    everywhere = len(r_V)
    loss_V = direct_opd_loss(logp_V[c].expand(everywhere, -1), one(r_C).expand(everywhere, -1), logp_V, log_b_V, 2.0)
    (slope_V,) = torch.autograd.grad((log_b_V.exp() * loss_V).sum(), logits_V)  # in expectation over cached tokens
    assert slope_V.abs().max().item() > 1e-3


def on_policy_slope(p_V: np.ndarray, r_V: np.ndarray, b_V: np.ndarray, alpha: float) -> Tensor:
    """The logits' gradient of Direct-OPD, in expectation over tokens that the student itself samples."""
    logits_V = tensor(np.log(p_V), requires_grad=True)
    logp_V, each = logits_V.log_softmax(-1), (len(p_V), -1)
    loss_V = direct_opd_loss(logp_V.expand(each), one(r_V).expand(each), logp_V, tensor(np.log(b_V)), alpha)
    return torch.autograd.grad((tensor(p_V) * loss_V).sum(), logits_V)[0]


def test_sampled_kl_pulls_like_the_forward_kl_even_on_policy(decision):
    """Its value is KL(pi || b) on average, its gradient that of KL(b || pi): the draw is not differentiated."""
    slope_V = on_policy_slope(decision.pi_V, np.zeros_like(decision.b_V), decision.b_V, 1.0)

    def slow(logits: list[float]) -> float:
        return oracle.kl(decision.b_V, oracle.softmax(logits))

    assert slope_V.tolist() == pytest.approx(oracle.gradient(slow, np.log(decision.pi_V).tolist()), abs=1e-8)


def test_online_direct_opd_rests_beyond_the_target(decision):
    """It rests where p = alpha b / (lambda - r): not at the target, and with more reward than the target has."""
    b_V, alpha = decision.b_V, 2.0
    r_V = np.log(decision.post_KV[0] / decision.pre_KV[0])
    low, high = r_V.max(), r_V.max() + alpha
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if (alpha * b_V / (middle - r_V)).sum() > 1 else (low, middle)
    rest_V = alpha * b_V / (high - r_V)
    assert rest_V.sum() == pytest.approx(1, abs=1e-9)
    assert on_policy_slope(rest_V, r_V, b_V, alpha).abs().max() < 1e-8
    target_V = np.array(oracle.tilt(b_V, r_V, alpha))
    assert on_policy_slope(target_V, r_V, b_V, alpha).abs().max() > 1e-3
    assert (rest_V * r_V).sum() > (target_V * r_V).sum()


def test_direct_opd_in_float32_is_finite_at_extremes():
    logp_NC = tensor([[-100.0, -1e-6], [-40.0, -90.0], [-math.inf, 0.0]], requires_grad=True)
    r_NC = tensor([[30.0, -30.0], [5.0, 0.0], [-9.0, 1.0]])
    loss_N = direct_opd_loss(logp_NC, r_NC, tensor([-100.0, 0.0, -1.0]), tensor([0.0, -100.0, -1.0]), 2.0)
    (slope_NC,) = torch.autograd.grad(loss_N.sum(), logp_NC)
    assert loss_N.isfinite().all()
    assert slope_NC.isfinite().all()
