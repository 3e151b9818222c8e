"""Log-probabilities read off the head in tiles, against a full log_softmax in float64."""

import math

import pytest
import torch
from torch import Tensor

import rounding
from lightning_weave.heads import Head, candidate_logprobs, top_candidates
from lightning_weave.heads.tiles import TILE_WIDTH

HEADS = {
    "plain": {},
    "bias": {"bias_V": True},
    "scale": {"scale": 0.125},
    "soft cap": {"softcap": 5.0},
    "all three": {"bias_V": True, "scale": 1.5, "softcap": 7.0},
}


def make_head(name: str, V: int, D: int, padding: int = 3, dtype: torch.dtype = torch.float32) -> Head:
    settings = dict(HEADS[name])
    weight_VD = 4 * torch.randn(V + padding, D) / D**0.5
    weight_VD[V:] = 100.0  # would win everywhere if it took part
    if settings.pop("bias_V", False):
        settings["bias_V"] = torch.randn(V + padding).to(dtype)
    return Head(weight_VD.to(dtype), V, **settings)


def full_logprobs(hidden_ND: Tensor, head: Head) -> Tensor:
    """All of it at once, written down again, in float64."""
    logits_NV = head.scale * hidden_ND.double() @ head.weight_VD[: head.vocabulary].double().T
    if head.bias_V is not None:
        logits_NV += head.bias_V[: head.vocabulary].double()
    if head.softcap is not None:
        logits_NV = head.softcap * torch.tanh(logits_NV / head.softcap)
    return torch.log_softmax(logits_NV, dim=1)


def others_of(logp_NV: Tensor, ids_NC: Tensor) -> Tensor:
    return logp_NV.scatter(1, ids_NC, -torch.inf).logsumexp(1)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(
    ("N", "V", "D", "C", "chunk"),
    [
        (11, 40, 8, 16, 4),
        (5, 3 * TILE_WIDTH + 100, 48, 16, None),
        (7, TILE_WIDTH, 16, 1, 2),
        (4, TILE_WIDTH + 1, 16, 5, 3),
        (3, 17, 4, 16, 1),
    ],
)
def test_every_number_equals_the_full_computation(name, N, V, D, C, chunk):
    torch.manual_seed(0)
    head, hidden_ND = make_head(name, V, D), torch.randn(N, D)
    logp_NV = full_logprobs(hidden_ND, head)
    sampled_N = torch.randint(0, V, (N,))
    sampled_N[0] = V - 1

    ids_NC, top_logp_NC, top_other_N, sampled_logp_N = top_candidates(hidden_ND, head, sampled_N, C, chunk)
    apart = rounding.of_logprobs(hidden_ND, head.weight_VD[:V], head.scale)
    assert all(len(set(row)) == C for row in ids_NC.tolist())
    close(logp_NV.gather(1, ids_NC), logp_NV.topk(C).values, apart)  # two that are as good as equal may change places
    close(top_logp_NC, logp_NV.gather(1, ids_NC), apart)
    close(top_other_N, others_of(logp_NV, ids_NC), apart)
    close(sampled_logp_N, logp_NV.gather(1, sampled_N[:, None])[:, 0], apart)

    chosen_NC = torch.stack([torch.randperm(V)[:C] for _ in range(N)])
    chosen_NC[0, 0] = V - 1
    chosen_NC[0, 1:] = torch.arange(C - 1)
    got_NC, other_N = candidate_logprobs(hidden_ND, head, chosen_NC, chunk)
    close(got_NC, logp_NV.gather(1, chosen_NC), apart)
    close(other_N, others_of(logp_NV, chosen_NC), apart)


def test_the_log_mass_of_the_rest_keeps_its_digits_however_small_it_is():
    torch.manual_seed(1)
    V, D, C = 2500, 8, 16
    weight_VD, hidden_ND = torch.randn(V, D), torch.randn(30, D)
    ahead_N = torch.linspace(0, 60, 30)  # of the same sixteen tokens at every position
    weight_VD = torch.cat([weight_VD, (torch.arange(V) < C).float()[:, None]], dim=1)
    head, hidden_ND = Head(weight_VD, V), torch.cat([hidden_ND, ahead_N[:, None]], dim=1)
    wanted_N = others_of(full_logprobs(hidden_ND, head), torch.arange(C).expand(30, C))
    _, other_N = candidate_logprobs(hidden_ND, head, torch.arange(C).expand(30, C))
    assert wanted_N.min() < -50
    apart = rounding.of_logprobs(hidden_ND, weight_VD)
    assert apart < 1e-4
    close(other_N, wanted_N, apart)
    _, _, other_N, _ = top_candidates(hidden_ND[20:], head, torch.zeros(10, dtype=torch.long), C)
    close(other_N, wanted_N[20:], apart)


def test_nothing_left_is_the_floor_and_never_infinite():
    head, hidden_ND = Head(torch.randn(16, 4), 16), torch.randn(3, 4)
    floor_N = torch.full((3,), math.log(1e-30), dtype=torch.float64)
    _, other_N = candidate_logprobs(hidden_ND, head, torch.arange(16).expand(3, 16))
    close(other_N, floor_N)
    ids_NC, logp_NC, other_N, _ = top_candidates(hidden_ND, head, torch.zeros(3, dtype=torch.long), 16)
    close(other_N, floor_N)
    close(logp_NC, full_logprobs(hidden_ND, head).gather(1, ids_NC))


