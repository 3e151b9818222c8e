"""From a source of any kind to the student's prompts, with a count of what happened to every row."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_weave.config import Prompts
from lightning_weave.config.fields import PromptFormat
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.prompts.decontaminate import Screen
from lightning_weave.prompts.filters import Dedup, PromptReport, drop_duplicates, duplicate_key, take_by_seed
from lightning_weave.prompts.formats import ask, chatml, template_columns
from lightning_weave.prompts.guess import columns_line
from lightning_weave.prompts.questions import ColumnNames, Message, Question, question_of
from lightning_weave.prompts.render import encode, knows_thinking, render
from lightning_weave.prompts.sources import read_rows
from lightning_weave.store.tables import BadRow, Row
from lightning_weave.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOKED_AT = 20  # rows, to say which columns there are
_PROBLEM_COLUMNS = ("problem", "question_content", "question", "prompt")


def build_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str | Path | None,
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    format: PromptFormat = "plain",
    template: str | None = None,
    system: str | None = None,
    chat: bool = True,
    thinking: bool = True,
    max_tokens: int | None = None,
    dedup: Dedup = "exact",
    take: int | None = None,
    seed: int = 42,
    screen_against: Sequence[str | Path] = (),
) -> tuple[list[Prompt], PromptReport]:
    """Read, deduplicate, screen, render, filter by length and draw, in this order.

    The keywords are those of [prompts] in a recipe. Every row ends up in exactly one count of the report.
    """
    if source is None:
        raise InputError("prompts.source is missing. Set it to a .jsonl or .parquet file, a directory or a hub name.")
    report = PromptReport()
    screen = Screen(_problems(screen_against))
    by_template = chat and format != "livecodebench"  # LiveCodeBench prompts are always rendered as ChatML
    if by_template and not knows_thinking(tokenizer) and not thinking:  # fails here if there is no template
        report.notes.append("prompts.thinking = false has no effect: the chat template has no thinking switch")
    others = frozenset(template_columns(template))
    column_names = _column_names(columns, format, others)
    answer = (column_names.answer or "").split(".")[0]
    if answer in others:
        raise InputError(f"prompts.template names {{{answer}}}, which holds the answer. Leave it out of the template.")
    rows = read_rows(source, split=split, name=name, revision=revision, columns=column_names.roots())
    distinct = _deduplicated(_questions(rows, column_names, str(source), report), dedup, report)
    screened = _screened(_with_unique_ids(distinct, report), screen, report)

    def asked(question: Question) -> tuple[list[Message], str]:
        """Make the messages of a question and their text."""
        messages = ask(
            format,
            question.messages,
            template=template,
            system=system,
            columns=question.columns,
            starter=question.starter,
        )
        is_code = format == "livecodebench"
        return messages, chatml(messages) if is_code else render(messages, tokenizer, by_template, thinking)

    prompts = _encoded(list(_rendered(screened, asked, report)), tokenizer, by_template, max_tokens, report)
    sample = _taken(prompts, take, seed, report)
    if not sample:
        raise InputError(
            f"{source}: no prompts are left of {report.read:,} rows: {len(report.bad):,} bad, {report.too_long:,} "
            f"longer than prompts.max_tokens = {max_tokens}, {len(report.overlaps):,} overlapping with "
            "prompts.screen_against." + "".join(f" The first bad one: {row.where}: {row.why}" for row in report.bad[:1])
        )
    return sample, report


def _column_names(
    columns: Mapping[str, str | None] | None, format: PromptFormat, others: frozenset[str]
) -> ColumnNames:
    named = {key: column for key, column in (columns or {}).items() if column is not None}
    return ColumnNames(**named, starter="starter_code" if format == "livecodebench" else None, others=others)


def read_columns(names: Collection[str], prompts: Prompts) -> dict[str, dict[str, Any]]:
    """Read columns of the rows that prompts are built from: prompt id -> column -> value."""
    assert prompts.source is not None, "the prompts were built from it"
    report = PromptReport()
    columns = _column_names(prompts.columns.model_dump(), prompts.format, frozenset(names))
    where = {"split": prompts.split, "name": prompts.name, "revision": prompts.revision}
    rows = read_rows(prompts.source, **where, columns=columns.roots())
    distinct = _deduplicated(_questions(rows, columns, prompts.source, report), prompts.dedup, report)
    columns_by_id = {question.id: question.columns for question in _with_unique_ids(distinct, report)}
    return {id: dict(row) for id, row in columns_by_id.items()}


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts.jsonl."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            prompts.append(Prompt(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CorruptData(f"{path}:{number}: not a prompt ({error}). Delete the file and re-run.") from error
    return prompts


def _problems(files: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Read the problems to screen against. A bad row is an error, because its problem would go unscreened."""
    for file in files:
        row = None
        for row in read_rows(file, columns=_PROBLEM_COLUMNS):
            problem = question_of(row, ColumnNames(_problem_column(row))) if isinstance(row, Row) else row
            if isinstance(problem, BadRow):
                raise InputError(f"prompts.screen_against: {problem.where}: {problem.why}. Fix or remove this row.")
            yield problem.where, problem.messages[-1]["content"]
        if row is None:
            raise InputError(f"prompts.screen_against: {file} has no rows. Give a file of problems, or remove it.")


