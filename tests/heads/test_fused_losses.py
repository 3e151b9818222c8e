"""The one-pass losses against autograd on the plain formula over whole rows of logits, in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import rounding
from lightning_weave.heads import Head, fused_log_residual_loss, fused_reverse_kl, outcome_logprobs
from lightning_weave.maths import log_residual_loss, reverse_kl, tilted_target, with_other

ALPHA, NORMALIZER = 2.0, 7.0
LOSSES = ("log-residual", "reverse-kl")
# A residual of 1e-12 takes logits near 32, where an operation errs by up to 32 units. A logit is a sum of one or two
# dozen terms, whose errors mostly cancel: eight of them are allowed for.
TOLERANCE = {torch.float32: 8 * 32 * rounding.UNIT, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """Hidden states and a head whose residual at every position is what was drawn, whatever the behaviour's is."""

    hidden_ND: Tensor
    weight_VD: Tensor
    ids_NC: Tensor
    log_b_NO: Tensor
    log_q_NO: Tensor
    vocabulary: int

    def to(self, dtype: torch.dtype) -> "Case":
        tensors = (x.to(dtype) for x in (self.hidden_ND, self.weight_VD))
        logs = (x.to(dtype) for x in (self.log_b_NO, self.log_q_NO))
        return Case(*tensors, self.ids_NC, *logs, self.vocabulary)

    def rows(self, kept: Tensor) -> "Case":
        return Case(
            self.hidden_ND[kept],
            self.weight_VD,
            self.ids_NC[kept],
            self.log_b_NO[kept],
            self.log_q_NO[kept],
            self.vocabulary,
        )


def make_case(seed: int, N: int = 23, V: int = 300, D: int = 12, C: int = 16, padding: int = 5) -> Case:
    torch.manual_seed(seed)
    options = {"dtype": torch.float64}
    weight_VD = torch.randn(V + padding, D, **options) / D**0.5
    hidden_ND = torch.randn(N, D, **options)
    ids_NC = torch.stack([torch.randperm(V)[:C] for _ in range(N)])

    # One more dimension per position parts its candidates from the rest, by as much as gives the residual drawn.
    logits_NV = hidden_ND @ weight_VD[:V].T
    log_odds_N = logits_NV.gather(1, ids_NC).logsumexp(1) - logits_NV.scatter(1, ids_NC, -torch.inf).logsumexp(1)
    residual_N = draw_residuals(N)
    apart_N = torch.log1p(-residual_N) - residual_N.log() - log_odds_N
    sides_VN = torch.zeros(V + padding, N, **options)
    sides_VN[ids_NC, torch.arange(N)[:, None]] = 1.0

    behaviour_N = draw_residuals(N)
    candidates_NC = torch.log_softmax(2 * torch.randn(N, C, **options), dim=1) + torch.log1p(-behaviour_N)[:, None]
    log_b_NO = with_other(candidates_NC, behaviour_N.log())
    case = Case(
        torch.cat([hidden_ND, torch.diag(apart_N)], dim=1),
        torch.cat([weight_VD, sides_VN], dim=1),
        ids_NC,
        log_b_NO,
        tilted_target(log_b_NO, 2 * torch.randn(N, C, **options), ALPHA),
        V,
    )
    return case.to(torch.float32).to(torch.float64)  # so that both precisions see the same numbers


def draw_residuals(count: int) -> Tensor:
    return 10 ** torch.empty(count, dtype=torch.float64).uniform_(-12, -0.0458)  # 1e-12 to 0.9


def plain(case: Case, loss: str) -> Tensor:
    """The formula as it stands: whole rows of logits, `other` from the non-candidates."""
    logp_NV = torch.log_softmax(case.hidden_ND @ case.weight_VD[: case.vocabulary].T, dim=1)
    other_N = logp_NV.scatter(1, case.ids_NC, -torch.inf).logsumexp(1)
    return finite_loss(with_other(logp_NV.gather(1, case.ids_NC), other_N), case, loss)


def finite_loss(log_pi_NO: Tensor, case: Case, loss: str) -> Tensor:
    if loss == "log-residual":
        return log_residual_loss(log_pi_NO, case.log_b_NO, case.log_q_NO, ALPHA).sum() / NORMALIZER
    return reverse_kl(log_pi_NO, case.log_q_NO, ALPHA).sum() / NORMALIZER


