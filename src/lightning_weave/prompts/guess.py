"""Guess which columns of somebody's data hold the problem, the answer and the id."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_weave.errors import InputError
from lightning_weave.prompts.questions import ColumnNames, Question, look_up, question_of
from lightning_weave.store.tables import ANSWER_NAMES, PROBLEM_NAMES, BadRow, Row, reference_answer

# Lower case, the likeliest first, looked for after those of every table; a dotted name is a nested column.
WORKED = ("reward_model.ground_truth", "solution")
IDS = ("id", "uid", "unique_id", "problem_id", "question_id", "problem_idx", "index", "idx")
MOST = 0.9  # of the rows must be usable with a column


def guess_columns(rows: Sequence[Row | BadRow], source: str, prompt: str | None = None) -> ColumnNames:
    """Choose columns by their names and by what is in them. Which one is the problem is never left to chance.

    >>> rows = [Row(f"x:{n}", {"Frage": f"{n}+1?", "answer": n + 1, "id": n}) for n in range(3)]
    >>> guess_columns(rows, "x")
    ColumnNames(prompt='Frage', answer='answer', id='id', starter=None, others=frozenset())
    """
    good = [row for row in rows if isinstance(row, Row)]
    if not good:
        raise InputError(f"{source}: none of its first {len(rows)} rows can be read. Give another file of prompts")
    names = list(dict.fromkeys(name for row in good for name in row.values))
    problem = prompt or _problem(good, names, source)
    rest = [name for name in names if name != problem]
    answer = _named((*ANSWER_NAMES, *WORKED), rest, lambda name: _share(good, partial(_has_answer, name)) >= MOST)
    identity = _named(IDS, rest, lambda name: _all_differ(good, name))
    return ColumnNames(problem, answer, identity)


def columns_line(rows: Sequence[Row], source: str) -> str:
    """Write the key that names the columns of these rows; nothing if they cannot be told.

    >>> columns_line([Row("x:1", {"Frage": "1+1?", "answer": 2})], "x")
    'prompts.columns = { prompt = "Frage", answer = "answer" }'
    """
    try:
        columns = guess_columns(rows, source)
    except InputError:
        return ""
    named = [("prompt", columns.prompt), ("answer", columns.answer), ("id", columns.id)]
    return f"prompts.columns = {{ {', '.join(f'{key} = {json.dumps(name)}' for key, name in named if name)} }}"


def _problem(rows: list[Row], names: list[str], source: str) -> str:
    usable = [name for name in names if _share(rows, partial(_is_question, name)) >= MOST]
    if column := _named(PROBLEM_NAMES, usable, lambda name: True):
        return column
    other_roles = {*ANSWER_NAMES, *WORKED, *IDS}
    others = [name for name in usable if name.lower() not in other_roles]
    if len(others) == 1:
        return others[0]
    which = f"any of {', '.join(others)}" if others else "none of them can be: each must be text, or a list of messages"
    raise InputError(
        f"{source}: which column is the problem? It has {', '.join(names)}; {which}. "
        "Say it: --set prompts.columns.prompt=NAME"
    )


def _named(choices: Sequence[str], names: list[str], fits: Callable[[str], bool]) -> str | None:
    """Take the first of the wanted names that the data has, in whatever case, and that fits."""
    for name in choices:
        root = name.partition(".")[0]
        matches = [own for own in names if own.lower() == root]
        candidates = [own if root == name else name for own in matches]
        if chosen := next(filter(fits, candidates), None):
            return chosen
    return None


def _is_question(name: str, row: Row) -> bool:
    return isinstance(question_of(row, ColumnNames(name)), Question)


def _has_answer(name: str, row: Row) -> bool:
    return reference_answer(look_up(row.values, name)) is not None


def _all_differ(rows: list[Row], name: str) -> bool:
    values: list[Any] = [row.values.get(name) for row in rows]
    plain = all(isinstance(value, str | int) and not isinstance(value, bool) for value in values)
    return plain and all(map(str, values)) and len({str(value) for value in values}) == len(values)


def _share(rows: list[Row], holds: Callable[[Row], bool]) -> float:
    return sum(map(holds, rows)) / len(rows)
