"""Logits of a chunk of positions, one tile of the vocabulary at a time.

A tile stays in cache, so further passes over it cost little compared with the matrix product. Logits are in base 2 (the
factor is applied to the hidden states), because exp2 is three times as fast as exp on a CPU.

Letters: N positions of a chunk, V vocabulary, W width of a tile, T tiles, C candidates, O = C + 1 outcomes.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_weave.devices import has_wide_products
from lightning_weave.heads.head import Head

LN2 = math.log(2)
NOTHING = -1e30
"""The base-2 logarithm of no mass: finite, so that the difference of two of them is too."""

TILE_WIDTH = 1024
TILE_BYTES = 2 * 2**20  # about one core's share of the cache
CHUNK_BYTES = 128 * 2**20  # logits of one chunk; with less, reading the matrix dominates
CHUNK_BYTES_GPU = 512 * 2**20  # small products waste a GPU


def rows_within_budget(vocabulary: int, device: torch.device) -> int:
    """Choose the number of positions per chunk when whole rows of logits are in memory."""
    budget = CHUNK_BYTES if device.type == "cpu" else CHUNK_BYTES_GPU
    return max(1, budget // (4 * vocabulary))


def rows_within_cache(vocabulary: int, device: torch.device) -> int:
    """Choose the number of positions per chunk when only one tile of logits is in memory."""
    if device.type != "cpu":
        return rows_within_budget(vocabulary, device)
    return max(1, TILE_BYTES // (4 * min(vocabulary, TILE_WIDTH)))


def tile_width(vocabulary: int, device: torch.device) -> int:
    """Choose the width of a tile: cache-sized on a CPU, the whole vocabulary on a GPU, to launch few kernels."""
    return min(vocabulary, TILE_WIDTH) if device.type == "cpu" else vocabulary


def maths_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Use float64 for float64 and float32 for everything else."""
    return torch.promote_types(hidden_ND.dtype, torch.float32)


def product_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Choose the dtype of matrix products: bfloat16 if the input is and the device can, otherwise `maths_dtype`.

    Small gradients vanish in float16.
    """
    device = hidden_ND.device
    autocast = torch.is_autocast_enabled(device.type)
    dtype = torch.get_autocast_dtype(device.type) if autocast else hidden_ND.dtype
    return dtype if dtype == torch.bfloat16 and has_wide_products(device) else maths_dtype(hidden_ND)


def check_ids(ids: Tensor, vocabulary: int) -> Tensor:
    """Refuse ids without a row in the head, where looking at them waits for no device; return them as int64."""
    if ids.device.type == "cpu" and ids.numel():
        values = ids.numpy()
        if not (values.min() >= 0 and values.max() < vocabulary):
            raise ValueError(f"token ids from {values.min()} to {values.max()} in a vocabulary of {vocabulary}")
    return ids.long()


def cast_once(head: Head, dtype: torch.dtype) -> Head:
    """Cast the matrix for all chunks if a tile is all of it; a smaller tile is cast while it is in cache."""
    weight_VD = head.weight_VD[: head.vocabulary]
    whole = tile_width(head.vocabulary, weight_VD.device) >= head.vocabulary
    return replace(head, weight_VD=weight_VD.to(dtype)) if whole else head


def add_product(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor, fresh: bool, factor: float = 1.0) -> None:
    """Add a matrix product to `sum_MN`, or overwrite it if `fresh`, in one kernel and in the precision of `sum_MN`."""
    beta = 0 if fresh else 1
    if a_MK.dtype == sum_MN.dtype:
        sum_MN.addmm_(a_MK, b_KN, beta=beta, alpha=factor)
    else:
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, beta=beta, alpha=factor, out=sum_MN)


@dataclass(frozen=True)
class Logits:
    """The base-2 logits of one chunk of positions, computed tile by tile."""

    head: Head
    hidden_ND: Tensor  # in product precision
    dtype: torch.dtype  # of the logits

    @classmethod
    def from_hidden(cls, hidden_ND: Tensor, head: Head, dtype: torch.dtype) -> "Logits":
        """Prepare a chunk; the factor is applied to the hidden states unless that would round them."""
        logits = cls(head, hidden_ND.to(dtype), maths_dtype(hidden_ND))
        return replace(logits, hidden_ND=logits.hidden_ND * logits.factor) if dtype == logits.dtype else logits

    @property
    def inner(self) -> float:
        """Factor on natural logits: to base 2, or to units of the soft cap."""
        return 1 / (self.head.softcap or LN2)

    @property
    def factor(self) -> float:
        """Factor on h W^T."""
        return self.head.scale * self.inner

    @property
    def width(self) -> int:
        """Number of columns of a tile; the last one may have fewer."""
        return tile_width(self.head.vocabulary, self.hidden_ND.device)

    @property
    def starts(self) -> range:
        """First columns of the tiles."""
        return range(0, self.head.vocabulary, self.width)

    def allocate(self, keep: bool) -> Tensor:
        """Allocate memory for all tiles, or for a single one that is reused."""
        shape = (len(self.starts) if keep else 1, len(self.hidden_ND) * self.width)
        return torch.empty(shape, dtype=self.dtype, device=self.hidden_ND.device)

    def weight(self, start: int) -> Tensor:
        """Return the tile's rows of the matrix, in product precision."""
        stop = min(start + self.width, self.head.vocabulary)
        return self.head.weight_VD[start:stop].to(self.hidden_ND.dtype)

    def make(self, start: int, out_NW: Tensor) -> Tensor:
        """Compute the tile's logits into `out_NW`."""
        weight_DW = self.weight(start).t()
        if weight_DW.dtype == out_NW.dtype:
            torch.mm(self.hidden_ND, weight_DW, out=out_NW)
        else:
            add_product(out_NW, self.hidden_ND, weight_DW, fresh=True, factor=self.factor)
        if self.head.bias_V is not None:
            bias_W = self.head.bias_V[start : start + out_NW.shape[1]].to(out_NW.dtype)
            out_NW.add_(bias_W, alpha=self.inner)
        if self.head.softcap is not None:
            out_NW.tanh_().mul_(self.head.softcap / LN2)
        return out_NW


