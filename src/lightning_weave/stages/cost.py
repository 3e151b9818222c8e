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
    """State cost per composition: offline, amortised over those that share the cache, and against online."""
    by_stage = costs(rows, "stage")
    shared = sum(by_stage[(stage,)].seconds for stage in SHARED if (stage,) in by_stage)
    trained = costs([row for row in rows if row["stage"] == "train"], "name", "method")
    offline = {key: cost.seconds for key, cost in trained.items() if key[1] != "online"}
    online = {key: cost.seconds for key, cost in trained.items() if key[1] == "online"}
    lines = []
    if offline:
        count, mean = len(offline), sum(offline.values()) / len(offline)
        one, many = shared + mean, shared + count * mean
        lines.append(f"One composition: {duration(one)} ({duration(shared)} cache + {duration(mean)} training)")
        lines.append(f"{count} sharing the cache: {duration(many)}, {duration(many / count)} each")
        if online:
            live = sum(online.values()) / len(online)
            ratios = f"{live / one:.2f} x offline for one, {count * live / many:.2f} x for {count}"
            lines.append(f"Online, one composition: {duration(live)} = {ratios}")
    return lines


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
