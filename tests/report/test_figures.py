"""Figures: what is on the front, the same bytes every time, and nothing in the page but drawing."""

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib import pyplot
from matplotlib.colors import to_hex
from pandas import DataFrame

from lightning_weave.report.figures import (
    PAPER,
    cost_figures,
    frontier,
    inline,
    kinds,
    lines,
    part_hues,
    policy_hues,
    profile,
    save,
    stacked,
    training_figures,
)
from lightning_weave.report.survey import Survey
from lightning_weave.stages.forecast import ForecastPoint
from lightning_weave.store import write_atomic
from report.decisions import decisions, vocabulary
from report.evaluated import point, result_row, results_of
from tiny import make_world, run_of

POINTS = [
    point("base", "base", 60, 400, 3, 20),
    point("acc", "single", 80, 450, 3, 20, "f", 0.0),
    point("both", "composition", 78, 250, 3, 20, "f", 0.5),
    point("mid", "composition", 70, 300, 3, 20, "f", 0.7),
    point("brief", "single", 50, 200, 3, 20, "f", 1.0),
    point("outside", "other", 79, 500),
    point("short", "other", 30, 100),
]

BOTH = policy_hues(["base", "both", "x"])


def table(points: list[dict]) -> DataFrame:
    return DataFrame(points).set_index("name")


def drawn(points: list[dict], hues: dict | None = None) -> object:
    return frontier(table(points), hues).drawing


def markers(figure: object) -> dict[tuple[float, float], bool]:
    """Where each policy's marker stands, and whether it is filled."""
    found = {}
    for collection in figure.axes[0].collections:
        offsets = collection.get_offsets()
        if type(collection).__name__ == "PathCollection" and len(offsets):
            found[tuple(float(value) for value in offsets[0])] = to_hex(collection.get_facecolors()[0]) != PAPER
    return found


def test_only_what_nothing_beats_is_filled_and_only_own_policies_are_joined() -> None:
    figure = drawn(POINTS)
    filled = {place for place, is_filled in markers(figure).items() if is_filled}
    assert filled == {(450, 80), (250, 78), (200, 50), (100, 30)}
    by_length = {len(line.get_xdata()): line for line in figure.axes[0].lines}
    front, family = by_length[3], by_length[4]
    assert list(front.get_xdata()) == [200, 250, 450]  # the other checkpoint is a single mark
    assert list(family.get_xdata()) == [450, 250, 300, 200]  # in the order of the share
    assert family.is_dashed()
    pyplot.close(figure)


def test_the_caption_describes_only_what_is_drawn() -> None:
    starred = [{**one, "aes": place} for place, one in enumerate(POINTS[:-2])]
    whole = frontier(table(starred), problems=450).caption
    assert [word for word in ("Solid", "Hollow", "Dashed", "Star", "Bars") if word in whole] == [
        "Solid", "Hollow", "Dashed", "Star", "Bars"
    ]  # fmt: skip
    assert "450 problems" in whole
    assert frontier(table([point("base", "base", 60, 400)])).caption == ""
    trusted, not_trusted = (
        ForecastPoint("x", {"a": 1.0}, 2.0, 80, 75, 85, 50, 45, 55, 0.5, 0.3, 0.7, 0.1, 99, is_trusted, True)
        for is_trusted in (True, False)
    )
    before, after, same = (
        frontier(table(starred), forecasts=forecasts) for forecasts in ([], [trusted, not_trusted], [not_trusted])
    )
    assert "Small diamonds: forecasts from the cache, with 95 % intervals." in after.caption
    assert before.caption == same.caption
    marks = [len(one.drawing.axes[0].collections) for one in (before, after, same)]
    assert marks[0] == marks[2] < marks[1]
    on_front = [point(f"rho-{n}", "composition", 60 + n, 100 + n, family="f", share=n) for n in range(3)]
    figure = frontier(table(on_front))
    assert figure.caption.startswith("Solid line")
    assert "Dashed" not in figure.caption  # the solid line is where it would be
    assert [len(line.get_xdata()) for line in figure.drawing.axes[0].lines].count(3) == 1
    pyplot.close("all")


def test_a_forecast_that_rounding_puts_outside_of_its_interval_is_drawn() -> None:
    """Of responses that are all cut off at the same length."""
    tokens = (50.00000000000004, 49.99999999999998, 50.00000000000001)
    one = ForecastPoint("x", {"a": 1.0}, 2.0, 80, 80.00000000000001, 85, *tokens, 0.5, 0.3, 0.7, 0.1, 99, True, True)
    assert "Small diamonds" in frontier(table(POINTS), forecasts=[one]).caption


def test_an_accuracy_of_zero_everywhere_has_an_axis_that_makes_sense() -> None:
    figure = drawn([point("base", "base", 0, 400), point("both", "composition", 0, 300)])
    low, high = figure.axes[0].get_ylim()
    assert -2 < low <= 0
    assert high - low > 2
    pyplot.close(figure)


