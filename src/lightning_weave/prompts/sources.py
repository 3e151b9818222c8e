"""Rows of a file, a directory or a Hugging Face dataset, in order and one at a time."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from lightning_weave.config import split_revision
from lightning_weave.errors import InputError, first_line
from lightning_weave.models.hub import explain_hub_error, go_offline_if_unreachable
from lightning_weave.store.tables import SUFFIXES, BadRow, Row, columns_to_read, table_rows

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_rows(
    source: str | Path,
    *,
    split: str | None = None,
    name: str | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[Row | BadRow]:
    """Read a file, a directory of a Hugging Face dataset, or a dataset by its hub name.

    `split` and `name` (its configuration) apply to datasets only; a hub name may end in `@revision`. `columns` are the
    top-level columns to read; others (the tests of a code problem may take megabytes) are skipped if possible.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return table_rows(path, columns)
    is_local = path.is_dir()
    repository, revision = split_revision(str(source))
    if not is_local and (path.suffix in SUFFIXES or not _HUB_NAME.fullmatch(repository)):
        raise InputError(f"{source}: no such file or directory (looked in {Path.cwd()}). Check the path.")
    import datasets

    where = str(path) if is_local else str(source)
    if not is_local:
        go_offline_if_unreachable()
    try:
        if is_local and ((path / "dataset_dict.json").exists() or (path / "state.json").exists()):
            opened: Any = datasets.load_from_disk(where)
        elif is_local:  # data files in the layout of the hub; streaming writes no second copy into the user's cache
            opened = datasets.load_dataset(where, name, streaming=True)
        else:  # with `split`, the others are not downloaded
            opened = datasets.load_dataset(repository, name, split=split, revision=revision)
    # Each loader has its own exceptions (offline, unknown name or configuration, no data files); all are input errors.
    except Exception as error:
        reason = first_line(error) if is_local else explain_hub_error(error)
        raise InputError(
            f"{where}: cannot be opened as a Hugging Face dataset ({reason}). "
            "Check the name, its configuration and revision, or give the path of a .jsonl or .parquet file."
        ) from error
    if isinstance(opened, dict):  # else it is one saved split
        chosen = split or ("train" if "train" in opened else next(iter(opened)) if len(opened) == 1 else None)
        if chosen not in opened:
            problem = f"no split {split!r}" if split else "several splits"
            raise InputError(f"{where}: {problem}; there are {', '.join(sorted(opened))}. Set prompts.split to one.")
        opened = opened[chosen]
    return _read_dataset(opened, str(source), columns)


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
