"""The other figures of the report: dot plots, line plots, bars, and the cost per composition."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from lightning_weave.bench.statistics import Interval
from lightning_weave.report.colours import COLOURS, Hue, Hues
from lightning_weave.report.figures import INK, STYLE, WIDTH, literal, span_at_least

Line = Sequence[tuple[float, float]]
READABLE = (2, 3, 4, 6, 8)  # ticks between powers of ten whose labels have room
DARK = ("slate", "clay")  # parts of a bar whose label is white


def profile(policies: Sequence[str], columns: Mapping[str, Sequence[Interval]], hues: Hues) -> Any:
    """Draw one panel per column (AES, then each benchmark), one row per policy."""
    across = min(len(columns), 2)
    down = -(-len(columns) // across)
    with pyplot.rc_context(STYLE):
        size = (WIDTH, down * (0.8 + 0.2 * len(policies)))
        figure, grid = pyplot.subplots(down, across, figsize=size, sharey=True, squeeze=False)
        places = list(range(len(policies)))[::-1]
        colours = [hues[policy].hex for policy in policies]
        for axes, (name, column) in zip(grid.flat, columns.items(), strict=False):
            axes.hlines(
                places, [cell.low for cell in column], [cell.high for cell in column], color=colours, linewidth=1.3
            )
            axes.scatter([cell.estimate for cell in column], places, color=colours, s=24, zorder=3)
            axes.set_title(literal(name) if name == "AES" else f"{literal(name)}, %")
            axes.set_yticks(places, [literal(policy) for policy in policies])
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_locator(MaxNLocator(3))
            axes.margins(0.12, 0.6 / max(len(policies), 1))
            if name == "AES":
                axes.axvline(0, color=INK, linewidth=0.7)
            else:
                span_at_least(axes.get_xlim, axes.set_xlim)
        for axes in list(grid.flat)[len(columns) :]:
            axes.remove()
    return figure


def lines(panels: Mapping[str, Mapping[str, Line]], x: str, y: str, hues: Hues, *, logarithmic: bool = False) -> Any:
    """Draw one panel per key with one line per policy, and a shared legend."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    with pyplot.rc_context(STYLE):
        columns = 3 if max(map(len, names), default=0) < 14 else 2
        size = (WIDTH, down * 2.2 + 0.2 * -(-len(names) // columns))
        figure, grid = pyplot.subplots(down, across, figsize=size, squeeze=False)
        for place, (axes, (title, panel)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
            for name, line in panel.items():
                marker = "o" if len(line) <= 12 else ""
                style = {"color": hues[name].hex, "linestyle": hues[name].dash, "marker": marker, "markersize": 3}
                axes.plot([at for at, _ in line], [value for _, value in line], **style)
            axes.set_title(literal(title))
            axes.set_xlabel(x)
            if place % across == 0:
                axes.set_ylabel(y)
            if logarithmic and all(value > 0 for line in panel.values() for _, value in line):
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(ScalarFormatter())
                axes.yaxis.set_minor_locator(LogLocator(subs=READABLE))
                axes.yaxis.set_minor_formatter(NullFormatter() if _spans_decade(panel) else ScalarFormatter())
        for axes in list(grid.flat)[len(panels) :]:
            axes.remove()
        handles = [pyplot.Line2D([], [], color=hues[n].hex, linestyle=hues[n].dash, label=literal(n)) for n in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure


def _spans_decade(panel: Mapping[str, Line]) -> bool:
    values = [value for line in panel.values() for _, value in line]
    return max(values) >= 10 * min(values)


def stacked(rows: Mapping[str, Mapping[str, float]], hues: Mapping[str, Hue], x: str, *, shares: bool = False) -> Any:
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
                axes.barh(-place, width, left=start, color=hues[part].hex, height=0.66)
                if shares and width >= 8:
                    ink = "white" if hues[part].name in DARK else "#111111"
                    label = {"ha": "center", "va": "center", "fontsize": 8, "color": ink}
                    axes.text(start + width / 2, -place, f"{width:.0f} %", **label)
                start += width
        _label_rows(axes, list(rows), x)
        if shares:
            axes.set_xlim(0, 100)
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=hues[part].hex, label=part) for part in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def amortised(cache: float, training: float, online: float | None, made: int, unit: str) -> Any:
    """Draw the cost of one composition when n of them share a cache, beside online training if it was measured."""
    counts = list(range(1, max(made, 8) + 1))
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 2.6))
        costs = [cache / count + training for count in counts]
        axes.plot(counts, costs, color=COLOURS["slate"], marker="o", markersize=3, label="offline, shared cache")
        axes.axhline(training, color=COLOURS["steel"], linewidth=0.9, linestyle="dotted", label="training only")
        axes.scatter([made], [cache / made + training], s=70, facecolors="none", edgecolors=INK, zorder=3)
        if online is not None:
            axes.axhline(online, color=COLOURS["clay"], linewidth=1.2, label="online, measured")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("compositions that share a cache")
        axes.set_ylabel(f"{unit} per composition")
        axes.legend()
    return figure


def grouped(rows: Mapping[str, Mapping[str, float]], hues: Mapping[str, Hue], x: str) -> Any:
    """Draw a group of horizontal bars for each row, one bar per series."""
    series = list(hues)
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + len(rows) * (0.2 + 0.15 * len(series))))
        height = 0.8 / max(len(series), 1)
        for number, name in enumerate(series):
            places = [-row + 0.4 - (number + 0.5) * height for row in range(len(rows))]
            values = [values.get(name, 0.0) for values in rows.values()]
            axes.barh(places, values, height=0.9 * height, color=hues[name].hex, label=literal(name))
        _label_rows(axes, list(rows), x)
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _label_rows(axes: Any, names: Sequence[str], x: str) -> None:
    axes.set_yticks([-row for row in range(len(names))], [literal(name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x)
