"""Results as a person meets them in a notebook: lists of plain dicts that also draw themselves."""

import html
import io
from collections.abc import Callable
from typing import Any, SupportsIndex, overload

from rich.console import Console

WIDTH = 120  # characters, of what is drawn as on a terminal
SHOWN = 50  # rows of a table, and no more than LONG characters of a cell: responses are long
LONG = 300
_PRE = '<pre style="line-height:1.3">{code}</pre>'


class Records(list[dict[str, Any]]):
    """Rows that `pandas.DataFrame(rows)` takes as they are; a notebook shows them as a table.

    >>> Records([{"policy": "base", "accuracy": 75.25}, {"policy": "a<b"}])._repr_html_()
    '<table><tr><th>policy</th><th>accuracy</th></tr><tr><td>base</td><td>75.25</td></tr><tr><td>a&lt;b</td><td></td></tr></table>'
    """

    @overload
    def __getitem__(self, place: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> "Records": ...

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        item: Any = super().__getitem__(place)
        return Records(item) if isinstance(place, slice) else item

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        shown = [_row("td", [_cell(row.get(name)) for name in names]) for row in self[:SHOWN]]
        rest = f"<p>{len(self) - SHOWN:,} more rows</p>" if len(self) > SHOWN else ""
        return f"<table>{_row('th', names)}{''.join(shown)}</table>{rest}"


def as_html(draw: Callable[[Console], object]) -> str:
    """Draw for a terminal, and give that as HTML."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH)
    draw(console)
    return console.export_html(inline_styles=True, code_format=_PRE)


def _row(tag: str, cells: list[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONG else f"{text[: LONG - 1]}…"