def test_a_policy_has_one_colour_in_every_figure() -> None:
    names = ["base", *(f"p{n}" for n in range(11))]
    hues = policy_hues(names)
    assert len({(hue.name, hue.again) for hue in hues.values()}) == 12
    points = [point(name, "composition", 50 + n, 100.0 + n) for n, name in enumerate(names)]
    front = drawn(points, hues)
    found = {
        tuple(c.get_offsets()[0]): to_hex(c.get_edgecolors()[0])
        for c in front.axes[0].collections
        if len(c.get_offsets())
    }
    assert [found[one["tokens"], one["accuracy"]] for one in points] == [hues[name].hex for name in names]
    dots = profile(results_of(*(result_row(name, {}, (0, 0, 0)) for name in names)).droplevel("group"), hues).drawing
    assert [to_hex(one) for one in dots.axes[0].collections[1].get_facecolors()] == [hues[n].hex for n in names]
    curves = lines({"": {name: [(1, 1.0), (2, 2.0)] for name in reversed(names)}}, "x", "y", hues)
    legend = {one.get_label(): one for one in curves.legends[0].legend_handles}
    assert all(to_hex(legend[name].get_color()) == hues[name].hex for name in names)
    assert legend["p9"].get_linestyle() != legend["p0"].get_linestyle()  # the same colour again
    for figure in (front, dots, curves):
        assert "var(--blue)" in inline(figure)
        assert hues["p0"].hex not in inline(figure)
        pyplot.close(figure)


@pytest.mark.slow
def test_same_points_same_files(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        save(frontier(table(POINTS)), tmp_path / folder)
    for name in ("frontier.svg", "frontier.pdf", "frontier.png"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_inline_drawing_has_the_readers_colours_and_no_style_or_unused_id() -> None:
    figure = drawn([*POINTS, point("$x^2$ <b>", "other", 55, 350)])
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


def test_every_figure_says_what_it_shows(tmp_path: Path) -> None:
    even = {"weights": {"acc": 0.5, "brief": 0.5}}
    run = run_of({**make_world(tmp_path), "compositions": {"even": even, "live": {**even, "method": "online"}}})
    counts = {"tokens": 1, "bytes": 1, "peak_memory": 1, "device_seconds": 7200.0}
    ledger = [{"stage": stage, "name": "", **counts} for stage in ("rollout", "reference")]
    for name, method in (("even", "joint"), ("live", "online")):
        ledger.append({"stage": "train", "name": name, "method": method, **counts})
    cost, amortised = cost_figures(run, ledger)
    base = result_row("base", {"sums": (50.0, 9.0, 12)}, (50, 9, 0.0))
    both = result_row("both", {"sums": (60.0, 9.0, 12)}, (60, 9, 1.0))
    survey = Survey(["a", "b"], {"one": {"a": 1.0}}, vocabulary())
    survey.add(decisions())
    bars = stacked({"row": {"kept": 3.0, "gone": 1.0}}, part_hues(["kept", "gone"]), "%", shares=True)
    curves = lines({"a": {"x": [(1, 2.0), (2, 1.0)]}}, "step", "nats", BOTH, logarithmic=True)
    dots = profile(results_of(base, both).droplevel("group"), BOTH).drawing
    for figure, words in (
        (dots, ["base", "both", "AES", "sums, %", "12 problems"]),
        (curves, ["step", "nats", "x"]),
        (bars, ["row", "kept", "gone", "75 %", "25 %"]),
        (kinds(survey, BOTH).drawing, ["a", "b", "mean size of the pull, nats"]),
        (cost.drawing, ["one composition", "online, one", "rollout", "train", "device time, h"]),
        (amortised.drawing, ["online, measured", "h per composition"]),
    ):
        elements = ElementTree.fromstring(inline(figure)).iter()
        assert set(words) <= {element.text for element in elements if element.tag.endswith("text")}
    pyplot.close("all")


@pytest.mark.parametrize(("low", "high"), [(0.037, 0.16), (0.2, 1.9), (1.2, 1.9), (0.011, 0.019), (0.03, 4.0)])
def test_labels_of_a_logarithmic_axis_have_room_and_are_at_least_one(low: float, high: float) -> None:
    curve = lines({"": {"x": [(1, high), (12, low)]}}, "update", "nats", BOTH, logarithmic=True)
    curve.canvas.draw()
    (axes,) = curve.axes
    labels = [
        label.get_window_extent()
        for tick in (*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks())
        if (label := tick.label1).get_text() and axes.bbox.y0 - 1 <= axes.transData.transform((1, tick.get_loc()))[1]
        if axes.transData.transform((1, tick.get_loc()))[1] <= axes.bbox.y1 + 1
    ]
    pyplot.close(curve)
    labels.sort(key=lambda box: box.y0)
    assert labels
    assert all(lower.y1 <= upper.y0 for lower, upper in pairwise(labels))


def test_the_curves_are_those_of_the_recipe_whatever_was_trained_last(tmp_path: Path) -> None:
    world = make_world(tmp_path, prompts=2)
    run, other = run_of(world), run_of({**world, "train": {**world["train"], "learning_rate": 1e-2}})
    for one, loss in ((run, 1.0), (other, 5.0)):
        stage = one.stage("train", "both")
        rows = [{"step": step, "loss": loss} for step in (1, 2, 3)]
        write_atomic(stage.folder / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
        stage.link()
    (figure,) = training_figures(run, policy_hues(run.policies))
    assert set(figure.drawing.axes[0].lines[0].get_ydata()) == {1.0}
