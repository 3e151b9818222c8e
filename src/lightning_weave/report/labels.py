"""Put names beside points so that all of them can be read: no name on another, on a point or outside the axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIRECTIONS = 16
RADII = (9.0, 16.0, 26.0, 38.0, 54.0, 72.0)  # pixels from a point to the nearest edge of its name
LEADER_FROM = 14.0  # beyond this a thin line says whose name it is
POINT = 6.0  # half the side of the square that a marker fills


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


def place(points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], bounds: Box) -> list[Box]:
    """Choose a box for each name: nearest first, the crowded points first."""
    markers = [Box(x - POINT, y - POINT, x + POINT, y + POINT) for x, y in points]
    order = sorted(range(len(points)), key=lambda index: -_crowd(points, index))
    placed: dict[int, Box] = {}
    for index in order:
        taken = [*markers, *placed.values()]
        placed[index] = min(_choices(points[index], sizes[index]), key=lambda choice: _cost(choice, taken, bounds))[0]
    return [placed[index] for index in range(len(points))]


def annotate(axes: Any, points: Sequence[tuple[float, float]], names: Sequence[str], size: float, colour: str) -> None:
    """Write the names of points into axes whose layout is final."""
    renderer = axes.figure.canvas.get_renderer()
    scale = 72 / axes.figure.dpi
    texts = [axes.annotate(name, point, fontsize=size) for name, point in zip(names, points, strict=True)]
    extents = [text.get_window_extent(renderer) for text in texts]
    pixels = [tuple(pair) for pair in axes.transData.transform(points)] if points else []
    inside = axes.get_window_extent(renderer)
    boxes = place(
        pixels, [(e.width + 2, e.height + 1) for e in extents], Box(inside.x0, inside.y0, inside.x1, inside.y1)
    )
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


def _crowd(points: Sequence[tuple[float, float]], index: int) -> int:
    near = 4 * RADII[-1]
    return sum(math.dist(points[index], other) < near for other in points)


def _choices(point: tuple[float, float], size: tuple[float, float]) -> list[tuple[Box, float]]:
    boxes = []
    for radius in RADII:
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * (turn + 1) / DIRECTIONS  # first up and to the right
            x = point[0] + math.cos(angle) * (radius + size[0] / 2)
            y = point[1] + math.sin(angle) * (radius + size[1] / 2)
            box = Box(x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            boxes.append((box, radius))
    return boxes


def _cost(choice: tuple[Box, float], taken: Sequence[Box], bounds: Box) -> float:
    box, radius = choice
    covered = sum(box.overlap(other) for other in taken)
    outside = box.area - box.overlap(bounds)
    return 100 * (covered + outside) + radius


def _distance(pixel: tuple[float, float], box: Box) -> float:
    across = max(box.left - pixel[0], 0.0, pixel[0] - box.right)
    along = max(box.bottom - pixel[1], 0.0, pixel[1] - box.top)
    return math.hypot(across, along)
