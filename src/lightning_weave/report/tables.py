"""Tables as pandas DataFrames, and one renderer each for Markdown, LaTeX, CSV, plain text, the terminal and HTML.

A table of results has a row per policy, indexed by group and policy. Its columns are (part, measure): a part is a
benchmark, their average, or a task of another harness. `format_results` and `format_costs` turn numbers into printed
cells in the paper's layout (tables main-results and training-cost); the renderers take any table of cells or texts.
"""

import math
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any, NamedTuple

import pandas as pd
from pandas import DataFrame
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages.costs import SHARED, offline_cost, training_seconds

AVERAGE = "Average"
HEADINGS = {"accuracy": "Acc.↑", "tokens": "#Tok.↓", "aes": "AES↑"}  # tasks name theirs: exact_match↑
DIGITS = {"accuracy": 1, "tokens": 0, "aes": 2}
MISSING = "–"
SHORT = 100  # tokens: where no response is longer on average, one decimal is shown
TRAINING = "Student-only training"
COST_RULES = (2, 5)  # before these rows: what was measured, the parts of it


class Cell(NamedTuple):
    """A value as printed, its mark ("best", "second" or "") and what follows it: an interval or a standard error."""

    text: str
    mark: str = ""
    interval: str = ""


def benchmarks_of(results: DataFrame) -> list[str]:
    """The benchmarks of a table of results."""
    return [part for part, measure in results.columns if measure == "accuracy" and part != AVERAGE]


def tasks_of(results: DataFrame) -> list[tuple[str, str]]:
    """The columns of another harness: task, and metric with its direction."""
    return [(part, measure) for part, measure in results.columns if measure[-1] in "↑↓"]


def format_results(results: DataFrame) -> DataFrame:
    """Round every value and mark the best and second best of each group, of those that are comparable.

    Values that print the same rank the same.
    """
    if results.empty:
        raise InputError("no policy has been evaluated. Run eval first")
    benchmarks = benchmarks_of(results)
    averages = [(AVERAGE, measure) for measure in HEADINGS] if benchmarks else []
    shown = [*((part, measure) for part in benchmarks for measure in ("accuracy", "tokens")), *averages]
    columns = {}
    for part, measure in [*shown, *tasks_of(results)]:
        values = results[part, measure].astype(float)
        digits = DIGITS.get(measure, 3) + (measure == "accuracy" and part == AVERAGE)
        digits += measure == "tokens" and values.max(skipna=True) < SHORT
        texts = [round_text(value, digits) for value in values]
        why = "task differs" if measure not in DIGITS else "differs"
        differs = results[part, why] if (part, why) in results else [math.nan] * len(results)
        pairs = zip(texts, differs, strict=True)
        ranked = [float(text.replace(",", "")) if text and pd.isna(reason) else math.nan for text, reason in pairs]
        printed = pd.Series(ranked, results.index)
        groups = printed.groupby(level="group")
        ranks = groups.rank(method="dense", ascending=(HEADINGS.get(measure, measure)[-1] == "↓"))
        marks = ranks.where(groups.transform("nunique") > 1).map({1: "best", 2: "second"}).fillna("")
        intervals = [_interval(row, part, measure) for _, row in results.iterrows()]
        cells = [Cell(text or MISSING, *rest) for text, *rest in zip(texts, marks, intervals, strict=True)]
        columns[part, HEADINGS.get(measure, measure)] = cells
    older = results["", "older"].eq(True) if ("", "older") in results else [False] * len(results)
    index = [
        (group, f"{policy} (older recipe)" if is_older else policy)
        for (group, policy), is_older in zip(results.index, older, strict=True)
    ]
    return DataFrame(columns, index=pd.MultiIndex.from_tuples(index, names=["Group", "Policy"]))


