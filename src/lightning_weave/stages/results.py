"""What evaluation found: the paper's table over all policies, and one point per policy for machines."""

import math
from typing import Any

from rich.console import Console

from lightning_weave.bench.summary import Summary, combine, read_summary
from lightning_weave.config import Composition
from lightning_weave.report.tables import PolicyRow, Score, console
from lightning_weave.stages.steps import Steps


def summaries(steps: Steps) -> dict[str, list[Summary]]:
    """Every finished evaluation of every policy that has all benchmarks done."""
    found = {}
    for policy in steps.policies:
        stages = [steps.store.stage(steps.eval(policy, name)) for name in steps.recipe.eval.benchmarks]
        if all(stage.state() == "done" for stage in stages):
            found[policy] = [read_summary(stage.folder / "summary.json") for stage in stages]
    return found


def policy_rows(found: dict[str, list[Summary]]) -> list[PolicyRow]:
    """One row per policy, compared with the base where it was evaluated."""
    base = found.get("base")
    rows = []
    for policy, results in found.items():
        overall = combine(results, base)
        aes = overall.comparison.average.aes if overall.comparison else None
        rows.append(
            PolicyRow(
                policy=policy,
                scores=tuple(Score(result.label, result.accuracy, result.tokens) for result in results),
                accuracy=overall.accuracy,
                tokens=overall.tokens,
                aes=aes.estimate if aes else None,
                aes_low=aes.low if aes and policy != "base" else None,
                aes_high=aes.high if aes and policy != "base" else None,
            )
        )
    return rows


def points(steps: Steps, rows: list[PolicyRow]) -> list[dict[str, Any]]:
    """points.json: a list of policies with weights, alpha, accuracy, tokens and AES with its interval."""
    return [_point(row, steps.recipe.compositions.get(row.policy)) for row in rows]


def _point(row: PolicyRow, composition: Composition | None) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "weights": composition.weights if composition else {},
        "alpha": composition.alpha if composition else None,
        "accuracy": row.accuracy,
        "tokens": row.tokens,
        "aes": _number(row.aes),
        "aes_low": _number(row.aes_low if row.policy != "base" else row.aes),
        "aes_high": _number(row.aes_high if row.policy != "base" else row.aes),
    }


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def show_results(steps: Steps, out: Console) -> None:
    """Print the table of everything evaluated so far."""
    rows = policy_rows(summaries(steps))
    if rows:
        out.print(console(rows))
        out.print(f"Samples and summaries: {steps.store.run_dir / 'eval'}", soft_wrap=True, markup=False)
