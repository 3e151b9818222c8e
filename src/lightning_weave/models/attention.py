"""Attention whose memory grows with the length T of a row, where torch or transformers would keep T x T numbers.

For grouped heads transformers leaves the grouping to torch, which in float32 on a GPU then takes the kernel that keeps
all T x T weights. With keys and values repeated it takes one that does not.

A layer that sees only a window gets a mask of T x T from transformers. Here it gets one of W x 2W: the row is cut into
blocks of a window's length, each of which looks at itself and at the block before, all with the same mask.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SPARING = "sdpa_sparing"


def spare_memory(model: Any) -> None:
    """Let a model that would leave its attention to torch spare memory, wherever it will run."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(SPARING, attend_sparing)
        AttentionMaskInterface.register(SPARING, sparing_mask)
        model.set_attn_implementation(SPARING)


def sparing_mask(**arguments: Any) -> Tensor | None:
    """Make the mask of a block where a layer sees only a window of a row; otherwise what transformers makes."""
    window = arguments.get("local_size")
    one_sequence = arguments.get("attention_mask") is None and arguments.get("allow_is_causal_skip", False)
    offset = arguments.get("q_offset", 0)
    from_start = isinstance(offset, int) and offset == 0 and arguments["kv_length"] == arguments["q_length"]
    if window is None or not one_sequence or not from_start or arguments["q_length"] < 2 * window:
        return sdpa_mask(**arguments)
    block = {"batch_size": 1, "q_length": window, "q_offset": window, "kv_length": 2 * window, "kv_offset": 0}
    return sdpa_mask(**{**arguments, **block, "allow_is_causal_skip": False})


def attend_sparing(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does: in blocks where the mask is one of a block, with heads repeated in float32."""
    if query.dtype == torch.float32 and query.device.type != "cpu":
        groups = getattr(module, "num_key_value_groups", 1)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
        key, value = (repeat_kv(heads, groups) for heads in (key, value))
    if attention_mask is not None and 1 < attention_mask.shape[2] < query.shape[2]:
        return _attend_in_blocks(module, query, key, value, attention_mask, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _attend_in_blocks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask_W2W: Tensor, **kwargs: Any
) -> Tensor:
    """Attend within the first block, and from every later block to itself and the one before."""
    batch, heads, tokens, size = query.shape
    window = mask_W2W.shape[2]
    short = -tokens % window  # filled up with keys that nothing before them can see
    first, _ = sdpa_attention_forward(
        module, *(part[:, :, :window] for part in (query, key, value)), attention_mask=None, **kwargs
    )
    later = pad(query[:, :, window:], (0, 0, 0, short)).unflatten(2, (-1, window))  # (B, H, T, D) -> (B, H, N, W, D)
    pairs = (pad(part, (0, 0, 0, short)).unfold(2, 2 * window, window).mT for part in (key, value))
    # Blocks become rows: (B, H, N, W, D) -> (B N, H, W, D)
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (later, *pairs))
    rest, _ = sdpa_attention_forward(module, query, key, value, mask_W2W, **kwargs)
    return torch.cat([first, rest.reshape(batch, -1, heads, size)[:, : tokens - window]], dim=1)
