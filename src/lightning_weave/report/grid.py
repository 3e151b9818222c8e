"""A table that is texts alone: its header is the first line, its names the first column."""

import csv
import io
import re
from collections.abc import Collection, Sequence

TextTable = Sequence[Sequence[str]]


def markdown(lines: TextTable) -> str:
    """Write the table as GitHub Markdown."""
    escaped = [[escape_markdown(text) for text in line] for line in lines]
    rule = [":---", *["---:"] * (len(lines[0]) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (escaped[0], rule, *escaped[1:]))


def latex(lines: TextTable, rules: Collection[int] = (1,)) -> str:
    """Write the table as a LaTeX tabular with a rule before these lines; it only needs the booktabs package."""
    body = [
        (r"\midrule" + "\n") * (at in rules) + " & ".join(map(escape_latex, line)) + r" \\"
        for at, line in enumerate(lines)
    ]
    columns = "r" * (len(lines[0]) - 1)
    parts = [rf"\begin{{tabular}}{{@{{}}l{columns}@{{}}}}", r"\toprule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(parts) + "\n"


def to_csv(lines: TextTable) -> str:
    """Write the table as CSV."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()


def escape_latex(text: str) -> str:
    """Escape text for LaTeX."""
    names = {"\\": "textbackslash", "~": "textasciitilde", "^": "textasciicircum", "<": "textless", ">": "textgreater"}
    return re.sub(
        r"[\\~^<>&%$#_{}]", lambda hit: rf"\{names[hit[0]]}{{}}" if hit[0] in names else "\\" + hit[0], _one_line(text)
    )


def escape_markdown(text: str) -> str:
    """Escape text for a Markdown table."""
    return re.sub(r"([\\`*_{}\[\]<>|~])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())
