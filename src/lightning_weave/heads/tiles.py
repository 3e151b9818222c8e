"""Logits of a chunk of positions, one tile of the vocabulary at a time.

A tile is small enough to stay in cache, so the passes over it after the matrix product cost next to nothing. Logits are
made in base 2 (the factor goes into the hidden states): exp2 is three times as fast as exp on a CPU.

Letters: N positions of a chunk, V vocabulary, W width of a tile, T tiles, C candidates, O = C + 1 outcomes.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_weave.heads.head import Head

LN2 = math.log(2)
NOTHING = -1e30
"""Stands for the base-2 logarithm of no mass at all: finite, so that differences of two of them are."""

TILE_WIDTH = 1024
TILE_BYTES = 2 * 2**20  # about a core's share of the cache
CHUNK_BYTES = 128 * 2**20  # of the logits of one chunk; with less, the products spend their time on reading the matrix
CHUNK_BYTES_GPU = 512 * 2**20  # products of few rows waste a GPU


def rows_within_budget(vocabulary: int, device: torch.device) -> int:
    """Choose how many positions to hold whole rows of logits for."""
    budget = CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_GPU
    return max(1, budget // (4 * vocabulary))


def rows_within_cache(vocabulary: int, device: torch.device) -> int:
    """Choose how many positions to work on when only one tile of logits is held."""
    if device.type != "cpu":
        return rows_within_budget(vocabulary, device)
    return max(1, TILE_BYTES // (4 * min(vocabulary, TILE_WIDTH)))


def tile_width(vocabulary: int, device: torch.device) -> int:
    """Choose the tile: cache-sized on a CPU, everything at once where launching a kernel costs more than memory."""
    return min(vocabulary, TILE_WIDTH) if device.type == "cpu" else vocabulary


def maths_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Keep float64 and do everything else in float32."""
    return torch.promote_types(hidden_ND.dtype, torch.float32)


