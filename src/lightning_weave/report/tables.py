"""Tables in the paper's layout: accuracy and tokens per benchmark, then averages and AES (table main-results).

In every column the best value is bold and the second best underlined, within each group of rows or over the whole
table. Values that print the same rank the same.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from lightning_weave.errors import InputError
from lightning_weave.report.grid import escape_latex, escape_markdown
from lightning_weave.runs.steps import Steps

if TYPE_CHECKING:
    from rich.table import Table as RichTable

Mark = Literal["best", "second", ""]
Scope = Literal["group", "table"]
MISSING = "–"
SHORT = 100  # tokens


@dataclass(frozen=True)
class BenchmarkScore:
    """The result of one policy on one benchmark."""

    benchmark: str
    accuracy: float
    tokens: float
    samples: int = 0  # per problem; 0: not said


@dataclass(frozen=True)
class TaskScore:
    """The result of one policy on one task of another harness, and its difference to the base; NaN: not measured."""

    task: str
    metric: str
    value: float
    error: float | None = None
    difference: float | None = None
    difference_error: float | None = None
    lower_is_better: bool = False

    @property
    def label(self) -> str:
        """The head of its column."""
        return f"{self.task} {self.metric}{'↓' if self.lower_is_better else '↑'}"

    @property
    def beside(self) -> str:
        """What is printed beside the score: its standard error, and the difference with its own."""
        error = f"±{self.error:.3f}" if self.error is not None else ""
        if self.difference is None:
            return error
        own = f" ±{self.difference_error:.3f}" if self.difference_error is not None else ""
        return f"{error} ({self.difference:+.3f}{own})".strip()


@dataclass(frozen=True)
class PolicyRow:
    """One line of the table. Consecutive rows of a group are printed under its name, if it has one."""

    policy: str
    scores: tuple[BenchmarkScore, ...]
    accuracy: float  # averages
    tokens: float
    aes: float | None = None
    aes_low: float | None = None
    aes_high: float | None = None
    group: str = ""
    stale: bool = False  # made by another recipe than the present one
    tasks: tuple[TaskScore, ...] = ()  # of another harness: further columns

    @property
    def label(self) -> str:
        """The policy as it is printed."""
        return f"{self.policy} (stale)" if self.stale else self.policy


@dataclass(frozen=True)
class Cell:
    """A value as printed, and its mark in its column."""

    text: str
    mark: Mark = ""
    interval: str = ""


@dataclass(frozen=True)
class _Column:
    values: Sequence[float | None]
    digits: int
    lower_is_better: bool = False


def markdown(rows: Sequence[PolicyRow], marks: Scope = "group") -> str:
    """Write the table as GitHub Markdown."""
    header = ["Policy", *_flat_header(rows)]
    lines = [_pipe(map(escape_markdown, header)), _pipe([":---", *["---:"] * (len(header) - 1)])]
    for group, members in _groups(rows, cells(rows, marks)):
        if group:
            lines.append(_pipe([f"***{escape_markdown(group)}***", *[""] * (len(header) - 1)]))
        lines += [_pipe([escape_markdown(row.label), *map(_markdown_cell, line)]) for row, line in members]
    return "\n".join(lines) + "\n"


def latex(rows: Sequence[PolicyRow], marks: Scope = "group") -> str:
    """Write the table as a LaTeX tabular; it only needs the booktabs package."""
    benchmarks = _benchmarks(rows)
    tasks = [task.task for task in rows[0].tasks]
    averages = 3 if benchmarks else 0
    width = 2 * len(benchmarks) + 1 + averages + len(tasks)
    spans = [*((name, 2) for name in benchmarks), *([("Average", 3)] if benchmarks else []), *((t, 1) for t in tasks)]
    heads = [rf"\multicolumn{{{span}}}{{c}}{{\textbf{{{escape_latex(name)}}}}}" for name, span in spans]
    pair = [r"\textbf{Acc.}$\uparrow$", r"\textbf{\#Tok.}$\downarrow$"]
    names = [r"\textbf{Policy}", *(pair * (len(benchmarks) + 1) + [r"\textbf{AES}$\uparrow$"] if benchmarks else [])]
    names += [rf"\textbf{{{escape_latex(task.metric)}}}{_latex_arrow(task)}" for task in rows[0].tasks]
    rules = [f"{2 * k + 2}-{2 * k + 3}" for k in range(len(benchmarks))]
    first = 2 * len(benchmarks) + 2  # of the averages
    rules += [f"{first}-{first + 2}"] if benchmarks else []
    rules += [f"{first + averages + k}-{first + averages + k}" for k in range(len(tasks))]
    lines = [rf"\begin{{tabular}}{{l{'c' * (width - 1)}}}", r"\toprule", _ampersand(["", *heads])]
    lines += ["".join(rf"\cmidrule(lr){{{rule}}}" for rule in rules), _ampersand(names)]
    for group, members in _groups(rows, cells(rows, marks)):
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textbf{{\textit{{{escape_latex(group)}}}}}}} \\")
        lines += [_ampersand([escape_latex(row.label), *map(_latex_cell, line)]) for row, line in members]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def legend(rows: Sequence[PolicyRow]) -> str:
    """Explain the marks and the columns of a table."""
    where = " of its block" if any(row.group for row in rows) else ""
    parts = [f"Bold: best{where}. Underlined: second best."] if len(rows) > 1 else []
    if any(row.scores for row in rows):
        parts.append("Acc.: accuracy in %. #Tok.: mean response tokens.")
    if counts := sample_counts(rows):
        each = ", ".join(f"{name} {text}" for name, text in counts.items())
        parts.append(f"Samples per problem: {each if len(set(counts.values())) > 1 else min(counts.values())}.")
    if any(not _is_missing(row.aes) for row in rows):
        parts.append(
            "AES: share of tokens saved plus three times the relative gain in accuracy (or minus five times the loss), "
            "compared with the base" + " and averaged over benchmarks" * (len(_benchmarks(rows)) > 1) + "."
        )
    if any(map(_interval, rows)):
        parts.append("In brackets: 95 % interval, resampling problems for policy and base together.")
    if any(row.tasks for row in rows):
        parts.append(
            "Columns of other harnesses: the score ± its standard error, and in parentheses the difference to the base "
            "± its own, over the same questions where they are known."
        )
    if any(_is_missing(value) for row in rows for value in (row.accuracy, row.tokens, row.aes)):
        parts.append(f"{MISSING}: not measured, or undefined.")
    return " ".join(parts)


def sample_counts(rows: Sequence[PolicyRow]) -> dict[str, str]:
    """Say of every benchmark how many samples of a problem its column averages, and of which blocks if they differ."""
    by_benchmark: dict[str, dict[int, dict[str, None]]] = {}  # benchmark -> samples -> blocks
    for row in rows:
        for score in row.scores:
            if score.samples:
                by_benchmark.setdefault(score.benchmark, {}).setdefault(score.samples, {})[row.group] = None
    return {
        name: " and ".join(
            f"{samples} ({', '.join(filter(None, blocks))})" if len(counts) > 1 and any(blocks) else str(samples)
            for samples, blocks in counts.items()
        )
        for name, counts in by_benchmark.items()
    }


def to_csv(rows: Sequence[PolicyRow]) -> str:
    """Write the values as CSV: unrounded, unmarked, missing ones empty."""
    names = [f"{name} {what}" for name in (*_benchmarks(rows), "Average") for what in ("Acc.", "#Tok.")]
    further = ("", " error", " difference", " difference error")
    names += ["AES", "AES low", "AES high"]
    names += [f"{task.task} {task.metric}{what}" for task in rows[0].tasks for what in further]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["Group", "Policy", *names])
    for row in rows:
        scores = [value for score in row.scores for value in (score.accuracy, score.tokens)]
        values = [*scores, row.accuracy, row.tokens, row.aes, row.aes_low, row.aes_high]
        values += [value for one in row.tasks for value in (one.value, one.error, one.difference, one.difference_error)]
        writer.writerow([row.group, row.label, *("" if _is_missing(value) else value for value in values)])
    return out.getvalue()


def plain(rows: Sequence[PolicyRow], marks: Scope = "group") -> str:
    """Write aligned text for logs and pipes: * marks the best of a column, + the second best."""
    signs = {"best": "*", "second": "+", "": " "}
    first, header = _text_columns(rows)
    lines: list[list[str]] = [["Policy", *header]]
    for group, members in _groups(rows, cells(rows, marks)):
        lines += [[group]] if group else []
        for row, line in members:
            shown = line[first:]
            texts = [f"{cell.text}{signs[cell.mark]}{' ' * bool(cell.interval)}{cell.interval}" for cell in shown]
            lines.append([("  " if group else "") + row.label, *texts])
    widths = [max(len(line[k]) for line in lines if len(line) > 1) for k in range(len(lines[0]))]
    padded = [
        [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=False))]
        for line in lines
    ]
    return "\n".join("  ".join(line).rstrip() for line in padded) + "\n"


def console(rows: Sequence[PolicyRow], marks: Scope = "group", width: int | None = None) -> "RichTable":
    """Build the table for a terminal; if it is too narrow for every benchmark, only the averages are shown."""
    from rich.box import SIMPLE
    from rich.table import Table
    from rich.text import Text

    styles = {"best": "bold", "second": "underline", "": ""}
    first, header = _text_columns(rows, averages=width is not None and not fits(rows, width, marks))
    table = Table(box=SIMPLE)
    for name in ["Policy", *header]:
        table.add_column(name, justify="left" if name == "Policy" else "right", no_wrap=True)
    for group, members in _groups(rows, cells(rows, marks)):
        if group:
            table.add_row(Text(group, style="bold italic"))
        for row, line in members:
            shown = line[first:]
            texts = [Text.assemble((cell.text, styles[cell.mark]), f" {cell.interval}".rstrip()) for cell in shown]
            table.add_row(Text(row.label), *texts)
    return table


def fits(rows: Sequence[PolicyRow], width: int, marks: Scope = "group") -> bool:
    """Say whether a terminal has room for every benchmark."""
    return max(map(len, plain(rows, marks).splitlines())) + 2 * len(_columns(rows)) <= width


def cells(rows: Sequence[PolicyRow], marks: Scope = "group") -> list[list[Cell]]:
    """Round every value of the table for printing, and rank it within its group or the whole table."""
    columns = _columns(rows)
    texts = [[_show(value, column.digits) for value in column.values] for column in columns]
    scopes = [row.group if marks == "group" else "" for row in rows]
    ranked = [_rank(shown, scopes, column.lower_is_better) for shown, column in zip(texts, columns, strict=True)]
    return [
        [Cell(texts[k][r] or MISSING, ranked[k][r], beside) for k, beside in enumerate(_beside(row, len(columns)))]
        for r, row in enumerate(rows)
    ]


def _columns(rows: Sequence[PolicyRow]) -> list[_Column]:
    columns = []
    for k in range(len(_benchmarks(rows))):
        columns.append(_Column([row.scores[k].accuracy for row in rows], digits=1))
        columns.append(_tokens_column([row.scores[k].tokens for row in rows]))
    if columns:
        columns.append(_Column([row.accuracy for row in rows], digits=2))
        columns.append(_tokens_column([row.tokens for row in rows]))
        columns.append(_Column([row.aes for row in rows], digits=2))
    for k, task in enumerate(rows[0].tasks):
        columns.append(_Column([row.tasks[k].value for row in rows], digits=3, lower_is_better=task.lower_is_better))
    return columns


def _beside(row: PolicyRow, columns: int) -> list[str]:
    """What is printed beside each value of a row: the interval of AES, the errors of other harnesses' scores."""
    own = columns - len(row.tasks)
    return [*[""] * (own - 1), *([_interval(row)] if own else []), *(task.beside for task in row.tasks)]


