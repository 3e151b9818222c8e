"""Print a comparison, and draw it."""

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_weave.bench.statistics import Interval
from lightning_weave.progress import duration
from lightning_weave.report import figures
from lightning_weave.report.tables import sample_size
from lightning_weave.stages.compare import ComparedPolicy, ComparePlan
from lightning_weave.stages.run import dry_run


def show_plan(plan: ComparePlan, out: Console) -> None:
    """Print what a comparison would compute with the time it takes, and what is left out."""
    dry_run(plan.narrowed, out)
    _show_left_out(plan, out)


def show(plan: ComparePlan, rows: Sequence[ComparedPolicy], out: Console) -> None:
    """Print a row for every policy, ordered by length, and save the figure."""
    table = Table(box=None)
    heads = ("policy", "accuracy", "tokens", "AES", "at the same tokens", "made in", "models", "prompt")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda one: one.tokens):
        table.add_row(
            f"{row.policy} *" if row.on_frontier else row.policy,
            f"{row.accuracy:.1f} %",
            f"{row.tokens:,.1f}",
            "" if row.aes is None or math.isnan(row.aes.estimate) else f"{row.aes.estimate:+.2f}",
            "" if row.on_frontier else difference(row.difference),
            "?" if row.seconds is None else duration(row.seconds) if row.seconds else "-",
            str(row.models),
            f"{row.prompt_tokens:+.0f}" if row.prompt_tokens else "",
        )
    out.print(table)
    exact: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    size = sample_size(max(row.problems for row in rows), max(row.seeds for row in rows))
    out.print(
        f"* the frontier of {plan.composition}. At the same tokens: points of accuracy above the frontier, 95 % "
        f"intervals over {size}. Made in: device time, given the cache. Models: loaded to sample. "
        "Prompt: additional tokens in every request.",
        **exact,
    )
    _show_left_out(plan, out)
    for path in figures.save(figures.compared(rows, plan.composition), plan.run.directory / "compare"):
        if path.suffix == ".svg":
            out.print(f"Figure: {path}", **exact)


def print_json(found: Sequence[dict[str, Any]]) -> None:
    """Print every row as data."""
    print(json.dumps(found, indent=1))


def difference(found: Interval | None) -> str:
    """Write a difference with its interval; a policy that is shorter than the frontier has none."""
    if found is None:
        return "evaluated differently"
    if math.isnan(found.estimate):
        return "shorter"
    return f"{found.estimate:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def _show_left_out(plan: ComparePlan, out: Console) -> None:
    for why in dict.fromkeys(plan.left_out.values()):
        names = ", ".join(name for name, its in plan.left_out.items() if its == why)
        out.print(f"left out: {names}: {why}", markup=False, highlight=False, soft_wrap=True)
