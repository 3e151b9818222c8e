"""Figures as SVG, PDF and PNG, and in the page: colour-blind safe, readable at paper size."""

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray
from pandas import DataFrame, Series

from lightning_weave.bench.summary import Summary
from lightning_weave.maths.metrics import pareto_front
from lightning_weave.report.survey import KINDS, REASONS, Survey
from lightning_weave.report.tables import AVERAGE, benchmarks_of, sample_size, seeds_of
from lightning_weave.run import Run
from lightning_weave.stages.compare import ComparedPolicy
from lightning_weave.stages.costs import offline_cost, online_costs
from lightning_weave.stages.forecast import ForecastPoint
from lightning_weave.store import read_lines, write_atomic

COLOURS = {
    "blue": "#0072b2", "vermilion": "#d55e00", "green": "#009e73", "orange": "#e69f00", "purple": "#cc79a7",
    "sky": "#56b4e9", "brown": "#8c564b", "olive": "#8a8b00", "indigo": "#5b4bb7", "grey": "#7f7f7f",
    # Not of policies: parts of a bar.
    "slate": "#4a5a6a", "steel": "#7d8fa1", "mist": "#aab8c5", "sand": "#c9b78e", "clay": "#a8806a",
}  # fmt: skip
POLICIES = tuple(COLOURS)[:9]
PARTS = ("slate", "mist", "clay", "sand", "steel")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


@dataclass(frozen=True)
class Hue:
    """The colour of a policy; `again` counts how often it was used before, which the dashes of a line show."""

    name: str
    again: int = 0

    @property
    def hex(self) -> str:
        return COLOURS[self.name]

    @property
    def css(self) -> str:
        return f"var(--{self.name})"

    @property
    def dash(self) -> str | tuple[int, tuple[float, ...]]:
        return DASHES[self.again % len(DASHES)]


Hues = dict[str, Hue]