def _tokens_column(values: Sequence[float]) -> _Column:
    """Print whole tokens like the paper; if all responses are short, with one decimal."""
    short = max((value for value in values if not _is_missing(value)), default=0.0) < SHORT
    return _Column(values, digits=1 if short else 0, lower_is_better=True)


def _rank(texts: Sequence[str], scopes: Sequence[str], lower_is_better: bool) -> list[Mark]:
    """Mark best and second best per scope, unless all values are equal."""
    places: dict[str, list[float]] = {}
    for text, scope in zip(texts, scopes, strict=True):
        if text and _value(text) not in places.setdefault(scope, []):
            places[scope].append(_value(text))
    order = {scope: sorted(values, reverse=not lower_is_better) for scope, values in places.items() if len(values) > 1}
    return [_place(text, order.get(scope, [])) for text, scope in zip(texts, scopes, strict=True)]


def _place(text: str, order: list[float]) -> Mark:
    if not text or not order:
        return ""
    place = order.index(_value(text))
    return "best" if place == 0 else "second" if place == 1 else ""


def _benchmarks(rows: Sequence[PolicyRow]) -> list[str]:
    if not rows:
        raise InputError("no policy has been evaluated. Run eval first")
    names = [[score.benchmark for score in row.scores] for row in rows]
    for row, evaluated in zip(rows, names, strict=True):
        if evaluated != names[0]:
            raise InputError(
                f"{row.policy} was evaluated on {evaluated}, {rows[0].policy} on {names[0]}: they need separate tables"
            )
    return names[0]