def _problem_column(row: Row) -> str:
    return next((column for column in _PROBLEM_COLUMNS if column in row.values), _PROBLEM_COLUMNS[0])


def _questions(
    rows: Iterable[Row | BadRow], columns: ColumnNames, source: str, report: PromptReport
) -> Iterator[Question]:
    first_rows: list[Row] = []
    for row in rows:
        report.read += 1
        if isinstance(row, Row) and len(first_rows) < _LOOKED_AT:
            first_rows.append(row)
        question = question_of(row, columns) if isinstance(row, Row) else row
        if isinstance(question, Question):
            yield question
        else:
            report.bad.append(question)
    if not report.read:
        raise InputError(f"{source}: has no rows. Set prompts.source to a file with one prompt per row.")
    if report.read == len(report.bad):
        first = report.bad[0]
        line = columns_line(first_rows, source)
        raise InputError(
            f"{source}: none of its {report.read:,} rows can be used; the first is {first.where}: {first.why}. "
            "Check prompts.columns." + f" By their names: {line}" * bool(line)
        )


def _deduplicated(questions: Iterable[Question], dedup: Dedup, report: PromptReport) -> list[Question]:
    if dedup == "none":
        return list(questions)
    distinct, report.duplicates = drop_duplicates(questions, lambda question: duplicate_key(question, dedup))
    return distinct


def _with_unique_ids(questions: Iterable[Question], report: PromptReport) -> Iterator[Question]:
    """Keep the source's own ids, or derive one from the question.

    An id must always mean the same prompt, so a second question with a used id is a bad row and is never renamed.
    Derived ids do not depend on the order of rows; where duplicates are kept, later copies get a number.
    """
    owners: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for question in questions:
        identity = question.id
        if not identity:
            derived = hashlib.sha256(duplicate_key(question, "exact").encode()).hexdigest()[:16]
            copies[derived] += 1
            identity = derived if copies[derived] == 1 else f"{derived}-{copies[derived]}"
        elif identity in owners:
            report.bad.append(BadRow(question.where, f"id {identity!r} is already used by {owners[identity]}"))
            continue
        owners[identity] = question.where
        yield replace(question, id=identity)


def _screened(questions: Iterable[Question], screen: Screen, report: PromptReport) -> Iterator[Question]:
    for question in questions:
        turns = (turn["content"] for turn in question.messages if turn["role"] == "user")
        overlap = next(filter(None, (screen.find(question.where, content) for content in turns)), None)
        if overlap is None:
            yield question
        else:
            report.overlaps.append(overlap)


def _rendered(
    questions: Iterable[Question], asked: Callable[[Question], tuple[list[Message], str]], report: PromptReport
) -> Iterator[tuple[str, Prompt]]:
    """Make prompts without token ids, each with its location in the source."""
    for question in questions:
        try:
            messages, text = asked(question)
        except InputError as error:
            report.bad.append(BadRow(question.where, str(error)))
        else:
            yield question.where, Prompt(question.id, messages, text, [], question.answer)


def _encoded(
    rendered: list[tuple[str, Prompt]],
    tokenizer: "PreTrainedTokenizerBase",
    template: bool,
    max_tokens: int | None,
    report: PromptReport,
) -> Iterator[Prompt]:
    encoded = encode([prompt.text for _, prompt in rendered], tokenizer, rendered=template)
    for (where, prompt), ids in zip(rendered, encoded, strict=True):
        if not ids:
            report.bad.append(BadRow(where, "has no tokens"))
        elif max_tokens is not None and len(ids) > max_tokens:
            report.too_long += 1
        else:
            yield replace(prompt, token_ids=ids)


def _taken(prompts: Iterable[Prompt], take: int | None, seed: int, report: PromptReport) -> list[Prompt]:
    eligible = list(prompts)
    sample = take_by_seed(eligible, lambda prompt: prompt.id, take, seed)
    report.kept = len(sample)
    report.not_taken = len(eligible) - len(sample)
    if take is not None and len(sample) < take:
        report.notes.append(f"prompts.take is {take:,}, but only {len(sample):,} prompts are available: all are used")
    return sample
