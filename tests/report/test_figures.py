"""Figures: what is on the front, the same bytes every time, and nothing in the page but drawing."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex

from lightning_weave.bench.statistics import Interval
from lightning_weave.report.colours import part_hues, policy_hues
from lightning_weave.report.figures import PAPER, FrontierPoint, frontier, inline, save
from lightning_weave.report.headline import frontier_caption
from lightning_weave.report.plots import amortised, grouped, lines, profile, stacked

POINTS = [
    FrontierPoint("base", "base", 60, 400, 3, 20),
    FrontierPoint("acc", "single", 80, 450, 3, 20, "f", 0.0),
    FrontierPoint("both", "composition", 78, 250, 3, 20, "f", 0.5),
    FrontierPoint("mid", "composition", 70, 300, 3, 20, "f", 0.7),
    FrontierPoint("brief", "single", 50, 200, 3, 20, "f", 1.0),
    FrontierPoint("outside", "other", 79, 500),
    FrontierPoint("short", "other", 30, 100),
]

BOTH = policy_hues(["base", "both", "x"])


def markers(figure: object) -> dict[tuple[float, float], bool]:
    """Where each policy's marker stands, and whether it is filled."""
    found = {}
    for collection in figure.axes[0].collections:
        offsets = collection.get_offsets()
        if type(collection).__name__ == "PathCollection" and len(offsets):
            found[tuple(float(value) for value in offsets[0])] = to_hex(collection.get_facecolors()[0]) != PAPER
    return found


def test_only_what_nothing_beats_is_filled_and_only_own_policies_are_joined() -> None:
    figure = frontier(POINTS)
    filled = {place for place, is_filled in markers(figure).items() if is_filled}
    assert filled == {(450, 80), (250, 78), (200, 50), (100, 30)}
    drawn = {len(line.get_xdata()): line for line in figure.axes[0].lines}
    front, family = drawn[3], drawn[4]
    assert list(front.get_xdata()) == [200, 250, 450]  # the other checkpoint is a single mark
    assert list(family.get_xdata()) == [450, 250, 300, 200]  # in the order of the share
    assert family.is_dashed()
    pyplot.close(figure)


def test_the_caption_describes_only_what_is_drawn() -> None:
    whole = frontier_caption([*POINTS[:-2], replace(POINTS[2], best=True)])
    assert [word for word in ("Solid", "Hollow", "Dashed", "Star", "Bars") if word in whole] == [
        "Solid", "Hollow", "Dashed", "Star", "Bars"
    ]  # fmt: skip
    assert frontier_caption([FrontierPoint("base", "base", 60, 400)]) == ""
    on_front = [FrontierPoint(f"rho-{n}", "composition", 60 + n, 100 + n, family="f", share=n) for n in range(3)]
    assert frontier_caption(on_front).startswith("Solid line")
    assert "Dashed" not in frontier_caption(on_front)  # the solid line is where it would be
    figure = frontier(on_front)
    assert [len(line.get_xdata()) for line in figure.axes[0].lines].count(3) == 1
    pyplot.close(figure)


def test_an_accuracy_of_zero_everywhere_has_an_axis_that_makes_sense() -> None:
    figure = frontier([FrontierPoint("base", "base", 0, 400), FrontierPoint("both", "composition", 0, 300)])
    low, high = figure.axes[0].get_ylim()
    assert -2 < low <= 0
    assert high - low > 2
    pyplot.close(figure)


