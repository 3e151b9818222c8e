"""Whatever finite numbers come in, nothing infinite comes out, and the equations still hold."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, tensor
from torch.testing import assert_close

import oracle
from lightning_weave.maths import (
    LOG_RESIDUAL_FLOOR,
    compose_shifts,
    log_residual_loss,
    reverse_kl,
    tilted_target,
    with_other,
)

pytestmark = pytest.mark.slow

properties = settings(max_examples=150, deadline=None, derandomize=True)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


@dataclass(frozen=True)
class Extreme:
    """A few positions of one dtype: two policies on the same candidates, shifts and an alpha."""

    logp_NC: Tensor
    other_N: Tensor
    student_NC: Tensor
    student_other_N: Tensor
    r_NC: Tensor
    alpha: float

    def to(self, dtype: torch.dtype) -> "Extreme":
        tensors = {name: x.to(dtype) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Extreme(**tensors, alpha=self.alpha)


@st.composite
def extremes(draw: st.DrawFn) -> Extreme:
    """Draw log-probs down to -100 and residual masses from 1e-12 to 1."""
    n, c = draw(st.integers(1, 4)), draw(st.integers(1, 16))

    def matrix(low: float, high: float, columns: int = c) -> Tensor:
        numbers = st.lists(st.floats(low, high, allow_subnormal=False), min_size=n * columns, max_size=n * columns)
        return tensor(draw(numbers), dtype=torch.float64).reshape(n, columns)

    def policy() -> tuple[Tensor, Tensor]:
        other_N1 = 10.0 ** matrix(-12, 0, columns=1)
        logp_NC = matrix(-100, 0).log_softmax(-1) + torch.log1p(-other_N1.clamp(max=1 - 1e-15))
        return logp_NC, other_N1.log().squeeze(-1)

    return Extreme(*policy(), *policy(), matrix(-30, 30), draw(st.floats(0.25, 8)))


@properties
@given(extremes(), st.booleans())
@dtypes
def test_extremes_give_finite_normalised_results(dtype, extreme, given_residual):
    x = extreme.to(dtype)
    log_b_NO = with_other(x.logp_NC, x.other_N if given_residual else None)
    log_q_NO = tilted_target(log_b_NO, x.r_NC, x.alpha)
    for log_p_NO in (log_b_NO, log_q_NO):
        assert log_p_NO.isfinite().all()
        assert log_p_NO.dtype == dtype
        assert (log_p_NO[:, -1] >= LOG_RESIDUAL_FLOOR - 1e-6).all()
        roundoff = 1e-5 if dtype == torch.float32 else 1.1e-8  # the floor adds up to 1e-8
        assert_close(log_p_NO.exp().sum(-1), torch.ones_like(x.other_N), rtol=0.0, atol=roundoff)
    logits_NC, other_N = x.student_NC.requires_grad_(), x.student_other_N.requires_grad_()
    log_pi_NO = with_other(logits_NC, other_N if given_residual else None)
    loss_N = log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, x.alpha) + reverse_kl(log_pi_NO, log_q_NO, x.alpha)
    slopes = torch.autograd.grad(loss_N.sum(), [logits_NC, other_N], allow_unused=True)
    assert loss_N.isfinite().all()
    assert all(slope.isfinite().all() for slope in slopes if slope is not None)


@properties
@given(extremes())
@dtypes
def test_targets_follow_the_loops(dtype, extreme):
    x = extreme.to(dtype)
    log_q_NO = tilted_target(with_other(x.logp_NC, x.other_N), x.r_NC, x.alpha)
    for n in range(len(x.logp_NC)):
        p_V = [*x.logp_NC[n].double().exp().tolist(), x.other_N[n].double().exp().item()]
        q_O = oracle.finite_target(p_V, range(len(p_V) - 1), x.r_NC[n].tolist(), x.alpha)
        tolerance = 2e-4 if dtype == torch.float32 else 1e-9  # logs of up to 200 carry 2e-5 in float32
        assert log_q_NO[n].double().exp().tolist() == pytest.approx(q_O, rel=tolerance, abs=0.0)


@properties
@given(extremes(), st.floats(0, 1))
def test_log_odds_move_by_the_weighted_shift(x, weight):
    pair_KNC = torch.stack([x.r_NC, x.r_NC.flip(-1)])
    everywhere = torch.ones(pair_KNC.shape[:2], dtype=torch.bool)
    composed_NC, _ = compose_shifts(pair_KNC, everywhere, [weight, 1 - weight])
    log_b_NO = with_other(x.logp_NC, x.other_N)
    log_q_NO = tilted_target(log_b_NO, composed_NC, x.alpha)
    expected_NC = (weight * pair_KNC[0] + (1 - weight) * pair_KNC[1]) / x.alpha
    moved_NO = log_q_NO - log_b_NO
    free = log_q_NO[:, -1] > LOG_RESIDUAL_FLOOR
    assert_close((moved_NO[:, :-1] - moved_NO[:, -1:])[free], expected_NC[free], rtol=1e-10, atol=1e-10)
    assert_close(moved_NO[:, :-1] - moved_NO[:, :1], expected_NC - expected_NC[:, :1], rtol=1e-10, atol=1e-10)
