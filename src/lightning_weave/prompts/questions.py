"""From a row of any shape to one question, or the reason why the row cannot be used."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_weave.store.tables import BadRow, Row, reference_answer

Message = dict[str, str]


@dataclass(frozen=True)
class ColumnNames:
    """Which column holds what. A dotted name selects a nested column: `reward_model.ground_truth`."""

    prompt: str = "prompt"
    answer: str | None = None
    id: str | None = None
    starter: str | None = None  # starter code; may be missing or empty in a row
    others: frozenset[str] = frozenset()  # named by a template

    def roots(self) -> set[str]:
        """List the top-level columns to read."""
        named = [name for name in (self.prompt, self.answer, self.id, self.starter) if name]
        return {*named, *(name.split(".")[0] for name in named), *self.others}


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


def question_of(row: Row, columns: ColumnNames) -> Question | BadRow:
    """Read one question from a row, or say what is wrong with it.

    A column named by the user must exist; an answer of null means that there is none.
    """
    try:
        answer = _answer(_look_up(row.values, columns.answer)) if columns.answer else None
        identity = _identity(_look_up(row.values, columns.id)) if columns.id else ""
        messages = _messages(_look_up(row.values, columns.prompt), columns.prompt)
        starter = _starter(row.values.get(columns.starter), columns.starter) if columns.starter else ""
        columns_used = {name: row.values[name] for name in sorted(columns.others) if name in row.values}
        return Question(row.where, messages, answer, identity, starter=starter, columns=columns_used)
    except _UnusableError as unusable:
        return BadRow(row.where, str(unusable))


def look_up(values: Mapping[str, Any], name: str) -> Any:
    """Give a column by its name, or None where the row has none."""
    try:
        return _look_up(values, name)
    except _UnusableError:
        return None


def _look_up(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    inner: Any = values
    for part in name.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            raise _UnusableError(f"no column {name!r} (it has {', '.join(map(repr, values)) or 'none'})")
        inner = inner[part]
    return inner


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list):
        return [{"role": "user", "content": _text(value, name)}]
    if not value:
        raise _UnusableError(f"column {name!r} is an empty list")
    messages = [_message(item, f"{name}[{index}]") for index, item in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise _UnusableError(f"the last turn of {name!r} is from the {messages[-1]['role']}; it must be from the user")
    return messages


def _message(item: Any, name: str) -> Message:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise _UnusableError(f"{name!r} is not a message with 'role' and 'content'")
    return {"role": _text(item["role"], f"{name}.role"), "content": _text(item["content"], f"{name}.content")}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _UnusableError(f"{name!r} is {_kind(value)}, not text")
    if not value.strip():
        raise _UnusableError(f"{name!r} is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _UnusableError(f"{name!r} has half a surrogate pair, which is not a character")
    return value


def _answer(value: Any) -> str | None:
    if value is None:
        return None
    answer = reference_answer(value)
    return _text(value if answer is None else answer, "the answer")


def _identity(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, "the id")


def _starter(value: Any, name: str) -> str:
    return _text(value, name) if value else ""


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