def _interval(row: Any, part: str, measure: str) -> str:
    """What follows a value: the interval of AES; the standard error of a task, and its difference to the base."""
    if measure == "aes" and not row[[(part, "aes"), (part, "aes_low"), (part, "aes_high")]].isna().any():
        return f"[{round_text(row[part, 'aes_low'], 2)}, {round_text(row[part, 'aes_high'], 2)}]"
    if measure in DIGITS or math.isnan(row[part, measure]):
        return ""
    error, moved, moved_error = (row[part, key] for key in ("error", "difference", "difference_error"))
    own = "" if math.isnan(error) else f"±{error:.3f}"
    if math.isnan(moved):
        return own
    return f"{own} ({moved:+.3f}{'' if math.isnan(moved_error) else f' ±{moved_error:.3f}'})".strip()


def round_text(value: float, digits: int) -> str:
    """Round a value, without a negative zero; empty if it is missing."""
    if math.isnan(value):
        return ""
    text = f"{value:,.{digits}f}"
    return text.lstrip("-") if not text.strip("-0.") else text


def legend(results: DataFrame) -> str:
    """Explain the marks and the columns of a table of results, with the number of problems and samples."""
    benchmarks = benchmarks_of(results)
    where = " of its block" if any(group for group, _ in results.index) else ""
    parts = [f"Bold: best{where}. Underlined: second best."] if len(results) > 1 else []
    parts += ["Acc.: accuracy in %. #Tok.: mean response tokens."] if benchmarks else []
    parts += [counts(results)] if counts(results) else []
    if benchmarks and results[AVERAGE, "aes"].notna().any():
        parts.append(
            "AES: share of tokens saved plus three times the relative gain in accuracy (or minus five times the loss), "
            "compared with the base" + " and averaged over benchmarks" * (len(benchmarks) > 1) + "."
        )
    if benchmarks and results[AVERAGE, "aes_low"].notna().any():
        seeds = ", and widened by the t interval of the training seeds" * (seeds_of(results) > 1)
        parts.append(f"In brackets: 95 % interval, resampling problems for policy and base together{seeds}.")
    if tasks_of(results):
        parts.append(
            "Columns of other harnesses: the score ± its standard error, and in parentheses the difference to the base "
            "± its standard error, paired by question where the questions are known."
        )
    if benchmarks and results[[(AVERAGE, measure) for measure in HEADINGS]].isna().any(axis=None):
        parts.append(f"{MISSING}: not measured, or undefined.")
    return " ".join(parts)


def counts(results: DataFrame) -> str:
    """State how many problems and samples every benchmark has, and in which groups where these differ."""
    sentences = []
    for title, measure in (("Problems", "problems"), ("Samples per problem", "samples")):
        texts = {}
        for name in benchmarks_of(results):
            groups: dict[int, dict[str, None]] = {}
            for (group, _), count in results[name, measure].dropna().items():
                groups.setdefault(int(count), {})[group] = None
            if groups:
                texts[name] = " and ".join(
                    f"{count:,} ({', '.join(filter(None, some))})" if len(groups) > 1 and any(some) else f"{count:,}"
                    for count, some in groups.items()
                )
        if texts:
            each = " on each benchmark" if measure == "problems" and len(texts) > 1 else ""
            listed = ", ".join(f"{name} {text}" for name, text in texts.items())
            sentences.append(f"{title}: {listed if len(set(texts.values())) > 1 else min(texts.values()) + each}.")
    if (most := seeds_of(results)) > 1:
        trained = [policy for _, policy in results.index if policy != "base"]
        fewer = [f"{policy} {count}" for policy in trained if (count := seeds_of(results, policy)) < most]
        sentences.append(f"Training seeds: {most}{f' ({chr(44).join(fewer)})' if fewer else ''}.")
    return " ".join(sentences)


def seeds_of(results: DataFrame, policy: str | None = None) -> int:
    """The number of training seeds in a policy's average; without a policy, the most of any."""
    columns = [(name, "seeds") for name in benchmarks_of(results) if (name, "seeds") in results]
    rows = results if policy is None else results.xs(policy, level="policy")
    counts = rows[columns].min(axis=1).dropna()
    return int(counts.max()) if len(counts) else 1


def sample_size(problems: int, seeds: int) -> str:
    """State how many seeds and problems a figure is based on.

    >>> sample_size(1200, 1), sample_size(200, 3)
    ('1,200 problems', '3 seeds × 200 problems')
    """
    return f"{seeds} seeds × " * (seeds > 1) + f"{problems:,} problems"


