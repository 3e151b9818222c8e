"""Shards: one dataclass of row arrays and ragged arrays per safetensors file, memory-mapped, a CRC for every row.

A field that is a plain array has one entry per row; a `Ragged` field is stored flat with its offsets. Reading one
row touches only that row's bytes (and the small offsets), and checks its CRC.
"""

import json
import mmap
import zlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from lightning_weave.errors import CorruptData
from lightning_weave.types import Ragged


@dataclass(frozen=True)
class RowIndex:
    """Row numbers of a whole stage.

    >>> index = RowIndex.of({"shards": [{"rows": 3}, {"rows": 2}]})
    >>> len(index), index.find(2), index.find(3)
    (5, (0, 2), (1, 0))
    """

    starts: NDArray[np.int64]  # of every shard, and the end

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "RowIndex":
        return cls(np.cumsum([0, *(entry["rows"] for entry in manifest["shards"])]))

    def __len__(self) -> int:
        return int(self.starts[-1])

    @property
    def shards(self) -> int:
        return len(self.starts) - 1

    def find(self, row: int) -> tuple[int, int]:
        """Turn a row of the stage into (shard, row of the shard)."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        return shard, row - int(self.starts[shard])


T = TypeVar("T")
FINGERPRINT = "fingerprint"
CRC = "row_crc"
OFFSETS = ".offsets"
# What reading a damaged header raises: it may be any JSON, or none.
BROKEN_HEADER = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
DTYPES = {"BOOL": "?", "U8": "u1", "I32": "<i4", "I64": "<i8", "U32": "<u4", "F32": "<f4", "F64": "<f8"}


def pack(shard: Any, fingerprint: str) -> bytes:
    """Serialise a dataclass of row arrays and ragged arrays, marked with the fingerprint of what made it."""
    tensors: dict[str, NDArray] = {}
    for field in fields(shard):
        value = getattr(shard, field.name)
        if value is None:  # only a field that may be left out
            continue
        if isinstance(value, Ragged):
            tensors[field.name] = np.ascontiguousarray(value.flat)
            tensors[field.name + OFFSETS] = np.ascontiguousarray(value.offsets, dtype=np.int64)
        else:
            tensors[field.name] = np.ascontiguousarray(value)
    names = _ordered(tensors)
    counts = {
        name: len(tensors[name + OFFSETS]) - 1 if name + OFFSETS in tensors else len(tensors[name]) for name in names
    }
    assert len(set(counts.values())) == 1, f"{type(shard).__name__}: unequal numbers of rows {counts}"
    rows = counts[names[0]]
    tensors[CRC] = np.array([_row_crc(tensors, names, row) for row in range(rows)], dtype=np.uint32)
    # One key only: the library writes several in random order, and equal shards must be equal bytes.
    return save(tensors, {FINGERPRINT: fingerprint})


class Shard(Generic[T]):
    """One shard on disk. `read(start, stop)` gives those rows as the dataclass they were written from."""

    def __init__(self, kind: type[T], path: Path) -> None:
        self.kind = kind
        self.path = path
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._tensors, self.fingerprint = _parse(self._map)
            self._names = _ordered({name: value for name, value in self._tensors.items() if name != CRC})
            required = [field.name for field in fields(kind) if field.default is MISSING]  # type: ignore[arg-type]
            expected = {*required, CRC}
            missing = expected - self._tensors.keys()
            if missing:
                raise ValueError(f"no {', '.join(sorted(missing))}")
        except BROKEN_HEADER as error:
            raise CorruptData(f"{path}: not a whole shard ({error}). {_remedy(path)}") from None

    def __len__(self) -> int:
        return len(self._tensors[CRC])

    def read(self, start: int = 0, stop: int | None = None) -> T:
        """Read a range of rows, checking each row's CRC."""
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of {len(self)}")
        for row in range(start, stop):
            if _row_crc(self._tensors, self._names, row) != self._tensors[CRC][row]:
                raise CorruptData(f"{self.path}: row {row} is damaged (its CRC does not match). {_remedy(self.path)}")
        values: dict[str, NDArray | Ragged | None] = {}
        for field in fields(self.kind):  # type: ignore[arg-type]
            flat = self._tensors.get(field.name)
            offsets = self._tensors.get(field.name + OFFSETS)
            if flat is None:
                values[field.name] = None
            elif offsets is None:
                values[field.name] = flat[start:stop]
            else:
                window = offsets[start : stop + 1]
                values[field.name] = Ragged(flat[window[0] : window[-1]], window - window[0])
        return self.kind(**values)

    @property
    def positions(self) -> int:
        """The number of entries of the last ragged field: decisions, in every kind of shard that there is."""
        names = [field.name for field in fields(self.kind)]  # type: ignore[arg-type]
        ragged = [name for name in names if name + OFFSETS in self._tensors]
        return len(self._tensors[ragged[-1]]) if ragged else 0


def _remedy(path: Path) -> str:
    return f"Remove it (rm {path}) and run the stage again: only this shard is remade"


def _parse(data: mmap.mmap) -> tuple[dict[str, NDArray], str | None]:
    """Map the tensors of a safetensors file. (The library's own slices copy and cost more than the rows they read.)"""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    fingerprint = header.pop("__metadata__", {}).get(FINGERPRINT)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if 8 + size + end > len(data) or end - begin != dtype.itemsize * int(np.prod(entry["shape"])):
            raise ValueError(f"{name} is cut off")
        tensors[name] = np.frombuffer(data, dtype, (end - begin) // dtype.itemsize, 8 + size + begin).reshape(
            entry["shape"]
        )
    return tensors, fingerprint


def _ordered(tensors: Mapping[str, NDArray]) -> list[str]:
    return sorted(name for name in tensors if not name.endswith(OFFSETS))


def _row_crc(tensors: Mapping[str, NDArray], names: list[str], row: int) -> int:
    crc = zlib.crc32(str(row).encode())
    for name in names:
        offsets = tensors.get(name + OFFSETS)
        begin, end = (row, row + 1) if offsets is None else (int(offsets[row]), int(offsets[row + 1]))
        if not 0 <= begin <= end <= len(tensors[name]):
            return -1  # no CRC: the offsets themselves are damaged
        crc = zlib.crc32(f"{name}{end - begin}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(tensors[name][begin:end]).view(np.uint8).data, crc)
    return crc
