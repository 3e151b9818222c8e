"""Put names beside points so that all of them can be read: on no other name, on no point, off the lines, within."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DIRECTIONS = 16
RADII = (9.0, 16.0, 26.0, 38.0, 54.0, 72.0)  # pixels from a point to the nearest edge of its name
LEADER_FROM = 14.0  # beyond this a thin line says whose name it is
POINT = 6.0  # half the side of the square that a marker fills
LINE = 1.5  # the same for a piece of a line, of which there is one every few pixels
STEP = 4.0

Pixel = tuple[float, float]


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


def place(points: Sequence[Pixel], sizes: Sequence[Pixel], bounds: Box, lines: Sequence[Box] = ()) -> list[Box]:
    """Choose a box for each name: nearest first, the crowded points first, off the lines where there is room."""
    markers = [Box(x - POINT, y - POINT, x + POINT, y + POINT) for x, y in points]
    order = sorted(range(len(points)), key=lambda index: -_crowd(points, index))
    placed: dict[int, Box] = {}
    for index in order:
        taken = [*markers, *placed.values()]
        placed[index] = min(
            _choices(points[index], sizes[index]), key=lambda choice: _cost(choice, taken, lines, bounds)
        )[0]
    return [placed[index] for index in range(len(points))]


def pieces(start: Pixel, end: Pixel) -> list[Box]:
    """Cut a line into small boxes that a name can keep away from."""
    count = max(int(math.dist(start, end) / STEP), 1)
    at = [
        (start[0] + (end[0] - start[0]) * n / count, start[1] + (end[1] - start[1]) * n / count) for n in range(count)
    ]
    return [Box(x - LINE, y - LINE, x + LINE, y + LINE) for x, y in at]


def annotate(
    axes: Any,
    points: Sequence[Pixel],
    names: Sequence[str],
    lines: Sequence[tuple[Pixel, Pixel]],
    size: float,
    colour: str,
) -> None:
    """Write the names of points into axes whose layout is final, away from lines given in the axes' own units."""
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


def _crowd(points: Sequence[Pixel], index: int) -> int:
    near = 4 * RADII[-1]
    return sum(math.dist(points[index], other) < near for other in points)


def _choices(point: Pixel, size: Pixel) -> list[tuple[Box, float]]:
    boxes = []
    for radius in RADII:
        for turn in range(DIRECTIONS):
            angle = 2 * math.pi * (turn + 1) / DIRECTIONS  # first up and to the right
            x = point[0] + math.cos(angle) * (radius + size[0] / 2)
            y = point[1] + math.sin(angle) * (radius + size[1] / 2)
            box = Box(x - size[0] / 2, y - size[1] / 2, x + size[0] / 2, y + size[1] / 2)
            boxes.append((box, radius))
    return boxes


def _cost(choice: tuple[Box, float], taken: Sequence[Box], lines: Sequence[Box], bounds: Box) -> float:
    box, radius = choice
    covered = sum(box.overlap(other) for other in taken)
    crossed = sum(box.overlap(piece) for piece in lines)
    outside = box.area - box.overlap(bounds)
    return 100 * (covered + outside) + 0.6 * crossed + radius


def _distance(pixel: Pixel, box: Box) -> float:
    across = max(box.left - pixel[0], 0.0, pixel[0] - box.right)
    along = max(box.bottom - pixel[1], 0.0, pixel[1] - box.top)
    return math.hypot(across, along)