def _groups(rows: Sequence[PolicyRow], lines: list[list[Cell]]) -> list[tuple[str, list[tuple[PolicyRow, list[Cell]]]]]:
    pairs = zip(rows, lines, strict=True)
    return [(group, list(members)) for group, members in groupby(pairs, key=lambda pair: pair[0].group)]


def _flat_header(rows: Sequence[PolicyRow]) -> list[str]:
    benchmarks = _benchmarks(rows)
    own = [f"{name} {what}" for name in (*benchmarks, "Average") for what in ("Acc.↑", "#Tok.↓")] + ["AES↑"]
    return [*(own if benchmarks else []), *(task.label for task in rows[0].tasks)]


def _text_columns(rows: Sequence[PolicyRow], averages: bool = False) -> tuple[int, list[str]]:
    """Say with which column a text begins, and what they are called. Of one benchmark, the average says it all."""
    benchmarks = _benchmarks(rows)
    header = _flat_header(rows)
    if len(benchmarks) == 1:
        return 2, [*header[:2], *header[4:]]
    first = 2 * len(benchmarks) if averages else 0
    return first, header[first:]


def _interval(row: PolicyRow) -> str:
    if _is_missing(row.aes) or row.aes_low is None or row.aes_high is None or math.isnan(row.aes_low + row.aes_high):
        return ""
    return f"[{_show(row.aes_low, 2)}, {_show(row.aes_high, 2)}]"


