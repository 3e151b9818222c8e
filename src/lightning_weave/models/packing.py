"""Attention that needs little memory, and several rows packed into one sequence without padding.

Transformers asks for a mask once per kind of layer and hands it to attention unchanged. For packed rows this mask holds
the lengths of the rows. On a GPU in 16 bits attention is one call of torch's variable-length kernel for all rows;
elsewhere it runs row by row. Either way there is no T x T mask. Everything else in the model sees one row of tokens
whose positions start at 0 in every row.

Where a model's rotary embedding depends on the length (longrope), each row's own length decides, whatever its batch.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lightning_weave.devices import has_flash_attention, supports_async_copy
from lightning_weave.errors import InputError
from lightning_weave.heads import hidden_states

VARLEN_DTYPES = (torch.bfloat16, torch.float16)
EFFICIENT = "sdpa_efficient"
PACKED = "packed"
RECURRENT_KERNELS = ("fla", "causal_conv1d")  # packages whose kernels keep packed rows apart
PROBE_LENGTHS = (5, 7)  # of two rows on which packing is tried


@dataclass(frozen=True)
class RowLengths:
    """How long the rows of a forward pass are, which are in one sequence if packed, else padded on the right."""

    lengths: tuple[int, ...]
    whole: tuple[int, ...]  # lengths with the tokens that are not run, since nothing after them is needed
    packed: bool
    offsets: Tensor | None = None  # where packed rows begin and end, on the device, for one kernel over all of them
    shared: "Shared | None" = None


@dataclass(frozen=True)
class Shared:
    """Rows of a sequence in which a beginning that several rows have in common is read once."""

    place_E: Tensor  # of the tokens of all rows, row after row, in the sequence
    first_T: Tensor  # where each token of the sequence is among those of all rows, at first

    @classmethod
    def from_rows(cls, rows: Sequence[Tensor]) -> "Shared":
        """Let each row share what it has in common with the one before it.

        >>> Shared.from_rows([torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8, 9])]).place_E.tolist()
        [0, 1, 2, 0, 1, 3, 4]
        """
        places: list[Tensor] = []
        tokens = 0
        for number, ids in enumerate(rows):
            before = rows[number - 1][: len(ids)] if number else ids[:0]
            common = int((ids[: len(before)] == before).int().cumprod(dim=0).sum())
            own = torch.arange(tokens, tokens + len(ids) - common)
            places.append(torch.cat([places[-1][:common], own]) if number else own)
            tokens += len(own)
        place_E = torch.cat(places)
        every_E = torch.arange(len(place_E))
        return cls(place_E, torch.full((tokens,), len(place_E)).scatter_reduce_(0, place_E, every_E, "amin"))


_rows: ContextVar[RowLengths | None] = ContextVar("rows of this forward pass", default=None)


@dataclass(frozen=True)
class RowMasks:
    """The mask of packed rows: their lengths, and the mask of each (None: plainly causal)."""

    lengths: tuple[int, ...]
    masks: tuple[Tensor | None, ...]
    offsets: Tensor | None  # as in RowLengths; None: only the masks tell what a row sees
    longest: int
    window: int  # tokens that a token sees, itself included; 0: all
    shared: Shared | None


def packed_states(
    model: Any,
    input_ids_T: Tensor,
    positions_T: Tensor,
    lengths: Sequence[int],
    whole: Sequence[int] | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Compute the hidden states of packed rows, each as if it were alone; (T) -> (T, D).

    `whole` are the lengths of rows whose end is not run.
    """
    device = input_ids_T.device

    def on_device(numbers: Tensor) -> Tensor:
        return (numbers.pin_memory() if supports_async_copy(device) else numbers).to(device, non_blocking=True)

    offsets, boundaries = None, {}
    if is_recurrent(model) or has_flash_attention(device):
        offsets = on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))
    if is_recurrent(model):
        row_T = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(torch.tensor(lengths))
        boundaries = {"cu_seq_lens_q": offsets, "seq_idx": on_device(row_T[None])}
    for_attention = offsets if has_flash_attention(device) else None
    with separate_rows(RowLengths(tuple(lengths), tuple(whole or lengths), True, for_attention, shared)):
        return hidden_states(model, input_ids_T[None], position_ids=positions_T[None], **boundaries)[0]


def padded_states(
    model: Any, input_ids_T: Tensor, lengths: Sequence[int], whole: Sequence[int] | None = None
) -> Tensor:
    """Compute the hidden states of rows as a batch padded on the right, without the padding; (T) -> (T, D)."""
    rows = input_ids_T.split(list(lengths))
    with separate_rows(RowLengths(tuple(lengths), tuple(whole or lengths), packed=False)):
        hidden_RTD = hidden_states(model, pad_sequence(rows, batch_first=True))
    if len(rows) == 1:
        return hidden_RTD[0]
    return torch.cat([hidden_TD[:length] for hidden_TD, length in zip(hidden_RTD, lengths, strict=True)])


