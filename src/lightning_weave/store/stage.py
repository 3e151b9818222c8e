"""A stage on disk: its fingerprint, its folder, its manifest, and its shards.

A shard is one dataclass of row arrays and ragged arrays in a safetensors file, memory-mapped, with a CRC for every row.
A field that is a plain array has one entry per row; a `Ragged` field is stored flat with its offsets. Reading one
row touches only that row's bytes (and the small offsets), and checks its CRC.
"""

import json
import logging
import mmap
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from safetensors.numpy import save

from lightning_weave.errors import CorruptData, InputError
from lightning_weave.ranks import is_main_process, is_single_process
from lightning_weave.store.files import (
    TEMPORARY,
    FilePath,
    append_line,
    fingerprint,
    read_checked,
    read_lines,
    remove_temporaries,
    sha256_file,
    write_atomic,
    write_checked,
)
from lightning_weave.types import Ragged

log = logging.getLogger(__name__)
T = TypeVar("T")
State = Literal["complete", "partial", "missing"]
LATE = 60.0  # seconds until a shared disk shows what another machine wrote (NFS caches a failed look-up so long)
FORMAT = 2  # of shards and manifests; part of every fingerprint
MANIFEST = "manifest.json"
BEGUN = "stage.json"  # describes an unfinished stage; the manifest replaces it
ENGINES = "engines.jsonl"  # the engines of an unfinished stage; the manifest lists them in the end
DIGITS = 8  # of the fingerprint in a folder's name
FOLDER = re.compile(rf"@[0-9a-f]{{{DIGITS}}}(?=/|$)")  # ends the name of a stage folder; effort@low is a policy
FINGERPRINT = "fingerprint"
CRC = "row_crc"
OFFSETS = ".offsets"
LONGEST_HEADER = 1 << 20
# What reading a damaged header raises: it can be any JSON, or not JSON.
BROKEN_HEADER = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)
DTYPES = {"BOOL": "?", "U8": "u1", "I32": "<i4", "I64": "<i8", "U32": "<u4", "F32": "<f4", "F64": "<f8"}


class Entry(BaseModel):
    """A file of a stage."""

    file: FilePath
    bytes: int
    sha256: str
    rows: int = Field(0, ge=0, lt=1 << 40)


class Manifest(BaseModel):
    """What every manifest holds, whoever wrote it."""

    fingerprint: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    shards: list[Entry]


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


def pack(shard: Any, fingerprint: str) -> bytes:
    """Serialise a dataclass of row arrays and ragged arrays, marked with the fingerprint of what made it."""
    tensors: dict[str, NDArray] = {}
    counts = {}
    for name, value in sorted(vars(shard).items()):
        if isinstance(value, Ragged):
            tensors[name] = np.ascontiguousarray(value.flat)
            tensors[name + OFFSETS] = np.ascontiguousarray(value.offsets, dtype=np.int64)
        elif value is not None:  # a field that may be left out
            tensors[name] = np.ascontiguousarray(value)
        if value is not None:
            counts[name] = len(value)
    assert len(set(counts.values())) == 1, f"{type(shard).__name__}: unequal numbers of rows {counts}"
    rows = next(iter(counts.values()))
    tensors[CRC] = np.array([_row_crc(tensors, counts, row) for row in range(rows)], dtype=np.uint32)
    # One key only: the library writes several in random order, and equal shards must be equal bytes.
    return save(tensors, {FINGERPRINT: fingerprint})


