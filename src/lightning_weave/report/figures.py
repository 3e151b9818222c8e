"""Figures as SVG and PNG, and inside the page: colour-blind safe, readable at paper size."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from lightning_weave.maths.metrics import pareto_front
from lightning_weave.report.labels import annotate

# Okabe and Ito's palette: told apart by everyone, and in grey.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, GREY = "#CC79A7", "#56B4E9", "#7F7F7F"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
INK, PALE = "#1b1b1f", "#c9c9cd"  # in the page these become the reader's own colours
STYLE = {
    "svg.hashsalt": "lightning-weave",  # the same figure is the same file
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.7,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "figure.constrained_layout.use": True,
}
CROWD = 12  # points that fit a column of the page
Ends = tuple[tuple[float, float], tuple[float, float]]
Kind = Literal["base", "single", "composition", "baseline", "other"]
MARKERS: dict[Kind, tuple[str, str, str]] = {
    "base": ("s", GREY, "student, untrained"),
    "single": ("^", BLUE, "one anchor"),
    "composition": ("o", VERMILION, "several anchors"),
    "baseline": ("D", GREEN, "baseline"),
    "other": ("v", ORANGE, "other checkpoint"),
}


@dataclass(frozen=True)
class Point:
    """One policy on the plane of accuracy and tokens, with standard errors.

    Compositions of one family (the same anchors and alpha) are joined in the order of `share`.
    """

    name: str
    kind: Kind
    accuracy: float
    tokens: float
    accuracy_error: float = 0.0
    tokens_error: float = 0.0
    family: str = ""
    share: float = 0.0


def frontier(points: Sequence[Point], title: str = "") -> Any:
    """Draw accuracy against tokens: the front of all policies solid, what is dominated hollow and dashed."""
    with pyplot.rc_context(STYLE):
        crowd = max(1.0, (len(points) / CROWD) ** 0.5)  # every name needs its room
        figure, axes = pyplot.subplots(figsize=(4.7 * crowd, 3.9 * crowd))
        on_front = set(pareto_front([(point.accuracy, point.tokens) for point in points]))
        families = _families(points)
        dashed = {"color": VERMILION, "linewidth": 0.9, "linestyle": (0, (4, 3)), "alpha": 0.7, "zorder": 1}
        for members in families:
            axes.plot([p.tokens for p in members], [p.accuracy for p in members], **dashed)
        front = sorted((points[index] for index in on_front), key=lambda point: point.tokens)
        axes.plot([p.tokens for p in front], [p.accuracy for p in front], color=VERMILION, linewidth=1.4, zorder=2)
        for index, point in enumerate(points):
            _draw_point(axes, point, index in on_front)
        for kind in dict.fromkeys(point.kind for point in points):
            marker, colour, meaning = MARKERS[kind]
            axes.scatter([], [], marker=marker, color=colour, s=30, label=meaning)
        columns = {"ncols": 3 if crowd == 1 else 5, "handletextpad": 0.1, "columnspacing": 0.9}
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15 / crowd), **columns)
        axes.set_xlabel("mean response tokens (fewer is better)")
        axes.set_ylabel("accuracy, %")
        axes.set_title(title)
        axes.margins(0.17, 0.16)
        _freeze(figure)
        drawn = [*_bars(points), *(ends for line in (front, *families) for ends in _segments(line))]
        places = [(point.tokens, point.accuracy) for point in points]
        annotate(axes, places, [literal(point.name) for point in points], drawn, 9, INK)
    return figure


def _families(points: Sequence[Point]) -> list[list[Point]]:
    """Sweeps of weights, each in its order."""
    names = sorted({point.family for point in points if point.family})
    return [sorted((p for p in points if p.family == name), key=lambda point: point.share) for name in names]


def _segments(line: Sequence[Point]) -> list[Ends]:
    places = [(point.tokens, point.accuracy) for point in line]
    return list(pairwise(places))


def _bars(points: Sequence[Point]) -> list[Ends]:
    """The error bars, as lines that names keep away from."""
    across = [((p.tokens - p.tokens_error, p.accuracy), (p.tokens + p.tokens_error, p.accuracy)) for p in points]
    along = [((p.tokens, p.accuracy - p.accuracy_error), (p.tokens, p.accuracy + p.accuracy_error)) for p in points]
    return across + along


def _draw_point(axes: Any, point: Point, on_front: bool) -> None:
    marker, colour, _ = MARKERS[point.kind]
    bars = {"ecolor": colour, "elinewidth": 0.7, "alpha": 0.55, "linestyle": "none", "zorder": 2}
    axes.errorbar(point.tokens, point.accuracy, point.accuracy_error, point.tokens_error, **bars)
    look: dict[str, Any] = {"facecolors": colour} if on_front else {"facecolors": "none", "linestyles": (0, (2, 1.4))}
    axes.scatter(
        [point.tokens], [point.accuracy], s=42, marker=marker, edgecolors=colour, linewidths=1.2, zorder=3, **look
    )


def _freeze(figure: Any) -> None:
    """Lay the figure out once and for all, so that names can be placed by pixel."""
    figure.canvas.draw()
    figure.set_layout_engine("none")


def literal(text: str) -> str:
    """Keep matplotlib from reading a dollar sign as mathematics."""
    return text.replace("$", r"\$")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with pyplot.rc_context(STYLE):
        for suffix, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 160})):
            written.append(folder / f"{name}.{suffix}")
            figure.savefig(written[-1], **options)
    pyplot.close(figure)
    return written


def inline(figure: Any) -> str:
    """Write a figure as an SVG element for the page, in the reader's colours and without a style of its own."""
    out = io.StringIO()
    with pyplot.rc_context(STYLE):
        figure.savefig(
            out, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = out.getvalue()
    text = (
        text[text.index("<svg") :]
        .replace(INK, "currentColor")
        .replace(PALE, "var(--rule)")
        .replace("xlink:href", "href")
    )
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', text, count=1
    )
    used = set(re.findall(r'(?:#)([\w.-]+)(?:\)|")', text))
    return re.sub(r' id="([\w.-]+)"', lambda hit: hit[0] if hit[1] in used else "", text)
