"""From a source of any kind to the student's prompts, with a count of what happened to every row."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from lightning_weave.config import Prompts
from lightning_weave.config.fields import named_columns
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.prompts.decontaminate import Overlap, Screen, normalise
from lightning_weave.prompts.render import encode, form_of, format_messages, knows_thinking, render, unmark
from lightning_weave.prompts.sources import ColumnNames, Question, columns_line, read_question, read_rows
from lightning_weave.store.tables import BadRow, Row
from lightning_weave.types import Prompt, PromptForm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_LISTED = 5  # rows of each kind in the printed report; the manifest of the stage has all of them
_LOOKED_AT = 20  # rows, to suggest columns
HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.1, 20, 200  # of the questions, but never more than half of them
HELD_OUT_RULE = f"{HELD_OUT_SHARE:.0%}, {LEAST_HELD_OUT} to {MOST_HELD_OUT}"  # in fingerprints
SEED = 42  # of the draw
_PROBLEM_COLUMNS = ("problem", "question_content", "question", "prompt")


@dataclass
class PromptReport:
    """What happened to every row: `read` is the sum of all other counts."""

    read: int = 0
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0
    held_out: int = 0
    overlaps: list[Overlap] = field(default_factory=list)
    too_long: int = 0
    not_taken: int = 0
    kept: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Print the counts that are not zero, one per line."""
        overlaps = []
        for overlap in self.overlaps:
            how = "same as" if overlap.same else f"shares {overlap.share:.0%} with"
            overlaps.append(f"{overlap.where}: {how} {overlap.problem}")
        counts = [
            (len(self.bad), "cannot be used:", [f"{row.where}: {row.why}" for row in self.bad]),
            (self.duplicates, "duplicates", []),
            (self.held_out, "held out for evaluation", []),
            (len(overlaps), "overlap with a benchmark:", overlaps),
            (self.too_long, "too long", []),
            (self.not_taken, "not drawn", []),
        ]
        lines = [f"{self.kept:,} prompts from {self.read:,} rows"]
        for count, what, rows in counts:
            if count:
                lines += [f"  {count:,} {what}", *(f"    {row}" for row in rows[:_LISTED])]
                lines += [f"    and {count - _LISTED:,} more"] if len(rows) > _LISTED else []
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def build_prompts(
    tokenizer: "PreTrainedTokenizerBase", section: Prompts, day: str | None = None, *, holds_out: bool = False
) -> tuple[list[Prompt], PromptReport]:
    """Read, deduplicate, hold out, screen, render, filter by length and draw, in this order.

    Every row ends up in exactly one count of the report.
    """
    if section.source is None:
        raise InputError("prompts.source is missing. Set it to a .jsonl or .parquet file, a directory or a hub name.")
    report = PromptReport()
    screen = Screen(_read_problems(section.screen_against))
    form = form_of(section, section.format == "livecodebench")
    is_chat = form.style == "chat"
    if is_chat and not knows_thinking(tokenizer) and not section.thinking:  # fails here if there is no template
        report.notes.append("prompts.thinking = false has no effect: the chat template has no thinking switch")
    answer = (section.columns.answer or "").split(".")[0]
    if answer in template_columns(section):
        raise InputError(f"prompts.format names {{{answer}}}, which holds the answer. Leave it out of the template.")

    rendered: list[tuple[str, Prompt]] = []  # text as `render` returns it, no token ids; and where it is from
    questions = list(read_questions(section, (), report))
    held_out = {normalise(one.messages[0]["content"]) for one in hold_out(questions)} if holds_out else set()
    for question in questions:
        turns = [turn["content"] for turn in question.messages if turn["role"] == "user"]
        if not held_out.isdisjoint(map(normalise, turns)):
            report.held_out += 1
            continue
        overlap = next(filter(None, (screen.find(question.where, content) for content in turns)), None)
        if overlap is not None:
            report.overlaps.append(overlap)
            continue
        try:
            messages = format_messages(section, question.messages, question.columns, question.starter)
            text = render(messages, tokenizer, form, day)
        except InputError as error:
            report.bad.append(BadRow(question.where, str(error)))
        else:
            rendered.append((question.where, Prompt(question.id, messages, text, [], question.answer, form)))

    eligible = []
    encoded = encode([prompt.text for _, prompt in rendered], tokenizer, is_chat)
    for (where, prompt), ids in zip(rendered, encoded, strict=True):
        if not ids:
            report.bad.append(BadRow(where, "has no tokens"))
        elif section.max_tokens is not None and len(ids) > section.max_tokens:
            report.too_long += 1
        else:
            eligible.append(replace(prompt, text=unmark(prompt.text, tokenizer), token_ids=ids))
    sample = take_by_seed(eligible, lambda prompt: prompt.id, section.take, SEED)
    report.kept = len(sample)
    report.not_taken = len(eligible) - len(sample)
    if section.take is not None and len(sample) < section.take:
        report.notes.append(
            f"prompts.take is {section.take:,}, but only {len(sample):,} prompts are available: all are used"
        )
    if not sample:
        raise InputError(
            f"{section.source}: no prompts are left of {report.read:,} rows: {len(report.bad):,} bad, "
            f"{report.too_long:,} longer than prompts.max_tokens = {section.max_tokens}, {len(report.overlaps):,} "
            "overlapping with prompts.screen_against."
            + "".join(f" The first bad one: {row.where}: {row.why}" for row in report.bad[:1])
        )
    return sample, report


