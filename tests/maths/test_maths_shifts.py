"""Shifts, composition, the residual outcome and the target, against brute force and the paper's propositions."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor, tensor
from torch.testing import assert_close

import oracle
from lightning_weave.maths import LOG_RESIDUAL_FLOOR, compose_shifts, policy_shift, tilted_target, with_other

EXACT = {"rtol": 1e-12, "atol": 1e-12}
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def one(values: object) -> Tensor:
    """Make one position in float64."""
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)[None]


def whole_target(b_V: np.ndarray, r_V: np.ndarray, alpha: float) -> Tensor:
    """Tilt a whole vocabulary: its last token stands where `other` stands, the shifts are relative to it."""
    r_V = np.asarray(r_V)
    return tilted_target(one(np.log(b_V)), one(r_V[:-1] - r_V[-1]), alpha)


# ---- the target ----


def test_target_is_exact_when_unseen_tokens_do_not_shift(decision):
    r_V = np.zeros(len(decision.b_V))
    r_V[decision.candidates] = np.random.default_rng(7).normal(size=len(decision.candidates)) * 2
    q_V = np.array(oracle.tilt(decision.b_V, r_V, alpha=2.0))
    log_b_NO = with_other(one(np.log(decision.b_V[decision.candidates])))
    log_q_NO = tilted_target(log_b_NO, one(r_V[decision.candidates]), alpha=2.0)
    seen = q_V[decision.candidates]
    assert_close(log_q_NO.exp()[0], tensor([*seen, 1 - seen.sum()], dtype=torch.float64), **EXACT)


def test_target_is_not_exact_when_an_unseen_token_shifts(decision):
    r_V = np.zeros(len(decision.b_V))
    unseen = next(a for a in np.argsort(-decision.b_V) if a not in decision.candidates)
    r_V[unseen] = 3.0
    q_V = np.array(oracle.tilt(decision.b_V, r_V, alpha=2.0))
    log_b_NO = with_other(one(np.log(decision.b_V[decision.candidates])))
    log_q_NO = tilted_target(log_b_NO, one(r_V[decision.candidates]), alpha=2.0)
    assert abs(log_q_NO.exp()[0, 0].item() - q_V[decision.candidates[0]]) > 1e-5


def test_target_is_the_product_of_policy_ratios(decision):
    shifts_KNC = policy_shift(tensor(np.log(decision.post_KV)), tensor(np.log(decision.pre_KV)))[:, None]
    everywhere = torch.ones(3, 1, dtype=torch.bool)
    r_NC, _ = compose_shifts(shifts_KNC, everywhere, decision.weights_K)
    q_V = oracle.product_of_ratios(decision.b_V, decision.post_KV, decision.pre_KV, decision.weights_K, alpha=1.5)
    assert_close(whole_target(decision.b_V, r_NC[0].numpy(), 1.5).exp(), one(q_V), **EXACT)


def test_target_maximises_the_local_objective(decision, rng):
    r_V = oracle.policy_shift(decision.post_KV[0], decision.pre_KV[0])
    q_V = whole_target(decision.b_V, r_V, 2.0).exp()[0].numpy()
    best = oracle.local_objective(q_V, r_V, decision.b_V, 2.0)
    for scale in (0.5, 1e-2, 1e-3):
        rival = q_V * np.exp(scale * rng.normal(size=len(q_V)))
        assert oracle.local_objective(rival / rival.sum(), r_V, decision.b_V, 2.0) < best


def test_pairwise_odds_move_by_the_weighted_shifts(decision):
    alpha, c = 1.3, decision.candidates
    r_KC = np.log(decision.post_KV[:, c] / decision.pre_KV[:, c])
    r_NC, _ = compose_shifts(tensor(r_KC)[:, None], torch.ones(3, 1, dtype=torch.bool), decision.weights_K)
    log_b_NO = with_other(one(np.log(decision.b_V[c])))
    log_q_O = tilted_target(log_b_NO, r_NC, alpha)[0].tolist()
    for x, y in itertools.combinations(range(len(c)), 2):
        moved = sum(w * (r_C[x] - r_C[y]) for w, r_C in zip(decision.weights_K, r_KC, strict=True)) / alpha
        odds = math.log(decision.b_V[c[x]] / decision.b_V[c[y]]) + moved
        assert log_q_O[x] - log_q_O[y] == pytest.approx(odds, abs=1e-12)
    against_other = sum(w * r_C[0] for w, r_C in zip(decision.weights_K, r_KC, strict=True)) / alpha
    moved_O = [q - b for q, b in zip(log_q_O, log_b_NO[0].tolist(), strict=True)]
    assert moved_O[0] - moved_O[-1] == pytest.approx(against_other, abs=1e-12)


def test_order_of_anchors_does_not_matter_and_only_weight_over_alpha_does(rng):
    r_KNC, weights_K = tensor(rng.normal(size=(3, 6, 4))), tensor(rng.dirichlet(np.ones(3)))
    valid_KN = tensor(rng.random((3, 6)) < 0.8)
    log_b_NO = tensor(rng.normal(size=(6, 5))).log_softmax(-1)
    r_NC, valid_N = compose_shifts(r_KNC, valid_KN, weights_K)
    log_q_NO = tilted_target(log_b_NO, r_NC, 2.0)
    for order in itertools.permutations(range(3)):
        k = list(order)
        permuted_NC, permuted_valid_N = compose_shifts(r_KNC[k], valid_KN[k], weights_K[k])
        assert_close(tilted_target(log_b_NO, permuted_NC, 2.0), log_q_NO, **EXACT)
        assert torch.equal(permuted_valid_N, valid_N)
    for c in (0.25, 3.0):
        scaled_NC, _ = compose_shifts(r_KNC, valid_KN, c * weights_K)
        assert_close(tilted_target(log_b_NO, scaled_NC, 2.0), tilted_target(log_b_NO, r_NC, 2.0 / c), **EXACT)


def test_a_state_baseline_cancels_over_the_whole_vocabulary_but_not_over_candidates_alone(decision):
    r_V = np.array(oracle.policy_shift(decision.post_KV[0], decision.pre_KV[0]))
    q_V = oracle.tilt(decision.b_V, r_V, 2.0)
    for baseline in (-3.0, 0.7):
        assert oracle.tilt(decision.b_V, r_V + baseline, 2.0) == pytest.approx(q_V, rel=1e-12)
        assert_close(whole_target(decision.b_V, r_V + baseline, 2.0).exp(), one(q_V), **EXACT)
    c = decision.candidates
    log_b_NO = with_other(one(np.log(decision.b_V[c])))
    plain, raised = (tilted_target(log_b_NO, one(r_V[c] + baseline), 2.0) for baseline in (0.0, 0.7))
    assert (raised - plain)[0, 0] > 0.005  # `other` does not take the baseline


def test_no_shift_leaves_the_behaviour(rng):
    log_b_NO = tensor(rng.normal(size=(5, 9))).log_softmax(-1)
    anything_KNC = tensor(rng.normal(size=(2, 5, 8)))
    r_NC, valid_N = compose_shifts(anything_KNC, torch.zeros(2, 5, dtype=torch.bool), tensor([0.0, 0.0]))
    assert valid_N.all()
    assert_close(tilted_target(log_b_NO, r_NC, 2.0), log_b_NO, **EXACT)


# ---- composition and its mask ----


@dtypes
def test_composition_and_mask_agree_with_loops(rng, dtype):
    r_KNC = tensor(rng.normal(size=(4, 10, 3)), dtype=dtype)
    valid_KN = tensor(rng.random((4, 10)) < 0.7)
    weights_K = [0.5, 0.0, 0.2, 0.3]
    r_NC, valid_N = compose_shifts(r_KNC, valid_KN, tensor(weights_K, dtype=dtype))
    assert r_NC.dtype == dtype
    for n in range(10):
        assert valid_N[n].item() == oracle.composed_validity(valid_KN[:, n].tolist(), weights_K)
        expected = oracle.compose(r_KNC[:, n].tolist(), weights_K) if valid_N[n] else [0.0] * 3
        assert r_NC[n].tolist() == pytest.approx(expected, abs=1e-6 if dtype == torch.float32 else 1e-14)


@dtypes
def test_an_endpoint_is_the_single_anchor_run_with_its_mask(rng, dtype):
    r_KNC = tensor(rng.normal(size=(3, 20, 4)), dtype=dtype)
    valid_KN = tensor(rng.random((3, 20)) < 0.5)
    for k in range(3):
        weights_K = torch.eye(3, dtype=dtype)[k]
        joint_NC, joint_valid_N = compose_shifts(r_KNC, valid_KN, weights_K)
        alone_NC, alone_valid_N = compose_shifts(r_KNC[k : k + 1], valid_KN[k : k + 1], tensor([1.0], dtype=dtype))
        assert torch.equal(joint_valid_N, valid_KN[k])
        assert torch.equal(joint_valid_N, alone_valid_N)
        assert torch.equal(joint_NC, alone_NC)
        assert torch.equal(joint_NC[joint_valid_N], r_KNC[k][joint_valid_N])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_garbage_at_unused_positions_does_not_leak(rng, garbage):
    clean_KNC = tensor(rng.normal(size=(3, 8, 4)))
    valid_KN = torch.ones(3, 8, dtype=torch.bool)
    valid_KN[0, 2] = valid_KN[1, 5] = False
    dirty_KNC = clean_KNC.clone()
    dirty_KNC[0, 2] = dirty_KNC[1, 5] = dirty_KNC[2] = garbage
    clean_KNC[2] = 0.0
    weights_K = tensor([0.6, 0.4, 0.0], dtype=torch.float64, requires_grad=True)
    r_NC, valid_N = compose_shifts(dirty_KNC, valid_KN, weights_K)
    expected_NC, expected_valid_N = compose_shifts(clean_KNC, valid_KN, weights_K)
    assert torch.equal(valid_N, expected_valid_N)
    assert torch.equal(r_NC, expected_NC)
    assert r_NC.sum().isfinite()
    (slope_K,) = torch.autograd.grad(r_NC.sum(), weights_K)
    assert slope_K.isfinite().all()


def test_garbage_at_a_used_position_is_not_hidden():
    r_KNC = torch.zeros(2, 1, 3)
    r_KNC[1, 0, 1] = math.nan
    r_NC, _ = compose_shifts(r_KNC, torch.ones(2, 1, dtype=torch.bool), tensor([0.5, 0.5]))
    assert r_NC.isnan().any()


# ---- the residual outcome ----

MASSES = [1e-12, 1e-9, 9.9e-9, 1.01e-8, 1e-6, 1e-3, 0.3, 0.5, 0.9, 1 - 1e-9]


@pytest.mark.parametrize("mass", MASSES)
def test_residual_is_one_minus_the_candidates(mass):
    logp_NC = one(np.log([0.25, 0.75])) + math.log1p(-mass)
    other = with_other(logp_NC)[0, -1].item()
    # float64 log-probs near 0 know the residual to 2e-16, whatever is computed from them
    assert math.exp(other) == pytest.approx(max(mass, 1e-8), abs=4e-16, rel=1e-12)
    assert with_other(logp_NC)[0, :-1].equal(logp_NC[0])


@pytest.mark.parametrize("mass", MASSES)
@dtypes
def test_given_residual_is_kept_and_floored(mass, dtype):
    logp_NC = tensor([[math.log(0.25), math.log(0.75)]], dtype=dtype)
    logp_NO = with_other(logp_NC, tensor([math.log(mass)], dtype=dtype))
    assert logp_NO[0, -1].item() == pytest.approx(max(math.log(mass), math.log(1e-8)), rel=1e-6, abs=1e-8)
    assert logp_NO.dtype == dtype


def test_residual_gradient_is_exact_above_the_floor_and_zero_below():
    for mass in (1e-5, 0.1, 0.49, 0.51, 0.999999):
        logp_C = tensor(np.log([0.3, 0.7]) + math.log1p(-mass), requires_grad=True)
        (slope_C,) = torch.autograd.grad(with_other(logp_C[None])[0, -1], logp_C)
        assert_close(slope_C, -logp_C.detach().exp() / mass, rtol=1e-9, atol=0.0)
    logp_C = tensor([-18.0, -19.0], requires_grad=True)  # candidates that hold next to nothing, in float32
    (slope_C,) = torch.autograd.grad(with_other(logp_C[None])[0, -1], logp_C)
    assert_close(slope_C, -logp_C.detach().exp(), rtol=1e-5, atol=0.0)
    for excess in (math.log1p(-1e-9), 0.0, 1e-7):  # below the floor, nothing left, and more than everything
        logp_C = tensor(np.log([0.3, 0.7]) + excess, requires_grad=True)
        other = with_other(logp_C[None])[0, -1]
        assert other.item() == LOG_RESIDUAL_FLOOR
        (slope_C,) = torch.autograd.grad(other, logp_C)
        assert slope_C.equal(torch.zeros(2, dtype=torch.float64))


def test_given_residual_has_no_gradient_below_the_floor():
    other_N = tensor([-20.0, -18.0], requires_grad=True)
    with_other(torch.zeros(2, 3), other_N)[:, -1].sum().backward()
    assert other_N.grad is not None
    assert other_N.grad.tolist() == [0.0, 1.0]


def test_targets_residual_is_floored_and_the_candidates_are_not_touched():
    log_b_NO = with_other(one(np.log([0.6, 0.4 - 1e-6])))
    r_NC = one([40.0, 38.0])
    log_q_NO = tilted_target(log_b_NO, r_NC, alpha=2.0)
    q_O = oracle.finite_target([0.6, 0.4 - 1e-6, 1e-6], [0, 1], [40.0, 38.0], 2.0)
    assert log_q_NO[0, -1].item() == LOG_RESIDUAL_FLOOR
    assert_close(log_q_NO.exp(), one(q_O), rtol=1e-9, atol=0.0)
    odds = (log_q_NO - log_b_NO)[0, 0] - (log_q_NO - log_b_NO)[0, 1]
    assert odds.item() == pytest.approx(1.0, abs=1e-12)
