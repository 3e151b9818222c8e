"""The paper's own numbers, rendered: bold and underline must stand where the paper prints them."""

import csv
import io
import re

import pandas as pd
import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.report.page import Page, render
from lightning_weave.report.tables import (
    Cell,
    console,
    escape_latex,
    escape_markdown,
    format_results,
    latex,
    legend,
    markdown,
    plain,
    to_csv,
)
from report.evaluated import result_row, results_of

BENCHMARKS = ["AIME 2024", "AIME 2025", "HMMT 2025", "LCB v5", "LCB v6"]

# group | policy | accuracy and tokens of five benchmarks, their averages, AES. * is printed bold, + underlined.
MAIN = """
Qwen3-1.7B | Base | 45.8 17,564 40.4 17,537 21.7 17,570 35.1 14,796 30.3 14,409 34.66 16,375 0.00
Qwen3-1.7B | Klear-only | 53.2+ 18,457 41.7* 19,178 24.1* 19,751 38.3* 15,131 31.9+ 15,198 37.84+ 17,543 0.20+
Qwen3-1.7B | DECS-only | 46.2 14,558* 34.9 14,534* 20.9 14,160* 33.1 13,406* 30.5 13,039* 33.12 13,939* -0.08
Qwen3-1.7B | Weave | 55.1* 15,289+ 40.8+ 16,151+ 22.9+ 15,855+ 38.1+ 14,284+ 32.8* 13,680+ 37.94* 15,052+ 0.34*
Qwen3-4B | Base | 72.9 14,641 65.4 17,844 41.4 17,626 53.0 13,843 46.8 14,663 55.90 15,723 0.00
Qwen3-4B | Klear-only | 75.8+ 15,061 71.3* 17,715 45.6* 18,230 57.4+ 13,252 49.6+ 13,776 59.94* 15,607 0.23+
Qwen3-4B | DECS-only | 68.3 10,918* 60.6 12,429* 35.0 11,862* 53.0 12,531+ 46.2 13,437+ 52.62 12,235* -0.09
Qwen3-4B | Weave | 76.0* 11,521+ 70.1+ 13,816+ 43.0+ 13,743+ 59.2* 11,702* 51.3* 12,357* 59.92+ 12,628+ 0.41*
"""
ANCHORS = """
 | Base | 72.9 14,641 65.4 17,844 41.4 17,626 53.0 13,843 46.8 14,663 55.90 15,723 0.00
Single anchor | Klear-only | 75.8 15,061 71.3 17,715 45.6 18,230 57.4 13,252 49.6 13,776 59.94 15,607 0.23
Single anchor | DECS-only | 68.3 10,918* 60.6 12,429* 35.0 11,862* 53.0 12,531+ 46.2 13,437 52.62 12,235* -0.09
Single anchor | MiMo-RL | 76.0+ 16,646 71.3 19,580 45.8 19,879 57.0 14,383 47.9 14,939 59.60 17,085 0.12
Two anchors | Klear+DECS | 76.0+ 11,521+ 70.1 13,816+ 43.0 13,743+ 59.2+ 11,702* 51.3 12,357* 59.92 12,628+ 0.41+
Two anchors | Klear+MiMo-RL | 78.7* 19,031 74.9* 21,355 50.5* 22,328 63.4* 14,778 54.4* 15,395 64.38* 18,577 0.31
Two anchors | DECS+MiMo-RL | 74.2 12,966 66.5 15,336 40.9 15,144 56.5 12,915 48.3 13,333+ 57.28 13,939 0.18
Three anchors | All | 78.7* 14,268 73.6+ 16,838 47.5+ 16,731 59.2+ 12,930 53.4+ 13,609 62.50+ 14,875 0.42*
"""


def paper_table(text: str, grouped: bool = True) -> tuple[pd.DataFrame, list[list[str]]]:
    rows, printed = [], []
    for line in text.strip("\n").splitlines():
        group, policy, values = (part.strip() for part in line.split("|"))
        numbers = [float(value.rstrip("*+").replace(",", "")) for value in values.split()]
        scores = {name: tuple(numbers[2 * k : 2 * k + 2]) for k, name in enumerate(BENCHMARKS)}
        rows.append(result_row(policy, scores, tuple(numbers[10:13]), group=group if grouped else ""))
        printed.append(values.split())
    return results_of(*rows), printed


def cells_of(results: pd.DataFrame) -> list[list[Cell]]:
    return format_results(results).to_numpy().tolist()


def with_signs(line: list) -> list[str]:
    return [cell.text + {"best": "*", "second": "+", "": ""}[cell.mark] for cell in line]


