"""Attention that spares memory: heads that torch must not group, windows without a mask of T x T, equal numbers."""

from typing import Any

import pytest
import torch
from small_models import small_model
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig, Olmo3Config

from lightning_weave.models.packing import use_efficient_attention

SMALL = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "pad_token_id": 0}
WINDOWED = {"olmo3": Olmo3Config, "gemma3": Gemma3TextConfig, "mistral": MistralConfig}


class Calls(TorchFunctionMode):
    """Keeps what attention was asked: whether to group, whether heads are equal in number, and the mask's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, bool]] = []
        self.masks: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.asked.append((bool((kwargs or {}).get("enable_gqa")), args[0].shape[1] == args[1].shape[1]))
            mask = (kwargs or {}).get("attn_mask")
            self.masks += [] if mask is None else [tuple(mask.shape)]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("device", "dtype", "asked"),
    [
        ("meta", torch.float32, (False, True)),  # torch would take the kernel that keeps T x T numbers
        ("meta", torch.bfloat16, (True, False)),
        ("cpu", torch.float32, (True, False)),
    ],
)
def test_only_float32_off_the_cpu_repeats_heads(
    architecture: str, device: str, dtype: torch.dtype, asked: tuple[bool, bool]
) -> None:
    model = small_model(architecture).to(device, dtype)
    use_efficient_attention(model)
    with Calls() as calls, torch.no_grad():
        model(torch.arange(6, 14, device=device)[None])
    assert set(calls.asked) == {asked}


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("tokens", [15, 16, 17, 24, 39])  # less than two windows, two, and more, even and not
def test_windows_are_seen_in_blocks_with_the_same_numbers(family: str, tokens: int) -> None:
    model = AutoModelForCausalLM.from_config(WINDOWED[family](**SMALL, **HEADS), dtype=torch.float64)
    ids = torch.randint(1, 60, (3, tokens))
    expected = model(ids).logits
    expected.square().sum().backward()
    gradients = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    use_efficient_attention(model)
    with Calls() as calls:
        actual = model(ids).logits
    actual.square().sum().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close([weight.grad for weight in model.parameters()], gradients)
    assert set(calls.masks) == ({(1, 1, 8, 16)} if tokens >= 16 else {(3, 1, tokens, tokens)})


@pytest.mark.parametrize("family", WINDOWED)
def test_padded_rows_and_sampling_keep_their_masks(family: str) -> None:
    model = AutoModelForCausalLM.from_config(WINDOWED[family](**SMALL, **HEADS), dtype=torch.float64).eval()
    ids = torch.randint(1, 60, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    ways = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
    expected = [
        model(ids, attention_mask=mask).logits,
        model.generate(ids, **ways),
        model.generate(ids[:1], **ways | {"attention_mask": None}),
    ]
    use_efficient_attention(model)
    actual = [
        model(ids, attention_mask=mask).logits,
        model.generate(ids, **ways),
        model.generate(ids[:1], **ways | {"attention_mask": None}),
    ]
    torch.testing.assert_close(actual, expected)
