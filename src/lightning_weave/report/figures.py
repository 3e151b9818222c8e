"""Figures as SVG and PNG, and in the page: colour-blind safe, readable at paper size."""

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
from lightning_weave.report.labels import XY, annotate

# Okabe and Ito's palette: distinguishable with colour blindness, and in grey.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
GREY = "#7F7F7F"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, GREY)
INK = "#1b1b1f"  # in the page, INK and PALE become the colours of the reader's theme
PALE = "#c9c9cd"
STYLE = {
    "svg.hashsalt": "lightning-weave",  # equal figures give equal files
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
PolicyKind = Literal["base", "single", "composition", "baseline", "other"]
MARKERS: dict[PolicyKind, tuple[str, str, str]] = {
    "base": ("s", GREY, "student, untrained"),
    "single": ("^", BLUE, "one anchor"),
    "composition": ("o", VERMILION, "several anchors"),
    "baseline": ("D", GREEN, "baseline"),
    "other": ("v", ORANGE, "other checkpoint"),
}


@dataclass(frozen=True)
class FrontierPoint:
    """Accuracy and tokens of one policy, with standard errors.

    Compositions of one family (the same anchors and alpha) are joined in the order of `share`.
    """

    name: str
    kind: PolicyKind
    accuracy: float
    tokens: float
    accuracy_error: float = 0.0
    tokens_error: float = 0.0
    family: str = ""
    share: float = 0.0

    @property
    def place(self) -> XY:
        return self.tokens, self.accuracy


def frontier(points: Sequence[FrontierPoint]) -> Any:
    """Draw accuracy against tokens: policies on the frontier filled, dominated ones hollow and dashed."""
    with pyplot.rc_context(STYLE):
        crowd = max(1.0, (len(points) / CROWD) ** 0.5)  # every label needs room
        figure, axes = pyplot.subplots(figsize=(4.7 * crowd, 3.9 * crowd))
        on_frontier = set(pareto_front([(point.accuracy, point.tokens) for point in points]))
        sweeps = _sweeps(points)
        dashed = {"color": VERMILION, "linewidth": 0.9, "linestyle": (0, (4, 3)), "alpha": 0.7, "zorder": 1}
        for sweep in sweeps:
            axes.plot(*zip(*sweep, strict=True), **dashed)
        front = sorted(points[index].place for index in on_frontier)
        axes.plot(*zip(*front, strict=True), color=VERMILION, linewidth=1.4, zorder=2)
        for index, point in enumerate(points):
            _draw_point(axes, point, index in on_frontier)
        for kind in dict.fromkeys(point.kind for point in points):
            marker, colour, meaning = MARKERS[kind]
            axes.scatter([], [], marker=marker, color=colour, s=30, label=meaning)
        columns = {"ncols": 3 if crowd == 1 else 5, "handletextpad": 0.1, "columnspacing": 0.9}
        axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.15 / crowd), **columns)
        axes.set_xlabel("mean response tokens (fewer is better)")
        axes.set_ylabel("accuracy, %")
        axes.margins(0.17, 0.16)
        figure.canvas.draw()
        figure.set_layout_engine("none")  # the layout is final now, so labels can be placed by pixel
        drawn = [*_error_bars(points), *(segment for line in (front, *sweeps) for segment in pairwise(line))]
        names = [literal(point.name) for point in points]
        annotate(axes, [point.place for point in points], names, drawn, size=9, colour=INK)
    return figure


def _sweeps(points: Sequence[FrontierPoint]) -> list[list[XY]]:
    """The points of each family, in the order of their shares."""
    names = sorted({point.family for point in points if point.family})
    ordered = sorted(points, key=lambda point: point.share)
    return [[point.place for point in ordered if point.family == name] for name in names]


def _error_bars(points: Sequence[FrontierPoint]) -> list[tuple[XY, XY]]:
    across = [((p.tokens - p.tokens_error, p.accuracy), (p.tokens + p.tokens_error, p.accuracy)) for p in points]
    along = [((p.tokens, p.accuracy - p.accuracy_error), (p.tokens, p.accuracy + p.accuracy_error)) for p in points]
    return across + along


def _draw_point(axes: Any, point: FrontierPoint, on_frontier: bool) -> None:
    marker, colour, _ = MARKERS[point.kind]
    bars = {"ecolor": colour, "elinewidth": 0.7, "alpha": 0.55, "linestyle": "none", "zorder": 2}
    axes.errorbar(point.tokens, point.accuracy, point.accuracy_error, point.tokens_error, **bars)
    face: dict[str, Any] = (
        {"facecolors": colour} if on_frontier else {"facecolors": "none", "linestyles": (0, (2, 1.4))}
    )
    axes.scatter(*point.place, s=42, marker=marker, edgecolors=colour, linewidths=1.2, zorder=3, **face)


def literal(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as mathematics."""
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
    """Write a figure as an SVG element for the page, in the colours of the reader's theme and without styles."""
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