def is_recurrent(model: Any) -> bool:
    """Whether some layers carry a state from token to token: transformers tells their kernels where rows end."""
    return "linear_attention" in (getattr(model.config.get_text_config(), "layer_types", None) or ())


def packed_positions(lengths: Sequence[int]) -> Tensor:
    """Count the tokens of each row from 0."""
    return torch.cat([torch.arange(length) for length in lengths])


@torch.no_grad()
def enable_packing(model: Any, vocabulary: int) -> bool:
    """Switch a model to packed attention, if it keeps packed rows apart; tried on two short rows.

    The configuration does not tell: without their kernels, recurrent layers would carry one row into the next, and
    other models ignore positions or build masks in their own way.
    """
    before = model.config._attn_implementation
    if before == PACKED:
        return True
    # Recurrent models do not say that they hand the mask to attention unchanged, but they do.
    able = all(map(find_spec, RECURRENT_KERNELS)) if is_recurrent(model) else model._supports_attention_backend
    if before not in ("sdpa", EFFICIENT) or not able:
        return False
    AttentionInterface.register(PACKED, _attend_packed)
    AttentionMaskInterface.register(PACKED, _packed_mask)
    model.set_attn_implementation(PACKED)
    ids_T = torch.arange(sum(PROBE_LENGTHS), device=model.device) % vocabulary
    was_training = model.training
    model.eval()
    try:
        padded_TD = padded_states(model, ids_T, PROBE_LENGTHS).float()
        packed_TD = packed_states(model, ids_T, packed_positions(PROBE_LENGTHS).to(ids_T.device), PROBE_LENGTHS)
    except (TypeError, ValueError):  # it does not take position_ids, or its kernels cannot be imported
        equal = False
    else:
        # A row that saw another one differs by a large part; rounding to bfloat16 is worth a hundredth.
        bound = 1e-4 if packed_TD.dtype == torch.float32 else 0.1
        equal = bool((packed_TD - padded_TD).norm() <= bound * padded_TD.norm())
    finally:
        model.train(was_training)
    if not equal:
        model.set_attn_implementation(before)
    return equal


def _packed_mask(*, q_length: int, kv_length: int, local_size: int | None = None, **kwargs: Any) -> Any:
    rows = _rows.get()

    def mask_for(length: int) -> Tensor | None:
        return efficient_mask(q_length=length, kv_length=length, local_size=local_size, **kwargs)

    if rows is None or not rows.packed:
        return efficient_mask(q_length=q_length, kv_length=kv_length, local_size=local_size, **kwargs)
    lengths = rows.lengths
    tokens = sum(lengths) if rows.shared is None else len(rows.shared.first_T)
    assert tokens == q_length == kv_length, "packed rows have no cache"
    is_plain = kwargs.get("allow_is_causal_skip", True)
    window = (local_size or 0) if is_plain else 0
    # Rows of two windows or more are computed in blocks, all with one mask. The mask of a shorter row is the beginning
    # of a longer one's; a row no longer than a window is plainly causal.
    short = [length for length in lengths if not window or length < 2 * window]
    short_mask = mask_for(max(short)) if short else None
    block_mask = mask_for(max(lengths)) if len(short) < len(lengths) else None
    masks = []
    for length in lengths:
        if window and length >= 2 * window:
            masks.append(block_mask)
        else:
            masks.append(None if short_mask is None or length <= window else short_mask[..., :length, :length])
    return RowMasks(lengths, tuple(masks), rows.offsets if is_plain else None, max(lengths), window, rows.shared)


def _attend_packed(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    if not isinstance(attention_mask, RowMasks):
        return attend_efficiently(module, query, key, value, attention_mask, **kwargs)
    window, shared = attention_mask.window, attention_mask.shared
    if shared is not None:  # every row attends as a whole
        query, key, value = (heads[:, :, shared.place_E] for heads in (query, key, value))
    if (
        attention_mask.offsets is None
        or query.dtype not in VARLEN_DTYPES
        or not query.shape[-1] == value.shape[-1] <= 256
        or kwargs.get("dropout")
        or kwargs.get("softcap") is not None
        or (window and kwargs.get("sliding_window") != window)  # chunked attention, not a window
    ):
        output = _attend_row_by_row(module, query, key, value, attention_mask, **kwargs)
    else:
        longest, offsets = attention_mask.longest, attention_mask.offsets
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))  # (1, H, T, D) -> (T, H, D)
        whole: Any = varlen_attn(  # a tensor, as no auxiliary output is asked for
            q,
            k,
            v,
            offsets,
            offsets,
            longest,
            longest,
            scale=kwargs.get("scaling"),
            window_size=(window - 1, 0),  # of tokens before and after; -1: all
            enable_gqa=query.shape[1] != key.shape[1],
        )
        output = whole[None]
    return output if shared is None else output[:, shared.first_T], None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it would be compiled again for every set of lengths