def _row_crc(tensors: Mapping[str, NDArray], names: Iterable[str], row: int) -> int:
    crc = zlib.crc32(str(row).encode())
    for name in names:
        offsets = tensors.get(name + OFFSETS)
        begin, end = (row, row + 1) if offsets is None else (int(offsets[row]), int(offsets[row + 1]))
        if not 0 <= begin <= end <= len(tensors[name]):
            return -1  # no CRC: the offsets themselves are damaged
        crc = zlib.crc32(f"{name}{end - begin}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(tensors[name][begin:end]).view(np.uint8).data, crc)
    return crc


def map_tensors(path: Path) -> tuple[dict[str, NDArray], str | None]:
    """Map the tensors of a shard and read its fingerprint; only the header is read. Raises one of BROKEN_HEADER.

    (The safetensors library's own slices copy, and cost more than the rows that they read.)
    """
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : min(start, LONGEST_HEADER)])
    fingerprint = header.pop("__metadata__", {}).get(FINGERPRINT)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        if start + end > len(data) or end - begin != dtype.itemsize * int(np.prod(entry["shape"])):
            raise ValueError(f"{name} is cut off")
        flat = np.frombuffer(data, dtype, (end - begin) // dtype.itemsize, start + begin)
        tensors[name] = flat.reshape(entry["shape"])
    if len(data) != start + max((entry["data_offsets"][1] for entry in header.values()), default=0):
        raise ValueError("something follows its last tensor")
    return tensors, fingerprint


class Shard(Generic[T]):
    """One shard on disk. `read(start, stop)` gives those rows as the dataclass they were written from."""

    def __init__(self, kind: type[T], path: Path) -> None:
        self.kind = kind
        self.path = path
        self._remedy = f"Remove it (rm {path}) and run the stage again: only this shard is remade"
        try:
            self._tensors, self.fingerprint = map_tensors(path)
            required = {one.name for one in fields(kind) if one.default is MISSING}  # type: ignore[arg-type]
            if missing := {*required, CRC} - self._tensors.keys():
                raise ValueError(f"no {', '.join(sorted(missing))}")
        except BROKEN_HEADER as error:
            raise CorruptData(f"{path}: not a whole shard ({error}). {self._remedy}") from None

    def __len__(self) -> int:
        return len(self._tensors[CRC])

    def read(self, start: int = 0, stop: int | None = None) -> T:
        """Read a range of rows, checking each row's CRC."""
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start}:{stop} of {len(self)}")
        names = sorted(name for name in self._tensors if name != CRC and not name.endswith(OFFSETS))
        for row in range(start, stop):
            if _row_crc(self._tensors, names, row) != self._tensors[CRC][row]:
                raise CorruptData(f"{self.path}: row {row} is damaged (its CRC does not match). {self._remedy}")
        values: dict[str, NDArray | Ragged] = {}
        for name in {one.name for one in fields(self.kind)} & self._tensors.keys():  # type: ignore[arg-type]
            if (offsets := self._tensors.get(name + OFFSETS)) is None:
                values[name] = self._tensors[name][start:stop]
            else:
                window = offsets[start : stop + 1]
                values[name] = Ragged(self._tensors[name][window[0] : window[-1]], window - window[0])
        return self.kind(**values)

    @property
    def positions(self) -> int:
        """The number of entries of the last ragged field: decisions, in every kind of shard that there is."""
        names = [one.name for one in fields(self.kind)]  # type: ignore[arg-type]
        ragged = [name for name in names if name + OFFSETS in self._tensors]
        return len(self._tensors[ragged[-1]]) if ragged else 0