def read_questions(section: Prompts, others: Collection[str], report: PromptReport) -> Iterator[Question]:
    """Read the distinct questions of the source, each with a unique id; `others` are further columns to keep.

    An id must always mean the same prompt, so a second question with a used id is a bad row and is never renamed.
    An id derived from the question does not depend on the order of rows; where duplicates are kept, later copies get a
    number.
    """
    source = section.source
    assert source is not None, "checked by the caller"
    starter = "starter_code" if section.format == "livecodebench" else None
    shown = template_columns(section)
    others = frozenset(others) | shown
    columns = ColumnNames(**section.columns.model_dump(), starter=starter, others=others)
    where = {"split": section.split, "name": section.name}
    first_rows: list[Row] = []
    distinct: dict[str, Question] = {}
    named = [name for name in (columns.prompt, columns.answer, columns.id, starter) if name]
    top_level = {*named, *(name.split(".")[0] for name in named), *others}
    for row in read_rows(source, **where, columns=top_level):
        report.read += 1
        if isinstance(row, Row) and len(first_rows) < _LOOKED_AT:
            first_rows.append(row)
        question = read_question(row, columns) if isinstance(row, Row) else row
        if isinstance(question, BadRow):
            report.bad.append(question)
            continue
        key = str(report.read) if section.dedup == "none" else duplicate_key(question, section.dedup, shown)
        distinct.setdefault(key, question)
    if not report.read:
        raise InputError(f"{source}: has no rows. Set prompts.source to a file with one prompt per row.")
    if report.read == len(report.bad):
        first, line = report.bad[0], columns_line(first_rows, source)
        raise InputError(
            f"{source}: none of its {report.read:,} rows can be used; the first is {first.where}: {first.why}. "
            "Check prompts.columns." + f" By their names: {line}" * bool(line)
        )
    report.duplicates = report.read - len(report.bad) - len(distinct)

    owners: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for question in distinct.values():
        identity = question.id
        if not identity:
            derived = hashlib.sha256(duplicate_key(question, "exact", shown).encode()).hexdigest()[:16]
            copies[derived] += 1
            identity = derived if copies[derived] == 1 else f"{derived}-{copies[derived]}"
        elif identity in owners:
            report.bad.append(BadRow(question.where, f"id {identity!r} is already used by {owners[identity]}"))
            continue
        owners[identity] = question.where
        yield replace(question, id=identity)


def template_columns(section: Prompts) -> frozenset[str]:
    """The columns that the prompts show of a row, except for the problem."""
    return frozenset(named_columns(section.format) - {"problem"})


def count_held_out(questions: int) -> int:
    """How many of these questions are held out.

    >>> [count_held_out(questions) for questions in (10, 30, 100, 1_000, 10_000)]
    [5, 15, 20, 100, 200]
    """
    return min(max(LEAST_HELD_OUT, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * questions))), questions // 2)


def hold_out(questions: Sequence[Question]) -> list[Question]:
    """Choose the questions that are a benchmark and not prompts: those with an answer, drawn by their content."""
    single = [one for one in questions if one.answer is not None and len(one.messages) == 1]
    distinct = {normalise(one.messages[0]["content"]): one for one in reversed(single)}  # the first of equal ones
    chosen = take_by_seed(list(distinct), str, count_held_out(len(distinct)), SEED)
    return [distinct[text] for text in chosen]


def duplicate_key(question: Question, dedup: Literal["exact", "normalised"], shown: Collection[str]) -> str:
    """Make the key by which questions are duplicates: every turn, the starter code and a template's columns."""
    form = normalise if dedup == "normalised" else str
    turns = [(turn["role"], form(turn["content"])) for turn in question.messages]
    own = {name: value for name, value in question.columns.items() if name in shown}
    columns = [own] if own else []
    return json.dumps([turns, question.starter, *columns], default=str)


def take_by_seed(items: Sequence[T], key: Callable[[T], str], take: int | None, seed: int) -> list[T]:
    """Draw items by their keys, independent of the order they come in.

    The draw is a ranking, so a larger `take` begins with the items of a smaller one. None takes all in their order.
    """
    if take is None:
        return list(items)
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\n{key(item)}".encode()).digest())[:take]


def _read_problems(files: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Read the problems to screen against. A bad row is an error, because its problem would go unscreened."""
    for file in files:
        row = None
        for row in read_rows(file, columns=_PROBLEM_COLUMNS):
            problem: Question | BadRow
            if isinstance(row, Row):
                column = next((column for column in _PROBLEM_COLUMNS if column in row.values), _PROBLEM_COLUMNS[0])
                problem = read_question(row, ColumnNames(column))
            else:
                problem = row
            if isinstance(problem, BadRow):
                raise InputError(f"prompts.screen_against: {problem.where}: {problem.why}. Fix or remove this row.")
            yield problem.where, problem.messages[-1]["content"]
        if row is None:
            raise InputError(f"prompts.screen_against: {file} has no rows. Give a file of problems, or remove it.")


def read_columns(names: Collection[str], section: Prompts) -> dict[str, dict[str, Any]]:
    """Read columns of the rows that prompts are built from: prompt id -> column -> value."""
    return {question.id: dict(question.columns) for question in read_questions(section, names, PromptReport())}


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts.jsonl."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            fields = json.loads(line)
            form = fields.pop("form", None)
            prompts.append(Prompt(**fields, form=None if form is None else PromptForm(**form)))
        except (ValueError, TypeError) as error:
            raise CorruptData(f"{path}:{number}: not a prompt ({error}). Delete the file and re-run.") from error
    return prompts
