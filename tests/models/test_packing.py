"""Packed rows are run as if each were alone; a model that cannot do that is found out."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from small_models import VOCABULARY, small_model
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from lightning_weave.heads import hidden_states
from lightning_weave.models import packing
from lightning_weave.models.packing import (
    EFFICIENT,
    RowMasks,
    Shared,
    enable_packing,
    packed_positions,
    packed_states,
    padded_states,
    rotate_by_row,
    use_efficient_attention,
)
from lightning_weave.models.scorer import Context, HFBody

LENGTHS = (3, 19, 1, 8, 12)  # of which three are no longer than the sliding windows
IDS_T = torch.randint(0, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))


def alone(model: Any) -> Tensor:
    return torch.cat([hidden_states(model, ids[None])[0] for ids in IDS_T.split(LENGTHS)])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "olmo3", "phi3"])
def test_a_packed_row_sees_itself_alone(architecture: str) -> None:
    model = small_model(architecture)
    expected_TD = alone(model)
    rotate_by_row(model)
    torch.testing.assert_close(padded_states(model, IDS_T, LENGTHS), expected_TD)
    assert enable_packing(model, VOCABULARY)
    torch.testing.assert_close(packed_states(model, IDS_T, packed_positions(LENGTHS), LENGTHS), expected_TD)
    torch.testing.assert_close(alone(model), expected_TD, msg="a model that packs can still be run as before")
    torch.testing.assert_close(padded_states(model, IDS_T, LENGTHS), expected_TD)


def test_a_model_that_spares_memory_packs_too() -> None:
    model = small_model("gemma3")
    expected_TD = alone(model)
    use_efficient_attention(model)
    assert model.config._attn_implementation == EFFICIENT
    assert enable_packing(model, VOCABULARY)
    torch.testing.assert_close(packed_states(model, IDS_T, packed_positions(LENGTHS), LENGTHS), expected_TD)


def test_what_would_carry_one_row_into_the_next_is_not_packed() -> None:
    recurrent = small_model("qwen3.5")
    expected_TD = alone(recurrent)
    assert not enable_packing(recurrent, VOCABULARY)
    assert recurrent.config._attn_implementation == "sdpa", "as it was"
    torch.testing.assert_close(padded_states(recurrent, IDS_T, LENGTHS), expected_TD)
    eager = small_model("llama")
    eager.set_attn_implementation("eager")
    assert not enable_packing(eager, VOCABULARY)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let recurrent layers have kernels that keep packed rows apart, as flash-linear-attention and causal-conv1d do."""
    calls: list[str] = []
    convolve, recur = modeling_qwen3_5.causal_conv1d_fn, modeling_qwen3_5.torch_chunk_gated_delta_rule

    def convolve_rows(states: Tensor, *rest: Any, seq_idx: Tensor | None = None, **kwargs: Any) -> Tensor:
        if seq_idx is None:
            return convolve(states, *rest, **kwargs)
        assert seq_idx.shape == (states.shape[0], states.shape[2])
        assert seq_idx.dtype == torch.int32
        calls.append("convolution")
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolve(row, *rest, **kwargs) for row in states.split(lengths, dim=2)], dim=2)

    def recur_rows(*heads: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, None]:
        kwargs = {name: value for name, value in kwargs.items() if name != "seq_idx"}
        if cu_seqlens is None:
            return recur(*heads, **kwargs)
        calls.append("recurrence")
        lengths = cu_seqlens.diff().tolist()
        g, beta = (kwargs.pop(name).split(lengths, dim=1) for name in ("g", "beta"))
        rows = zip(*(part.split(lengths, dim=1) for part in heads), g, beta, strict=True)
        return torch.cat([recur(q, k, v, g=g, beta=b, **kwargs)[0] for q, k, v, g, b in rows], dim=1), None

    monkeypatch.setattr(packing, "find_spec", lambda package: package)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", convolve_rows)
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", recur_rows)
    return calls


