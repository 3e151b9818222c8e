"""What a run spent, and how its training went: figures from the ledger and the metrics."""

from collections.abc import Sequence
from typing import Any

from lightning_weave.report.figures import BLUE, GREEN, ORANGE, PURPLE, SKY
from lightning_weave.report.plots import Line, amortised, lines, stacked
from lightning_weave.runs.costs import offline_cost, online_costs
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines

COLOURS = {"rollout": BLUE, "reference": SKY, "score": GREEN, "train": ORANGE, "online": PURPLE}
UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
CURVES = {"reverse_kl": "KL to the target, nats", "loss": "loss"}
WINDOWS = 25  # a curve is the running mean over one of so many parts of the training


def training_figures(steps: Steps) -> dict[str, Any]:
    """Draw how far each student still was from its target, and its loss, for every composition that has begun."""
    figures = {}
    for key, title in CURVES.items():
        curves = {name: _curve(steps, name, key) for name in steps.recipe.compositions}
        drawn = {name: curve for name, curve in curves.items() if curve}
        if drawn:
            figures[key] = lines({"": drawn}, "update", title, logarithmic=True)
    return figures


def _curve(steps: Steps, name: str, key: str) -> Line:
    folder = steps.store.run_dir / "train" / name
    points: list[tuple[float, float]] = []
    for path in [folder / "metrics.jsonl", *sorted(folder.glob("leg-*/**/metrics.jsonl"))]:  # a sequence has legs
        before = points[-1][0] if points else 0.0
        points += [(before + row["step"], float(row[key])) for row in read_lines(path) if key in row]
    window = -(-len(points) // WINDOWS)
    return [(points[last][0], _mean(points[max(last + 1 - window, 0) : last + 1])) for last in range(len(points))]


def _mean(points: Sequence[tuple[float, float]]) -> float:
    return sum(value for _, value in points) / len(points)


def cost_figures(steps: Steps, rows: list[dict[str, Any]]) -> tuple[Any, Any] | None:
    """Draw cost per stage for one composition and for those that share a cache, and the cost over their number."""
    offline = offline_cost(steps, rows)
    if offline is None:
        return None
    shared, each, number = offline.cache, offline.train, offline.compositions
    online = [seconds for seconds, _ in online_costs(steps, rows).values()]
    live = sum(online) / len(online) if online else None
    unit, divisor = _unit(max(offline.of(1), live or 0.0))
    bars = {"one composition": {**shared, "train": each}}
    if number > 1:
        bars[f"each of {number}"] = {**{stage: seconds / number for stage, seconds in shared.items()}, "train": each}
    if live is not None:
        bars["online, one"] = {"online": live}
    scaled = {name: {part: value / divisor for part, value in parts.items()} for name, parts in bars.items()}
    per_stage = stacked(scaled, COLOURS, f"device time, {unit}")
    curve = amortised(offline.of(0) / divisor, each / divisor, live and live / divisor, number, unit)
    return per_stage, curve


def _unit(seconds: float) -> tuple[str, float]:
    return next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])
