"""The paper's own numbers, rendered: bold and underline must stand where the paper prints them."""

import csv
import io
import re

import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.report.grid import escape_latex, escape_markdown
from lightning_weave.report.tables import (
    BenchmarkScore,
    PolicyRow,
    cells,
    console,
    latex,
    legend,
    markdown,
    plain,
    to_csv,
)

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


def paper_rows(text: str) -> tuple[list[PolicyRow], list[list[str]]]:
    rows, printed = [], []
    for line in text.strip("\n").splitlines():
        group, policy, values = (part.strip() for part in line.split("|"))
        numbers = [float(value.rstrip("*+").replace(",", "")) for value in values.split()]
        scores = tuple(BenchmarkScore(name, *numbers[2 * k : 2 * k + 2]) for k, name in enumerate(BENCHMARKS))
        rows.append(PolicyRow(policy, scores, *numbers[10:13], group=group))
        printed.append(values.split())
    return rows, printed


def with_signs(line: list) -> list[str]:
    return [cell.text + {"best": "*", "second": "+", "": ""}[cell.mark] for cell in line]


@pytest.mark.parametrize(("text", "marks"), [(MAIN, "group"), (ANCHORS, "table")], ids=["main", "anchors"])
def test_marks_and_digits_are_the_papers(text, marks):
    rows, printed = paper_rows(text)
    assert [with_signs(line) for line in cells(rows, marks)] == printed


def test_markdown_prints_the_papers_marks():
    rows, printed = paper_rows(MAIN)
    lines = [line.strip("| ").split(" | ") for line in markdown(rows).splitlines()]
    body = [line for line in lines[2:] if not line[0].startswith("***")]
    back = [re.sub(r"\*\*(.*?)\*\*", r"\1*", re.sub(r"<u>(.*?)</u>", r"\1+", " ".join(line[1:]))) for line in body]
    assert back == [" ".join(line) for line in printed]
    assert [line[0] for line in lines[2:] if line[0].startswith("***")] == ["***Qwen3-1.7B***", "***Qwen3-4B***"]
    assert lines[0][1:3] == ["AIME 2024 Acc.↑", "AIME 2024 #Tok.↓"]


def test_latex_prints_the_papers_rows():
    rows, _ = paper_rows(MAIN)
    text = latex(rows)
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


def test_of_one_benchmark_text_has_no_average_beside_it():
    """Neither in a pipe nor on a terminal that is too narrow for both."""
    row = PolicyRow("base", (BenchmarkScore("sums", 55.5, 4.0),), 55.5, 4.0, 0.0)
    assert plain([row]).splitlines()[0].split() == ["Policy", "sums", "Acc.↑", "sums", "#Tok.↓", "AES↑"]
    assert plain([row]).splitlines()[1].split() == ["base", "55.50", "4.0", "0.00"]
    shown = [column.header for column in console([row], width=20).columns]
    assert shown == ["Policy", "sums Acc.↑", "sums #Tok.↓", "AES↑"]


def test_csv_keeps_every_digit_and_leaves_gaps_empty():
    row = PolicyRow(
        'a "b", c', (BenchmarkScore("X", 1 / 3, 1234.5678),), 1 / 3, 1234.5678, float("nan"), None, None, "g"
    )
    header, line = csv.reader(io.StringIO(to_csv([row])))
    assert dict(zip(header, line, strict=True)) == {
        "Group": "g", "Policy": 'a "b", c', "X Acc.": repr(1 / 3), "X #Tok.": "1234.5678",
        "Average Acc.": repr(1 / 3), "Average #Tok.": "1234.5678", "AES": "", "AES low": "", "AES high": "",
    }  # fmt: skip


def one(policy: str, accuracy: float, aes: float | None = None, low: float | None = None, high: float | None = None):
    return PolicyRow(policy, (BenchmarkScore("X", accuracy, 100.0),), accuracy, 100.0, aes, low, high)


def test_values_that_print_alike_rank_alike():
    first = [line[0] for line in cells([one("a", 50.04), one("b", 49.96), one("c", 49.9), one("d", 49.8)])]
    assert [(cell.text, cell.mark) for cell in first] == [
        ("50.0", "best"), ("50.0", "best"), ("49.9", "second"), ("49.8", "")
    ]  # fmt: skip


def test_nothing_is_marked_where_nothing_differs_or_is_alone():
    rows = [one("a", 50.0), one("b", 60.0)]
    assert {line[1].mark for line in cells(rows)} == {""}  # tokens are equal
    assert {cell.mark for cell in cells(rows[:1])[0]} == {""}


