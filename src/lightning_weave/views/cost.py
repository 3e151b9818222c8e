"""`lweave cost`: the paper's cost table (tab. training-cost) from what was measured."""

import json as json_format
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_weave.errors import InputError
from lightning_weave.progress import duration
from lightning_weave.runs.costs import costs, summary
from lightning_weave.runs.steps import Steps
from lightning_weave.store.ledger import read_ledger


def run(steps: Steps, console: Console, json: bool = False) -> None:
    """Print what every stage cost, what a composition costs, and what sharing the cache saves."""
    rows = read_ledger(steps.store.run_dir)
    if not rows:
        raise InputError(f"{steps.store.run_dir}: nothing measured yet. Start with: lweave run {steps.arguments}")
    if json:
        stages = [
            {"stage": stage, "name": name, **asdict(cost)}
            for (stage, name), cost in costs(rows, "stage", "name").items()
        ]
        seconds = sum(row["device_seconds"] for row in rows)
        said = {"run": str(steps.store.run_dir), "stages": stages, "seconds": seconds, "summary": summary(steps, rows)}
        print(json_format.dumps(said, indent=2))
        return
    console.print(_stages_table(rows))
    for line in summary(steps, rows):
        console.print(line, soft_wrap=True)


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
