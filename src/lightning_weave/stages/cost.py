"""`lweave cost`: the paper's cost table (tab. training-cost) from what was measured."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_weave.errors import InputError
from lightning_weave.progress import duration
from lightning_weave.stages.steps import Steps
from lightning_weave.store.ledger import read_ledger

SHARED = {"rollout": "Student rollout collection", "reference": "Student-reference scoring", "score": "Anchor scoring"}


@dataclass(frozen=True)
class Cost:
    """What a stage has cost so far, over all its rows of the ledger."""

    seconds: float
    tokens: int
    written: int
    peak_memory: int


def run(steps: Steps, console: Console) -> None:
    """Print what every stage cost, what a composition costs, and what sharing the cache saves."""
    rows = read_ledger(steps.store.run_dir)
    if not rows:
        raise InputError(f"{steps.store.run_dir}: nothing measured yet. Start with: lweave run {steps.arguments}")
    console.print(_stages_table(rows))
    for line in summary(rows):
        console.print(line, soft_wrap=True)


def costs(rows: list[dict[str, Any]], *keys: str) -> dict[tuple[str, ...], Cost]:
    """Add up ledger rows that agree on `keys`."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[tuple(str(row.get(key, "")) for key in keys)].append(row)
    return {
        group: Cost(
            sum(row["device_seconds"] for row in members),
            sum(row["tokens"] for row in members),
            sum(row["bytes"] for row in members),
            max(row["peak_memory"] for row in members),
        )
        for group, members in groups.items()
    }


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """State what a composition costs: alone, five sharing the cache, and against online training."""
    by_stage = costs(rows, "stage")
    shared = sum(by_stage[(stage,)].seconds for stage in SHARED if (stage,) in by_stage)
    by_method = {
        method: [cost.seconds for key, cost in costs(_training(rows), "name", "method").items() if key[1] == method]
        for method in ("joint", "online")
    }
    if not by_method["joint"]:
        return []
    mean = sum(by_method["joint"]) / len(by_method["joint"])
    one, five = shared + mean, shared + 5 * mean
    lines = [
        f"One composition: {duration(one)} ({duration(shared)} cache + {duration(mean)} training)",
        f"Five sharing the cache: {duration(five)}, {duration(five / 5)} each",
    ]
    if by_method["online"]:
        live = sum(by_method["online"]) / len(by_method["online"])
        ratios = f"{live / one:.2f} x offline for one, {5 * live / five:.2f} x for five"
        lines.append(f"Online, one composition: {duration(live)} = {ratios}")
    return lines


def _training(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["stage"] == "train"]


def _stages_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(
        "stage", "what", "device time", "tokens", "tokens/s", "written", "peak memory", title="Cost", box=None
    )
    for (stage, name), cost in costs(rows, "stage", "name").items():
        rate = f"{cost.tokens / cost.seconds:,.0f}" if cost.tokens and cost.seconds else ""
        written = f"{cost.written / 1e6:,.1f} MB" if cost.written else ""
        table.add_row(
            stage, name, duration(cost.seconds), f"{cost.tokens:,}", rate, written, f"{cost.peak_memory / 1e9:.2f} GB"
        )
    total = sum(row["device_seconds"] for row in rows)
    table.add_row("total", "", duration(total), "", "", "", "", style="bold")
    return table
