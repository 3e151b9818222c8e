"""Scores of other harnesses, as further columns of the table of results."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_weave.bench.harness import SUMMARY, Metric, TaskResult, difference, read_result
from lightning_weave.config import HARNESS
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.report.tables import BenchmarkScore, PolicyRow, TaskScore
from lightning_weave.runs.known import tellable
from lightning_weave.runs.steps import Steps
from lightning_weave.store import MANIFEST, recorded

PolicyTasks = dict[str, dict[str, TaskResult]]  # policy -> task -> its result


def task_results(runs: Sequence[Steps]) -> PolicyTasks:
    """Read what another harness found, whichever command asked it: of these policies as they are now."""
    by_policy: PolicyTasks = {}
    for steps in runs:
        for policy in tellable(steps):
            folders = [
                folder
                for folder in sorted((steps.store.run_dir / "eval" / policy).glob(f"{HARNESS}*"))
                if "@" not in folder.name and (folder / MANIFEST).exists() and _is_of(steps, policy, folder.name)
            ]
            results = [read_result(folder) for folder in folders if (folder / SUMMARY).exists()]
            for task in steps.recipe.harness.tasks:  # by the protocol of the recipe, wherever that is
                stage = steps.store.stage(steps.harness(policy, task))
                results += [read_result(stage.folder)] if stage.state() == "done" else []
            if results:
                by_policy.setdefault(policy, {}).update({result.task: result for result in results})
    return by_policy


def task_columns(runs: Sequence[PolicyTasks], chosen: Mapping[str, str]) -> dict[str, Metric]:
    """Say which metric of each task is in the table: the recipe's choice, or the first."""
    results = [result for policies in runs for tasks in policies.values() for result in tasks.values()]
    first = {result.task: result for result in reversed(results)}
    return {task: _kind(first[task], chosen.get(task)) for task in dict.fromkeys(result.task for result in results)}


def missing_rows(
    rows: Sequence[PolicyRow], tasks: PolicyTasks, benchmarks: Sequence[str], group: str = ""
) -> list[PolicyRow]:
    """Make a row for every policy that was only asked tasks of another harness."""
    policies = {row.policy for row in rows}
    scores = tuple(BenchmarkScore(name, math.nan, math.nan) for name in benchmarks)
    return [PolicyRow(name, scores, math.nan, math.nan, group=group) for name in tasks if name not in policies]


def with_tasks(rows: Sequence[PolicyRow], tasks: PolicyTasks, columns: Mapping[str, Metric]) -> list[PolicyRow]:
    """Give every row these columns; empty where its policy was not asked."""
    base = {task: _metric(result, columns[task]) for task, result in tasks.get("base", {}).items()}
    return [
        replace(
            row, tasks=tuple(_score(row.policy, kind, task, tasks=tasks, base=base) for task, kind in columns.items())
        )
        for row in rows
    ]


def _score(policy: str, kind: Metric, task: str, tasks: PolicyTasks, base: Mapping[str, Metric]) -> TaskScore:
    empty = TaskScore(task, kind.name.partition(",")[0], math.nan, lower_is_better=kind.lower_is_better)
    if task not in tasks.get(policy, {}):
        return empty
    metric = _metric(tasks[policy][task], kind)
    score = replace(empty, value=metric.value, error=metric.error)
    if policy == "base" or task not in base:
        return score
    moved = difference(metric, base[task])
    return replace(score, difference=moved.value, difference_error=moved.error)


def _kind(result: TaskResult, chosen: str | None) -> Metric:
    for metric in result.metrics:
        if chosen is None or chosen in (metric.name, metric.name.partition(",")[0]):
            return metric
    names = ", ".join(metric.name for metric in result.metrics)
    raise InputError(f"harness.metrics.{result.task} = {chosen!r}: no such metric; there is {names or 'none'}")


def _metric(result: TaskResult, kind: Metric) -> Metric:
    missing = replace(kind, value=math.nan, error=None, values={})
    return next((metric for metric in result.metrics if metric.name == kind.name), missing)


def _is_of(steps: Steps, policy: str, folder: str) -> bool:
    """Whether a result is of the policy as it is now."""
    manifest = recorded(steps.store.run_dir / "eval" / policy / folder) or {}
    if policy in steps.recipe.compositions:
        return bool(manifest["inputs"].get(f"train/{policy}") == steps.train(policy).fingerprint)
    model = Checkpoint.of(steps.recipe.policies[policy]) if policy in steps.recipe.policies else steps.student
    return bool(manifest["settings"].get("model") == steps.identity_of(model))