def test_a_policy_has_one_colour_in_every_figure() -> None:
    names = ["base", *(f"p{n}" for n in range(11))]
    hues = policy_hues(names)
    assert len({(hue.name, hue.again) for hue in hues.values()}) == 12
    points = [FrontierPoint(name, "composition", 50 + n, 100.0 + n, hue=hues[name]) for n, name in enumerate(names)]
    drawn = frontier(points)
    found = {
        tuple(c.get_offsets()[0]): to_hex(c.get_edgecolors()[0])
        for c in drawn.axes[0].collections
        if len(c.get_offsets())
    }
    assert [found[point.place] for point in points] == [hues[name].hex for name in names]
    dots = profile(names, {"AES": [Interval(0, 0, 0)] * 12}, hues)
    assert [to_hex(one) for one in dots.axes[0].collections[1].get_facecolors()] == [hues[n].hex for n in names]
    curves = lines({"": {name: [(1, 1.0), (2, 2.0)] for name in reversed(names)}}, "x", "y", hues)
    legend = {one.get_label(): one for one in curves.legends[0].legend_handles}
    assert all(to_hex(legend[name].get_color()) == hues[name].hex for name in names)
    assert legend["p9"].get_linestyle() != legend["p0"].get_linestyle()  # the same colour again
    for figure in (drawn, dots, curves):
        assert "var(--blue)" in inline(figure)
        assert hues["p0"].hex not in inline(figure)
        pyplot.close(figure)


@pytest.mark.slow
def test_same_points_same_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save(frontier(POINTS), tmp_path / folder, "frontier")
    for name in ("frontier.svg", "frontier.pdf", "frontier.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_inline_drawing_has_the_readers_colours_and_no_style_or_id_of_its_own() -> None:
    figure = frontier([*POINTS, FrontierPoint("$x^2$ <b>", "other", 55, 350)])
    svg = inline(figure)
    pyplot.close(figure)
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "$x^2$ <b>" in texts  # neither mathematics nor markup
    assert "currentColor" in svg
    assert "<style" not in svg
    assert "<script" not in svg
    used = set(re.findall(r'#([\w.-]+)["\)]', svg))
    assert set(re.findall(r' id="([\w.-]+)"', svg)) <= used


@pytest.mark.parametrize(
    ("figure", "words"),
    [
        (lambda: profile(["base", "both"], {"AES": [Interval(0, 0, 0), Interval(1, 0.5, 1.5)]}, BOTH),
         ["base", "both", "AES"]),
        (lambda: lines({"a": {"x": [(1, 2.0), (2, 1.0)]}}, "step", "nats", BOTH, logarithmic=True),
         ["step", "nats", "x"]),
        (lambda: stacked({"row": {"kept": 3.0, "gone": 1.0}}, part_hues(["kept", "gone"]), "%", shares=True),
         ["row", "kept", "gone", "75 %", "25 %"]),
        (lambda: grouped({"digits": {"acc": 1.0}}, part_hues(["acc"]), "nats"), ["digits", "acc"]),
        (lambda: amortised(10.0, 1.0, 15.0, 3, "h"), ["online, measured", "h per composition"]),
    ],
)  # fmt: skip
def test_every_figure_says_what_it_shows(figure, words) -> None:
    drawn = figure()
    svg = inline(drawn)
    pyplot.close(drawn)
    texts = {element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")}
    assert set(words) <= texts


@pytest.mark.parametrize(("low", "high"), [(0.037, 0.16), (0.2, 1.9), (1.2, 1.9), (0.011, 0.019), (0.03, 4.0)])
def test_labels_of_a_logarithmic_axis_have_room_and_are_at_least_one(low: float, high: float) -> None:
    drawn = lines({"": {"x": [(1, high), (12, low)]}}, "update", "nats", BOTH, logarithmic=True)
    drawn.canvas.draw()
    (axes,) = drawn.axes
    labels = [
        label.get_window_extent()
        for tick in (*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks())
        if (label := tick.label1).get_text() and axes.bbox.y0 - 1 <= axes.transData.transform((1, tick.get_loc()))[1]
        if axes.transData.transform((1, tick.get_loc()))[1] <= axes.bbox.y1 + 1
    ]
    pyplot.close(drawn)
    labels.sort(key=lambda box: box.y0)
    assert labels
    assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(labels))
