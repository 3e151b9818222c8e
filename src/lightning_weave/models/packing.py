"""Several rows as one sequence without padding: each attends to itself alone, as if it had been run on its own.

Transformers asks for a mask once per kind of layer and hands it to attention as it is. Here that mask says where the
rows lie, and attention runs row by row: no T x T mask, and torch's fast causal kernels. Everything else in the model
sees one row of tokens whose positions start at 0 in every row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

from lightning_weave.heads import hidden_states
from lightning_weave.models.attention import SPARING, attend_sparing, sparing_mask

PACKED = "packed"
_PROBE = (5, 7)  # lengths of two rows on which a model is tried
_running: ContextVar[tuple[int, ...] | None] = ContextVar("lengths of the rows that are being run", default=None)


@dataclass(frozen=True)
class RowMasks:
    """What attention is given in place of a mask: the rows' lengths, and the mask of each (None: plainly causal)."""

    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]


def packed_states(model: Any, input_ids_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run rows that follow one another up to the final norm, each as if it were alone; (T) -> (T, D)."""
    token = _running.set(tuple(lengths))
    try:
        with one_sequence():
            return hidden_states(model, input_ids_T[None], position_ids=positions_T[None])[0]
    finally:
        _running.reset(token)


def padded_states(model: Any, input_ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Run rows beside one another, padded on the right, and give the states of their own tokens; (T) -> (T, D)."""
    rows = input_ids_T.split(list(lengths))
    with one_sequence():
        hidden_RTD = hidden_states(model, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    if len(rows) == 1:
        return hidden_RTD[0]
    return torch.cat([hidden_TD[:length] for hidden_TD, length in zip(hidden_RTD, lengths, strict=True)])


def positions_of(lengths: Sequence[int]) -> Tensor:
    """Count the tokens of each row from 0."""
    return torch.cat([torch.arange(length) for length in lengths])


def pack_rows(model: Any, vocabulary: int) -> bool:
    """Let a model keep packed rows apart, if it can: tried on two short rows, since a configuration does not say it.

    Recurrent layers would carry one row into the next; other models ignore positions, or mask in ways of their own.
    """
    before = model.config._attn_implementation
    if before not in ("sdpa", SPARING) or not model._supports_attention_backend:
        return False
    AttentionInterface.register(PACKED, _attend_by_row)
    AttentionMaskInterface.register(PACKED, _masks_by_row)
    model.set_attn_implementation(PACKED)
    if _keeps_apart(model, vocabulary):
        return True
    model.set_attn_implementation(before)
    return False


@torch.no_grad()
def _keeps_apart(model: Any, vocabulary: int) -> bool:
    ids_T = torch.arange(sum(_PROBE), device=model.device) % vocabulary
    was_training = model.training
    model.eval()
    try:
        apart_TD = padded_states(model, ids_T, _PROBE).float()
        packed_TD = packed_states(model, ids_T, positions_of(_PROBE).to(ids_T.device), _PROBE)
    except TypeError:  # it takes no positions
        return False
    finally:
        model.train(was_training)
    # A row that saw another one differs by a good part of itself; rounding to bfloat16 is worth a hundredth.
    bound = 1e-4 if packed_TD.dtype == torch.float32 else 0.1
    return bool((packed_TD - apart_TD).norm() <= bound * apart_TD.norm())


def _masks_by_row(*, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any) -> Any:
    lengths = _running.get()

    def mask_of(length: int) -> Tensor | None:
        return sparing_mask(q_length=length, kv_length=length, local_size=local_size, **kwargs)

    if lengths is None:
        return sparing_mask(q_length=q_length, kv_length=kv_length, local_size=local_size, **kwargs)
    assert sum(lengths) == q_length == kv_length, "rows that are packed have no past"
    window = (local_size or 0) if kwargs.get("allow_is_causal_skip", True) else 0
    # Rows of two windows and more are seen in blocks, all with one mask. That of a shorter row is the beginning of a
    # longer row's; one that is no longer than a window is plainly causal.
    short = [length for length in lengths if not window or length < 2 * window]
    of_short = mask_of(max(short)) if short else None
    of_long = mask_of(max(lengths)) if len(short) < len(lengths) else None

    def cut(length: int) -> Tensor | None:
        if window and length >= 2 * window:
            return of_long
        return None if of_short is None or length <= window else of_short[..., :length, :length]

    return RowMasks(lengths, tuple(map(cut, lengths)))


def _attend_by_row(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, RowMasks):
        return attend_sparing(module, query, key, value, attention_mask, **kwargs)
    rows = zip(*(heads.split(attention_mask.lengths, dim=2) for heads in (query, key, value)), strict=True)
    outputs = [
        attend_sparing(module, q, k, v, mask, **kwargs)[0]
        for (q, k, v), mask in zip(rows, attention_mask.masks, strict=True)
    ]
    return torch.cat(outputs, dim=1), None


@contextmanager
def one_sequence() -> Iterator[None]:
    """Keep transformers from looking for packed rows itself: it would ask the device, and wait, at every pass."""
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look