def product_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Choose what to multiply in: bfloat16 where that is the input's precision, else that of the maths.

    A CPU gains nothing from less than float32, and small gradients vanish in float16.
    """
    device = hidden_ND.device.type
    asked_for = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    return asked_for if asked_for == torch.bfloat16 and device != "cpu" else maths_dtype(hidden_ND)


def checked_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Refuse ids that have no row in the head; return them as indices."""
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
        raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())} in a vocabulary of {vocabulary}")
    return ids.long()


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, fresh: bool) -> None:
    """Add a matrix product to `sum_MN`, or put it there if that is `fresh` memory, in the precision of `sum_MN`."""
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN, beta=0 if fresh else 1)
    elif fresh:
        torch.mm(a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN += torch.mm(a_MK, b_KN, out_dtype=sum_MN.dtype)


@dataclass(frozen=True)
class Logits:
    """The base-2 logits of one chunk of positions, made tile by tile."""

    head: Head
    hidden_ND: Tensor  # in product precision
    dtype: torch.dtype  # of the logits

    @classmethod
    def of(cls, hidden_ND: Tensor, head: Head, dtype: torch.dtype) -> "Logits":
        """Prepare a chunk; the factors go into the hidden states unless these would be rounded by them."""
        logits = cls(head, hidden_ND.to(dtype), maths_dtype(hidden_ND))
        return replace(logits, hidden_ND=logits.hidden_ND * logits.factor) if dtype == logits.dtype else logits

    @property
    def inner(self) -> float:
        """Factor on natural logits: to base 2, or what the soft cap wants."""
        return 1 / (self.head.softcap or LN2)

    @property
    def factor(self) -> float:
        """Factor on h W^T."""
        return self.head.scale * self.inner

    @property
    def width(self) -> int:
        """Columns of a tile; the last one may have fewer."""
        return tile_width(self.head.vocabulary, self.hidden_ND.device)

    @property
    def starts(self) -> range:
        """First columns of the tiles."""
        return range(0, self.head.vocabulary, self.width)

    def room(self, keep: bool) -> Tensor:
        """Make room for all tiles, or for one that is used again and again."""
        tiles, size = len(self.starts) if keep else 1, len(self.hidden_ND) * self.width
        return torch.empty(tiles, size, dtype=self.dtype, device=self.hidden_ND.device)

    def weight(self, start: int) -> Tensor:
        """Take the tile's rows of the matrix, in product precision."""
        stop = min(start + self.width, self.head.vocabulary)
        return self.head.weight_VD[start:stop].to(self.hidden_ND.dtype)

    def make(self, start: int, out_NW: Tensor) -> Tensor:
        """Make the tile's logits in `out_NW`."""
        weight_DW = self.weight(start).t()
        if weight_DW.dtype == out_NW.dtype:
            torch.mm(self.hidden_ND, weight_DW, out=out_NW)
        else:
            torch.mm(self.hidden_ND, weight_DW, out_dtype=out_NW.dtype, out=out_NW)
            out_NW.mul_(self.factor)
        if self.head.bias_V is not None:
            bias_W = self.head.bias_V[start : start + out_NW.shape[1]].to(out_NW.dtype)
            out_NW.add_(bias_W, alpha=self.inner)
        if self.head.softcap is not None:
            out_NW.tanh_().mul_(self.head.softcap / LN2)
        return out_NW


def _places(ids_NC: Tensor, logits: Logits) -> list[tuple[Tensor, Tensor]]:
    """Find, for each tile, where the candidates that fall into it are in `ids_NC` and in the tile, both flattened."""
    flat = ids_NC.reshape(-1)
    tiles, count = len(logits.starts), ids_NC.shape[1]
    if tiles == 1:
        pieces: tuple[Tensor, ...] = (torch.arange(flat.numel(), device=flat.device),)
    else:
        order = flat.argsort()
        edges = torch.tensor(logits.starts[1:], device=flat.device)
        pieces = order.tensor_split(torch.searchsorted(flat[order], edges).cpu())
    found = []
    for start, piece in zip(logits.starts, pieces, strict=True):
        width = min(logits.width, logits.head.vocabulary - start)
        found.append((piece, piece // count * width + flat[piece] - start))
    return found


@dataclass(frozen=True)
class Scan:
    """One pass over the vocabulary: the candidates' logits, and the others' exponentials tile by tile."""

    logits: Logits
    ids_NC: Tensor
    candidates_NC: Tensor  # their base-2 logits
    tiles: list[Tensor]  # (N, W): 2 ** (logit - peak), 0 at candidates; all in one place unless kept
    peak_NT: Tensor  # the largest logit up to and with that tile
    other_N1: Tensor  # base-2 logarithm of the sum over all that are no candidates


def scan(logits: Logits, ids_NC: Tensor, room: Tensor, pull_ND: Tensor | None = None) -> Scan:
    """Run over the tiles, in as many places of `room` as it has.

    The candidates are left out of the sum, not subtracted from it: that loses all digits when the rest is small. Peaks
    rise along the way and what was summed before is scaled down, so nothing overflows. `pull_ND` becomes the sum of the
    others' matrix rows, each times its exponential, while these rows are in cache.
    """
    candidates = torch.empty(ids_NC.numel(), dtype=logits.dtype, device=ids_NC.device)
    peak_N1 = torch.full((len(ids_NC), 1), NOTHING, dtype=logits.dtype, device=ids_NC.device)
    sum_N1 = torch.zeros_like(peak_N1)
    peaks, tiles = [], []
    for number, (start, (there, here)) in enumerate(zip(logits.starts, _places(ids_NC, logits), strict=True)):
        width = min(logits.width, logits.head.vocabulary - start)
        flat = room[number % len(room)][: len(ids_NC) * width]
        tile_NW = logits.make(start, flat.view(len(ids_NC), width))
        candidates[there] = flat[here]
        flat[here] = -torch.inf
        before_N1, peak_N1 = peak_N1, torch.maximum(peak_N1, tile_NW.amax(dim=1, keepdim=True))
        down_N1 = (before_N1 - peak_N1).exp2_()
        tile_NW.sub_(peak_N1).exp2_()
        sum_N1.mul_(down_N1).add_(tile_NW.sum(dim=1, keepdim=True))
        if pull_ND is not None:
            add_product(pull_ND.mul_(down_N1), tile_NW, logits.weight(start), fresh=start == 0)
        peaks.append(peak_N1)
        tiles.append(tile_NW)
    other_N1 = (peak_N1 + sum_N1.log2()).clamp_(min=NOTHING)
    return Scan(logits, ids_NC, candidates.view(ids_NC.shape), tiles, torch.cat(peaks, dim=1), other_N1)


def normalised(scores_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Turn base-2 scores of all outcomes into natural log-probabilities and probabilities.

    The largest one is left out of the sum and comes back through log1p: a candidate of probability 1 - 1e-9 keeps its
    digits.
    """
    top_N1, where_N1 = scores_NO.max(dim=1, keepdim=True)
    gap_NO = scores_NO - top_N1
    share_NO = gap_NO.exp2()
    rest_N1 = share_NO.scatter(1, where_N1, 0.0).sum(dim=1, keepdim=True)
    return gap_NO * LN2 - torch.log1p(rest_N1), share_NO / (1 + rest_N1)
