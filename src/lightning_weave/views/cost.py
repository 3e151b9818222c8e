"""`lweave cost`: the paper's cost table (tab. training-cost) from what was measured."""

import json as json_format
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_weave.errors import InputError
from lightning_weave.progress import duration
from lightning_weave.report.cost_table import cost_columns, table_lines
from lightning_weave.report.tables import student_names
from lightning_weave.runs.costs import Spent, costs, read_spent, summary
from lightning_weave.runs.discard import file_size
from lightning_weave.runs.known import with_known
from lightning_weave.runs.steps import Steps


def run(runs: Sequence[Steps], console: Console, json: bool = False) -> None:
    """Print what every stage cost and what sharing the cache saves; of several runs, a table to compare them."""
    if len(runs) > 1:
        _compare(runs, console, json)
        return
    steps = with_known(runs[0])
    spent = _read(steps)
    rows = spent.kept
    if json:
        document = {
            "run": str(steps.store.run_dir),
            "stages": _stages(rows),
            "seconds": _seconds(rows),
            "discarded": _stages(spent.discarded),
            "discarded_seconds": _seconds(spent.discarded),
            "summary": summary(steps, rows),
        }
        print(json_format.dumps(document, indent=2))
        return
    console.print(_stages_table(rows, "Cost"))
    if spent.discarded:
        console.print(_stages_table(spent.discarded, "Not counted: rerun or removed since"))
    for line in summary(steps, rows):
        console.print(line, soft_wrap=True)


def _read(steps: Steps) -> Spent:
    spent = read_spent(steps.store.run_dir)
    if not spent.kept and not spent.discarded:
        raise InputError(f"{steps.store.run_dir}: nothing measured yet. Start with: {steps.command('run')}")
    return spent


def _compare(runs: Sequence[Steps], console: Console, json: bool) -> None:
    """Print the paper's table: one composition by student and anchors, offline by stage and online."""
    columns = [
        column
        for steps in map(with_known, runs)
        for column in cost_columns(steps, _read(steps).kept, *student_names([[steps]]))
    ]
    if not columns:
        raise InputError("no composition is trained in any of these runs, so there is nothing to compare")
    if json:
        print(json_format.dumps([{**asdict(column), "ratio": column.ratio} for column in columns], indent=2))
        return
    header, *lines = table_lines(columns)
    table = Table(*header, title="Cost of one composition, device time", box=None)
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    console.print(table)


def _stages(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"stage": stage, "name": name, **asdict(cost), "idle": cost.idle}
        for (stage, name), cost in costs(rows, "stage", "name").items()
    ]


def _seconds(rows: list[dict[str, Any]]) -> float:
    return float(sum(row["device_seconds"] for row in rows))


def _stages_table(rows: list[dict[str, Any]], title: str) -> Table:
    by_name = costs(rows, "stage", "name")
    engines = ["engine"] if any(cost.idle is not None for cost in by_name.values()) else []
    columns = ("stage", "what", "device time", "tokens", "tokens/s", "written", "peak memory", *engines)
    table = Table(*columns, title=title, box=None)
    table.columns[1].overflow = "fold"  # a name that is cut names nothing
    for (stage, name), cost in by_name.items():
        rate = f"{cost.tokens / cost.seconds:,.0f}" if cost.tokens and cost.seconds else ""
        size = file_size(cost.written) if cost.written else ""
        memory = f"{cost.peak_memory / 1e9:.2f} GB"
        cells = [stage, name, duration(cost.seconds), f"{cost.tokens:,}", rate, size, memory]
        engine = "" if cost.idle is None else f"idle {cost.idle:.0%}, start {duration(cost.starting)}"
        table.add_row(*cells, *([engine] if engines else []))
    table.add_row("total", "", duration(_seconds(rows)), style="bold")
    return table
