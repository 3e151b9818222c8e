"""Attention in float32 on a GPU: torch's fast kernels there want as many heads of keys as of queries.

For grouped heads transformers leaves the grouping to torch, which in float32 then takes the kernel that keeps all
T x T weights. With keys and values repeated it takes one whose memory grows with T alone.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

REPEATED = "sdpa_repeated"


def repeat_heads_in_float32(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Let a model that would hand grouped heads to torch repeat them first, where that saves memory."""
    if dtype == torch.float32 and device.type != "cpu" and model.config._attn_implementation == "sdpa":
        AttentionInterface.register(REPEATED, attend_with_repeated_heads)
        AttentionMaskInterface.register(REPEATED, sdpa_mask)
        model.set_attn_implementation(REPEATED)


def attend_with_repeated_heads(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does, with keys and values repeated for grouped queries."""
    groups = getattr(module, "num_key_value_groups", 1)
    ungrouped: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    keys, values = (repeat_kv(heads, groups) for heads in (key, value))
    return sdpa_attention_forward(ungrouped, query, keys, values, attention_mask, **kwargs)
