"""Read single rows of a checkpoint's output matrix, and find those that training never touched."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from lightning_weave.models.checkpoint import Checkpoint

SAME_DIRECTION = 1 - 1e-4  # rows that only weight decay moved stay this parallel; exact equality misses them
NEAR_ZERO = 1e-3  # of the median row's norm
_HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight")  # the output matrix too, where they are tied
_BLOCKS = 64
_BLOCK = 32  # where the typical norm is measured: spread over the vocabulary, read in few pieces


@dataclass(frozen=True)
class OutputMatrix:
    """The output matrix of a checkpoint on disk; only the rows that are asked for are read."""

    file: Path
    key: str
    rows: int

    @classmethod
    def of(cls, path: Path) -> "OutputMatrix | None":
        """Find the matrix in a checkpoint directory; None where it has a name that is not known here."""
        tensors = dict(_tensors(path))
        for ending in (*_HEADS, *_EMBEDDINGS):
            for key in sorted(tensors):
                if key.endswith(ending):
                    with safe_open(tensors[key], framework="pt") as file:
                        return cls(tensors[key], key, file.get_slice(key).get_shape()[0])
        return None

    def read(self, ids: Sequence[int]) -> Tensor:
        """Read rows in ascending order of their ids, as float32."""
        with safe_open(self.file, framework="pt") as file:
            matrix = file.get_slice(self.key)
            return torch.cat([matrix[first : last + 1].float() for first, last in _runs(sorted(ids))])

    def untrained(self, special: Sequence[int]) -> set[int]:
        """List the special tokens whose row looks untrained."""
        ids = sorted(id for id in special if id < self.rows)
        if not ids:
            return set()
        step = max(_BLOCK, self.rows // _BLOCKS)
        sample = [id for start in range(0, self.rows, step) for id in range(start, min(start + _BLOCK, self.rows))]
        return _look_untrained(ids, self.read(ids), self.read(sample))


def untrained_specials(checkpoint: Checkpoint) -> set[int]:
    """List the special tokens of a checkpoint whose output row looks untrained, without loading or downloading it."""
    matrix = OutputMatrix.of(checkpoint.path) if checkpoint.is_here else None
    return matrix.untrained(sorted(checkpoint.tokenizer.added_tokens_decoder)) if matrix else set()


def untrained_rows(weight_VD: Tensor, special: Sequence[int]) -> set[int]:
    """List the special tokens whose row of a loaded matrix looks untrained."""
    ids = [id for id in special if id < len(weight_VD)]
    if not ids:
        return set()
    return _look_untrained(ids, weight_VD[ids], weight_VD[:: max(1, len(weight_VD) // (_BLOCKS * _BLOCK))])


def _look_untrained(ids: Sequence[int], rows_SD: Tensor, others_ND: Tensor) -> set[int]:
    """Pick the rows that are parallel to another special row, or almost zero beside others.

    Base checkpoints leave chat, tool and think tokens as they were initialised, often all alike.
    """
    rows_SD = rows_SD.float()
    norms_S = rows_SD.norm(dim=-1)
    near_zero_S = norms_S < NEAR_ZERO * others_ND.float().norm(dim=-1).median()
    unit_SD = rows_SD / norms_S.clamp(min=1e-12)[:, None]
    cosine_SS = (unit_SD @ unit_SD.T).fill_diagonal_(-1.0)
    alike_S = (cosine_SS >= SAME_DIRECTION).any(dim=-1)
    return {id for id, found in zip(ids, (near_zero_S | alike_S).tolist(), strict=True) if found}


def _tensors(path: Path) -> Iterator[tuple[str, Path]]:
    """Yield each tensor of a checkpoint with its file."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        for key, name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            yield key, path / name
        return
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a dict)
                yield key, file


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Join ids that follow one another.

    >>> list(_runs([1, 2, 3, 7, 9]))
    [(1, 3), (7, 7), (9, 9)]
    """
    for _, run in groupby(enumerate(ids), key=lambda pair: pair[1] - pair[0]):
        members = [id for _, id in run]
        yield members[0], members[-1]
