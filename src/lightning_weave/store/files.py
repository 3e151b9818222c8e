"""Files that are whole or not there, logs that survive a kill, locks, and what a model or a file is by its content.

Hashing a checkpoint reads all of its bytes, so hashes are remembered by path, size and modification time.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from pydantic import AfterValidator

from lightning_weave.errors import CorruptData, InputError, WeaveError
from lightning_weave.ranks import is_main_process, is_single_process

TEMPORARY = ".tmp-"
HOLDER = ".holder"  # names the process that holds a run directory
NO_FLOCK = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
# Everything that decides what a model computes or how its text becomes tokens; not READMEs, not optimizer states.
MODEL_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.gguf",
    "config.json",
    "generation_config.json",
    "*.py",
)
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
)
CHECKSUM = "checksum"  # of the other keys of a JSON object
_HUB_BLOB = re.compile(r"/blobs/[0-9a-f]{64}$")  # the hub's cache names large files by their sha256


def plain_path(name: str) -> str:
    """Refuse what is not the path of a file below some folder, or could be written in another way."""
    path = PurePosixPath(name)
    is_below = path.parts and not path.is_absolute() and ".." not in path.parts
    if not is_below or str(path) != name or "\\" in name or not name.isprintable():
        raise ValueError(f"{name!r} is not the plain path of a file")
    return name


FilePath = Annotated[str, AfterValidator(plain_path)]  # in what others may have written


def write_atomic(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename, sync the directory: a kill leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def temporary_name(path: Path) -> Path:
    """Name a file that no other writer uses: containers on one disk may share process ids, and even host names."""
    host = socket.gethostname().partition(".")[0]
    return path.with_name(f"{TEMPORARY}{host}-{os.getpid()}-{secrets.token_hex(4)}-{path.name}")


def unwritable(path: Path, error: OSError) -> WeaveError:
    """The error for a file, or a folder of files, that cannot be written."""
    return WeaveError(f"{path}: cannot be written ({error.strerror}). What was finished before is kept")


def sync(path: Path) -> None:
    """Make a file, or the renames in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_directory(folder: Path) -> Iterator[Path]:
    """Give a temporary directory; at the end of the block, sync it and rename it to `folder`, replacing what is there.

    An error removes it and leaves `folder` as it was; what a kill leaves behind, the next call removes.
    """
    unfinished = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.rglob("*"):
            sync(path)
        sync(unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)
    sync(folder.parent)


def remove(path: Path) -> None:
    """Remove a file or a folder; under a temporary name first, so that a kill leaves no half of it in its place."""
    doomed = temporary_name(path)
    os.rename(path, doomed)
    if doomed.is_dir() and not doomed.is_symlink():
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        doomed.unlink()


def remove_temporaries(folder: Path, suffix: str) -> None:
    """Remove what killed writers left below a folder. Only safe where no process is writing such files."""
    for leftover in folder.rglob(f"{TEMPORARY}*{suffix}"):
        if leftover.is_file():  # unfinished checkpoints are folders, and training's own
            leftover.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write pretty JSON atomically, with sorted keys so that equal contents are equal bytes."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read JSON, or say which file is broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CorruptData(f"{path}: not valid JSON ({error}). Remove it and run the stage again") from None
    except OSError as error:
        raise CorruptData(f"{path}: cannot be read ({error.strerror})") from None