def test_recurrent_layers_get_the_boundaries_of_rows(kernels: list[str]) -> None:
    model = small_model("qwen3.5").requires_grad_()
    expected_TD = alone(model)
    expected_TD.square().sum().backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    assert enable_packing(model, VOCABULARY)
    kernels.clear()
    found_TD = packed_states(model, IDS_T, packed_positions(LENGTHS), LENGTHS)
    assert kernels == 2 * ["convolution", "recurrence"]
    torch.testing.assert_close(found_TD, expected_TD)
    found_TD.square().sum().backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-4)
    # The beginning of a row that another one shares would have to be kept in the state.
    rows = [torch.cat([IDS_T[:9], IDS_T[number : number + 3]]) for number in (20, 30)]
    contexts = [Context(number, "row", ids, torch.arange(len(ids)), len(ids)) for number, ids in enumerate(rows)]
    found_ND = HFBody(model, VOCABULARY).hidden(contexts, [])
    torch.testing.assert_close(found_ND, torch.cat([hidden_states(model, ids[None])[0] for ids in rows]))


def shares_HTT(query: Tensor, key: Tensor, offsets: Tensor, scale: float | None, window: list[int]) -> Tensor:
    """Compute how much every token attends to every other of its row, with one mask over all rows."""
    left, right = window
    assert right == 0
    place_T = torch.arange(len(query))
    row_T = torch.bucketize(place_T, offsets[1:].long(), right=True)
    before_TT = place_T[:, None] - place_T[None]
    seen_TT = (row_T[:, None] == row_T[None]) & (before_TT >= 0)
    if left >= 0:
        seen_TT &= before_TT <= left
    scores_HTT = torch.einsum("qhd,khd->hqk", query, key) * (scale or query.shape[-1] ** -0.5)
    return scores_HTT.masked_fill(~seen_TT, -torch.inf).softmax(dim=-1)


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the CPU in any dtype have torch's kernels for packed rows; every call of the forward one is noted."""
    calls: list[str] = []

    def forward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
        offsets_q, offsets_k, longest_q, longest_k, _, scale, window, grouped, *_ = rest
        calls.append("")
        assert torch.equal(offsets_q, offsets_k)
        assert offsets_q.dtype == torch.int32
        assert longest_q == longest_k == int(offsets_q.diff().max())
        assert grouped == (query.shape[1] != key.shape[1])
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        output = torch.einsum("hqk,khd->qhd", shares_HTT(query, key, offsets_q, scale, window), value)
        unused = torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)
        return output.contiguous(), *unused

    def backward(d_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        offsets, scale, window = rest[2], rest[8], rest[9]
        groups = query.shape[1] // key.shape[1]
        key, value = (heads.repeat_interleave(groups, dim=1) for heads in (key, value))
        share_HTT = shares_HTT(query, key, offsets, scale, window)
        d_share_HTT = torch.einsum("qhd,khd->hqk", d_output, value)
        d_score_HTT = share_HTT * (d_share_HTT - (d_share_HTT * share_HTT).sum(dim=-1, keepdim=True))
        d_score_HTT *= scale or query.shape[-1] ** -0.5
        d_key = torch.einsum("hqk,qhd->khd", d_score_HTT, query)
        d_value = torch.einsum("hqk,qhd->khd", share_HTT, d_output)
        d_pair = (heads.unflatten(1, (-1, groups)).sum(dim=2) for heads in (d_key, d_value))
        return torch.einsum("hqk,khd->qhd", d_score_HTT, key).contiguous(), *d_pair

    monkeypatch.setattr(packing, "VARLEN_DTYPES", (torch.float32, torch.float64))
    monkeypatch.setattr(packing, "has_flash_attention", lambda device: True)
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield calls


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "olmo3", "phi3"])
def test_one_kernel_over_all_rows_is_the_loop_over_rows(
    architecture: str, varlen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States and gradients, to 1e-5; in float64, since float32 adds up gradients of 43 tokens in another order."""
    found = []
    for one_kernel in (True, False):
        model = small_model(architecture).double().requires_grad_()
        use_efficient_attention(model)
        assert enable_packing(model, VOCABULARY)
        varlen.clear()
        monkeypatch.setattr(packing, "has_flash_attention", lambda device, one_kernel=one_kernel: one_kernel)
        hidden_TD = packed_states(model, IDS_T, packed_positions(LENGTHS), LENGTHS)
        assert len(varlen) == (3 if one_kernel else 0)  # one per layer
        hidden_TD.square().sum().backward()
        found.append((hidden_TD, {name: weight.grad for name, weight in model.named_parameters()}))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_one_kernel_attends_to_what_rows_share(architecture: str, varlen: list[str]) -> None:
    first_T, second_T = torch.arange(40).split([24, 16])
    rows = [
        first_T,
        torch.cat([first_T[:14], second_T]),
        torch.cat([first_T[:14], second_T[:3], first_T[:2]]),
        second_T,
    ]
    shared, lengths = Shared.from_rows(rows), [len(row) for row in rows]
    assert len(shared.first_T) == 24 + 16 + 2 + 16
    model = small_model(architecture).double()
    expected_ED = torch.cat([hidden_states(model, row[None])[0] for row in rows])
    use_efficient_attention(model)
    assert enable_packing(model, VOCABULARY)
    varlen.clear()
    ids_T, positions_T = torch.cat(rows)[shared.first_T], packed_positions(lengths)[shared.first_T]
    found_TD = packed_states(model, ids_T, positions_T, lengths, shared=shared)
    torch.testing.assert_close(found_TD[shared.place_E], expected_ED)
    assert len(varlen) == 3


@pytest.mark.parametrize(
    ("architecture", "kinds", "checkpointing"), [("qwen3", 1, False), ("qwen3", 1, True), ("gemma3", 2, False)]
)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler, which means to hide it
def test_layers_are_compiled_twice_whatever_the_lengths(
    architecture: str, kinds: int, checkpointing: bool, varlen: list[str]
) -> None:
    """Each kind of layer as one graph, once for passes with gradients and once without; results are equal."""
    batches = [LENGTHS, (9,), (2, 2), (5, 4, 3, 2, 1, 7)]
    model = small_model(architecture).double().requires_grad_().train()
    use_efficient_attention(model)
    assert enable_packing(model, VOCABULARY)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    def run(lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ids_T = torch.arange(sum(lengths)) % VOCABULARY
        hidden_TD = packed_states(model, ids_T, packed_positions(lengths), lengths)
        if not torch.is_grad_enabled():
            return (hidden_TD,)
        return hidden_TD, *torch.autograd.grad(hidden_TD.square().sum(), list(model.model.layers.parameters()))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            expected = [run(lengths) for lengths in batches]
            for block in model.model.layers:
                block.compile(backend="aot_eager", dynamic=True)
            varlen.clear()
            found = [run(lengths) for lengths in batches]
            for block in model.model.layers:
                block._compiled_call_impl = None
        torch.testing.assert_close(found, expected)
        passes = 2 if enabled and checkpointing else 1
        assert len(varlen) == passes * len(model.model.layers) * len(batches)
    assert not torch._dynamo.utils.counters["graph_break"]
    # With checkpointing, transformers lets the first layer's input require a gradient even where none is computed.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * kinds + (1 if checkpointing else 0)


def test_masks_are_made_only_for_rows_longer_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never one over all rows: a row of two windows and more is seen in blocks, with a mask of a block and two."""
    model = small_model("gemma3")
    assert enable_packing(model, VOCABULARY)
    seen: list[RowMasks] = []
    layer = type(model.model.layers[0])
    forward = layer.forward

    def watched(module: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kwargs["attention_mask"])
        return forward(module, *args, **kwargs)

    monkeypatch.setattr(layer, "forward", watched)
    packed_states(model, IDS_T, packed_positions(LENGTHS), LENGTHS)
    shapes = [[None if mask is None else mask.shape[-1] for mask in masks.masks] for masks in seen]
    assert shapes == [[None, 16, None, None, 12], [None] * 5, [None, 16, None, None, 12]]