def not_compared(results: DataFrame) -> list[str]:
    """Name every result that was not compared with the base, and the settings that differ."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for part, measure in results.columns:
        if measure in ("differs", "task differs"):
            for (_, policy), why in results[part, measure].items():
                if pd.notna(why):
                    reasons.setdefault((policy, why), []).append(part)
    return [
        f"{policy} on {', '.join(parts)} is not compared with the base: {why}."
        for (policy, why), parts in reasons.items()
    ]


def student_names(students: Sequence[Sequence[Run]]) -> list[str]:
    """Name each student by the last part of its model's name, or in full where two would be the same."""
    full = [runs[0].recipe.student.model.rstrip("/") for runs in students]
    short = [name.split("/")[-1] for name in full]
    names = [one if short.count(one) == 1 else long for one, long in zip(short, full, strict=True)]
    marks = [f" ({runs[0].recipe.mark})" if runs[0].recipe.mark else "" for runs in students]
    return [name + mark for name, mark in zip(names, marks, strict=True)]


def cost_table(run: Run, ledger: list[dict[str, Any]], student: str) -> DataFrame:
    """Seconds of one composition for every set of anchors, the smallest first: by part, in total, and online.

    Training is the mean over the compositions of these anchors.
    """
    trained: dict[tuple[str, ...], dict[str, list[float]]] = {}  # by anchors and method
    for method in ("joint", "online"):
        for name, seconds in training_seconds(run, ledger, method).items():
            if name in run.recipe.compositions:
                used = run.recipe.compositions[name].used
                anchors = tuple(one for one in run.recipe.anchors if one in used)
                trained.setdefault(anchors, {}).setdefault(method, []).append(seconds)
    rows = []
    for anchors, by_method in sorted(trained.items(), key=lambda item: len(item[0])):
        offline = offline_cost(run, ledger, anchors)
        if offline is not None and "joint" in by_method:
            parts = {SHARED[stage]: seconds for stage, seconds in offline.cache.items()}
            parts[TRAINING] = fmean(by_method["joint"])
            total = sum(parts.values())
            online = fmean(by_method["online"]) if "online" in by_method else None
            ratio = online / total if online is not None and total else None
            totals = {"online": online, "offline": total, "ratio": ratio}
            rows.append({"student": student, "anchors": anchors, **totals, **parts})
    return DataFrame(rows)


def format_costs(costs: DataFrame) -> DataFrame:
    """Arrange costs as the paper does: a column for every set of anchors, in hours or seconds."""
    unit, divisor = ("h", 3600.0) if costs["offline"].max() >= 360 else ("s", 1.0)

    def numbers(key: str, divisor: float = divisor) -> list[str]:
        return [round_text(value / divisor, 2) or MISSING for value in costs[key].astype(float)]

    rows = {
        "Anchors": [" + ".join(anchors) for anchors in costs["anchors"]],
        "Number of anchors": [str(len(anchors)) for anchors in costs["anchors"]],
        f"Online DOPD, {unit}": numbers("online"),
        f"Lightning Weave, {unit}": numbers("offline"),
        "Online/offline cost ratio": numbers("ratio", 1.0),
        **{part: numbers(part) for part in (*SHARED.values(), TRAINING)},
    }
    table = DataFrame.from_dict(rows, orient="index", columns=list(costs["student"]))
    return table.rename_axis("Student")


