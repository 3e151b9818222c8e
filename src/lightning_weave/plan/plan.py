"""`lweave plan`: predict the cost of a recipe from the architectures alone."""

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from lightning_weave.config import Recipe
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.gpus import CALIBRATED
from lightning_weave.plan.recipe import Plan, make_plan


def run(recipe: Recipe, machine: PlannedMachine, prompt_tokens: float | None, as_json: bool, console: Console) -> None:
    """Print the plan of a recipe."""
    plan = make_plan(recipe, machine, prompt_tokens)
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
        return
    console.print(_stage_table(plan))
    console.print(_memory_table(plan))
    for line in _summary(plan):
        console.print(line, soft_wrap=True, highlight=False)


def _stage_table(plan: Plan) -> Table:
    table = Table("stage", "what", "operations", "GPU hours", "on disk", title=f"Plan of {plan.name}", box=None)
    for row in plan.stages:
        table.add_row(row.stage, row.what, f"{row.operations:.1e}", f"{row.gpu_hours:.2f}", f"{row.disk / 1e9:.1f} GB")
    return table


def _memory_table(plan: Plan) -> Table:
    table = Table(
        "stage", "what", "loading", "weights", "working", "each GPU", "", title=f"Memory, {plan.gpu}", box=None
    )
    for row in plan.memory:
        sizes = [_size(size) for size in (row.loading, row.weights, row.working, row.weights + row.working)]
        table.add_row(row.stage, row.what, *sizes, "fits" if row.fits else "does not fit")
    return table


def _size(count: float) -> str:
    """Format bytes for people.

    >>> _size(104_600_000_000), _size(3_200_000), _size(41_000)
    ('104.6 GB', '3.2 MB', '0.0 MB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _summary(plan: Plan) -> list[str]:
    total = plan.one_composition
    lines = [
        f"{plan.trajectories:,} trajectories of {plan.prompt_tokens:g} + {plan.response_tokens:g} tokens "
        "(typical prompts, maximum-length responses: --prompt-tokens, rollout.max_tokens)",
        f"One composition: {total:.1f} GPU hours "
        f"({plan.cache_hours:.1f} cache + {total - plan.cache_hours:.1f} training), "
        f"{total / plan.gpus:.1f} h on {plan.gpus} x {plan.gpu}",
    ]
    if plan.compositions > 1:
        lines.append(
            f"{plan.compositions} sharing the cache: {plan.all_compositions:.1f} GPU hours, "
            f"{plan.all_compositions / plan.compositions:.1f} each; online: {plan.compositions * plan.online:.1f}"
        )
    lines += [
        f"Online: {plan.online:.1f} GPU hours per composition, {plan.online / total:.2f} x",
        f"Evaluation: about {plan.evaluation:.1f} GPU hours per policy, assuming answers half of max_tokens",
    ]
    if plan.gpu != CALIBRATED.name:
        lines.append(
            f"Calibrated on {CALIBRATED.name}; scaled to {plan.gpu} by peak and bandwidth (--utilisation, --rate)"
        )
    return lines
