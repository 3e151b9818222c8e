"""How far a target moves, against loops; alpha from a KL budget."""

import numpy as np
import pytest
import torch
from torch import tensor

import oracle
from lightning_weave.maths import expected_kl, shift_covariance, solve_alpha_for_kl, tilted_target


def positions(rng: np.random.Generator, n: int = 30, c: int = 6):
    log_b_NO = tensor(2 * rng.normal(size=(n, c + 1))).log_softmax(-1)
    return log_b_NO, tensor(rng.normal(size=(n, c)))


def test_expected_kl_agrees_with_loops(rng):
    log_b_NO, r_NC = positions(rng)
    kl_N = expected_kl(tilted_target(log_b_NO, r_NC, 1.5), log_b_NO)
    for n, kl in enumerate(kl_N.tolist()):
        b_O = log_b_NO[n].exp().tolist()
        assert kl == pytest.approx(oracle.kl(oracle.tilt(b_O, [*r_NC[n].tolist(), 0.0], 1.5), b_O), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("budget", [1e-4, 0.01, 0.1, 0.8])
def test_solved_alpha_spends_the_budget(rng, budget, dtype):
    log_b_NO, r_NC = (x.to(dtype) for x in positions(rng))
    alpha = solve_alpha_for_kl(log_b_NO, r_NC, budget)
    spent = [
        oracle.kl(oracle.tilt(b_O, [*r_C, 0.0], alpha), b_O)
        for b_O, r_C in zip(log_b_NO.double().exp().tolist(), r_NC.double().tolist(), strict=True)
    ]
    assert np.mean(spent) == pytest.approx(budget, rel=1e-3)


def test_budget_out_of_reach_names_the_range(rng):
    log_b_NO, r_NC = positions(rng)
    most = expected_kl(tilted_target(log_b_NO, r_NC, 1e-4), log_b_NO).mean().item()
    for budget in (most * 1.01, 0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"out of reach.*to {most:.3g}"):
            solve_alpha_for_kl(log_b_NO, r_NC, budget)
    with pytest.raises(ValueError, match="out of reach"):
        solve_alpha_for_kl(log_b_NO, torch.zeros_like(r_NC), 0.1)
    with pytest.raises(ValueError, match="no valid position"):
        solve_alpha_for_kl(log_b_NO[:0], r_NC[:0], 0.1)


def test_covariance_agrees_with_loops_and_with_the_curvature_of_the_kl(rng):
    log_b_NO, u_NC = positions(rng)
    v_NC = tensor(rng.normal(size=u_NC.shape))
    covariance_N = shift_covariance(log_b_NO, u_NC, v_NC)
    for n, value in enumerate(covariance_N.tolist()):
        u_O, v_O = [*u_NC[n].tolist(), 0.0], [*v_NC[n].tolist(), 0.0]
        assert value == pytest.approx(oracle.covariance(log_b_NO[n].exp().tolist(), u_O, v_O), abs=1e-12)
    # a weak tilt costs half its variance: KL(q || b) = Var_b(r) / (2 alpha^2) + O(alpha^-3)
    weak_N = expected_kl(tilted_target(log_b_NO, u_NC, 1e3), log_b_NO) * 2e6
    assert weak_N.tolist() == pytest.approx(shift_covariance(log_b_NO, u_NC, u_NC).tolist(), rel=1e-2)
