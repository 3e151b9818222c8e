"""Rows of the JSONL, JSON and Parquet files that users bring, read lazily and in order.

A row that cannot be read becomes a `BadRow` that says where and why; a file that cannot be read is an `InputError`.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
# How data calls its problems and answers, in whatever case, the likeliest first.
PROBLEM_NAMES = (
    "problem",
    "question",
    "question_content",
    "prompt",
    "messages",
    "query",
    "instruction",
    "input",
    "task",
)
ANSWER_NAMES = (
    "answer",
    "expected_answer",
    "final_answer",
    "reference_answer",
    "ground_truth",
    "gold",
    "target",
    "label",
)
_BOM = b"\xef\xbb\xbf"
_BATCH = 64  # Parquet rows in memory at a time: a code problem with its tests may take megabytes


@dataclass(frozen=True)
class Row:
    """One row and its location."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True)
class BadRow:
    """One row that cannot be used: its location and the reason."""

    where: str
    why: str


def table_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[Row | BadRow]:
    """Read the rows of one file. `columns` limits what is read where the format allows it."""
    if path.is_file() and path.suffix not in SUFFIXES:
        raise InputError(f"{path}: unknown kind of file {path.suffix!r}. Convert it to .jsonl or .parquet.")
    return _parquet_rows(path, columns) if path.suffix == ".parquet" else _json_rows(path)


def checked_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file of which every row counts: a bad one is an error."""
    for row in table_rows(path):
        if isinstance(row, BadRow):
            raise InputError(f"{row.where}: {row.why}. Fix or remove this row.")
        try:
            json.dumps(row.values, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError:
            text = "has half a surrogate pair, which is not a character. Fix or remove this row."
            raise InputError(f"{row.where}: {text}") from None
        yield row


def columns_to_read(existing: list[str], wanted: Collection[str] | None) -> list[str] | None:
    """Choose the wanted columns that exist, or None (read all) if none of them does."""
    return [column for column in existing if column in wanted] or None if wanted else None


def reference_answer(value: Any) -> str | None:
    """Read a reference answer: a number or text, or the first item of a list. None for anything else.

    >>> reference_answer(204.0), reference_answer('["\\\\\\\\frac{1}{2}", "0.5"]'), reference_answer("[0, 1]")
    ('204', '\\\\frac{1}{2}', '[0, 1]')
    """
    if isinstance(value, str) and value.startswith('["'):  # a list written as JSON
        with suppress(ValueError):
            value = json.loads(value)
    if isinstance(value, list) and value:
        return reference_answer(value[0])
    is_answer = isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip()
    return plain_text(value) if is_answer else None


def plain_text(value: object) -> str:
    """Convert to text; an integer that a table stored as a float loses its `.0`."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _json_rows(path: Path) -> Iterator[Row | BadRow]:
    """Read a JSON list, or one JSON object per line; a row is bad on its own, unless none can be read."""
    any_readable = False
    first_bad: BadRow | None = None
    try:
        with path.open("rb") as file:
            if path.suffix == ".json" and file.peek().removeprefix(_BOM).lstrip().startswith(b"["):
                try:
                    items = _parse(file.read().removeprefix(_BOM))
                except ValueError as error:
                    raise InputError(f"{path}: {error}. Write a list of JSON objects, in UTF-8.") from error
                for index, item in enumerate(items):
                    yield _row(item, f"{path}[{index}]")
                return
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = _row(_parse(line.removeprefix(_BOM) if number == 1 else line), where)
                except ValueError as error:
                    row = BadRow(where, str(error))
                if isinstance(row, Row):
                    any_readable = True
                else:
                    first_bad = first_bad or row
                yield row
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    if first_bad and not any_readable:
        raise InputError(
            f"{path}: no line can be read; the first, {first_bad.where}, is {first_bad.why}. "
            "Write one JSON object per line, in UTF-8."
        )


def _parse(data: bytes) -> Any:
    """Parse JSON, or raise a ValueError with the reason in plain words."""
    try:
        return json.loads(data.rstrip().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (0x{data[error.start]:02x} at byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise ValueError(f"not readable as JSON ({error})") from error


def _row(values: Any, where: str) -> Row | BadRow:
    if isinstance(values, dict):
        return Row(where, values)
    return BadRow(where, f"not a JSON object but a {type(values).__name__}")


def _parquet_rows(path: Path, columns: Collection[str] | None) -> Iterator[Row | BadRow]:
    """Read Parquet a few rows at a time; text that is not UTF-8 makes one row bad."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = columns_to_read(file.schema_arrow.names, columns)
            for batch in file.iter_batches(batch_size=_BATCH, columns=names):
                for index in range(batch.num_rows):
                    number += 1
                    where = f"{path} row {number}"
                    try:
                        values = batch.slice(index, 1).to_pylist()[0]
                    except UnicodeDecodeError as error:
                        yield BadRow(where, f"not UTF-8 ({error.reason})")
                    else:
                        yield Row(where, values)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{path}: broken Parquet after row {number} ({reason}). Write or copy it again.") from error
