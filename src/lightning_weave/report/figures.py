"""Figures as SVG, PDF and PNG, and in the page: colour-blind safe, readable at paper size."""

import io
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib

if "MPLBACKEND" not in os.environ:  # a notebook has set it, and its user's own plots are to be seen
    matplotlib.use("Agg")
from matplotlib import pyplot

from lightning_weave.maths.metrics import pareto_front
from lightning_weave.report.colours import COLOURS, Hue
from lightning_weave.report.labels import XY, annotate

INK = "#1b1b1f"  # in the page, INK, PALE and PAPER become the colours of the reader's theme
PALE = "#c9c9cd"
PAPER = "#fefefe"
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
WIDTH = 4.0  # inches: a column of a paper, and of the page
CROWD = 7  # points that fit a column
LEAST = 5.0  # points of accuracy that an axis spans at least
FIRST = Hue("blue")
PolicyKind = Literal["base", "single", "composition", "baseline", "other"]
OWN: tuple[PolicyKind, ...] = ("single", "composition")
MARKERS: dict[PolicyKind, tuple[str, str]] = {
    "base": ("s", "student, untrained"),
    "single": ("^", "one anchor"),
    "composition": ("o", "several anchors"),
    "baseline": ("D", "baseline"),
    "other": ("v", "other checkpoint"),
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
    hue: Hue = FIRST
    best: bool = False  # of the own policies by AES

    @property
    def place(self) -> XY:
        return self.tokens, self.accuracy


@dataclass(frozen=True)
class Frontier:
    """What a drawing of the frontier has, so that its caption can tell."""

    dominated: bool
    joined: bool
    swept: bool
    starred: bool
    errors: bool


def frontier_parts(points: Sequence[FrontierPoint]) -> Frontier:
    """Look which parts a frontier of these points has."""
    front = pareto_front([(point.accuracy, point.tokens) for point in points])
    return Frontier(
        dominated=len(front) < len(points),
        joined=len(_own_front(points)) > 1,
        swept=bool(_sweeps(points, _own_front(points))),
        starred=any(point.best for point in points),
        errors=any(point.accuracy_error or point.tokens_error for point in points),
    )


def crowd(points: int) -> float:
    """Say how much larger than a column a frontier must be for every label to have room."""
    return max(1.0, (points / CROWD) ** 0.5)


def frontier(points: Sequence[FrontierPoint]) -> Any:
    """Draw accuracy against tokens: on the frontier filled, own ones joined; dominated ones hollow."""
    with pyplot.rc_context(STYLE):
        scale = crowd(len(points))
        figure, axes = pyplot.subplots(figsize=(WIDTH * scale, 3.5 * scale))
        on_frontier = set(pareto_front([(point.accuracy, point.tokens) for point in points]))
        front = _own_front(points)
        sweeps = _sweeps(points, front)
        for sweep in sweeps:
            axes.plot(*zip(*sweep, strict=True), color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.55, zorder=1)
        if len(front) > 1:
            axes.plot(*zip(*front, strict=True), color=INK, linewidth=1.3, alpha=0.8, zorder=2)
        for index, point in enumerate(points):
            _draw_point(axes, point, index in on_frontier)
        kinds = dict.fromkeys(point.kind for point in points)
        handles = [(*MARKERS[kind], 30) for kind in kinds] + [("*", "highest AES", 70)] * any(p.best for p in points)
        for marker, meaning, size in handles:
            axes.scatter([], [], marker=marker, color=INK, s=size, label=meaning)
        columns = {"ncols": 2 if scale < 1.4 else 5, "handletextpad": 0.1, "columnspacing": 0.9}
        figure.legend(loc="outside lower center", **columns)
        axes.set_xlabel("mean response tokens (fewer is better)")
        axes.set_ylabel("accuracy, %")
        axes.margins(0.17, 0.16)
        span_at_least(axes.get_ylim, axes.set_ylim)
        figure.canvas.draw()
        figure.set_layout_engine("none")  # the layout is final now, so labels can be placed by pixel
        drawn = [*_error_bars(points), *(segment for line in (front, *sweeps) for segment in pairwise(line))]
        names = [literal(point.name) for point in points]
        annotate(axes, [point.place for point in points], names, drawn, size=9, colour=INK)
    return figure


def span_at_least(limits: Callable[[], tuple[float, float]], put: Callable[[float, float], Any]) -> None:
    """Widen an axis of accuracy that chance alone would fill, and let it show no more than there can be."""
    low, high = limits()
    missing = max(LEAST - (high - low), 0.0)
    put(max(low - missing / 2, -LEAST / 4), min(high + missing / 2, 100 + LEAST / 4))


def _sweeps(points: Sequence[FrontierPoint], front: Collection[XY]) -> list[list[XY]]:
    """The points of each family, in the order of their shares, unless the line of the frontier joins them already."""
    names = sorted({point.family for point in points if point.family})
    ordered = sorted(points, key=lambda point: point.share)
    families = [[point.place for point in ordered if point.family == name] for name in names]
    return [family for family in families if not set(family) <= set(front)]


def _own_front(points: Sequence[FrontierPoint]) -> list[XY]:
    """The own policies that no other policy beats in both, by tokens."""
    front = pareto_front([(point.accuracy, point.tokens) for point in points])
    return sorted(points[index].place for index in front if points[index].kind in OWN)


def _error_bars(points: Sequence[FrontierPoint]) -> list[tuple[XY, XY]]:
    across = [((p.tokens - p.tokens_error, p.accuracy), (p.tokens + p.tokens_error, p.accuracy)) for p in points]
    along = [((p.tokens, p.accuracy - p.accuracy_error), (p.tokens, p.accuracy + p.accuracy_error)) for p in points]
    return across + along


def _draw_point(axes: Any, point: FrontierPoint, on_frontier: bool) -> None:
    marker = "*" if point.best else MARKERS[point.kind][0]
    colour = point.hue.hex
    bars = {"ecolor": colour, "elinewidth": 1.1, "linestyle": "none", "zorder": 2}
    axes.errorbar(point.tokens, point.accuracy, point.accuracy_error, point.tokens_error, **bars)
    size = 130 if point.best else 42
    face = colour if on_frontier else PAPER
    axes.scatter(*point.place, s=size, marker=marker, facecolors=face, edgecolors=colour, linewidths=1.2, zorder=3)


def literal(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG, PDF and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with pyplot.rc_context(STYLE):
        for suffix, options in (
            ("svg", {"metadata": {"Date": None}}),
            ("pdf", {"metadata": {"CreationDate": None}}),
            ("png", {"dpi": 300}),
        ):
            paths.append(folder / f"{name}.{suffix}")
            figure.savefig(paths[-1], **options)
    pyplot.close(figure)
    return paths


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
        .replace(PAPER, "var(--paper)")
        .replace("xlink:href", "href")
    )
    for name, code in COLOURS.items():
        text = text.replace(code, f"var(--{name})")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg \1 aria-hidden="true" focusable="false">', text, count=1
    )
    used = set(re.findall(r'(?:#)([\w.-]+)(?:\)|")', text))
    return re.sub(r' id="([\w.-]+)"', lambda hit: hit[0] if hit[1] in used else "", text)