@pytest.mark.parametrize(("text", "grouped"), [(MAIN, True), (ANCHORS, False)], ids=["main", "anchors"])
def test_marks_and_digits_are_the_papers(text, grouped):
    results, printed = paper_table(text, grouped)
    assert [with_signs(line) for line in cells_of(results)] == printed


def test_markdown_prints_the_papers_marks():
    results, printed = paper_table(MAIN)
    lines = [line.strip("| ").split(" | ") for line in markdown(format_results(results)).splitlines()]
    body = [line for line in lines[2:] if not line[0].startswith("***")]
    back = [re.sub(r"\*\*(.*?)\*\*", r"\1*", re.sub(r"<u>(.*?)</u>", r"\1+", " ".join(line[1:]))) for line in body]
    assert back == [" ".join(line) for line in printed]
    assert [line[0] for line in lines[2:] if line[0].startswith("***")] == ["***Qwen3-1.7B***", "***Qwen3-4B***"]
    assert lines[0][1:3] == ["AIME 2024 Acc.↑", "AIME 2024 #Tok.↓"]


def test_latex_prints_the_papers_rows():
    text = latex(format_results(paper_table(MAIN)[0]))
    assert (
        r"Weave & \textbf{76.0} & \underline{11,521} & \underline{70.1} & \underline{13,816} & \underline{43.0} & "
        r"\underline{13,743} & \textbf{59.2} & \textbf{11,702} & \textbf{51.3} & \textbf{12,357} & "
        r"\underline{59.92} & \underline{12,628} & \textbf{0.41} \\"
    ) in text.splitlines()
    assert r"33.12 & \textbf{13,939} & $-0.08$ \\" in text
    body = [line for line in text.splitlines() if "&" in line]
    assert {line.count("&") for line in body[1:]} == {13}  # 14 columns; the first header spans
    assert sum(map(int, re.findall(r"multicolumn\{(\d+)\}\{c\}", body[0]))) == 13
    assert text.count("{") == text.count("}")
    assert r"\cmidrule(lr){12-14}" in text
    assert r"\begin{tabular}{lccccccccccccc}" in text


def test_of_one_benchmark_text_has_no_separate_average():
    """Neither in a pipe nor on a terminal that is too narrow for both."""
    table = format_results(results_of(result_row("base", {"sums": (55.5, 4.0)}, (55.5, 4.0, 0.0))))
    assert plain(table).splitlines()[0].split() == ["Policy", "sums", "Acc.↑", "sums", "#Tok.↓", "AES↑"]
    assert plain(table).splitlines()[1].split() == ["base", "55.50", "4.0", "0.00"]
    shown = [column.header for column in console(table, width=20).columns]
    assert shown == ["Policy", "sums Acc.↑", "sums #Tok.↓", "AES↑"]


def test_csv_keeps_every_digit_and_leaves_gaps_empty():
    third = 1 / 3
    table = results_of(result_row('a "b", c', {"X": (third, 1234.5678, 30)}, (third, 1234.5678), group="g"))
    header, line = csv.reader(io.StringIO(to_csv(table)))
    assert dict(zip(header, line, strict=True)) == {
        "Group": "g", "Policy": 'a "b", c', "X Acc.": repr(third), "X #Tok.": "1234.5678",
        "Average Acc.": repr(third), "Average #Tok.": "1234.5678", "AES": "", "AES low": "", "AES high": "",
        "X problems": "30", "X samples": "",
    }  # fmt: skip


def one(policy: str, accuracy: float, *aes: float) -> dict:
    return result_row(policy, {"X": (accuracy, 100.0)}, (accuracy, 100.0, *aes))


def test_values_that_print_alike_rank_alike():
    table = results_of(one("a", 50.04), one("b", 49.96), one("c", 49.9), one("d", 49.8))
    assert [(line[0].text, line[0].mark) for line in cells_of(table)] == [
        ("50.0", "best"), ("50.0", "best"), ("49.9", "second"), ("49.8", "")
    ]  # fmt: skip


def test_nothing_is_marked_where_nothing_differs_or_is_alone():
    table = results_of(one("a", 50.0), one("b", 60.0))
    assert {line[1].mark for line in cells_of(table)} == {""}  # tokens are equal
    assert {cell.mark for cell in cells_of(table[:1])[0]} == {""}


def test_missing_values_take_no_place():
    nan = float("nan")
    table = results_of(one("a", nan), one("b", 10.0, -0.2, -0.3, -0.1), one("c", 20.0, -0.001, -0.2, 0.004))
    lines = cells_of(table)
    assert [line[0].mark for line in lines] == ["", "second", "best"]
    assert [(line[-1].text, line[-1].mark, line[-1].interval) for line in lines] == [
        ("–", "", ""), ("-0.20", "second", "[-0.30, -0.10]"), ("0.00", "best", "[-0.20, 0.00]")
    ]  # fmt: skip
    assert "| **0.00** [-0.20, 0.00] |" in markdown(format_results(table))
    assert r"\underline{$-0.20$} {\scriptsize $[-0.30, -0.10]$} \\" in latex(format_results(table))
    assert "not measured, or undefined" in legend(table)


