"""What lm-evaluation-harness found: the scores of one policy on one task, and the difference to the base."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.errors import WeaveError
from lightning_weave.store.files import read_json, write_json

SUMMARY = "summary.json"
WORKER = Path(__file__).with_name("lm_eval_worker.py")


@dataclass(frozen=True)
class Metric:
    """One score as the harness gives it, with its standard error where it has one."""

    name: str  # METRIC,FILTER
    value: float
    error: float | None
    lower_is_better: bool
    values: dict[str, float]  # by question; empty where the score is not their mean


@dataclass(frozen=True)
class TaskResult:
    """One policy on one task or group of tasks; metrics in the harness's order."""

    task: str
    harness: str  # with its version
    metrics: list[Metric]


@dataclass(frozen=True)
class ScoreDifference:
    """A policy's score minus the base's; paired: over the same questions, else from the two standard errors."""

    value: float
    error: float | None
    paired: bool


def summarise(folder: Path, task: str, harness: str) -> TaskResult:
    """Read the result files that the harness wrote into a folder."""
    files = list(folder.glob("results_*.json"))
    if not files:  # the harness only logs that it could not write them
        raise WeaveError(f"{harness} has written no results of {task} to {folder}. Is the disk full?")
    results = read_json(files[0])
    scores = {**results.get("groups", {}), **results["results"]}[task]
    directions = results.get("higher_is_better", {}).get(task) or {}
    samples = list(_samples(folder))
    metrics = []
    for name, value in scores.items():
        kind, _, chosen = name.partition(",")
        if not chosen or kind.endswith("_stderr") or not isinstance(value, int | float):
            continue
        error = scores.get(f"{kind}_stderr,{chosen}")
        metrics.append(
            Metric(
                name=name,
                value=float(value),
                error=float(error) if isinstance(error, int | float) and not math.isnan(error) else None,
                lower_is_better=directions.get(kind) is False,
                values=_values(samples, kind, chosen, float(value)),
            )
        )
    return TaskResult(task, harness, metrics)


def write_result(folder: Path, result: TaskResult) -> Path:
    """Write summary.json."""
    write_json(folder / SUMMARY, asdict(result))
    return folder / SUMMARY


def read_result(folder: Path) -> TaskResult:
    """Read summary.json."""
    data = read_json(folder / SUMMARY)
    return TaskResult(data["task"], data["harness"], [Metric(**one) for one in data["metrics"]])


def difference(policy: Metric, base: Metric) -> ScoreDifference:
    """Compare a policy with the base: question by question where both have the same ones.

    >>> one = Metric("acc,none", 0.75, 0.25, False, {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0})
    >>> two = Metric("acc,none", 0.5, 0.29, False, {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0})
    >>> difference(one, two)
    ScoreDifference(value=0.25, error=0.25, paired=True)
    """
    value = policy.value - base.value
    if policy.values and policy.values.keys() == base.values.keys():
        pairs = np.array([policy.values[key] - base.values[key] for key in policy.values])
        error = float(pairs.std(ddof=1) / np.sqrt(len(pairs))) if len(pairs) > 1 else None
        return ScoreDifference(value, error, paired=True)
    known = policy.error is not None and base.error is not None
    return ScoreDifference(value, math.hypot(policy.error or 0.0, base.error or 0.0) if known else None, paired=False)


def _samples(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every question with the task that it is of."""
    for file in sorted(folder.glob("samples_*.jsonl")):
        name = file.stem.removeprefix("samples_").rpartition("_")[0]
        with file.open(encoding="utf-8") as lines:
            yield from ((name, json.loads(line)) for line in lines)


def _values(samples: list[tuple[str, dict[str, Any]]], metric: str, chosen: str, score: float) -> dict[str, float]:
    """The metric of every question, if the score is their mean."""
    values = {}
    for task, sample in samples:
        value = sample.get(metric)
        if sample.get("filter", chosen) == chosen and isinstance(value, bool | int | float):
            values[f"{task}/{sample['doc_id']}/{str(sample.get('doc_hash', ''))[:8]}"] = float(value)
    is_mean = bool(values) and math.isclose(sum(values.values()) / len(values), score, abs_tol=1e-9)
    return values if is_mean else {}