@dataclass(frozen=True)
class Stage:
    """What decides the content of one stage, and the folder that holds it."""

    directory: Path  # of the run
    path: str  # below it, without the fingerprint, for example score/Qwen3-8B-Base
    settings: Mapping[str, Any]  # what decides the content, model identities included
    inputs: tuple["Stage", ...] = ()
    command: str = ""  # what a user types to make it
    key: Mapping[str, Any] | None = None  # hashed instead of the settings: the same without the names of anchors
    definition: Mapping[str, Any] = field(default_factory=dict)  # the recipe's tables that define it; not hashed
    found: str = ""  # the fingerprint of an existing folder that is used whatever the recipe says

    @cached_property
    def fingerprint(self) -> str:
        if self.found:
            return self.found
        inputs = sorted(stage.fingerprint for stage in self.inputs)
        kind = self.path.split("/")[0]
        settings = self.settings if self.key is None else self.key
        return fingerprint({"format": FORMAT, "stage": kind, "settings": settings, "inputs": inputs})

    @property
    def folder(self) -> Path:
        """Where it is: under its own name or, where another name has the same content already, under that one."""
        folder = self.directory / f"{self.path}@{self.fingerprint[:DIGITS]}"
        if folder.exists():
            return folder
        kind, *names = PurePosixPath(self.path).parts
        others = "/".join([kind, *["[!.]*"] * len(names)])
        return next(self.directory.glob(f"{others}@{self.fingerprint[:DIGITS]}"), folder)

    @property
    def name(self) -> str:
        """The last part of the path: a model, a composition, a benchmark."""
        return PurePosixPath(self.path).name

    @property
    def manifest_path(self) -> Path:
        return self.folder / MANIFEST

    def shard_path(self, index: int) -> Path:
        return self.folder / f"{index:05d}.safetensors"

    def manifest(self) -> dict[str, Any] | None:
        """Read the manifest, if there is one."""
        manifest = read_manifest(self.folder)
        if manifest is not None and manifest["fingerprint"] != self.fingerprint:
            raise CorruptData(f"{self.manifest_path} belongs to another stage. Remove it, then run: {self.command}")
        return manifest

    def state(self) -> State:
        """Look at the folder: complete with its manifest and all of its files, partial, or missing."""
        manifest = self.manifest()
        if manifest is not None:
            files = [(self.folder / entry["file"], entry["bytes"]) for entry in manifest["shards"]]
            whole = all(path.exists() and path.stat().st_size == size for path, size in files)
            return "complete" if whole else "partial"
        if not self.folder.is_dir():
            return "missing"
        others = (name for name in os.listdir(self.folder) if not name.startswith(TEMPORARY))
        return "partial" if any(name not in (BEGUN, ENGINES) for name in others) else "missing"

    @property
    def complete(self) -> bool:
        return self.state() == "complete"

    def begin(self) -> None:
        """Create the folder, when its first file is about to be written. Beginning again changes nothing."""
        if not self.manifest_path.exists() and not (self.folder / BEGUN).exists():
            write_checked(self.folder / BEGUN, self._description())
        self.link()

    def link(self) -> None:
        """Point the plain name at this folder."""
        link = self.directory / self.path
        target = os.path.relpath(self.folder, link.parent)
        if is_main_process() and not (link.is_symlink() and os.readlink(link) == target):
            temporary = link.with_name(f"{TEMPORARY}{link.name}")  # one left by a killed command is replaced
            try:
                link.parent.mkdir(parents=True, exist_ok=True)
                temporary.unlink(missing_ok=True)
                os.symlink(target, temporary)
                os.replace(temporary, link)
            except OSError as error:  # a file system without symlinks, or a copy that followed them
                log.debug("no link %s: %s", link, error)
                temporary.unlink(missing_ok=True)

    def siblings(self) -> list["Stage"]:
        """List the other complete folders with this plain name, newest first."""
        others = []
        for folder in self.folder.parent.glob(f"{self.name}@*"):
            manifest = read_manifest(folder) if folder != self.folder else None
            if manifest is not None:
                other = replace(self, settings=manifest["settings"], found=manifest["fingerprint"])
                if other.folder == folder and other.complete:
                    others.append(other)
        return sorted(others, key=lambda other: other.manifest_path.stat().st_mtime_ns, reverse=True)

    def missing(self, shards: Iterable[int]) -> list[int]:
        """List the shards that this machine does not see."""
        self._refresh()
        return [index for index in shards if not self._is_ours(self.shard_path(index))]

    def pending(self, shards: int) -> list[int]:
        """List the shards that still have to be computed.

        A shard that the manifest lists may exist without being visible here yet (NFS): look again before it is computed
        a second time.
        """
        missing = self.missing(range(shards))
        if missing and not is_single_process() and self.manifest() is not None:
            self.wait_until_complete(LATE)
            missing = self.missing(missing)
        return missing

    def wait_until_complete(self, seconds: float) -> None:
        """Look until it is complete, or for so long."""
        end = time.monotonic() + seconds
        while not self.complete and time.monotonic() < end:
            time.sleep(0.1)
            self._refresh()

    def _refresh(self) -> None:
        """List the folder, which makes a client of NFS ask the server again for names that it has not seen."""
        if not is_single_process() and self.folder.exists():
            os.listdir(self.folder)

    def _is_ours(self, path: Path) -> bool:
        """Whether a shard is there, not cut off, and of this stage. Only its header is read."""
        with suppress(OSError, *BROKEN_HEADER):
            return map_tensors(path)[1] == self.fingerprint
        return False

    def write(self, index: int, shard: Any) -> int:
        """Write one shard atomically; returns its bytes. If a listed shard was lost, the manifest is removed."""
        self.begin()
        path = self.shard_path(index)
        data = pack(shard, self.fingerprint)
        if not self._is_ours(path):
            self.manifest_path.unlink(missing_ok=True)  # it lists a shard that was lost
        write_atomic(path, data)
        return len(data)

    def open(self, kind: type[T], index: int) -> Shard[T]:
        """Map one shard for reading."""
        path = self.shard_path(index)
        if not path.exists():
            raise CorruptData(f"{path} is missing. Rerun: {self.command}")
        shard = Shard(kind, path)
        if shard.fingerprint != self.fingerprint:
            raise CorruptData(f"{path} belongs to another stage. Remove it, then run: {self.command}")
        return shard

    def finish(self, kind: type[Any], shards: int) -> bool:
        """Write the manifest if every shard is there, else return False. Ranks may all call it: same bytes."""
        if self.complete:  # no need to read and hash it all again
            self.settle()
            return True
        paths = [self.shard_path(index) for index in range(shards)]
        if self.missing(range(shards)):
            return False
        # All shards are there, so none is being written; but another rank may be writing this manifest.
        remove_temporaries(self.folder, "" if is_single_process() else ".safetensors")
        counts = []
        for path in paths:  # one map at a time
            shard = Shard(kind, path)
            counts.append({"rows": len(shard), "positions": shard.positions})
        self.record(paths, {name: sum(each[name] for each in counts) for name in ("rows", "positions")}, counts)
        return True

    def record(
        self,
        files: Sequence[Path],
        extra: Mapping[str, Any] | None = None,
        counts: Sequence[Mapping[str, int]] | None = None,
    ) -> None:
        """Write the manifest of these files, with the counts of each if there are any."""
        entries = []
        for path, count in zip(files, counts or [{}] * len(files), strict=True):
            entry = {"file": str(path.relative_to(self.folder)), "sha256": sha256_file(path)}
            entries.append({**entry, "bytes": path.stat().st_size, **count})
        engines = {"engines": names} if (names := self.engines()) else {}
        write_checked(self.manifest_path, {**self._description(), "shards": entries, **engines, **(extra or {})})
        self.settle()

    def settle(self) -> None:
        """Remove the notes of an unfinished stage, which a killed command may have left, and point the link here."""
        for name in (BEGUN, ENGINES):
            (self.folder / name).unlink(missing_ok=True)
        self.link()

    def note_engine(self, name: str) -> list[str]:
        """Write down for the manifest which engine computes this stage; returns the others that took part."""
        self.begin()
        engines = self.engines()
        noted = {row["engine"] for row in read_lines(self.folder / ENGINES, engine=str)}
        for each in sorted({*engines, name} - noted):  # a manifest goes when one of its shards is computed again
            append_line(self.folder / ENGINES, {"engine": each})
        return [each for each in engines if each != name]

    def engines(self) -> list[str]:
        """The engines that computed this stage, by version and dtype. They are not part of its fingerprint."""
        # Read first: writing a manifest deletes it.
        noted = [row["engine"] for row in read_lines(self.folder / ENGINES, engine=str)]
        return sorted({*(self.manifest() or {}).get("engines", []), *noted})

    def _description(self) -> dict[str, Any]:
        inputs = {stage.path: stage.fingerprint for stage in self.inputs}
        own = {"fingerprint": self.fingerprint, "settings": dict(self.settings), "inputs": inputs}
        return own | ({"definition": dict(self.definition)} if self.definition else {})

    def require(self) -> dict[str, Any]:
        """Return the manifest. If the stage is not complete, raise an error with the command to run."""
        if not is_main_process():  # another rank may just have finished it
            self.wait_until_complete(LATE)
        if (state := self.state()) != "complete":
            word = "is not finished" if state == "partial" else "is not there yet"
            raise InputError(f"{self.directory / self.path} {word}. Make it with: {self.command}")
        manifest = self.manifest()
        assert manifest is not None
        return manifest


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a folder, if there is one."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    manifest = read_checked(path)
    try:
        Manifest.model_validate(manifest, strict=True)
    except ValidationError:
        wrong = "is not a manifest, or lists files outside its folder"
        raise CorruptData(f"{path}: {wrong}. Remove it and run the stage again") from None
    return manifest