def fused(case: Case, loss: str, chunk: int | None = None, normalizer: float | Tensor = NORMALIZER) -> Tensor:
    start = (case.hidden_ND, case.weight_VD, case.ids_NC)
    rest = (case.log_q_NO, ALPHA, normalizer, chunk, case.vocabulary)
    if loss == "log-residual":
        return fused_log_residual_loss(*start, case.log_b_NO, *rest)
    return fused_reverse_kl(*start, *rest)


def with_gradients(function, case: Case, *args) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and gradients of hidden states and weight."""
    case.hidden_ND.requires_grad_()
    case.weight_VD.requires_grad_()
    loss = function(case, *args)
    return loss.detach(), *torch.autograd.grad(loss, (case.hidden_ND, case.weight_VD))


def relative_errors(got, wanted) -> list[float]:
    return [((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, wanted, strict=True)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("shape", "chunk"),
    [
        ({"N": 23, "V": 300}, 5),
        ({"N": 40, "V": 2500, "D": 24}, 7),  # three tiles of the vocabulary
        ({"N": 7, "V": 1024, "padding": 0}, 100),
        ({"N": 30, "V": 1025, "C": 3}, None),  # a tile of one column
        ({"N": 1, "V": 60, "D": 3}, 1),
        ({"N": 16, "V": 17}, 4),  # a single token is `other`
    ],
)
def test_loss_and_gradients_equal_autograd_on_the_plain_formula(shape, chunk, loss, dtype):
    for seed in range(4):
        case = make_case(seed, **shape)
        wanted = with_gradients(plain, case, loss)
        got = with_gradients(fused, case.to(dtype), loss, chunk)
        assert all(x.dtype == dtype for x in got)
        assert max(relative_errors(got, wanted)) < TOLERANCE[dtype]
        assert not got[2][case.vocabulary :].any()  # padding of the vocabulary learns nothing


@pytest.mark.parametrize("loss", LOSSES)
def test_reverse_kl_and_residuals_keep_their_digits_near_the_target(loss):
    """Where autograd in float32 has few digits left: targets nearly met, candidates nearly certain."""
    case = make_case(3)
    case.weight_VD[case.ids_NC[:, 0], -23:] += 0.4 * torch.eye(23, dtype=torch.float64)  # one candidate far ahead
    case = case.to(torch.float32).to(torch.float64)
    log_pi_NO = outcome_logprobs(case.hidden_ND, Head(case.weight_VD, case.vocabulary), case.ids_NC)
    log_q_NO = log_pi_NO + 1e-2 * torch.randn_like(log_pi_NO)
    case = Case(case.hidden_ND, case.weight_VD, case.ids_NC, log_pi_NO, log_q_NO, case.vocabulary)
    wanted = with_gradients(plain, case, loss)
    ours = relative_errors(with_gradients(fused, case.to(torch.float32), loss), wanted)
    autograd = relative_errors(with_gradients(plain, case.to(torch.float32), loss), wanted)
    assert max(ours) < 3e-4  # float32 logits of 15 are known to 1e-6, the residual is 1e-2
    # Both know the log-residual as well as they know the logits, and either may be the luckier; not so the reverse KL.
    assert max(ours[1:]) < (1.0 if loss == "reverse-kl" else 2.0) * max(autograd[1:])


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_rows_get_no_gradient_and_change_nothing(loss):
    case = make_case(5)
    kept = torch.arange(23) % 3 > 0
    case.hidden_ND[~kept] = torch.nan
    alone = case.rows(kept)
    case.hidden_ND.requires_grad_()
    fused(case.rows(kept), loss, 4).backward()
    _, wanted, _ = with_gradients(plain, alone, loss)
    assert torch.equal(case.hidden_ND.grad[~kept], torch.zeros(8, case.hidden_ND.shape[1], dtype=torch.float64))
    torch.testing.assert_close(case.hidden_ND.grad[kept], wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loss", LOSSES)
def test_no_position_is_a_zero_that_takes_part_in_autograd(loss):
    value, *gradients = with_gradients(fused, make_case(0).rows(torch.zeros(23, dtype=torch.bool)), loss)
    assert value == 0
    assert gradients[0].shape == (0, 35)
    assert not gradients[1].any()
    assert gradients[1].shape == (305, 35)


def test_everything_is_a_candidate():
    """No token is left for `other`: its floored mass stays, and gets no gradient."""
    case = make_case(1, N=6, V=17, padding=0)
    hidden_ND, weight_VD = case.hidden_ND[:, :12].detach(), case.weight_VD[:16, :12].detach()
    ids_NC = torch.stack([torch.randperm(16) for _ in range(6)])
    case = Case(hidden_ND, weight_VD, ids_NC, case.log_b_NO, case.log_q_NO, 16)
    for loss in LOSSES:
        errors = relative_errors(with_gradients(fused, case, loss, 4), with_gradients(plain, case, loss))
        assert max(errors) < 1e-12


def test_a_tile_without_anything_but_candidates():
    case = make_case(1, V=1025)
    case.ids_NC[:, 5] = 1024  # the only column of the second tile
    for loss in LOSSES:
        errors = relative_errors(with_gradients(fused, case, loss, 4), with_gradients(plain, case, loss))
        assert max(errors) < 1e-12


@pytest.mark.parametrize("V", [300, 2500])
def test_a_frozen_head_and_a_frozen_body(V):
    case = make_case(2, V=V)
    _, d_hidden, d_weight = with_gradients(plain, case, "log-residual")
    case.weight_VD.requires_grad_(False)
    fused(case, "log-residual").backward()
    torch.testing.assert_close(case.hidden_ND.grad, d_hidden, rtol=1e-11, atol=1e-13)
    assert case.weight_VD.grad is None
    case.hidden_ND.requires_grad_(False)
    case.weight_VD.requires_grad_()
    fused(case, "log-residual").backward()
    torch.testing.assert_close(case.weight_VD.grad, d_weight, rtol=1e-11, atol=1e-13)


def test_nothing_is_kept_for_gradients_that_nobody_wants():
    case = make_case(2)
    case.hidden_ND.requires_grad_()
    with torch.no_grad():
        quiet = fused(case, "log-residual", 5)
    assert not quiet.requires_grad
    torch.testing.assert_close(quiet, plain(case, "log-residual").detach(), rtol=1e-12, atol=0)


def test_a_tied_weight_adds_up_both_of_its_gradients():
    case = make_case(4)
    tokens = torch.randint(0, case.vocabulary, (23,))
    grads = []
    for function in (plain, fused):
        weight_VD = case.weight_VD.detach().clone().requires_grad_()
        hidden_ND = case.hidden_ND.detach() + 0.1 * torch.tanh(weight_VD[tokens])  # the embedding is the head
        function(Case(hidden_ND, weight_VD, case.ids_NC, case.log_b_NO, case.log_q_NO, 300), "log-residual").backward()
        grads.append(weight_VD.grad)
    assert relative_errors(grads[1:], grads[:1])[0] < 1e-12


def test_scaled_accumulated_and_repeated_backward_passes():
    case = make_case(6)
    _, d_hidden, d_weight = with_gradients(plain, case, "log-residual")
    loss = fused(case, "log-residual", 9)
    for _ in range(2):
        (3 * loss).backward(retain_graph=True)
        loss.backward(retain_graph=True)
    torch.testing.assert_close(case.hidden_ND.grad, 8 * d_hidden, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(case.weight_VD.grad, 8 * d_weight, rtol=1e-11, atol=1e-12)


def test_the_normalizer_may_be_a_tensor():
    case = make_case(6)
    wanted = with_gradients(fused, case, "reverse-kl", 5)
    for dtype in (torch.float64, torch.int64):
        got = with_gradients(fused, case, "reverse-kl", 5, torch.tensor(NORMALIZER, dtype=dtype))
        assert max(relative_errors(got, wanted)) < 1e-14
    single = fused(case.to(torch.float32), "reverse-kl", 5, torch.tensor(NORMALIZER, dtype=torch.float64))
    assert single.dtype == torch.float32


@pytest.mark.parametrize("loss", LOSSES)
def test_double_backward_is_refused_in_plain_words(loss):
    case = make_case(0)
    case.hidden_ND.requires_grad_()
    (gradient,) = torch.autograd.grad(fused(case, loss), case.hidden_ND, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated only once.*outcome_logprobs"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("V", [300, 2500])
def test_bfloat16_inputs_are_multiplied_and_summed_in_float32(loss, V):
    logs = make_case(7, V=V)
    case = logs.to(torch.bfloat16)
    exact = case.to(torch.float64)
    case = Case(case.hidden_ND, case.weight_VD, case.ids_NC, logs.log_b_NO, logs.log_q_NO, V)
    exact = Case(exact.hidden_ND, exact.weight_VD, case.ids_NC, logs.log_b_NO, logs.log_q_NO, V)
    wanted = with_gradients(plain, exact, loss)
    got = with_gradients(fused, case, loss, 5)
    assert [x.dtype for x in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    errors = relative_errors(got, wanted)
    assert errors[0] < TOLERANCE[torch.float32]
    assert max(errors[1:]) < 2**-8  # nothing but the last rounding


def test_bfloat16_hidden_states_under_a_float32_master_weight():
    case, logs = make_case(8), make_case(8).to(torch.float32)
    hidden_ND = case.hidden_ND.to(torch.bfloat16)
    mixed = Case(hidden_ND, logs.weight_VD, case.ids_NC, logs.log_b_NO, logs.log_q_NO, 300)
    exact = Case(hidden_ND.double(), case.weight_VD, case.ids_NC, case.log_b_NO, case.log_q_NO, 300)
    with torch.autocast("cpu", torch.bfloat16):
        got = with_gradients(fused, mixed, "log-residual", 5)
    errors = relative_errors(got, with_gradients(plain, exact, "log-residual"))
    assert got[2].dtype == torch.float32
    assert errors[2] < TOLERANCE[torch.float32]


@pytest.mark.parametrize("loss", LOSSES)
def test_the_fallback_equals_the_plain_formula(loss):
    case = make_case(9)
    wanted = with_gradients(plain, case, loss)

    def fallback(case: Case) -> Tensor:
        head = Head(case.weight_VD, case.vocabulary)
        return finite_loss(outcome_logprobs(case.hidden_ND, head, case.ids_NC, chunk=5), case, loss)

    assert max(relative_errors(with_gradients(fallback, case), wanted)) < 1e-12


def test_the_fallback_goes_through_bias_scale_and_soft_cap():
    case = make_case(10)
    bias_V = torch.randn(305, dtype=torch.float64, requires_grad=True)
    case.hidden_ND.requires_grad_()
    head = Head(case.weight_VD, 300, bias_V, scale=0.7, softcap=4.0)
    logits_NV = 4 * torch.tanh((0.7 * case.hidden_ND @ case.weight_VD[:300].T + bias_V[:300]) / 4)
    logp_NV = torch.log_softmax(logits_NV, dim=1)
    wanted_NO = with_other(logp_NV.gather(1, case.ids_NC), logp_NV.scatter(1, case.ids_NC, -torch.inf).logsumexp(1))
    got_NO = outcome_logprobs(case.hidden_ND, head, case.ids_NC, chunk=10)
    torch.testing.assert_close(got_NO, wanted_NO, rtol=1e-12, atol=1e-12)
    inputs = (case.hidden_ND, bias_V)
    got = torch.autograd.grad(finite_loss(got_NO, case, "log-residual"), inputs)
    wanted = torch.autograd.grad(finite_loss(wanted_NO, case, "log-residual"), inputs)
    assert max(relative_errors(got, wanted)) < 1e-12


def test_ids_outside_the_vocabulary_are_refused():
    case = make_case(0)
    case.ids_NC[4, 2] = 300  # a row of the matrix, but of no token
    with pytest.raises(ValueError, match=r"300 in a vocabulary of 300"):
        fused(case, "log-residual")


def test_an_onlooker_sees_the_students_outcomes():
    case = make_case(11)
    wanted_NO = outcome_logprobs(case.hidden_ND, Head(case.weight_VD, 300), case.ids_NC)
    start, rest = (case.hidden_ND, case.weight_VD, case.ids_NC), (case.log_q_NO, ALPHA, NORMALIZER, 5, 300)
    for function, logs in ((fused_log_residual_loss, (case.log_b_NO,)), (fused_reverse_kl, ())):
        watch_NO = torch.full_like(case.log_q_NO, torch.nan)
        function(*start, *logs, *rest, watch_NO=watch_NO)
        torch.testing.assert_close(watch_NO, wanted_NO, rtol=1e-12, atol=1e-12)