def test_missing_values_take_no_place():
    rows = [one("a", float("nan"), None), one("b", 10.0, -0.2, -0.3, -0.1), one("c", 20.0, -0.001, -0.2, 0.004)]
    table = cells(rows)
    assert [line[0].mark for line in table] == ["", "second", "best"]
    assert [(line[-1].text, line[-1].mark, line[-1].interval) for line in table] == [
        ("–", "", ""), ("-0.20", "second", "[-0.30, -0.10]"), ("0.00", "best", "[-0.20, 0.00]")
    ]  # fmt: skip
    assert "| **0.00** [-0.20, 0.00] |" in markdown(rows)
    assert r"\underline{$-0.20$} {\scriptsize $[-0.30, -0.10]$} \\" in latex(rows)


def test_names_cannot_break_a_table():
    name = "a|b_*c*\\ <x> & 50% $y$ #1 {z} ~^\nnew"
    row = one(name, 1.0)
    assert len(markdown([row]).splitlines()) == 3
    assert len(re.findall(r"(?<!\\)\|", markdown([row]).splitlines()[2])) == 7
    assert escape_markdown("a|b_*c*") == r"a\|b\_\*c\*"
    assert (
        escape_latex(name)
        == r"a|b\_*c*\textbackslash{} \textless{}x\textgreater{} \& 50\% \$y\$ \#1 \{z\} \textasciitilde{}"
        r"\textasciicircum{} new"
    )
    line = next(line for line in latex([row]).splitlines() if line.startswith("a|b"))
    assert len(re.findall(r"(?<!\\)&", line)) == 5


def test_plain_and_console_show_the_same_values():
    rows, printed = paper_rows(MAIN)
    lines = plain(rows).splitlines()
    assert [line.split()[-13:] for line in lines if line.startswith("  ")] == printed
    assert len({line.rindex(".") for line in lines if line.startswith("  ")}) == 1  # digits stand under digits
    screen = io.StringIO()
    Console(file=screen, width=250, force_terminal=True, color_system="standard").print(console(rows))
    assert "\x1b[1m76.0\x1b[0m" in screen.getvalue()
    assert "\x1b[4m11,521\x1b[0m" in screen.getvalue()
    assert "Qwen3-4B" in screen.getvalue()


def test_rows_of_other_benchmarks_are_refused():
    other = PolicyRow("b", (BenchmarkScore("Y", 1.0, 1.0),), 1.0, 1.0)
    with pytest.raises(InputError, match="b was evaluated on"):
        markdown([one("a", 1.0), other])
    with pytest.raises(InputError, match="Run eval"):
        latex([])


@pytest.mark.parametrize("width", [80, 100, 250])
def test_a_narrow_terminal_cuts_no_number(width: int) -> None:
    rows, _ = paper_rows(MAIN)
    screen = io.StringIO()
    Console(file=screen, width=width).print(console(rows, width=width))
    text = screen.getvalue()
    assert "…" not in text
    assert "55.90" in text
    assert "15,723" in text
    assert ("72.9" in text) == (width == 250)  # the benchmarks only where there is room


def test_short_responses_are_told_apart() -> None:
    rows = [
        PolicyRow(name, (BenchmarkScore("sums", 70.0, tokens),), 70.0, tokens)
        for name, tokens in (("a", 21.4), ("b", 20.8))
    ]
    assert [[cell.text for cell in line][1] for line in cells(rows)] == ["21.4", "20.8"]
    longer = [*rows, PolicyRow("c", (BenchmarkScore("sums", 70.0, 1234.4),), 70.0, 1234.4)]
    assert [[cell.text for cell in line][1] for line in cells(longer)] == ["21", "21", "1,234"]


def test_the_legend_says_how_many_samples_a_column_averages() -> None:
    def block(student: str, code: int) -> PolicyRow:
        return PolicyRow(
            "base", (BenchmarkScore("AIME", 1, 9, 64), BenchmarkScore("LCB", 2, 9, code)), 1, 9, group=student
        )

    assert "Samples per problem: AIME 64, LCB 4." in legend([block("1.7B", 4), block("4B", 4)])
    assert "Samples per problem: AIME 64, LCB 1 (1.7B) and 4 (4B, 7B)." in legend(
        [block("1.7B", 1), block("4B", 4), block("7B", 4)]
    )
    assert "Samples per problem: 64." in legend([block("1.7B", 64)])
    assert "Samples" not in legend([one("a", 50.0)])