def test_logits_far_from_zero_neither_overflow_nor_vanish():
    torch.manual_seed(2)
    V = 2 * TILE_WIDTH + 9
    bias_V = torch.zeros(V)
    bias_V[0], bias_V[1500], bias_V[-1] = 900.0, 890.0, -900.0
    for shift in (-3000.0, 0.0, 3000.0):
        head, hidden_ND = Head(torch.randn(V, 4), V, bias_V + shift), torch.randn(6, 4)
        logp_NV = full_logprobs(hidden_ND, head)
        sampled_N = torch.full((6,), V - 1)
        ids_NC, logp_NC, _, sampled_logp_N = top_candidates(hidden_ND, head, sampled_N, 2)
        assert ids_NC.tolist() == [[0, 1500]] * 6
        close(logp_NC, logp_NV.gather(1, ids_NC), 1e-3)  # float32 logits of 3,900 are known to 2e-4
        close(sampled_logp_N, logp_NV[:, -1], 1e-3)


def test_equal_logits_are_taken_in_the_order_of_their_ids():
    V = 2 * TILE_WIDTH
    values_V = torch.zeros(V)
    values_V[torch.tensor([2000, 700, 1030, 5, 1999])] = 2.0
    values_V[torch.tensor([1500, 64, 63])] = 3.0
    values_V[torch.arange(300, V, 7)] += 1.0
    head = Head(values_V[:, None], V)
    wanted = values_V.sort(descending=True, stable=True).indices
    for count in (1, 4, 16, 40, 500):
        for chunk in (1, 2, None):
            ids_NC, *_ = top_candidates(torch.ones(3, 1), head, torch.zeros(3, dtype=torch.long), count, chunk)
            assert torch.equal(ids_NC, wanted[:count].expand(3, count))


def test_repeated_candidates_count_once():
    torch.manual_seed(3)
    head, hidden_ND = Head(torch.randn(50, 4), 50), torch.randn(5, 4)
    ids_NC = torch.tensor([[7, 3, 7, 0, 0, 0]]).expand(5, 6)
    logp_NV = full_logprobs(hidden_ND, head)
    logp_NC, other_N = candidate_logprobs(hidden_ND, head, ids_NC)
    close(logp_NC, logp_NV.gather(1, ids_NC))
    close(other_N, others_of(logp_NV, ids_NC))


def test_chunks_change_nothing():
    torch.manual_seed(4)
    head, hidden_ND = make_head("plain", 1500, 16, dtype=torch.float64), torch.randn(13, 16, dtype=torch.float64)
    sampled_N = torch.randint(0, 1500, (13,))
    whole = top_candidates(hidden_ND, head, sampled_N, 16)
    for chunk in (1, 5, 13, 1000):
        for got, wanted in zip(top_candidates(hidden_ND, head, sampled_N, 16, chunk), whole, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_low_precision_is_multiplied_in_float32_and_float64_is_kept():
    torch.manual_seed(5)
    head, hidden_ND = make_head("plain", 1500, 16, dtype=torch.bfloat16), torch.randn(9, 16).bfloat16()
    ids_NC = torch.randint(0, 1500, (9, 16))
    logp_NV = full_logprobs(hidden_ND, head)  # of the rounded inputs
    with torch.autocast("cpu", torch.bfloat16):
        logp_NC, _ = candidate_logprobs(hidden_ND, head, ids_NC)
        top_ids_NC, top_logp_NC, _, _ = top_candidates(hidden_ND, head, ids_NC[:, 0], 16)
    assert logp_NC.dtype == torch.float32
    close(logp_NC, logp_NV.gather(1, ids_NC))
    close(top_logp_NC, logp_NV.gather(1, top_ids_NC))
    head = Head(head.weight_VD.double(), 1500)
    logp_NC, _ = candidate_logprobs(hidden_ND.double(), head, ids_NC)
    close(logp_NC, logp_NV.gather(1, ids_NC), 1e-12)


def test_no_position_at_all():
    head, empty = Head(torch.randn(50, 4), 50), torch.zeros(0, dtype=torch.long)
    ids_NC, logp_NC, other_N, sampled_N = top_candidates(torch.zeros(0, 4), head, empty, 16)
    assert (ids_NC.shape, logp_NC.shape, other_N.shape, sampled_N.shape) == ((0, 16), (0, 16), (0,), (0,))
    logp_NC, other_N = candidate_logprobs(torch.zeros(0, 4), head, ids_NC)
    assert (logp_NC.shape, other_N.shape) == ((0, 16), (0,))


def test_what_cannot_be_asked_for():
    head, hidden_ND = Head(torch.randn(12, 4), 10), torch.randn(2, 4)
    with pytest.raises(ValueError, match="11 candidates requested from a vocabulary of 10"):
        top_candidates(hidden_ND, head, torch.zeros(2, dtype=torch.long), 11)
    with pytest.raises(ValueError, match="from -1 to 3 in a vocabulary of 10"):
        candidate_logprobs(hidden_ND, head, torch.tensor([[3, -1], [0, 1]]))
    with pytest.raises(ValueError, match="to 10 in a vocabulary of 10"):
        top_candidates(hidden_ND, head, torch.tensor([0, 10]), 5)


def test_ids_as_they_are_stored_are_welcome():
    torch.manual_seed(6)
    head, hidden_ND = make_head("plain", 1500, 16), torch.randn(4, 16)
    ids_NC = torch.randint(0, 1500, (4, 5), dtype=torch.int32)
    close(candidate_logprobs(hidden_ND, head, ids_NC)[0], full_logprobs(hidden_ND, head).gather(1, ids_NC.long()))
