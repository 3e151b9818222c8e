"""Results as a person meets them in a notebook: lists of plain dicts that also draw themselves."""

import html
import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

WIDTH = 120  # characters, of what is drawn as on a terminal
_PRE = '<pre style="line-height:1.3">{code}</pre>'


class Records(list[dict[str, Any]]):
    """Rows that `pandas.DataFrame(rows)` takes as they are; a notebook shows them as a table.

    >>> Records([{"policy": "base", "accuracy": 75.25}, {"policy": "a<b"}])._repr_html_()
    '<table><tr><th>policy</th><th>accuracy</th></tr><tr><td>base</td><td>75.25</td></tr><tr><td>a&lt;b</td><td></td></tr></table>'
    """

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        rows = [_row("th", names), *(_row("td", [_cell(row.get(name)) for name in names]) for row in self)]
        return f"<table>{''.join(rows)}</table>"


def as_html(draw: Callable[[Console], object]) -> str:
    """Draw for a terminal, and give that as HTML."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    draw(console)
    return console.export_html(inline_styles=True, code_format=_PRE)


def _row(tag: str, cells: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