def policy_hues(policies: Iterable[str]) -> Hues:
    """Give each policy its colour, in their order; the untrained student is grey.

    >>> [hue.name for hue in policy_hues(["base", "acc", "brief"]).values()]
    ['grey', 'blue', 'vermilion']
    """
    others = [policy for policy in dict.fromkeys(policies) if policy != "base"]
    hues = {policy: Hue(POLICIES[at % len(POLICIES)], at // len(POLICIES)) for at, policy in enumerate(others)}
    return {"base": Hue("grey"), **hues}


def part_hues(parts: Sequence[str]) -> Hues:
    """Give the parts of a bar colours that no policy has."""
    return {part: Hue(PARTS[at % len(PARTS)]) for at, part in enumerate(parts)}


DIRECTIONS = 16
RADII = (9.0, 16.0, 26.0, 38.0, 54.0, 72.0)  # pixels from a point to the nearest edge of its label
LEADER_FROM = 14.0  # beyond this distance, a thin line joins label and point
POINT = 6.0  # half the side of a marker's square
LINE = 1.5  # half the side of a piece of a line
STEP = 4.0  # between two pieces
NO_BOXES = np.zeros((0, 4))

XY = tuple[float, float]
Boxes = NDArray[np.float64]  # (N, 4): left, bottom, right, top in pixels


def overlaps(boxes: Boxes, others: Boxes) -> NDArray[np.float64]:
    """Compute the area that every box shares with every other: (N, 4), (M, 4) -> (N, M).

    >>> overlaps(np.array([[0.0, 0, 2, 2]]), np.array([[1.0, 1, 5, 5], [2, 0, 3, 1]])).tolist()
    [[1.0, 0.0]]
    """
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    return np.clip(high - low, 0, None).prod(axis=-1)


def place(points: Sequence[XY], sizes: Sequence[XY], bounds: Sequence[float], lines: Boxes = NO_BOXES) -> Boxes:
    """Choose a box for each label: crowded points first, as near as possible, off the lines if there is room."""
    points_N2 = np.array(points, float).reshape(-1, 2)
    taken = np.hstack([points_N2 - POINT, points_N2 + POINT])  # first the markers, then the labels
    distances = np.linalg.norm(points_N2[:, None] - points_N2[None], axis=-1)
    radii = np.repeat(RADII, DIRECTIONS)
    angles = np.tile(2 * np.pi * (np.arange(DIRECTIONS) + 1) / DIRECTIONS, len(RADII))  # first up and to the right
    boxes = np.zeros((len(points_N2), 4))
    for index in np.argsort(-(distances < 4 * RADII[-1]).sum(axis=1), kind="stable"):
        half = np.array(sizes[index]) / 2
        directions = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        centres = points_N2[index] + directions * (radii[:, None] + half)
        choices = np.hstack([centres - half, centres + half])
        outside = 4 * half.prod() - overlaps(choices, np.array([bounds], float))[:, 0]
        covered = overlaps(choices, taken).sum(axis=1) + outside
        costs = 100 * covered.round(6) + 0.6 * overlaps(choices, lines).sum(axis=1) + radii
        boxes[index] = choices[costs.argmin()]
        taken = np.vstack([taken, boxes[index]])
    return boxes


def pieces(start: XY, end: XY) -> Boxes:
    """Cut a line into small boxes for labels to avoid."""
    count = max(int(math.dist(start, end) / STEP), 1)
    at = np.linspace(start, end, count, endpoint=False)
    return np.hstack([at - LINE, at + LINE])


def annotate(axes: Any, points: Sequence[XY], names: Sequence[str], lines: Sequence[tuple[XY, XY]]) -> None:
    """Label points in axes whose layout is final, avoiding lines given in data coordinates."""
    renderer = axes.figure.canvas.get_renderer()
    scale = 72 / axes.figure.dpi
    texts = [axes.annotate(name, point, fontsize=9) for name, point in zip(names, points, strict=True)]
    extents = [text.get_window_extent(renderer) for text in texts]
    pixels = axes.transData.transform(points) if points else []
    drawn = [pieces(*axes.transData.transform(ends)) for ends in lines]
    sizes = [(extent.width + 2, extent.height + 1) for extent in extents]
    boxes = place(pixels, sizes, axes.get_window_extent(renderer).extents, np.vstack([NO_BOXES, *drawn]))
    for text, name, point, (x, y), (left, bottom, right, top) in zip(texts, names, points, pixels, boxes, strict=True):
        text.remove()
        gap = math.hypot(max(left - x, 0.0, x - right), max(bottom - y, 0.0, y - top))
        leader = {"arrowstyle": "-", "linewidth": 0.5, "color": INK, "alpha": 0.5} if gap > LEADER_FROM else None
        style = {"textcoords": "offset points", "fontsize": 9, "color": INK, "arrowprops": leader}
        axes.annotate(name, point, ((left - x) * scale, (bottom - y) * scale), **style)


if "MPLBACKEND" not in os.environ:  # a notebook has set it, and its user's own plots are to be seen
    matplotlib.use("Agg")

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
WINDOWS = 25  # the window of a running mean is this part of a training
READABLE = (2, 3, 4, 6, 8)  # ticks between powers of ten whose labels have room
DARK = ("slate", "clay")  # parts of a bar whose label is white
Line = Sequence[tuple[float, float]]
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
class Figure:
    """A drawing with its text: `alt` describes it to readers who cannot see it."""

    name: str
    drawing: Any
    title: str
    caption: str
    alt: str
    svg: str = ""  # for the page


@matplotlib.rc_context(STYLE)
def frontier(
    points: DataFrame,
    hues: Hues | None = None,
    problems: int = 0,
    forecasts: Sequence[ForecastPoint] = (),
    seeds: Mapping[str, Sequence[XY]] | None = None,
) -> Figure:
    """Draw accuracy against tokens: on the frontier filled, the policies trained here joined; dominated ones hollow.

    Forecasts that are trusted and anchored at the base's evaluation are small hollow diamonds with their intervals.
    `seeds` are tokens and accuracy of the training seeds of a policy: small faint points.

    One row per policy: kind, accuracy, tokens, their standard errors, AES; compositions of one family (the same anchors
    and alpha) are joined in the order of `share`.
    """
    defaults = {"accuracy_error": 0.0, "tokens_error": 0.0, "aes": math.nan, "family": "", "share": 0.0}
    points = points.assign(**{key: value for key, value in defaults.items() if key not in points})
    points = points.fillna({"accuracy_error": 0.0, "tokens_error": 0.0})
    places = list(zip(points["tokens"], points["accuracy"], strict=True))
    is_own = points["kind"].isin(OWN)
    best = points["aes"].where(is_own)
    best = best.idxmax() if best.notna().sum() > 1 else None
    on_frontier = pareto_front(list(zip(points["accuracy"], points["tokens"], strict=True)))
    front = sorted(places[index] for index in on_frontier if is_own.iloc[index])
    families = points[points["family"] != ""].sort_values("share", kind="stable").groupby("family")
    sweeps = [list(zip(one["tokens"], one["accuracy"], strict=True)) for _, one in families]
    sweeps = [sweep for sweep in sweeps if not set(sweep) <= set(front)]  # else the frontier's line joins them

    scale = crowd(len(points))
    figure, axes = pyplot.subplots(figsize=(WIDTH * scale, 3.5 * scale))
    for sweep in sweeps:
        axes.plot(*zip(*sweep, strict=True), color=INK, linewidth=0.9, linestyle=(0, (4, 3)), alpha=0.55, zorder=1)
    if len(front) > 1:
        axes.plot(*zip(*front, strict=True), color=INK, linewidth=1.3, alpha=0.8, zorder=2)
    lines = [segment for line in (front, *sweeps) for segment in pairwise(line)]
    for index, (name, one) in enumerate(points.iterrows()):
        colour = (hues or {}).get(name, Hue("blue")).hex
        x, y = places[index]
        errors = (one["accuracy_error"], one["tokens_error"])
        axes.errorbar(x, y, *errors, ecolor=colour, elinewidth=1.1, linestyle="none", zorder=2)
        marker, size = ("*", 130) if name == best else (MARKERS[one["kind"]][0], 42)
        face = colour if index in on_frontier else PAPER
        axes.scatter(x, y, s=size, marker=marker, facecolors=face, edgecolors=colour, linewidths=1.2, zorder=3)
        for own in (seeds or {}).get(name, ()):
            axes.scatter(*own, s=12, color=colour, alpha=0.4, linewidths=0, zorder=2)
        lines += [((x - errors[1], y), (x + errors[1], y)), ((x, y - errors[0]), (x, y + errors[0]))]
    drawn = [one.to_dict() for one in forecasts if one.trusted and one.anchored and one.weights]
    drawn = [one for one in drawn if one["accuracy"] is not None]
    for one in drawn:
        x, y = one["tokens"], one["accuracy"]
        ends = [((one[f"{key}_low"], one[key]), (one[key], one[f"{key}_high"])) for key in ("accuracy", "tokens")]
        # Where all responses are alike, rounding may put the estimate outside.
        bars = [[[max(high - low, 0.0)] for low, high in each] for each in ends]
        axes.errorbar(x, y, *bars, ecolor=INK, elinewidth=0.6, alpha=0.3, linestyle="none", zorder=0)
        axes.scatter(x, y, s=16, marker="D", facecolors="none", edgecolors=INK, linewidths=0.8, alpha=0.6, zorder=1)
    for kind in dict.fromkeys(points["kind"]):
        axes.scatter([], [], marker=MARKERS[kind][0], color=INK, s=30, label=MARKERS[kind][1])
    if drawn:
        axes.scatter([], [], marker="D", facecolors="none", edgecolors=INK, s=16, linewidths=0.8, label="forecast")
    if best is not None:
        axes.scatter([], [], marker="*", color=INK, s=70, label="highest AES")
    ncols = 2 if scale < 1.4 else 5
    figure.legend(loc="outside lower center", ncols=ncols, handletextpad=0.1, columnspacing=0.9)
    axes.set_xlabel("mean response tokens (fewer is better)")
    most = max(map(len, (seeds or {}).values()), default=0)
    counted = f" ({sample_size(problems, most)})" if problems else ""
    axes.set_ylabel(f"accuracy, %{counted}")
    axes.margins(0.17, 0.16)
    span_at_least(axes.get_ylim, axes.set_ylim)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the layout is final now, so labels can be placed by pixel
    annotate(axes, places, [literal(name) for name in points.index], lines)

    sentences = {
        "Solid line: the policies trained here that no other policy beats in both.": len(front) > 1,
        "Hollow: another policy has more accuracy for as few tokens.": len(on_frontier) < len(points),
        "Dashed line: a sweep of weights.": bool(sweeps),
        "Star: the highest AES.": best is not None,
        "Small diamonds: forecasts from the cache, with 95 % intervals.": bool(drawn),
        "Small faint points: single training seeds.": most > 1,
        f"Bars: {standard_error(most)}{counted}.": points[["accuracy_error", "tokens_error"]].any(axis=None),
    }
    caption = " ".join(sentence for sentence, is_true in sentences.items() if is_true)
    data = "; ".join(f"{name}: {y:.1f} % at {x:,.0f} tokens" for name, (x, y) in zip(points.index, places, strict=True))
    alt = f"Accuracy against mean response tokens. {data}."
    return Figure("frontier", figure, "Accuracy against tokens", caption, alt)


def standard_error(seeds: int) -> str:
    """Describe the errors of results on so many training seeds."""
    return "one standard error" + (" over problems and training seeds" if seeds > 1 else ", clustered by problem")


@matplotlib.rc_context(STYLE)
def compared(rows: Sequence[ComparedPolicy], composition: str) -> Figure:
    """Draw what could be done instead of a composition against its frontier, each with its distance from the line."""
    line = sorted((one.tokens, one.accuracy) for one in rows if one.on_frontier)
    places = [(one.tokens, one.accuracy) for one in rows]
    scale = crowd(len(rows))
    figure, axes = pyplot.subplots(figsize=(WIDTH * scale, 3.5 * scale))
    axes.plot(*zip(*line, strict=True), color=INK, linewidth=1.3, alpha=0.8, zorder=2)
    segments = list(pairwise(line))
    for one, (x, y) in zip(rows, places, strict=True):
        colour = COLOURS["blue" if one.on_frontier else "vermilion"]
        if one.difference is not None and not math.isnan(one.difference.estimate):
            at = y - one.difference.estimate
            axes.plot([x, x], [y, at], color=colour, linewidth=0.8, alpha=0.6, zorder=1)
            segments.append(((x, y), (x, at)))
        face = colour if one.on_frontier else PAPER
        axes.scatter(x, y, s=42, facecolors=face, edgecolors=colour, linewidths=1.2, zorder=3)
    axes.set_xlabel("mean response tokens (fewer is better)")
    size = sample_size(max(one.problems for one in rows), max(one.seeds for one in rows))
    axes.set_ylabel(f"accuracy, % ({size})")
    axes.margins(0.17, 0.16)
    span_at_least(axes.get_ylim, axes.set_ylim)
    figure.canvas.draw()
    figure.set_layout_engine("none")
    annotate(axes, places, [literal(one.policy) for one in rows], segments)
    data = "; ".join(f"{one.policy}: {one.accuracy:.1f} % at {one.tokens:,.0f} tokens" for one in rows)
    caption = f"Filled, joined: the frontier of {composition}. Hollow: alternatives, with their distance to it."
    title = f"{composition} and the alternatives"
    return Figure(f"compare-{composition}", figure, title, caption, f"Accuracy against mean response tokens. {data}.")


def crowd(points: int) -> float:
    """How much larger than a column a frontier must be for every label to have room."""
    return max(1.0, (points / CROWD) ** 0.5)


def span_at_least(limits: Callable[[], tuple[float, float]], put: Callable[[float, float], Any]) -> None:
    """Widen an axis of accuracy that chance alone would fill, and let it show no more than there can be."""
    low, high = limits()
    missing = max(LEAST - (high - low), 0.0)
    put(max(low - missing / 2, -LEAST / 4), min(high + missing / 2, 100 + LEAST / 4))


@matplotlib.rc_context(STYLE)
def profile(results: DataFrame, hues: Hues) -> Figure:
    """Draw AES and the accuracy on every benchmark: one panel each, one row per policy."""
    policies = list(results.index)
    has_aes = bool(results[AVERAGE, "aes"].notna().any())
    parts = [*([AVERAGE] if has_aes else []), *benchmarks_of(results)]
    figure, panels = make_panels(len(parts), 0.95 + 0.2 * len(policies), sharey=True)
    places = list(range(len(policies)))[::-1]
    colours = [hues[policy].hex for policy in policies]
    for axes, part in zip(panels, parts, strict=True):
        column = results[part]
        if part == AVERAGE:
            values, title = column["aes"], "AES"
            low, high = column["aes_low"].fillna(values), column["aes_high"].fillna(values)
        else:
            values, error = column["accuracy"], column["accuracy_error"].fillna(0.0)
            low, high = values - error, values + error
            title = f"{literal(part)}, %"
            counts = sorted({int(count) for count in column["problems"].dropna()})
            axes.set_xlabel(" or ".join(f"{count:,}" for count in counts) + " problems", fontsize=8.5)
        axes.hlines(places, low, high, color=colours, linewidth=1.3)
        axes.scatter(values, places, color=colours, s=24, zorder=3)
        axes.set_title(title)
        axes.set_yticks(places, [literal(policy) for policy in policies])
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.margins(0.12, 0.6 / max(len(policies), 1))
        if part == AVERAGE:
            axes.axvline(0, color=INK, linewidth=0.7)
        else:
            span_at_least(axes.get_xlim, axes.set_xlim)
    aes = "AES with its 95 % interval; accuracies" if has_aes else "Accuracies"
    caption = f"{aes} with {standard_error(seeds_of(results))}."
    alt = "Dot plot of AES and of the accuracy on every benchmark."
    return Figure("profile", figure, "AES and accuracy by benchmark", caption, alt)


def budgets(evaluated: Mapping[str, Sequence[Summary]], hues: Hues, benchmark: str | None = None) -> Figure | None:
    """Draw the accuracy of the same samples cut at token budgets, on every benchmark or on one, if there are any."""
    panels: dict[str, dict[str, Line]] = {}
    for policy, results in evaluated.items():
        for result in results:
            if result.budgets and benchmark in (None, result.label):
                line = [(float(point.budget), point.accuracy) for point in result.budgets]
                panels.setdefault(result.label, {})[policy] = line
    if not panels:
        return None
    drawing = lines(panels, "token budget", "accuracy, %", hues)
    caption = "The same samples, truncated at each budget and graded again."
    alt = "Accuracy of every policy when responses are truncated at token budgets."
    return Figure("budgets", drawing, "Accuracy within a token budget", caption, alt)


CURVES = {  # key of the metrics -> axis, title, caption
    "reverse_kl": ("KL to the target, nats", "KL between student and target",
                   "Running mean over the decisions of each update."),
    "drift": ("KL to the sampler, nats", "KL between student and the student that sampled",
              "Running mean. With refresh = \"auto\" the student samples again above 0.2."),
    "loss": ("loss", "Loss", "Running mean of the objective. It scales with alpha and the dose."),
    "eval_accuracy": ("accuracy on a few problems, %", "Accuracy during training",
                      "A few problems of the first benchmark, one sample each: a trend, not a result."),
    "eval_tokens": ("tokens on a few problems", "Tokens during training",
                    "Mean length of the answers to the same few problems."),
}  # fmt: skip


def training_figures(run: Run, hues: Hues) -> list[Figure]:
    """Draw the metrics of every composition whose training has started; evaluations where there were any."""
    figures = []
    for key, (label, title, caption) in CURVES.items():
        curves: dict[str, Line] = {}
        for name in run.recipe.written:
            folder = run.stage("train", name).folder
            points: list[tuple[float, float]] = []
            for path in [folder / "metrics.jsonl", *sorted(folder.glob("leg-*/**/metrics.jsonl"))]:  # of a sequence
                before = points[-1][0] if points else 0.0
                points += [(before + row["step"], float(row[key])) for row in read_lines(path, step=int) if key in row]
            if points:
                window = -(-len(points) // WINDOWS)
                means = Series([value for _, value in points]).rolling(window, min_periods=1).mean()
                curves[name] = list(zip([step for step, _ in points], means, strict=True))
        if curves:
            drawing = lines({"": curves}, "update", label, hues, logarithmic=not key.startswith("eval_"))
            alt = f"Training curves of every composition: {label} by update."
            figures.append(Figure(f"training-{key}", drawing, title, caption, alt))
    return figures


@matplotlib.rc_context(STYLE)
def cost_figures(run: Run, ledger: list[dict[str, Any]]) -> list[Figure]:
    """Draw the cost of a composition by stage, alone and sharing the cache, and its cost by the number that share."""
    offline = offline_cost(run, ledger)
    if offline is None:
        return []
    number = offline.compositions
    measured = [seconds for seconds, _ in online_costs(run, ledger).values()]
    online = sum(measured) / len(measured) if measured else None
    units = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
    longest = max(offline.of(1), online or 0.0)
    unit, divisor = next((one for one in units if longest >= 2 * one[1]), units[-1])
    bars = {"one composition": {**offline.cache, "train": offline.train}}
    if number > 1:
        shares = {stage: seconds / number for stage, seconds in offline.cache.items()}
        bars[f"each of {number}"] = {**shares, "train": offline.train}
    if online is not None:
        bars["online, one"] = {"online": online}
    scaled = {name: {stage: seconds / divisor for stage, seconds in parts.items()} for name, parts in bars.items()}
    colours = part_hues(("rollout", "reference", "score", "train", "online"))
    by_stage = stacked(scaled, colours, f"device time, {unit}")

    cache, training = offline.of(0) / divisor, offline.train / divisor
    shared_by = list(range(1, max(number, 8) + 1))
    figure, axes = pyplot.subplots(figsize=(WIDTH, 2.6))
    each = [cache / count + training for count in shared_by]
    axes.plot(shared_by, each, color=COLOURS["slate"], marker="o", markersize=3, label="offline, shared cache")
    axes.axhline(training, color=COLOURS["steel"], linewidth=0.9, linestyle="dotted", label="training only")
    axes.scatter([number], [cache / number + training], s=70, facecolors="none", edgecolors=INK, zorder=3)
    if online is not None:
        axes.axhline(online / divisor, color=COLOURS["clay"], linewidth=1.2, label="online, measured")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("compositions that share a cache")
    axes.set_ylabel(f"{unit} per composition")
    axes.legend()
    measured_once = "Measured device time. The cache (rollout, reference, score) is computed once."
    bars_alt = "Stacked bars of device time by stage, for one composition and amortised."
    shared_alt = "Cost per composition against the number of compositions that share a cache."
    caption = "Rollouts and scores are shared, so another setting of the weights only costs its training. "
    return [
        Figure("cost", by_stage, "Cost by stage", measured_once, bars_alt),
        Figure("amortised", figure, "Cost per composition", f"{caption}Circled: this run.", shared_alt),
    ]


@matplotlib.rc_context(STYLE)
def kinds(survey: Survey, hues: Hues) -> Figure:
    """Draw the mean size of each anchor's pull by kind of token, and with two anchors how often they agree on it."""
    sizes = {anchor: survey.size_by_kind(anchor) for anchor in survey.anchors}
    found = [kind for kind in KINDS if any(kind in by_kind for by_kind in sizes.values())]
    pair = next(iter(survey.pairs.values())) if len(survey.pairs) == 1 else None
    names = []
    for kind in found:
        share = pair.agreement("sampled", kind) if pair else math.nan
        names.append(kind if math.isnan(share) else f"{kind}\nagree {100 * share:.0f} %")
    colours = part_hues(survey.anchors)
    for name, weights in reversed(survey.compositions.items()):  # the colour of the policy that has only this anchor
        used = [anchor for anchor, weight in zip(survey.anchors, weights, strict=True) if weight]
        if len(used) == 1 and name in hues:
            colours[used[0]] = hues[name]
    figure, axes = pyplot.subplots(figsize=(WIDTH, 0.9 + len(found) * (0.2 + 0.15 * len(colours))))
    height = 0.8 / max(len(colours), 1)
    for number, (anchor, hue) in enumerate(colours.items()):
        places = [-row + 0.4 - (number + 0.5) * height for row in range(len(found))]
        values = [sizes[anchor].get(kind, 0.0) for kind in found]
        axes.barh(places, values, height=0.9 * height, color=hue.hex, label=literal(anchor))
    _label_rows(axes, names, "mean size of the pull, nats")
    figure.legend(loc="outside lower center", ncols=3)
    caption = "Pull on the sampled token, by its kind; mean over the cache."
    alt = "Mean size of each anchor's pull by kind of token."
    return Figure("kinds", figure, "Size of each anchor's pull", caption, alt)


def positions(survey: Survey) -> Figure:
    """Draw the decisions kept and masked: by anchor and reason, and by the anchors of each composition."""
    shared = "masked by one of its anchors"
    rows: dict[str, dict[str, float]] = {}
    for anchor, counts in zip(survey.anchors, survey.reasons, strict=True):
        rows[anchor] = {reason: counts[reason] for reason in REASONS}
    for name, kept in survey.kept.items():  # compositions of the same anchors have the same mask
        used = [anchor for anchor, weight in zip(survey.anchors, survey.compositions[name], strict=True) if weight]
        if len(used) > 1:
            rows[" + ".join(used)] = {"kept": kept, shared: survey.decisions - kept}
    categories = [part for part in (*REASONS, shared) if any(parts.get(part) for parts in rows.values())]
    seen = {name: {part: count for part, count in parts.items() if count} for name, parts in rows.items()}
    drawing = stacked(seen, part_hues(categories), f"share of all {survey.decisions:,} decisions, %", shares=True)
    caption = "An anchor keeps the decisions that it can score; a composition keeps what all its anchors keep."
    alt = "Share of decisions kept and masked, by anchor and reason, and kept by each composition."
    return Figure("positions", drawing, "Kept and masked decisions", caption, alt)


@matplotlib.rc_context(STYLE)
def lines(panels: Mapping[str, Mapping[str, Line]], x: str, y: str, hues: Hues, *, logarithmic: bool = False) -> Any:
    """Draw one panel per key with one line per policy, and a shared legend."""
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    columns = 3 if max(map(len, names), default=0) < 14 else 2
    figure, grid = make_panels(len(panels), 2.2, 0.2 * -(-len(names) // columns))
    for place, (axes, (title, panel)) in enumerate(zip(grid, panels.items(), strict=True)):
        for name, line in panel.items():
            style = {"color": hues[name].hex, "linestyle": hues[name].dash, "marker": "o" if len(line) <= 12 else ""}
            axes.plot(*zip(*line, strict=True), **style, markersize=3)
        axes.set_title(literal(title))
        axes.set_xlabel(x)
        if place % 2 == 0:
            axes.set_ylabel(y)
        values = [value for line in panel.values() for _, value in line]
        if logarithmic and min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_locator(LogLocator(subs=READABLE))
            decade = max(values) >= 10 * min(values)
            axes.yaxis.set_minor_formatter(NullFormatter() if decade else ScalarFormatter())
    handles = [pyplot.Line2D([], [], color=hues[n].hex, linestyle=hues[n].dash, label=literal(n)) for n in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    return figure


def make_panels(count: int, height: float, legend: float = 0.0, **options: Any) -> tuple[Any, list[Any]]:
    """Lay out so many panels in at most two columns, each row of this height in inches, with room for a legend."""
    across = min(count, 2)
    down = -(-count // across)
    figure, grid = pyplot.subplots(down, across, figsize=(WIDTH, down * height + legend), squeeze=False, **options)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, list(grid.flat[:count])


@matplotlib.rc_context(STYLE)
def stacked(rows: Mapping[str, Mapping[str, float]], hues: Hues, x: str, *, shares: bool = False) -> Any:
    """Draw stacked horizontal bars; with `shares`, each bar adds up to 100 % and its parts are labelled."""
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


def _label_rows(axes: Any, names: Sequence[str], x: str) -> None:
    axes.set_yticks([-row for row in range(len(names))], [literal(name) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x)


def literal(text: str) -> str:
    """Escape dollar signs, which matplotlib would read as mathematics."""
    return text.replace("$", r"\$")


@matplotlib.rc_context(STYLE)
def save(figure: Figure, folder: Path) -> list[Path]:
    """Write a figure as SVG, PDF and PNG."""
    options: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
        "png": {"dpi": 300},
    }
    for suffix, own in options.items():
        out = io.BytesIO()
        figure.drawing.savefig(out, format=suffix, **own)
        write_atomic(folder / f"{figure.name}.{suffix}", out.getvalue())
    pyplot.close(figure.drawing)
    return [folder / f"{figure.name}.{suffix}" for suffix in options]


@matplotlib.rc_context(STYLE)
def inline(figure: Any) -> str:
    """Write a figure as an SVG element for the page, in the colours of the reader's theme and without styles."""
    out = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=metadata)
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("xlink:href", "href")
    names = {INK: "currentColor", PALE: "var(--rule)", PAPER: "var(--paper)"}
    for code, name in (names | {code: f"var(--{name})" for name, code in COLOURS.items()}).items():
        text = text.replace(code, name)
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    svg = r'<svg \1 aria-hidden="true" focusable="false">'
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', svg, text, count=1)
    used = set(re.findall(r'(?:#)([\w.-]+)(?:\)|")', text))
    return re.sub(r' id="([\w.-]+)"', lambda hit: hit[0] if hit[1] in used else "", text)