def _attend_row_by_row(module: Any, query: Tensor, key: Tensor, value: Tensor, rows: RowMasks, **kwargs: Any) -> Tensor:
    heads = zip(*(heads.split(rows.lengths, dim=2) for heads in (query, key, value)), strict=True)
    outputs = [
        attend_efficiently(module, q, k, v, mask, **kwargs)[0]
        for (q, k, v), mask in zip(heads, rows.masks, strict=True)
    ]
    return torch.cat(outputs, dim=1)


@contextmanager
def separate_rows(rows: RowLengths) -> Iterator[None]:
    """Tell attention and rotary embeddings which rows a forward pass has.

    Transformers does not search for packed rows itself, which would synchronise with the device every pass.
    """
    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)
        masking_utils.find_packed_sequence_indices = search


def rope_switch(config: Any) -> int | None:
    """Return the length beyond which a whole row is rotated by other frequencies (longrope); None: at no length."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else None


def rotate_by_row(model: Any) -> None:
    """Let each row's own length choose its frequencies. Transformers lets the longest row choose for the batch."""
    if rope_switch(model.config) is None:
        return
    rotary = [module for module in model.modules() if getattr(module, "rope_type", None) == "longrope"]
    if not rotary:
        raise InputError(
            f"{model.name_or_path}: its own code computes its rotary embedding (longrope), and rows of one batch would "
            "change each other's numbers. Set trust_remote_code = false, or use another model"
        )
    for module in rotary:
        module.forward = MethodType(_rotate_by_row, module)


@torch.no_grad()
def _rotate_by_row(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    switch = module.config.rope_parameters["original_max_position_embeddings"]
    rows = _rows.get()
    if rows is None:
        long_BT = position_ids.amax(dim=-1, keepdim=True) >= switch
    else:
        long_R = torch.tensor([length > switch for length in rows.whole], device=x.device)
        lengths_R = torch.tensor(rows.lengths, device=x.device)
        long_BT = long_R.repeat_interleave(lengths_R)[None] if rows.packed else long_R[:, None]
    init = ROPE_INIT_FUNCTIONS["longrope"]
    both = []
    for length in (switch, switch + 1):
        module.inv_freq, _ = init(module.config, x.device, seq_len=length)
        both.append(inspect.unwrap(type(module).forward)(module, x, position_ids))
    (short_cos, short_sin), (long_cos, long_sin) = both
    long_BT1 = long_BT[..., None]
    return torch.where(long_BT1, long_cos, short_cos), torch.where(long_BT1, long_sin, short_sin)


def use_efficient_attention(model: Any) -> None:
    """Switch a model that uses torch's sdpa to an attention that needs less memory."""
    rotate_by_row(model)
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(EFFICIENT, attend_efficiently)
        AttentionMaskInterface.register(EFFICIENT, efficient_mask)
        model.set_attn_implementation(EFFICIENT)


def efficient_mask(**arguments: Any) -> Tensor | None:
    """Build the mask of one block if a layer sees only a window of a row; otherwise the mask of transformers."""
    window = arguments.get("local_size")
    one_sequence = arguments.get("attention_mask") is None and arguments.get("allow_is_causal_skip", False)
    offset = arguments.get("q_offset", 0)
    from_start = isinstance(offset, int) and offset == 0 and arguments["kv_length"] == arguments["q_length"]
    if window is None or not one_sequence or not from_start or arguments["q_length"] < 2 * window:
        return sdpa_mask(**arguments)
    block = {"batch_size": 1, "q_length": window, "q_offset": window, "kv_length": 2 * window, "kv_offset": 0}
    return sdpa_mask(**{**arguments, **block, "allow_is_causal_skip": False})


def attend_efficiently(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' sdpa does, but in blocks if the mask is that of a block; float32 repeats its heads.

    The first block attends to itself, every later one to itself and the one before.
    """
    if query.dtype == torch.float32 and query.device.type != "cpu":
        groups = getattr(module, "num_key_value_groups", 1)
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
        key, value = (repeat_kv(heads, groups) for heads in (key, value))
    if attention_mask is None or not 1 < attention_mask.shape[2] < query.shape[2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    batch, heads, tokens, size = query.shape
    window = attention_mask.shape[2]
    short = -tokens % window  # padded with keys that no earlier token can see
    first, _ = sdpa_attention_forward(
        module, *(part[:, :, :window] for part in (query, key, value)), attention_mask=None, **kwargs
    )
    later = pad(query[:, :, window:], (0, 0, 0, short)).unflatten(2, (-1, window))  # (B, H, T, D) -> (B, H, N, W, D)
    pairs = (pad(part, (0, 0, 0, short)).unfold(2, 2 * window, window).mT for part in (key, value))
    # Blocks become rows: (B, H, N, W, D) -> (B N, H, W, D)
    query, key, value = (part.transpose(1, 2).flatten(0, 1) for part in (later, *pairs))
    rest, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return torch.cat([first, rest.reshape(batch, -1, heads, size)[:, : tokens - window]], dim=1), None
