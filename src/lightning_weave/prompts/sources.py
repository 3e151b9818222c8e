"""From a source of any kind to its rows, and from a row to its question: columns are named, or recognised."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_weave.config import split_revision
from lightning_weave.errors import InputError, first_line
from lightning_weave.models.hub import explain_hub_error, go_offline_if_unreachable
from lightning_weave.prompts.render import Message
from lightning_weave.store.tables import (
    ANSWER_NAMES,
    PROBLEM_NAMES,
    SUFFIXES,
    BadRow,
    Row,
    columns_to_read,
    reference_answer,
    table_rows,
)

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Lower case, the likeliest first, looked for after those of every table; a dotted name is a nested column.
_WORKED = ("reward_model.ground_truth", "solution")
_IDS = ("id", "uid", "unique_id", "problem_id", "question_id", "problem_idx", "index", "idx")
_MOST = 0.9  # of the rows must be usable with a column


def read_rows(
    source: str | Path, *, split: str | None = None, name: str | None = None, columns: Collection[str] | None = None
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


@dataclass(frozen=True)
class ColumnNames:
    """Which column holds what. A dotted name selects a nested column: `reward_model.ground_truth`."""

    prompt: str = "prompt"
    answer: str | None = None
    id: str | None = None
    starter: str | None = None  # starter code; may be missing or empty in a row
    others: frozenset[str] = frozenset()  # named by a template


@dataclass(frozen=True)
class Question:
    """The question of one row, before formatting."""

    where: str
    messages: list[Message]
    answer: str | None = None
    id: str = ""  # from the source; empty if it has none
    starter: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)  # those that a template names


class _UnusableError(Exception):
    """Why a row cannot be used."""


def read_question(row: Row, columns: ColumnNames) -> Question | BadRow:
    """Read one question from a row, or explain what is wrong with it.

    A column named by the user must exist; an answer of null means that there is none.
    """
    values = row.values
    try:
        answer, identity, starter = None, "", ""
        if columns.answer and (value := _look_up(values, columns.answer)) is not None:
            reference = reference_answer(value)
            answer = _check_text(value if reference is None else reference, "the answer")
        if columns.id:
            value = _look_up(values, columns.id)
            is_number = isinstance(value, int) and not isinstance(value, bool)
            identity = str(value) if is_number else _check_text(value, "the id")
        value, name = _look_up(values, columns.prompt), columns.prompt
        if isinstance(value, list):
            messages = []
            for index, item in enumerate(value):
                place = f"{name}[{index}]"
                if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
                    raise _UnusableError(f"{place!r} is not a message with 'role' and 'content'")
                messages.append({key: _check_text(item[key], f"{place}.{key}") for key in ("role", "content")})
            if not messages:
                raise _UnusableError(f"column {name!r} is an empty list")
            if (role := messages[-1]["role"]) != "user":
                raise _UnusableError(f"the last turn of {name!r} is from the {role}; it must be from the user")
        else:
            messages = [{"role": "user", "content": _check_text(value, name)}]
        if columns.starter and values.get(columns.starter):
            starter = _check_text(values[columns.starter], columns.starter)
        shown = {other: values[other] for other in sorted(columns.others) if other in values}
        return Question(row.where, messages, answer, identity, starter, shown)
    except _UnusableError as unusable:
        return BadRow(row.where, str(unusable))


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    inner: Any = values
    for part in name.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            raise _UnusableError(f"no column {name!r} (it has {', '.join(map(repr, values)) or 'none'})")
        inner = inner[part]
    return inner


def _check_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _UnusableError(f"{name!r} is {'null' if value is None else f'a {type(value).__name__}'}, not text")
    if not value.strip():
        raise _UnusableError(f"{name!r} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _UnusableError(f"{name!r} has half a surrogate pair, which is not a character")
    return value


def guess_columns(rows: Sequence[Row | BadRow], source: str, prompt: str | None = None) -> ColumnNames:
    """Choose columns by their names and their content. Which one is the problem is never left to chance.

    >>> rows = [Row(f"x:{n}", {"Frage": f"{n}+1?", "answer": n + 1, "id": n}) for n in range(3)]
    >>> guess_columns(rows, "x")
    ColumnNames(prompt='Frage', answer='answer', id='id', starter=None, others=frozenset())
    """
    good = [row for row in rows if isinstance(row, Row)]
    if not rows:
        raise InputError(f'{source}: is empty. Write one problem per line: {{"problem": "1+1?", "answer": "2"}}')
    if not good:
        raise InputError(f"{source}: none of its first {len(rows)} rows can be read. Give another file of prompts")
    names = list(dict.fromkeys(name for row in good for name in row.values))

    def has_answers(name: str) -> bool:
        found = 0
        for row in good:
            try:
                found += reference_answer(_look_up(row.values, name)) is not None
            except _UnusableError:
                continue
        return found / len(good) >= _MOST

    def all_differ(name: str) -> bool:
        values: list[Any] = [row.values.get(name) for row in good]
        plain = all(isinstance(value, str | int) and not isinstance(value, bool) for value in values)
        return plain and all(map(str, values)) and len({str(value) for value in values}) == len(values)

    if prompt is None:
        candidates = []
        for name in names:
            usable = sum(isinstance(read_question(row, ColumnNames(name)), Question) for row in good)
            candidates += [name] if usable / len(good) >= _MOST else []
        prompt = _first_fitting(PROBLEM_NAMES, candidates, lambda name: True)
        if prompt is None:
            others = [name for name in candidates if name.lower() not in {*ANSWER_NAMES, *_WORKED, *_IDS}]
            if len(others) != 1:
                which = "" if others else "None of them can be: each must be text, or a list of messages. "
                which = f"It may be {' or '.join(others)}. " if 0 < len(others) < len(names) else which
                raise InputError(
                    f"{source}: which column is the problem? It has {', '.join(names)}. {which}"
                    "Set it: --set prompts.columns.prompt=NAME, and prompts.columns.answer=NAME if one has answers"
                )
            prompt = others[0]
    rest = [name for name in names if name != prompt]
    answer = _first_fitting((*ANSWER_NAMES, *_WORKED), rest, has_answers)
    return ColumnNames(prompt, answer, _first_fitting(_IDS, rest, all_differ))


def _first_fitting(choices: Sequence[str], names: list[str], fits: Callable[[str], bool]) -> str | None:
    """Take the first of the wanted names that the data has, in whatever case, and that fits."""
    for name in choices:
        root = name.partition(".")[0]
        matches = [own for own in names if own.lower() == root]
        candidates = [own if root == name else name for own in matches]
        if chosen := next(filter(fits, candidates), None):
            return chosen
    return None


def columns_line(rows: Sequence[Row], source: str) -> str:
    """Write the recipe line that names the columns of these rows; empty if they cannot be guessed.

    >>> columns_line([Row("x:1", {"Frage": "1+1?", "answer": 2})], "x")
    'prompts.columns = { prompt = "Frage", answer = "answer" }'
    """
    try:
        columns = guess_columns(rows, source)
    except InputError:
        return ""
    named = [("prompt", columns.prompt), ("answer", columns.answer), ("id", columns.id)]
    return f"prompts.columns = {{ {', '.join(f'{key} = {json.dumps(name)}' for key, name in named if name)} }}"
