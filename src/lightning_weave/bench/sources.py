"""Rows of a benchmark from a local file, a directory, or a dataset repository on the hub.

A repository on the hub is a directory once downloaded, so there is one reader for all of them, and no loading script
of a repository is ever run.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".parquet")


def locate(source: str, names: tuple[str, ...]) -> list[Path]:
    """Find the data files of a source: a file, a directory, or `owner/name[@revision]` on the hub.

    In a directory, a file called after the benchmark (`names`) is preferred to reading everything.
    """
    path = Path(source).expanduser()
    if not path.exists():
        if not _is_hub_name(source):
            raise InputError(f"{source}: no such file or directory. Correct its source (eval.sources).")
        path = _download(source)
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise InputError(f"{path}: not one of {', '.join(SUFFIXES)}; convert it to JSONL, one problem per line.")
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    own = [file for file in files if file.stem in names and file.parent == path]
    if not files:
        raise InputError(f"{path}: no {', '.join(SUFFIXES)} file in this directory.")
    if len(own) > 1:
        raise InputError(
            f"{path}: {' and '.join(file.name for file in own)} hold the same benchmark; name one of them."
        )
    return own or files


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of one file, lazily, since a LiveCodeBench file has gigabytes of tests."""
    match path.suffix:
        case ".jsonl":
            yield from _read_jsonl(path)
        case ".json":
            yield from _read_json(path)
        case _:
            yield from _read_parquet(path)


def _read_jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines, _only_text(path):
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(_parse(line, f"{path}:{number}"), f"{path}:{number}")


def _read_json(path: Path) -> Iterator[Row]:
    with _only_text(path):
        rows = _parse(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise InputError(f"{path}: holds {type(rows).__name__}, expected a list of problems.")
    for index, row in enumerate(rows):
        yield _row(row, f"{path}[{index}]")


@contextmanager
def _only_text(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason}); save it as UTF-8.") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=16):
                yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"{path}: not a readable Parquet file ({error}); download it again.") from error


def _parse(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not JSON ({error}).") from error


def _row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise InputError(f"{where}: holds {type(value).__name__}, expected an object with the problem's fields.")
    return value


def _is_hub_name(source: str) -> bool:
    return Path(source).suffix not in SUFFIXES and bool(re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", source))


def _download(source: str) -> Path:
    from huggingface_hub import snapshot_download

    repo, _, revision = source.partition("@")
    try:
        patterns = [f"*{suffix}" for suffix in SUFFIXES]
        return Path(snapshot_download(repo, repo_type="dataset", revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # offline, gated, misspelt: the hub's library has a class for each, the cure is the same
        raise InputError(_how_to_get(source, error)) from error


def download_files(repo: str, names: tuple[str, ...]) -> Iterator[Path]:
    """Download files of a dataset repository, each when it is asked for."""
    from huggingface_hub import hf_hub_download

    for name in names:
        try:
            yield Path(hf_hub_download(repo, name, repo_type="dataset"))
        except Exception as error:
            raise InputError(_how_to_get(repo, error, names)) from error


def _how_to_get(source: str, error: Exception, files: tuple[str, ...] = ()) -> str:
    repo, _, revision = source.partition("@")
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0].rstrip(".")
    command = " ".join(
        ["hf download --repo-type dataset", repo, *files, *(["--revision", revision] if revision else [])]
    )
    return (
        f"{source} cannot be read from the hub ({reason}). Where there is a network, run: "
        f"{command} --local-dir DIR, and give DIR as its source (eval.sources)."
    )