def test_a_result_that_is_not_comparable_takes_no_place_either():
    table = results_of(one("a", 10.0), one("b", 20.0), one("c", 30.0))
    table["X", "differs"] = [None, None, "format = plain (base: boxed)"]
    assert [line[0].mark for line in cells_of(table)] == ["second", "best", ""]


def test_names_cannot_break_a_table():
    name = "a|b_*c*\\ <x> & 50% $y$ #1 {z} ~^\nnew"
    results = results_of(one(name, 1.0))
    table = format_results(results)
    assert len(markdown(table).splitlines()) == 3
    assert len(re.findall(r"(?<!\\)\|", markdown(table).splitlines()[2])) == 7
    assert escape_markdown("a|b_*c*") == r"a\|b\_\*c\*"
    assert (
        escape_latex(name)
        == r"a|b\_*c*\textbackslash{} \textless{}x\textgreater{} \& 50\% \$y\$ \#1 \{z\} \textasciitilde{}"
        r"\textasciicircum{} new"
    )
    line = next(line for line in latex(table).splitlines() if line.startswith("a|b"))
    assert len(re.findall(r"(?<!\\)&", line)) == 5
    assert "&lt;x&gt; &amp; 50%" in render(Page("t", "", "", "", [], results=results))


def test_plain_console_and_html_show_the_same_values():
    results, printed = paper_table(MAIN)
    table = format_results(results)
    lines = plain(table).splitlines()
    assert [line.split()[-13:] for line in lines if line.startswith("  ")] == printed
    assert len({line.rindex(".") for line in lines if line.startswith("  ")}) == 1  # digits are aligned
    screen = io.StringIO()
    Console(file=screen, width=250, force_terminal=True, color_system="standard").print(console(table))
    assert "\x1b[1m76.0\x1b[0m" in screen.getvalue()
    assert "\x1b[4m11,521\x1b[0m" in screen.getvalue()
    assert "Qwen3-4B" in screen.getvalue()
    page = render(Page("t", "", "", "", [], results=results))
    rows = re.findall(r"<tr><th scope=.row.>.*?</tr>", page)
    found = [re.findall(r"<td>(.*?)</td>", row) for row in rows]
    signs = [[re.sub("<b>(.*)</b>", r"\1*", re.sub("<u>(.*)</u>", r"\1+", cell)) for cell in row] for row in found]
    assert [[cell.replace("−", "-") for cell in row] for row in signs] == [
        [*line[10:], *line[:10]]
        for line in printed  # averages first
    ]


def test_nothing_evaluated_names_the_command():
    with pytest.raises(InputError, match="Run eval"):
        format_results(pd.DataFrame())


@pytest.mark.parametrize("width", [80, 100, 250])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    table = format_results(paper_table(MAIN)[0])
    screen = io.StringIO()
    Console(file=screen, width=width).print(console(table, width=width))
    text = screen.getvalue()
    assert "…" not in text
    assert "55.90" in text
    assert "15,723" in text
    assert ("72.9" in text) == (width == 250)  # the benchmarks only where there is room


def test_short_responses_are_told_apart() -> None:
    def row(name: str, tokens: float) -> dict:
        return result_row(name, {"sums": (70.0, tokens)}, (70.0, tokens))

    rows = [row("a", 21.4), row("b", 20.8)]
    assert [line[1].text for line in cells_of(results_of(*rows))] == ["21.4", "20.8"]
    assert [line[1].text for line in cells_of(results_of(*rows, row("c", 1234.4)))] == ["21", "21", "1,234"]


def test_the_legend_has_the_number_of_problems_and_samples() -> None:
    def block(student: str, code: int) -> dict:
        scores = {"AIME": (1, 9, 30, 64), "LCB": (2, 9, 167, code)}
        return result_row("base", scores, (1, 9), group=student)

    two = legend(results_of(block("1.7B", 4), block("4B", 4)))
    assert "Problems: AIME 30, LCB 167. Samples per problem: AIME 64, LCB 4." in two
    assert "Samples per problem: AIME 64, LCB 1 (1.7B) and 4 (4B, 7B)." in legend(
        results_of(block("1.7B", 1), block("4B", 4), block("7B", 4))
    )
    assert "Samples per problem: 64." in legend(results_of(block("1.7B", 64)))
    assert "Samples" not in legend(results_of(one("a", 50.0)))
