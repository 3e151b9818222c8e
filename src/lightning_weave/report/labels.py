"""Place labels beside points: inside the axes, without covering other labels, points or lines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIRECTIONS = 16
RADII = (9.0, 16.0, 26.0, 38.0, 54.0, 72.0)  # pixels from a point to the nearest edge of its label
LEADER_FROM = 14.0  # beyond this distance, a thin line joins label and point
POINT = 6.0  # half the side of a marker's square
LINE = 1.5  # half the side of a piece of a line
STEP = 4.0  # between two pieces

XY = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """The shared area.

        >>> Box(0, 0, 2, 2).overlap(Box(1, 1, 5, 5)), Box(0, 0, 1, 1).overlap(Box(1, 0, 2, 1))
        (1, 0)
        """
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0) * max(height, 0)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place(points: Sequence[XY], sizes: Sequence[XY], bounds: Box, lines: Sequence[Box] = ()) -> list[Box]:
    """Choose a box for each label: crowded points first, as near as possible, off the lines if there is room."""
    markers = [Box(x - POINT, y - POINT, x + POINT, y + POINT) for x, y in points]
    order = sorted(range(len(points)), key=lambda index: -_crowd(points, index))
    placed: dict[int, Box] = {}
    for index in order:
        obstacles = [*markers, *placed.values()]
        placed[index] = min(
            _choices(points[index], sizes[index]), key=lambda choice: _cost(choice, obstacles, lines, bounds)
        )[0]
    return [placed[index] for index in range(len(points))]


def pieces(start: XY, end: XY) -> list[Box]:
    """Cut a line into small boxes for labels to avoid."""
    count = max(int(math.dist(start, end) / STEP), 1)
    at = [
        (start[0] + (end[0] - start[0]) * n / count, start[1] + (end[1] - start[1]) * n / count) for n in range(count)
    ]
    return [Box(x - LINE, y - LINE, x + LINE, y + LINE) for x, y in at]


def annotate(
    axes: Any,
    points: Sequence[XY],
    names: Sequence[str],
    lines: Sequence[tuple[XY, XY]],
    *,
    size: float,
    colour: str,
) -> None:
    """Label points in axes whose layout is final, avoiding lines given in data coordinates."""
    renderer = axes.figure.canvas.get_renderer()
    scale = 72 / axes.figure.dpi
    texts = [axes.annotate(name, point, fontsize=size) for name, point in zip(names, points, strict=True)]
    extents = [text.get_window_extent(renderer) for text in texts]
    pixels = [tuple(pair) for pair in axes.transData.transform(points)] if points else []
    inside = axes.get_window_extent(renderer)
    bounds = Box(inside.x0, inside.y0, inside.x1, inside.y1)
    drawn = [piece for ends in lines for piece in pieces(*(tuple(end) for end in axes.transData.transform(ends)))]
    boxes = place(pixels, [(extent.width + 2, extent.height + 1) for extent in extents], bounds, drawn)
    for text, name, point, pixel, box in zip(texts, names, points, pixels, boxes, strict=True):
        text.remove()
        far = _distance(pixel, box) > LEADER_FROM
        axes.annotate(
            name,
            point,
            ((box.left - pixel[0]) * scale, (box.bottom - pixel[1]) * scale),
            textcoords="offset points",
            fontsize=size,
            color=colour,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": colour, "alpha": 0.5} if far else None,
        )


def _crowd(points: Sequence[XY], index: int) -> int:
    near = 4 * RADII[-1]
    return sum(math.dist(points[index], other) < near for other in points)


def _choices(point: XY, size: XY) -> list[tuple[Box, float]]:
    boxes = []
    for radius in RADII:
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * (turn + 1) / DIRECTIONS  # first up and to the right
            x = point[0] + math.cos(angle) * (radius + size[0] / 2)
            y = point[1] + math.sin(angle) * (radius + size[1] / 2)
            box = Box(x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            boxes.append((box, radius))
    return boxes


def _cost(choice: tuple[Box, float], obstacles: Sequence[Box], lines: Sequence[Box], bounds: Box) -> float:
    box, radius = choice
    covered = sum(box.overlap(other) for other in obstacles)
    crossed = sum(box.overlap(piece) for piece in lines)
    outside = box.area - box.overlap(bounds)
    return 100 * (covered + outside) + 0.6 * crossed + radius


def _distance(pixel: XY, box: Box) -> float:
    across = max(box.left - pixel[0], 0.0, pixel[0] - box.right)
    along = max(box.bottom - pixel[1], 0.0, pixel[1] - box.top)
    return math.hypot(across, along)