def _places(ids_NC: Tensor, logits: Logits) -> list[tuple[Tensor, Tensor]]:
    """For each tile, find its candidates' positions in `ids_NC` and in the tile, both flattened."""
    flat = ids_NC.reshape(-1)
    if len(logits.starts) == 1:
        pieces: tuple[Tensor, ...] = (torch.arange(flat.numel(), device=flat.device),)
    else:
        order = flat.argsort()
        edges = torch.tensor(logits.starts[1:], device=flat.device)
        pieces = order.tensor_split(torch.searchsorted(flat[order], edges).cpu())
    places = []
    for start, piece in zip(logits.starts, pieces, strict=True):
        width = min(logits.width, logits.head.vocabulary - start)
        places.append((piece, piece // ids_NC.shape[1] * width + flat[piece] - start))
    return places


@dataclass(frozen=True)
class Scan:
    """One pass over the vocabulary: the candidates' logits, and the others' exponentials tile by tile."""

    logits: Logits
    ids_NC: Tensor
    candidates_NC: Tensor  # their base-2 logits
    tiles: list[Tensor]  # (N, W): 2 ** (logit - peak), 0 at candidates; all in the same memory unless kept
    peak_NT: Tensor  # the largest logit up to and including that tile
    other_N1: Tensor  # base-2 logarithm of the sum over all non-candidates


def scan(logits: Logits, ids_NC: Tensor, memory: Tensor, pull_ND: Tensor | None = None) -> Scan:
    """Compute all tiles, cycling through the memory in `memory`.

    The candidates are omitted from the sum, not subtracted from it, which would lose all digits when the rest is small.
    When the running peak rises, the sum so far is scaled down, so nothing overflows. `pull_ND` becomes the sum of the
    non-candidates' matrix rows, each times its exponential, while these rows are in cache.
    """
    candidates = torch.empty(ids_NC.numel(), dtype=logits.dtype, device=ids_NC.device)
    peak_N1 = torch.full((len(ids_NC), 1), NOTHING, dtype=logits.dtype, device=ids_NC.device)
    sum_N1 = torch.zeros_like(peak_N1)
    peaks: list[Tensor] = []
    tiles: list[Tensor] = []
    for number, (start, (there, here)) in enumerate(zip(logits.starts, _places(ids_NC, logits), strict=True)):
        width = min(logits.width, logits.head.vocabulary - start)
        flat = memory[number % len(memory)][: len(ids_NC) * width]
        tile_NW = logits.make(start, flat.view(len(ids_NC), width))
        candidates[there] = flat[here]
        flat[here] = -torch.inf
        last_peak_N1 = peak_N1
        peak_N1 = torch.maximum(peak_N1, tile_NW.amax(dim=1, keepdim=True))
        down_N1 = (last_peak_N1 - peak_N1).exp2_()
        tile_NW.sub_(peak_N1).exp2_()
        sum_N1.mul_(down_N1).add_(tile_NW.sum(dim=1, keepdim=True))
        if pull_ND is not None:
            add_product(pull_ND.mul_(down_N1), tile_NW, logits.weight(start), fresh=start == 0)
        peaks.append(peak_N1)
        tiles.append(tile_NW)
    other_N1 = (peak_N1 + sum_N1.log2()).clamp_(min=NOTHING)
    candidates_NC = candidates.view(ids_NC.shape)
    return Scan(logits, ids_NC, candidates_NC, tiles, peak_NT=torch.cat(peaks, dim=1), other_N1=other_N1)


def normalize_scores(scores_NO: Tensor) -> tuple[Tensor, Tensor]:
    """Convert base-2 scores of all outcomes to natural log-probabilities and probabilities.

    The largest one enters through log1p instead of the sum, so a probability of 1 - 1e-9 keeps its digits.
    """
    top_N1, where_N1 = scores_NO.max(dim=1, keepdim=True)
    gap_NO = scores_NO - top_N1
    share_NO = gap_NO.exp2()
    rest_N1 = share_NO.scatter(1, where_N1, 0.0).sum(dim=1, keepdim=True)
    return gap_NO * LN2 - torch.log1p(rest_N1), share_NO / (1 + rest_N1)
