"""Cost and training of a run: figures and a table from the ledger and the training metrics."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from lightning_weave.progress import duration
from lightning_weave.report.colours import Hues, part_hues
from lightning_weave.report.plots import Line, amortised, lines, stacked
from lightning_weave.runs.costs import offline_cost, online_costs, training_rows
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines

HUES = part_hues(("rollout", "reference", "score", "train", "online"))
UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))
CURVES = {
    "reverse_kl": "KL to the target, nats",
    "loss": "loss",
    "eval_accuracy": "accuracy on a few problems, %",
    "eval_tokens": "tokens on a few problems",
}
WINDOWS = 25  # the window of the running mean is this part of a training


def variants_table(steps: Steps, ledger: list[dict[str, Any]]) -> Table:
    """Tabulate the training cost of each composition, including what the legs of a sequence sampled."""
    table = Table("composition", "method", "device time", title="Training", title_justify="left", box=None)
    for name, composition in steps.recipe.compositions.items():
        seconds = [row["device_seconds"] for row in training_rows(ledger) if row["name"].split("/")[0] == name]
        epochs = composition.epochs and f"{composition.epochs} epochs"
        words = [word for word in (composition.method, composition.objective, epochs) if word]
        if seconds:
            table.add_row(name, ", ".join(words), duration(sum(seconds)))
    return table


def training_figures(steps: Steps, hues: Hues) -> dict[str, Any]:
    """Draw what was watched of every composition whose training has started; evaluations where there were any."""
    figures = {}
    for key, title in CURVES.items():
        curves = {name: _curve(steps, name, key) for name in steps.recipe.compositions}
        started = {name: curve for name, curve in curves.items() if curve}
        if started:
            logarithmic = not key.startswith("eval_")
            figures[f"training-{key}"] = lines({"": started}, "update", title, hues, logarithmic=logarithmic)
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


def cost_figures(steps: Steps, ledger: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw the cost of a composition by stage, alone and sharing the cache, and its cost by the number that share."""
    offline = offline_cost(steps, ledger)
    if offline is None:
        return {}
    number = offline.compositions
    online_seconds = [seconds for seconds, _ in online_costs(steps, ledger).values()]
    online = sum(online_seconds) / len(online_seconds) if online_seconds else None
    unit, divisor = _unit(max(offline.of(1), online or 0.0))
    bars = {"one composition": {**offline.cache, "train": offline.train}}
    if number > 1:
        shares = {stage: seconds / number for stage, seconds in offline.cache.items()}
        bars[f"each of {number}"] = {**shares, "train": offline.train}
    if online is not None:
        bars["online, one"] = {"online": online}
    scaled = {name: {stage: seconds / divisor for stage, seconds in parts.items()} for name, parts in bars.items()}
    return {
        "cost": stacked(scaled, HUES, f"device time, {unit}"),
        "amortised": amortised(
            offline.of(0) / divisor, offline.train / divisor, online and online / divisor, number, unit
        ),
    }


def _unit(seconds: float) -> tuple[str, float]:
    return next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])
