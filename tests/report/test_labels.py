"""Names beside points: readable whatever the crowd."""

import random

import pytest
from matplotlib.text import Text

from lightning_weave.report.figures import FrontierPoint, frontier
from lightning_weave.report.labels import POINT, Box, pieces, place


def crowd(count: int, seed: int, spread: float) -> tuple[list, list]:
    draw = random.Random(seed)
    points = [(300 + draw.gauss(0, spread), 200 + draw.gauss(0, spread)) for _ in range(count)]
    return points, [(draw.uniform(30, 80), 11.0) for _ in range(count)]


@pytest.mark.parametrize(("count", "spread"), [(6, 5.0), (12, 40.0), (20, 70.0)])
def test_no_name_covers_a_name_or_a_point(count: int, spread: float) -> None:
    points, sizes = crowd(count, seed=count, spread=spread)
    boxes = place(points, sizes, Box(0, 0, 600, 400))
    for n, box in enumerate(boxes):
        assert all(box.overlap(other) == 0 for other in boxes[:n])
        assert all(box.overlap(Box(x - POINT, y - POINT, x + POINT, y + POINT)) == 0 for x, y in points)
        assert (box.right - box.left, box.top - box.bottom) == pytest.approx(sizes[n])
        assert box.overlap(Box(0, 0, 600, 400)) == pytest.approx(box.area)


def test_a_point_in_a_corner_keeps_its_name_inside() -> None:
    (box,) = place([(598.0, 398.0)], [(60.0, 11.0)], Box(0, 0, 600, 400))
    assert box.right <= 600
    assert box.top <= 400


def test_a_name_stays_off_a_line() -> None:
    line = pieces((0.0, 0.0), (600.0, 400.0))
    (free,) = place([(300.0, 200.0)], [(60.0, 11.0)], Box(0, 0, 600, 400))
    (kept,) = place([(300.0, 200.0)], [(60.0, 11.0)], Box(0, 0, 600, 400), line)
    assert sum(free.overlap(piece) for piece in line) > 0
    assert sum(kept.overlap(piece) for piece in line) == 0


def test_names_of_a_drawn_frontier_do_not_touch() -> None:
    names = [f"decs-0.{n}50-alpha-2" for n in range(9)]
    points = [
        FrontierPoint(name, "composition", 80 - 0.2 * n, 900 + 4.0 * n, 2.0, 30.0) for n, name in enumerate(names)
    ]
    figure = frontier([*points, FrontierPoint("base", "base", 60.0, 1500.0)])
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    texts = [text for text in figure.axes[0].texts if text.get_text()]
    assert {text.get_text() for text in texts} == {*names, "base"}
    boxes = [Text.get_window_extent(text, renderer) for text in texts]  # without the leaders
    assert not any(one.overlaps(two) for n, one in enumerate(boxes) for two in boxes[:n])
