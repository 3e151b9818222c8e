"""Read rows from JSONL, Parquet or a Hugging Face dataset, in order and one at a time.

A row that cannot be read becomes a `BadRow` that names it; a source that cannot be read at all is an `InputError`.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError

_JSONL = (".jsonl", ".ndjson", ".json")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BOM = b"\xef\xbb\xbf"
_BATCH = 256  # rows of a Parquet file held at once


@dataclass(frozen=True)
class Row:
    """One readable row and where it stands."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used: where it stands, and why in words for its owner."""

    where: str
    why: str


def read_rows(
    source: str | Path,
    *,
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[Row | BadRow]:
    """Read a file, a directory of a Hugging Face dataset, or a dataset by its hub name.

    `split`, `name` (its configuration) and `revision` concern datasets only. `columns` are the top-level columns worth
    reading; what else a row holds (the tests of a code problem may be megabytes) is skipped where the format allows.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".parquet":
            return _read_parquet(path, columns)
        if path.suffix in _JSONL:
            return _read_jsonl(path)
        raise InputError(f"{path}: unknown kind of file {path.suffix!r}. Use .jsonl or .parquet.")
    if path.is_dir():
        return _read_dataset(_open_directory(path, split, name), str(source), columns)
    looks_like_a_path = path.suffix in (*_JSONL, ".parquet") or not _HUB_NAME.fullmatch(str(source))
    if looks_like_a_path:
        raise InputError(f"{source}: no such file or directory (looked in {Path.cwd()}). Check the path.")
    return _read_dataset(_open_hub(str(source), split, name, revision), str(source), columns)


def _read_jsonl(path: Path) -> Iterator[Row | BadRow]:
    readable = False
    first_bad: BadRow | None = None
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = _parse_line(line.removeprefix(_BOM) if number == 1 else line, f"{path}:{number}")
                if isinstance(row, Row):
                    readable = True
                else:
                    first_bad = first_bad or row
                yield row
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Check the file and its permissions.") from error
    if first_bad and not readable:
        raise InputError(
            f"{path}: no line could be read; the first, {first_bad.where}, is {first_bad.why}. "
            "Write one JSON object per line, in UTF-8."
        )


def _parse_line(line: bytes, where: str) -> Row | BadRow:
    try:
        values = json.loads(line.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"not UTF-8 (byte 0x{line[error.start]:02x} at column {error.start + 1})")
    except json.JSONDecodeError as error:
        return BadRow(where, f"not JSON ({error.msg} at column {error.pos + 1})")
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        return BadRow(where, f"not readable as JSON ({error})")
    if not isinstance(values, dict):
        return BadRow(where, f"not a JSON object but a {type(values).__name__}")
    return Row(where, values)


def _read_parquet(path: Path, columns: Collection[str] | None) -> Iterator[Row | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            wanted = _worth_reading(file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=_BATCH, columns=wanted):
                for row in _batch_rows(batch, path, number):
                    number += 1
                    yield row
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path}: broken Parquet after row {number} ({reason}). Write or copy it again.") from error


def _batch_rows(batch: Any, path: Path, before: int) -> Iterator[Row | BadRow]:
    for index in range(batch.num_rows):
        where = f"{path} row {before + index + 1}"
        try:
            yield Row(where, batch.slice(index, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield BadRow(where, f"not UTF-8 ({error.reason})")


def _worth_reading(existing: list[str], columns: Collection[str] | None) -> list[str] | None:
    """Choose the columns to read: all, unless some of the wanted ones exist."""
    return [column for column in existing if column in columns] or None if columns else None


def _open_directory(path: Path, split: str | None, name: str | None) -> Any:
    """Open what `save_to_disk` wrote, or data files in the layout of the hub."""
    import datasets

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        opened = _opening(path, lambda: datasets.load_from_disk(str(path)))
    else:
        # Streamed, so that no second copy is written into the user's cache.
        opened = _opening(path, lambda: datasets.load_dataset(str(path), name, streaming=True))
    return _choose_split(opened, split, str(path))


def _open_hub(source: str, split: str | None, name: str | None, revision: str | None) -> Any:
    import datasets

    # The split goes along, so that the others are not downloaded.
    opened = _opening(source, lambda: datasets.load_dataset(source, name, split=split, revision=revision))
    return _choose_split(opened, split, source)


def _opening(source: str | Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    # Every loader has its own errors (offline, no such name, no such configuration, no data files): all are input.
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"{source}: cannot be opened as a Hugging Face dataset ({reason}). "
            "Check the name, its configuration and revision, or give the path of a .jsonl or .parquet file."
        ) from error


def _choose_split(opened: Any, split: str | None, source: str) -> Any:
    if not isinstance(opened, dict):  # one saved split
        return opened
    chosen = split or ("train" if "train" in opened else next(iter(opened)) if len(opened) == 1 else None)
    if chosen not in opened:
        said = f"no split {split!r}" if split else "several splits"
        raise InputError(f"{source}: {said}; there are {', '.join(sorted(opened))}. Choose one with `split`.")
    return opened[chosen]


def _read_dataset(dataset: Any, source: str, columns: Collection[str] | None) -> Iterator[Row | BadRow]:
    wanted = _worth_reading(dataset.column_names or [], columns)
    number = 0
    try:
        for values in dataset.select_columns(wanted) if wanted else dataset:
            number += 1
            yield Row(f"{source} row {number}", values)
    except Exception as error:  # the readers of `datasets` again have their own errors
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"{source}: cannot be read after row {number} ({reason}). Repair that file, or give it directly as source."
        ) from error