def append_line(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON row in a single write; start a fresh line if a killed writer left a torn one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            torn = False
            if file.tell():
                file.seek(-1, os.SEEK_END)
                torn = file.read(1) != b"\n"
            file.write(b"\n" * torn + json.dumps(row, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise unwritable(path, error) from error


def make_directory(path: Path, asked: str) -> None:
    """Make a directory that a user asked for in these words, or say why it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{asked}: no directory can be made there ({error.strerror}). Name another") from None


def read_lines(path: Path, **kinds: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL log that are whole: lines that a kill tore, or without these fields, are left out."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items()):
                    yield row


def sha256_file(path: Path) -> str:
    """Hash a file without loading it."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def lock_run(directory: Path) -> Iterator[None]:
    """Hold the run directory for this process, or name who does. Ranks other than 0 work under rank 0's lock."""
    if not is_main_process():
        yield
        return
    lock: BaseFileLock = FileLock(directory / ".lock", timeout=0)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file system without flock, where filelock takes a file for the lock
            try:
                lock.acquire()
            except OSError as error:
                if error.errno not in NO_FLOCK:
                    raise
                lock = SoftFileLock(directory / ".lock-held", timeout=0)
                lock.acquire()
    except Timeout:
        holder = directory / HOLDER
        name = holder.read_text(errors="replace").strip() if holder.exists() else "another process"
        remedy = f"; if it no longer runs, remove {lock.lock_file}" if isinstance(lock, SoftFileLock) else ""
        raise InputError(f"{directory} is in use by {name}. Wait for it or stop it, then try again{remedy}") from None
    except OSError as error:
        raise WeaveError(f"{directory}: the run directory cannot be locked ({error.strerror})") from None
    try:
        if is_single_process():
            remove_temporaries(directory, "")  # of killed holders
        command = " ".join(["lweave", *sys.argv[1:]])
        name = f"process {os.getpid()} on {socket.gethostname()} ({command})"
        write_atomic(directory / HOLDER, name[:400].encode())
        yield
    finally:
        lock.release()


def fingerprint(value: Mapping[str, Any]) -> str:
    """Hash plain data, the same for equal contents in any order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def write_checked(path: Path, table: Mapping[str, Any]) -> None:
    """Write a JSON object with a checksum of its contents."""
    write_json(path, {**table, CHECKSUM: fingerprint(table)})


def read_checked(path: Path) -> dict[str, Any]:
    """Read a JSON object that is as it was written, or say that it is not."""
    table = read_json(path)
    if not isinstance(table, dict) or table.pop(CHECKSUM, None) != fingerprint(table):
        raise CorruptData(f"{path}: is damaged (not what was written). Remove it (rm {path}) and run the stage again")
    return table


def model_identity(directory: Path, absent: Mapping[str, str] | None = None) -> str:
    """Name a model directory by what its weights, configuration and tokenizer are, not by what it is called.

    `absent` gives the sha256 of files that belong to it but are not there yet.
    """
    patterns = MODEL_FILES + TOKENIZER_FILES
    files = sorted({path for pattern in patterns for path in directory.glob(pattern) if path.is_file()})
    if not files:
        raise InputError(f"{directory}: no model here (no config.json, weights or tokenizer files)")
    digests = dict(zip([path.name for path in files], file_identities(files), strict=True))
    return fingerprint({**(absent or {}), **digests})


def file_identity(path: Path) -> str:
    """Hash a file, or remember its hash if size and modification time have not changed."""
    return file_identities([path])[0]


def file_identities(paths: Sequence[Path]) -> list[str]:
    """Hash files; what is new is remembered in one go."""
    cache = _load_cache()
    new = {}
    digests = []
    for path in paths:
        key = str(path.resolve())
        if _HUB_BLOB.search(key):
            digests.append(Path(key).name)
            continue
        stat = path.stat()
        entry = cache.get(key)
        if not entry or entry[:2] != [stat.st_size, stat.st_mtime_ns]:
            entry = new[key] = [stat.st_size, stat.st_mtime_ns, sha256_file(path)]
        digests.append(str(entry[2]))
    if new:
        known = {path: entry for path, entry in _load_cache().items() if os.path.exists(path)}
        with suppress(Exception):  # a read-only home only costs time
            write_atomic(_cache_file(), json.dumps({**known, **new}).encode())
    return digests


def _cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lightning-weave" / "identities.json"


def _load_cache() -> dict[str, list[Any]]:
    """Read what is remembered, again only when another process has written it since."""
    file = _cache_file()
    try:
        stat = file.stat()
        return _read_cache(file, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    except (OSError, CorruptData):
        return {}


@lru_cache(maxsize=1)
def _read_cache(file: Path, *_stamp: int) -> dict[str, list[Any]]:
    cache = read_json(file)
    return cache if isinstance(cache, dict) else {}
