"""What holds on every device: no (positions x vocabulary) tensor; and the path of GPUs, as far as a CPU can walk it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import rounding
from lightning_weave.heads import (
    Head,
    candidate_logprobs,
    fused,
    fused_log_residual_loss,
    fused_reverse_kl,
    outcome_logprobs,
    scoring,
    tiles,
    top_candidates,
)
from lightning_weave.maths import log_residual_loss, tilted_target

N, V, D, C, CHUNK = 200, 3000, 8, 16, 10


class Largest(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden_ND, weight_VD = torch.randn(N, D).to(dtype), torch.randn(V, D).to(dtype)
    ids_NC = torch.stack([torch.randperm(V)[:C] for _ in range(N)])
    log_b_NO = torch.log_softmax(2 * torch.randn(N, C + 1), dim=1)
    log_q_NO = tilted_target(log_b_NO, torch.randn(N, C), 2.0)
    return hidden_ND.requires_grad_(), weight_VD.requires_grad_(), ids_NC, log_b_NO, log_q_NO


def test_no_tensor_of_positions_times_vocabulary_is_ever_made():
    hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO = make_inputs()
    head = Head(weight_VD, V)
    ways = {
        "candidates": lambda: candidate_logprobs(hidden_ND, head, ids_NC, CHUNK),
        "top": lambda: top_candidates(hidden_ND, head, ids_NC[:, 0], C, CHUNK),
        "residual": lambda: fused_log_residual_loss(
            hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO, 2.0, N, CHUNK
        ).backward(),
        "kl": lambda: fused_reverse_kl(hidden_ND, weight_VD, ids_NC, log_q_NO, 2.0, N, CHUNK).backward(),
        "plain": lambda: outcome_logprobs(hidden_ND, head, ids_NC, CHUNK).sum().backward(),
    }
    for name, way in ways.items():
        with Largest() as largest:
            way()
        assert largest.elements <= 1.5 * CHUNK * V, name  # a chunk, rounded up to whole tiles; all would be 200 V


def test_the_default_chunk_follows_a_budget_of_bytes():
    cpu = torch.device("cpu")
    for vocabulary in (60, 5_000, 151_936, 2_000_000):
        assert 4 * vocabulary * tiles.rows_within_budget(vocabulary, cpu) <= tiles.CHUNK_BYTES
        assert 4 * min(vocabulary, tiles.TILE_WIDTH) * tiles.rows_within_cache(vocabulary, cpu) <= tiles.TILE_BYTES
    assert tiles.rows_within_budget(10**9, cpu) == 1


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tile, products of bfloat16 summed in float32: the operation that a CPU lacks is made of two that it has."""
    real_addmm = torch.addmm

    def addmm(
        sum_MN: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, beta: int, alpha: float, out: Tensor
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.bfloat16
        assert out is sum_MN
        return real_addmm(sum_MN, a.to(out_dtype), b.to(out_dtype), beta=beta, alpha=alpha, out=out)

    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(tiles, "tile_width", lambda vocabulary, device: vocabulary)
    for module in (scoring, fused):
        monkeypatch.setattr(module, "product_dtype", lambda hidden_ND: torch.bfloat16)


@pytest.mark.usefixtures("as_on_a_gpu")
def test_bfloat16_products_on_a_gpu():
    hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO = make_inputs(torch.bfloat16)
    bias_V = torch.randn(V)
    for head in (Head(weight_VD, V), Head(weight_VD, V, bias_V, 0.5, 6.0)):
        exact = Head(weight_VD.detach().double(), V, head.bias_V, head.scale, head.softcap)
        logp_NV = torch.log_softmax(exact.logits(hidden_ND.detach().double()), dim=1)
        apart = rounding.of_logprobs(hidden_ND, weight_VD, head.scale)
        logp_NC, _ = candidate_logprobs(hidden_ND, head, ids_NC, CHUNK)
        torch.testing.assert_close(logp_NC.double(), logp_NV.gather(1, ids_NC), rtol=0, atol=apart)
        top_ids_NC, logp_NC, _, _ = top_candidates(hidden_ND, head, ids_NC[:, 0], C, CHUNK)
        torch.testing.assert_close(logp_NC.double(), logp_NV.gather(1, top_ids_NC), rtol=0, atol=apart)

    inputs = [x.detach().double().requires_grad_() for x in (hidden_ND, weight_VD)]
    log_pi_NO = outcome_logprobs(inputs[0], Head(inputs[1], V), ids_NC)
    wanted = log_residual_loss(log_pi_NO, log_b_NO.double(), log_q_NO.double(), 2.0).sum() / N
    wanted.backward()
    got = fused_log_residual_loss(hidden_ND, weight_VD, ids_NC, log_b_NO, log_q_NO, 2.0, N, CHUNK)
    got.backward()
    apart = rounding.of_logprobs(hidden_ND, weight_VD)  # of logits; the loss has their relative error at most twice
    assert abs(got.item() / wanted.item() - 1) < 2 * apart < 1e-4
    for ours, exact in zip((hidden_ND.grad, weight_VD.grad), (x.grad for x in inputs), strict=True):
        assert ((ours.double() - exact).norm() / exact.norm()).item() < 2**-7  # gradients of logits are rounded as well
