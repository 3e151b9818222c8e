"""Rows of a file, a directory or a Hugging Face dataset, in order and one at a time."""

import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError, first_line
from lightning_weave.hub import use_hub, why_not
from lightning_weave.store.tables import SUFFIXES, BadRow, Row, columns_to_read, table_rows

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_rows(
    source: str | Path,
    *,
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[Row | BadRow]:
    """Read a file, a directory of a Hugging Face dataset, or a dataset by its hub name.

    `split`, `name` (its configuration) and `revision` apply to datasets only. `columns` are the top-level columns to
    read; others (the tests of a code problem may take megabytes) are skipped where the format allows it.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return table_rows(path, columns)
    if path.is_dir():
        return _read_dataset(_open_directory(path, split, name), str(source), columns)
    if path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(str(source)):
        raise InputError(f"{source}: no such file or directory (looked in {Path.cwd()}). Check the path.")
    return _read_dataset(_open_hub(str(source), split, name, revision), str(source), columns)


def _open_directory(path: Path, split: str | None, name: str | None) -> Any:
    """Open a dataset written by `save_to_disk`, or data files in the layout of the hub."""
    import datasets

    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        opened = _opening(path, lambda: datasets.load_from_disk(str(path)))
    else:
        # Streaming writes no second copy into the user's cache.
        opened = _opening(path, lambda: datasets.load_dataset(str(path), name, streaming=True))
    return _choose_split(opened, split, str(path))


def _open_hub(source: str, split: str | None, name: str | None, revision: str | None) -> Any:
    import datasets

    use_hub()
    # With `split`, the others are not downloaded.
    opened = _opening(source, lambda: datasets.load_dataset(source, name, split=split, revision=revision))
    return _choose_split(opened, split, source)


def _opening(source: str | Path, load: Callable[[], Any]) -> Any:
    try:
        return load()
    # Each loader has its own exceptions (offline, unknown name or configuration, no data files); all are input errors.
    except Exception as error:
        reason = first_line(error) if isinstance(source, Path) else why_not(error)
        raise InputError(
            f"{source}: cannot be opened as a Hugging Face dataset ({reason}). "
            "Check the name, its configuration and revision, or give the path of a .jsonl or .parquet file."
        ) from error


def _choose_split(opened: Any, split: str | None, source: str) -> Any:
    if not isinstance(opened, dict):  # one saved split
        return opened
    chosen = split or ("train" if "train" in opened else next(iter(opened)) if len(opened) == 1 else None)
    if chosen not in opened:
        problem = f"no split {split!r}" if split else "several splits"
        raise InputError(f"{source}: {problem}; there are {', '.join(sorted(opened))}. Set prompts.split to one.")
    return opened[chosen]


def _read_dataset(dataset: Any, source: str, columns: Collection[str] | None) -> Iterator[Row | BadRow]:
    names = columns_to_read(dataset.column_names or [], columns)
    number = 0
    try:
        for values in dataset.select_columns(names) if names else dataset:
            number += 1
            yield Row(f"{source} row {number}", values)
    except Exception as error:  # readers of `datasets` have their own exceptions too
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise InputError(
            f"{source}: cannot be read after row {number} ({reason}). Fix that file, or use it directly as the source."
        ) from error
