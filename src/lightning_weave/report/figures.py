"""Figures as SVG and PNG: colour-blind safe, readable at paper size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from lightning_weave.maths.metrics import pareto_front

# Okabe and Ito's palette: told apart by everyone, and in grey.
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#7F7F7F"
STYLE = {
    "svg.hashsalt": "lightning-weave",  # the same figure is the same file
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}
Kind = Literal["base", "single", "composition", "baseline", "other"]
MARKERS: dict[Kind, tuple[str, str]] = {
    "base": ("s", GREY),
    "single": ("^", BLUE),
    "composition": ("o", VERMILION),
    "baseline": ("D", GREEN),
    "other": ("v", ORANGE),
}


@dataclass(frozen=True)
class Point:
    """One policy on the plane of accuracy and tokens, with standard errors."""

    name: str
    kind: Kind
    accuracy: float
    tokens: float
    accuracy_error: float = 0.0
    tokens_error: float = 0.0


def frontier(points: Sequence[Point], title: str) -> Any:
    """Draw accuracy against tokens: the front of all policies solid, the compositions off it dashed."""
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(5.2, 3.6))
        front = [points[index] for index in pareto_front([(point.accuracy, point.tokens) for point in points])]
        front.sort(key=lambda point: point.tokens)
        axes.plot([p.tokens for p in front], [p.accuracy for p in front], color=VERMILION, linewidth=1.2, zorder=1)
        woven = sorted((p for p in points if p.kind == "composition"), key=lambda point: point.tokens)
        axes.plot(
            [p.tokens for p in woven],
            [p.accuracy for p in woven],
            color=VERMILION,
            linewidth=0.9,
            linestyle="--",
            zorder=0,
        )
        for point in points:
            marker, colour = MARKERS[point.kind]
            axes.errorbar(
                point.tokens,
                point.accuracy,
                xerr=point.tokens_error,
                yerr=point.accuracy_error,
                marker=marker,
                color=colour,
                markersize=6,
                elinewidth=0.6,
                linestyle="none",
                zorder=2,
            )
            axes.annotate(point.name, (point.tokens, point.accuracy), (5, 4), textcoords="offset points", fontsize=7.5)
        axes.set_xlabel("mean response tokens (fewer is better)")
        axes.set_ylabel("accuracy, %")
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.margins(0.16, 0.14)
        axes.grid(alpha=0.25, linewidth=0.5)
    return figure


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
