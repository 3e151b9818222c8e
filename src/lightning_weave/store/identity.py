"""What a thing is, by its content: fingerprints of settings, identities of model directories and data files.

Hashing a checkpoint reads all of its bytes, so hashes are remembered by path, size and modification time.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from lightning_weave.errors import CorruptData, InputError
from lightning_weave.store.files import read_json, sha256_file, write_atomic, write_json

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


@dataclass(frozen=True)
class RunIdentities:
    """What the models and data of a run are: looked up once per command, and known to the run when they are gone."""

    file: Path
    found: dict[str, str]  # by this command

    @cached_property
    def remembered(self) -> dict[str, str]:
        """What earlier commands found."""
        return read_checked(self.file) if self.file.exists() else {}

    def identity(self, name: str, look: Callable[[], str]) -> str:
        """Return the identity of something from `look`, or where that fails the one that the run remembers."""
        if name not in self.found:
            try:
                self.found[name] = look()
            except InputError:
                if name not in self.remembered:
                    raise
                self.found[name] = self.remembered[name]
        return self.found[name]

    def keep(self) -> None:
        """Remember what was found."""
        identities = {**self.remembered, **self.found}
        if identities != self.remembered:
            write_checked(self.file, identities)


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