def _markdown_cell(cell: Cell) -> str:
    text = {"best": f"**{cell.text}**", "second": f"<u>{cell.text}</u>", "": cell.text}[cell.mark]
    return f"{text} {cell.interval}".strip()


def _latex_cell(cell: Cell) -> str:
    text = "--" if cell.text == MISSING else cell.text
    if text.startswith("-") and text != "--":
        text = rf"$\mathbf{{{text}}}$" if cell.mark == "best" else f"${text}$"  # a minus sign, not a hyphen
    elif cell.mark == "best":
        text = rf"\textbf{{{text}}}"
    if cell.mark == "second":
        text = rf"\underline{{{text}}}"
    beside = cell.interval.replace("±", r"\pm ")
    return rf"{text} {{\scriptsize ${beside}$}}" if beside else text


def _latex_arrow(task: TaskScore) -> str:
    return r"$\downarrow$" if task.lower_is_better else r"$\uparrow$"


def _pipe(texts: "Sequence[str] | map[str]") -> str:
    return f"| {' | '.join(texts)} |"


def _ampersand(texts: Sequence[str]) -> str:
    return " & ".join(texts) + r" \\"


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _is_missing(value: float | None) -> bool:
    return value is None or math.isnan(value)


def _show(value: float | None, digits: int) -> str:
    """Round a value, without a negative zero; nothing if it is missing."""
    if value is None or math.isnan(value):
        return ""
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if not text.strip("-0.") else text


def student_names(students: Sequence[Sequence[Steps]]) -> list[str]:
    """Name each student by the last part of its model's name, or the whole where two would be the same."""
    whole = [runs[0].recipe.student.model.rstrip("/") for runs in students]
    short = [name.split("/")[-1] for name in whole]
    names = [one if short.count(one) == 1 else long for one, long in zip(short, whole, strict=True)]
    marks = [f" ({runs[0].recipe.mark})" if runs[0].recipe.mark else "" for runs in students]
    return [name + mark for name, mark in zip(names, marks, strict=True)]
