"""Names next to points: readable whatever the crowd."""

import random

import numpy as np
import pytest
from matplotlib.text import Text
from pandas import DataFrame

from lightning_weave.report.figures import POINT, frontier, overlaps, pieces, place
from report.evaluated import point


def crowd(count: int, seed: int, spread: float) -> tuple[list, list]:
    draw = random.Random(seed)
    points = [(300 + draw.gauss(0, spread), 200 + draw.gauss(0, spread)) for _ in range(count)]
    return points, [(draw.uniform(30, 80), 11.0) for _ in range(count)]


BOUNDS = np.array([[0, 0, 600, 400.0]])


@pytest.mark.parametrize(("count", "spread"), [(6, 5.0), (12, 40.0), (20, 70.0)])
def test_no_name_covers_a_name_or_a_point(count: int, spread: float) -> None:
    points, sizes = crowd(count, seed=count, spread=spread)
    boxes = place(points, sizes, BOUNDS[0])
    markers = np.hstack([np.array(points) - POINT, np.array(points) + POINT])
    areas = np.prod(sizes, axis=1)
    assert overlaps(boxes, boxes) == pytest.approx(np.diag(areas))
    assert (overlaps(boxes, markers) == 0).all()
    assert boxes[:, 2:] - boxes[:, :2] == pytest.approx(np.array(sizes))
    assert overlaps(boxes, BOUNDS)[:, 0] == pytest.approx(areas)


def test_a_point_in_a_corner_keeps_its_name_inside() -> None:
    ((_, _, right, top),) = place([(598.0, 398.0)], [(60.0, 11.0)], BOUNDS[0])
    assert right <= 600
    assert top <= 400


def test_a_name_stays_off_a_line() -> None:
    line = pieces((0.0, 0.0), (600.0, 400.0))
    free = place([(300.0, 200.0)], [(60.0, 11.0)], BOUNDS[0])
    kept = place([(300.0, 200.0)], [(60.0, 11.0)], BOUNDS[0], line)
    assert overlaps(free, line).sum() > 0
    assert overlaps(kept, line).sum() == 0


def test_names_of_a_drawn_frontier_do_not_touch() -> None:
    names = [f"decs-0.{n}50-alpha-2" for n in range(9)]
    points = [point(name, "composition", 80 - 0.2 * n, 900 + 4.0 * n, 2.0, 30.0) for n, name in enumerate(names)]
    figure = frontier(DataFrame([*points, point("base", "base", 60.0, 1500.0)]).set_index("name")).drawing
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    assert {text.get_text() for text in texts} == {*names, "base"}
    boxes = [Text.get_window_extent(text, renderer) for text in texts]  # without the leaders
    assert not any(one.overlaps(two) for n, one in enumerate(boxes) for two in boxes[:n])
