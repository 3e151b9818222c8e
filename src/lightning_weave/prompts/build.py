"""From a source of any kind to the prompts that the student is given, with a count of every row on the way."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_weave.errors import CorruptData, InputError
from lightning_weave.prompts.decontaminate import Screen
from lightning_weave.prompts.filters import Dedup, PromptReport, drop_duplicates, duplicate_key, take_by_seed
from lightning_weave.prompts.formats import Format, chatml, put
from lightning_weave.prompts.questions import ColumnNames, Message, Question, question_of
from lightning_weave.prompts.render import encode, knows_thinking, render
from lightning_weave.prompts.sources import read_rows
from lightning_weave.store.tables import BadRow, Row
from lightning_weave.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PROBLEM_COLUMNS = ("problem", "question_content", "question", "prompt")


def build_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    source: str | Path | None,
    split: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str | None] | None = None,
    format: Format = "plain",
    chat: bool = True,
    thinking: bool = True,
    max_tokens: int | None = None,
    dedup: Dedup = "exact",
    take: int | None = None,
    seed: int = 42,
    screen_against: Sequence[str | Path] = (),
) -> tuple[list[Prompt], PromptReport]:
    """Read, deduplicate, screen, render, filter by length and draw, in this order.

    The keywords are the recipe's [prompts]. Every row that is read ends in exactly one count of the report.
    """
    if source is None:
        raise InputError("prompts.source is missing. Give a .jsonl or .parquet file, a directory or a hub name.")
    report = PromptReport()
    screen = Screen(_problems(screen_against))
    template = chat and format != "livecodebench"  # that one is rendered by its own rule
    if template:
        _check_template(tokenizer, thinking, report)
    named = _columns(columns or {}, format)
    rows = read_rows(source, split=split, name=name, revision=revision, columns=named.roots())
    distinct = _deduplicated(_questions(rows, named, str(source), report), dedup, report)
    screened = _screened(_with_unique_ids(distinct, report), screen, report)
    rendered = _rendered(screened, format, lambda messages: render(messages, tokenizer, template, thinking), report)
    prompts = _encoded(list(rendered), tokenizer, template, max_tokens, report)
    taken = _taken(prompts, take, seed, report)
    if not taken:
        raise InputError(
            f"{source}: no prompt is left of {report.read:,} rows: {len(report.bad):,} bad, {report.too_long:,} longer "
            f"than prompts.max_tokens = {max_tokens}, {len(report.overlaps):,} overlapping with prompts.screen_against."
        )
    return taken, report


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts.jsonl as it was written."""
    prompts = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            prompts.append(Prompt(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CorruptData(f"{path}:{number}: not a prompt ({error}). Remove the file and make it again.") from error
    return prompts


def _columns(columns: Mapping[str, str | None], format: Format) -> ColumnNames:
    named = {key: column for key, column in columns.items() if column is not None}
    return ColumnNames(**named, starter="starter_code" if format == "livecodebench" else None)


def _check_template(tokenizer: "PreTrainedTokenizerBase", thinking: bool, report: PromptReport) -> None:
    """Fail before any row is read if there is no template; note a wish that it cannot fulfil."""
    if not knows_thinking(tokenizer) and not thinking:
        report.notes.append("prompts.thinking = false has no effect: the chat template has no such switch")


def _problems(files: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Read the problems to screen against. A bad row is an error, because its problem would go unscreened."""
    for file in files:
        row = None
        for row in read_rows(file, columns=_PROBLEM_COLUMNS):
            column = _problem_column(row)
            problem = question_of(row, ColumnNames(column)) if isinstance(row, Row) else row
            if isinstance(problem, BadRow):
                raise InputError(f"prompts.screen_against: {problem.where}: {problem.why}. Fix or remove this row.")
            yield problem.where, problem.messages[-1]["content"]
        if row is None:
            raise InputError(f"prompts.screen_against: {file} has no rows. Give a file of problems, or remove it.")


def _problem_column(row: Row | BadRow) -> str:
    values = row.values if isinstance(row, Row) else {}
    return next((column for column in _PROBLEM_COLUMNS if column in values), _PROBLEM_COLUMNS[0])


def _questions(
    rows: Iterable[Row | BadRow], columns: ColumnNames, source: str, report: PromptReport
) -> Iterator[Question]:
    for row in rows:
        report.read += 1
        question = question_of(row, columns) if isinstance(row, Row) else row
        if isinstance(question, Question):
            yield question
        else:
            report.bad.append(question)
    if not report.read:
        raise InputError(f"{source}: has no rows. Give prompts.source a file with one prompt per row.")
    if report.read == len(report.bad):
        first = f"; the first is {report.bad[0].where}: {report.bad[0].why}"
        raise InputError(f"{source}: none of its {report.read:,} rows can be used{first}. Check prompts.columns.")


def _deduplicated(questions: Iterable[Question], dedup: Dedup, report: PromptReport) -> list[Question]:
    if dedup == "none":
        return list(questions)
    kept, report.duplicates = drop_duplicates(questions, lambda question: duplicate_key(question, dedup))
    return kept


def _with_unique_ids(questions: Iterable[Question], report: PromptReport) -> Iterator[Question]:
    """Keep the source's own ids, or make one from what is asked.

    An id names one prompt for good, so a second question under a used id is a bad row, never renamed. Made ids do not
    depend on the order of rows; where duplicates are kept, the second and third of a kind say so.
    """
    owners: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for question in questions:
        identity = question.id
        if not identity:
            made = hashlib.sha256(duplicate_key(question, "exact").encode()).hexdigest()[:16]
            copies[made] += 1
            identity = made if copies[made] == 1 else f"{made}-{copies[made]}"
        elif identity in owners:
            report.bad.append(BadRow(question.where, f"id {identity!r} is that of {owners[identity]} already"))
            continue
        owners[identity] = question.where
        yield replace(question, id=identity)


def _screened(questions: Iterable[Question], screen: Screen, report: PromptReport) -> Iterator[Question]:
    for question in questions:
        asked = [turn["content"] for turn in question.messages if turn["role"] == "user"]
        found = [overlap for content in asked if (overlap := screen.find(question.where, content))]
        report.overlaps += found[:1]
        if not found:
            yield question


def _rendered(
    questions: Iterable[Question], format: Format, rendering: Callable[[list[Message]], str], report: PromptReport
) -> Iterator[tuple[str, Prompt]]:
    """Make prompts that lack only their token ids, each with where it stands in the source."""
    for question in questions:
        try:
            messages = put(format, question.messages, question.starter)
            text = chatml(messages) if format == "livecodebench" else rendering(messages)
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
    taken = take_by_seed(eligible, lambda prompt: prompt.id, take, seed)
    report.kept, report.not_taken = len(taken), len(eligible) - len(taken)
    if take is not None and len(taken) < take:
        report.notes.append(f"prompts.take asks for {take:,}, but only {len(taken):,} are left")
    return taken