def read_description(folder: Path) -> dict[str, Any]:
    """Read what a folder holds, or will hold once it is finished: fingerprint, settings, inputs; empty if unknown."""
    if (manifest := read_manifest(folder)) is not None:
        return manifest
    return read_checked(folder / BEGUN) if (folder / BEGUN).exists() else {}


def damaged_files(folder: Path) -> dict[Path, str]:
    """Find files that do not match the manifest of their folder, and what is wrong with each."""
    faults = {}
    for entry in (read_manifest(folder) or {}).get("shards", []):
        path = folder / entry["file"]
        if not path.exists():
            faults[path] = "is missing"
        elif sha256_file(path) != entry["sha256"]:
            faults[path] = "is damaged (its sha256 is not the manifest's)"
    return faults


def differences(old: Any, new: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys, at any depth, in which two settings differ, and how. Of hashes it only says that they changed."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
    elif old != new:
        if isinstance(old, Mapping) or isinstance(new, Mapping):
            yield key, "is gone" if new is None else "is new"
        elif any(isinstance(value, str) and re.fullmatch("[0-9a-f]{16,}", value) for value in (old, new)):
            yield key, "has changed"
        else:
            values = ["unset" if value is None else value for value in (old, new)]
            shown = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
            yield key, " -> ".join(shown)
