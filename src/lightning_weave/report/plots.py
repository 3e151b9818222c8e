"""The other figures of the report: dot plots, line plots, bars, and the cost per composition."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from lightning_weave.bench.statistics import Interval
from lightning_weave.report.figures import BLUE, GREY, INK, ORANGE, PALETTE, STYLE, VERMILION, literal

Line = Sequence[tuple[float, float]]
WIDTH = 4.7
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))


def profile(policies: Sequence[str], columns: Mapping[str, Sequence[Interval]]) -> Any:
    """Draw one panel per column (AES, then each benchmark), one row per policy."""
    across = 2 if len(columns) == 4 else min(len(columns), 3)
    down = -(-len(columns) // across)
    with pyplot.rc_context(STYLE):
        size = (WIDTH, down * (0.95 + 0.22 * len(policies)))
        figure, grid = pyplot.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        places = list(range(len(policies)))[::-1]
        for axes, (name, column) in zip(grid.flat, columns.items(), strict=False):
            colour = VERMILION if name == "AES" else BLUE
            axes.hlines(
                places, [cell.low for cell in column], [cell.high for cell in column], color=colour, linewidth=1
            )
            axes.scatter([cell.estimate for cell in column], places, color=colour, s=22, zorder=3)
            axes.set_title(literal(name))
            axes.set_xlabel("" if name == "AES" else "accuracy, %")
            axes.set_yticks(places, [literal(policy) for policy in policies])
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_locator(MaxNLocator(3))
            axes.margins(0.12, 0.6 / max(len(policies), 1))
            if name == "AES":
                axes.axvline(0, color=INK, linewidth=0.7)
        for axes in list(grid.flat)[len(columns) :]:
            axes.remove()
    return figure


def lines(panels: Mapping[str, Mapping[str, Line]], x: str, y: str, *, logarithmic: bool = False) -> Any:
    """Draw one panel per key with one line per policy, and a shared legend."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    styles = dict(zip(names, zip(cycle(PALETTE), _dashes(len(names)), strict=False), strict=False))
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    with pyplot.rc_context(STYLE):
        legend_rows = -(-len(names) // 3)
        size = (WIDTH, down * 2.4 + 0.2 * legend_rows)
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False)
        for axes, (title, panel) in zip(grid.flat, panels.items(), strict=False):
            for name, line in panel.items():
                colour, dash = styles[name]
                marker = "o" if len(line) <= 12 else ""
                values = [value for _, value in line]
                axes.plot([at for at, _ in line], values, color=colour, linestyle=dash, marker=marker, markersize=3)
            axes.set_title(literal(title))
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            if logarithmic and all(value > 0 for line in panel.values() for _, value in line):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(ScalarFormatter())
                axes.yaxis.set_minor_formatter(NullFormatter() if _spans_decade(panel) else ScalarFormatter())
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        handles = [pyplot.Line2D([], [], color=c, linestyle=d, label=literal(n)) for n, (c, d) in styles.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _spans_decade(panel: Mapping[str, Line]) -> bool:
    values = [value for line in panel.values() for _, value in line]
    return max(values) >= 10 * min(values)


def _dashes(count: int) -> list[Any]:
    """Change the dash pattern each time the palette repeats."""
    return [DASHES[index // len(PALETTE) % len(DASHES)] for index in range(count)]


def stacked(
    rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], x: str, *, shares: bool = False
) -> Any:
    """Draw stacked horizontal bars; with `shares`, each bar adds up to 100 % and its parts are labelled."""
    with pyplot.rc_context(STYLE):
        used = dict.fromkeys(part for parts in rows.values() for part, value in parts.items() if value > 0)
        columns = 4 if max(map(len, used), default=0) < 12 else 1
        legend = -(-len(used) // columns)
        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.75 + 0.3 * len(rows) + 0.19 * legend))
        for place, parts in enumerate(rows.values()):
            start = 0.0
            total = sum(parts.values()) or 1.0
            for part, value in parts.items():
                width = 100 * value / total if shares else value
                axes.barh(-place, width, left=start, color=colours[part], height=0.66, edgecolor="white", linewidth=0.4)
                if shares and width >= 8:
                    label = {"ha": "center", "va": "center", "fontsize": 8, "color": "white"}
                    axes.text(start + width / 2, -place, f"{width:.0f} %", **label)
                start += width
        _label_rows(axes, list(rows), x)
        if shares:
            axes.set_xlim(0, 100)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=colours[part], label=part) for part in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def amortised(cache: float, training: float, online: float | None, made: int, unit: str) -> Any:
    """Draw the cost of one composition when n of them share a cache, beside online training if it was measured."""
    counts = list(range(1, max(made, 8) + 1))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.6))
        costs = [cache / count + training for count in counts]
        axes.plot(counts, costs, color=BLUE, marker="o", markersize=3, label="offline, shared cache")
        axes.axhline(training, color=GREY, linewidth=0.9, linestyle=DASHES[2], label="training only")
        axes.scatter([made], [cache / made + training], s=70, facecolors="none", edgecolors=VERMILION, zorder=3)
        if online is not None:
            axes.axhline(online, color=ORANGE, linewidth=1.2, label="online, measured")
        axes.set_ylim(bottom=0)
        axes.set_xlabel(f"compositions that share a cache (circled: the {made} of this run)")
        axes.set_ylabel(f"{unit} per composition")
        axes.legend()
    return figure


def grouped(rows: Mapping[str, Mapping[str, float]], colours: Mapping[str, str], x: str) -> Any:
    """Draw a group of horizontal bars for each row, one bar per series."""
    series = list(colours)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + len(rows) * (0.2 + 0.15 * len(series))))
        height = 0.8 / max(len(series), 1)
        for number, name in enumerate(series):
            places = [-row + 0.4 - (number + 0.5) * height for row in range(len(rows))]
            values = [values.get(name, 0.0) for values in rows.values()]
            axes.barh(places, values, height=0.9 * height, color=colours[name], label=literal(name))
        _label_rows(axes, list(rows), x)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _label_rows(axes: Any, names: Sequence[str], x: str) -> None:
    axes.set_yticks([-row for row in range(len(names))], [literal(name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x)