def markdown(table: DataFrame) -> str:
    """Write a table as GitHub Markdown."""
    header = [table.index.names[-1], *_flat_names(table)]
    lines = [[escape_markdown(name) for name in header], [":---", *["---:"] * (len(header) - 1)]]
    marks = {"best": "**{}**", "second": "<u>{}</u>", "": "{}"}
    for group, rows in grouped_rows(table):
        if group:
            lines.append([f"***{escape_markdown(group)}***", *[""] * (len(header) - 1)])
        for name, cells in rows:
            texts = [f"{marks[cell.mark].format(escape_markdown(cell.text))} {cell.interval}".strip() for cell in cells]
            lines.append([escape_markdown(name), *texts])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(table: DataFrame, rules: Collection[int] = ()) -> str:
    """Write a table as a LaTeX tabular, with further rules before these rows; it only needs the booktabs package."""
    width = len(table.columns) + 1
    if table.columns.nlevels == 1:
        lines = [rf"\begin{{tabular}}{{@{{}}l{'r' * (width - 1)}@{{}}}}", r"\toprule"]
        lines.append(" & ".join(map(escape_latex, [table.index.names[-1], *table.columns])) + r" \\")
    else:
        parts = spans(table)
        ends = [1 + sum(count for _, count in parts[: at + 1]) for at in range(len(parts))]
        heads = [rf"\multicolumn{{{count}}}{{c}}{{\textbf{{{escape_latex(part)}}}}}" for part, count in parts]
        arrows = {"↑": r"$\uparrow$", "↓": r"$\downarrow$"}
        names = [rf"\textbf{{{escape_latex(name[:-1])}}}{arrows[name[-1]]}" for _, name in table.columns]
        lines = [rf"\begin{{tabular}}{{l{'c' * (width - 1)}}}", r"\toprule", " & ".join(["", *heads]) + r" \\"]
        lines.append("".join(rf"\cmidrule(lr){{{end - n + 1}-{end}}}" for end, (_, n) in zip(ends, parts, strict=True)))
        lines.append(" & ".join([rf"\textbf{{{table.index.names[-1]}}}", *names]) + r" \\")
    number = 0
    for group, rows in grouped_rows(table):
        lines.append(r"\midrule")
        if group:
            lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textbf{{\textit{{{escape_latex(group)}}}}}}} \\")
        for name, cells in rows:
            lines += [r"\midrule"] * (number in rules)
            lines.append(" & ".join([escape_latex(name), *map(_latex_cell, cells)]) + r" \\")
            number += 1
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex_cell(cell: Cell) -> str:
    text = "--" if cell.text == MISSING else escape_latex(cell.text)
    if re.fullmatch(r"-[\d.,]+", text):
        text = rf"$\mathbf{{{text}}}$" if cell.mark == "best" else f"${text}$"  # a minus sign, not a hyphen
    elif cell.mark == "best":
        text = rf"\textbf{{{text}}}"
    if cell.mark == "second":
        text = rf"\underline{{{text}}}"
    interval = cell.interval.replace("±", r"\pm ")
    return rf"{text} {{\scriptsize ${interval}$}}" if interval else text


def to_csv(table: DataFrame) -> str:
    """Write a table as CSV. Numbers of results are neither rounded nor marked, and counts come last."""
    if table.columns.nlevels == 1:
        return str(table.to_csv(lineterminator="\n"))
    names = {"accuracy": "Acc.", "tokens": "#Tok."}
    columns = {"Group": [group for group, _ in table.index], "Policy": format_results(table).index.get_level_values(1)}
    for part in [*benchmarks_of(table), AVERAGE] if (AVERAGE, "accuracy") in table else ():
        columns |= {f"{part} {name}": table[part, measure] for measure, name in names.items()}
    if (AVERAGE, "aes") in table:
        columns |= {name: table[AVERAGE, name.lower().replace(" ", "_")] for name in ("AES", "AES low", "AES high")}
    if seeds_of(table) > 1:
        columns["Seeds"] = [seeds_of(table, policy) for _, policy in table.index]
    for task, metric in tasks_of(table):
        columns[f"{task} {metric[:-1]}"] = table[task, metric]
        further = ("error", "difference", "difference_error")
        columns |= {f"{task} {metric[:-1]} {key.replace('_', ' ')}": table[task, key] for key in further}
    for part in benchmarks_of(table):
        columns |= {f"{part} {key}": table[part, key].astype("Int64") for key in ("problems", "samples")}
    return str(DataFrame({key: list(values) for key, values in columns.items()}).to_csv(index=False))


