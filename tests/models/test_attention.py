"""Grouped heads in float32 off the CPU: torch is never left to group them, and the numbers are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import small_model
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from lightning_weave.models.attention import REPEATED, repeat_heads_in_float32
from lightning_weave.models.load import load_model


class Calls(TorchFunctionMode):
    """Keeps what attention was asked: whether to group, and how many heads of queries and keys there were."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[bool, bool]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is scaled_dot_product_attention:
            self.asked.append((bool((kwargs or {}).get("enable_gqa")), args[0].shape[1] == args[1].shape[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3"])
def test_heads_are_repeated_and_logits_stay(architecture: str) -> None:
    model = small_model(architecture)
    ids = torch.arange(6, 26)[None]
    with torch.no_grad():
        expected = model(ids).logits
        repeat_heads_in_float32(model, torch.float32, torch.device("meta"))
        with Calls() as calls:
            actual = model(ids).logits
    assert set(calls.asked) == {(False, True)}
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("dtype", "device", "way"),
    [
        (torch.float32, "meta", REPEATED),
        (torch.bfloat16, "meta", "sdpa"),
        (torch.float32, "cpu", "sdpa"),
    ],
)
def test_only_float32_off_the_cpu_is_changed(tmp_path: Path, dtype: torch.dtype, device: str, way: str) -> None:
    small_model("qwen3").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype, device=torch.device(device))
    assert model.config._attn_implementation == way
