"""Figures: what is on the front, the same bytes every time, and nothing in the page but drawing."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot

from lightning_weave.bench.statistics import Interval
from lightning_weave.report.figures import FrontierPoint, frontier, inline, save
from lightning_weave.report.plots import amortised, grouped, lines, profile, stacked

POINTS = [
    FrontierPoint("base", "base", 60, 400, 3, 20),
    FrontierPoint("acc", "single", 80, 450, 3, 20, "f", 0.0),
    FrontierPoint("both", "composition", 78, 250, 3, 20, "f", 0.5),
    FrontierPoint("mid", "composition", 70, 300, 3, 20, "f", 0.7),
    FrontierPoint("brief", "single", 50, 200, 3, 20, "f", 1.0),
    FrontierPoint("outside", "other", 79, 500),
]


def markers(figure: object) -> dict[tuple[float, float], bool]:
    """Where each policy's marker stands, and whether it is filled."""
    found = {}
    for collection in figure.axes[0].collections:
        offsets = collection.get_offsets()
        if type(collection).__name__ == "PathCollection" and len(offsets):
            found[tuple(float(value) for value in offsets[0])] = len(collection.get_facecolors()) > 0
    return found


def test_only_what_nothing_beats_is_filled_and_joined() -> None:
    figure = frontier(POINTS)
    filled = {place for place, is_filled in markers(figure).items() if is_filled}
    assert filled == {(450, 80), (250, 78), (200, 50)}
    drawn = {len(line.get_xdata()): line for line in figure.axes[0].lines}
    front, family = drawn[3], drawn[4]
    assert list(front.get_xdata()) == [200, 250, 450]
    assert list(family.get_xdata()) == [450, 250, 300, 200]  # in the order of the share
    assert family.is_dashed()
    pyplot.close(figure)


def test_same_points_same_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save(frontier(POINTS), tmp_path / folder, "frontier")
    for name in ("frontier.svg", "frontier.png"):
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
        (lambda: profile(["base", "both"], {"AES": [Interval(0, 0, 0), Interval(1, 0.5, 1.5)]}),
         ["base", "both", "AES"]),
        (lambda: lines({"a": {"x": [(1, 2.0), (2, 1.0)]}}, "step", "nats", logarithmic=True), ["step", "nats", "x"]),
        (lambda: stacked({"row": {"kept": 3.0, "gone": 1.0}}, {"kept": "#000", "gone": "#111"}, "%", shares=True),
         ["row", "kept", "gone", "75 %", "25 %"]),
        (lambda: grouped({"digits": {"acc": 1.0}}, {"acc": "#000"}, "nats"), ["digits", "acc"]),
        (lambda: amortised(10.0, 1.0, 15.0, 3, "h"), ["online, measured", "h per composition"]),
    ],
)  # fmt: skip
def test_every_figure_says_what_it_shows(figure, words) -> None:
    drawn = figure()
    svg = inline(drawn)
    pyplot.close(drawn)
    texts = {element.text for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")}
    assert set(words) <= texts