def plain(table: DataFrame) -> str:
    """Write aligned text for logs and pipes: * marks the best of a column, + the second best."""
    table = _without_repetition(table)
    signs = {"best": "*", "second": "+", "": " "}
    lines = [[table.index.names[-1], *_flat_names(table)]]
    for group, rows in grouped_rows(table):
        lines += [[group]] if group else []
        for name, cells in rows:
            texts = [f"{cell.text}{signs[cell.mark]}{' ' * bool(cell.interval)}{cell.interval}" for cell in cells]
            lines.append([("  " if group else "") + name, *texts])
    return "".join(f"{line}\n" for line in align(lines))


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Pad the first cell of each line on the right and the others on the left; a line of one cell may be of any width.

    >>> align([["group"], ["x", "10"], ["yz", "5"]])
    ['group', 'x   10', 'yz   5']
    """
    widths = [max(map(cell_len, column)) for column in zip(*(line for line in lines if len(line) > 1), strict=True)]
    aligned = []
    for line in lines:
        first, *gaps = (" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=False))
        cells = [line[0] + first, *(gap + cell for gap, cell in zip(gaps, line[1:], strict=True))]
        aligned.append("  ".join(cells).rstrip())
    return aligned


def fits(table: DataFrame, width: int) -> bool:
    """Whether a terminal has room for every column."""
    return max(map(len, plain(table).splitlines())) + 2 * len(table.columns) <= width


def console(table: DataFrame, width: int | None = None, title: str | None = None) -> Table:
    """Build a table for a terminal; where it is too narrow for every benchmark, only the averages are shown."""
    parts = [part for part, _ in table.columns] if table.columns.nlevels == 2 else []
    if width is not None and len(benchmarks := parts[: parts.index(AVERAGE)] if AVERAGE in parts else []) > 2:
        table = table if fits(table, width) else table.iloc[:, len(benchmarks) :]
    table = _without_repetition(table)
    styles = {"best": "bold", "second": "underline", "": ""}
    grid = Table(box=SIMPLE if title is None else None, title=title)
    grid.add_column(table.index.names[-1], no_wrap=title is None, overflow="fold")
    for name in _flat_names(table):
        grid.add_column(name, justify="right", no_wrap=title is None)
    for group, rows in grouped_rows(table):
        if group:
            grid.add_row(Text(group, style="bold italic"))
        for name, cells in rows:
            texts = [Text.assemble((cell.text, styles[cell.mark]), f" {cell.interval}".rstrip()) for cell in cells]
            grid.add_row(Text(name), *texts)
    return grid


def grouped_rows(table: DataFrame) -> Iterator[tuple[str, list[tuple[str, list[Cell]]]]]:
    """The rows of a table by group, in its order."""
    names = table.index if table.index.nlevels == 2 else [("", name) for name in table.index]
    rows = [
        (group, name, [cell if isinstance(cell, Cell) else Cell(str(cell)) for cell in cells])
        for (group, name), cells in zip(names, table.to_numpy(object).tolist(), strict=True)
    ]
    for group, members in groupby(rows, key=lambda row: row[0]):
        yield group, [(name, cells) for _, name, cells in members]


def spans(table: DataFrame) -> list[tuple[str, int]]:
    """The parts of a table of results with the number of their columns."""
    return [(part, len(list(columns))) for part, columns in groupby(part for part, _ in table.columns)]


def _flat_names(table: DataFrame) -> list[str]:
    if table.columns.nlevels == 1:
        return list(table.columns)
    return [name if name == HEADINGS["aes"] else f"{part} {name}" for part, name in table.columns]


def _without_repetition(table: DataFrame) -> DataFrame:
    """Leave out the columns of an only benchmark: its average is the same."""
    parts = [part for part, _ in spans(table)] if table.columns.nlevels == 2 else []
    if AVERAGE not in parts or parts.index(AVERAGE) != 1:
        return table
    columns = [(parts[0] if part == AVERAGE else part, name) for part, name in table.columns[2:]]
    table = table.iloc[:, 2:]
    return table.set_axis(pd.MultiIndex.from_tuples(columns), axis=1)


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    names = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless", ">": "textgreater"}
    return re.sub(
        r"[\\~^<>&%$#_{}]",
        lambda hit: rf"\{names[hit[0]]}{{}}" if hit[0] in names else "\\" + hit[0],
        " ".join(text.split()),
    )


def escape_markdown(text: str) -> str:
    """Escape text for a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|~])", r"\\\1", " ".join(text.split()))
