"""Results of lm-evaluation-harness: the scores of one policy on one task, and the difference to the base."""

import json
import math
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
    """One score of the harness, with its standard error if it has one."""

    name: str  # METRIC,FILTER
    value: float
    error: float | None
    lower_is_better: bool
    values: dict[str, float]  # by question; empty if the score is not their mean


@dataclass(frozen=True)
class TaskResult:
    """One policy on one task or group of tasks; metrics in the harness's order."""

    task: str
    harness: str  # with its version
    metrics: list[Metric]


def read_harness(folder: Path, task: str, harness: str) -> TaskResult:
    """Read the result files that the harness wrote into a folder."""
    files = list(folder.glob("results_*.json"))
    if not files:  # the harness only logs that it could not write them
        raise WeaveError(f"{harness} has written no results of {task} to {folder}. Is the disk full?")
    results = read_json(files[0])
    scores = {**results.get("groups", {}), **results["results"]}[task]
    directions = results.get("higher_is_better", {}).get(task) or {}
    samples: list[tuple[str, dict[str, Any]]] = []  # every question with its task
    for file in sorted(folder.glob("samples_*.jsonl")):
        name = file.stem.removeprefix("samples_").rpartition("_")[0]
        with file.open(encoding="utf-8") as lines:
            samples += ((name, json.loads(line)) for line in lines)
    metrics = []
    for name, score in scores.items():
        kind, _, chosen = name.partition(",")
        if not chosen or kind.endswith("_stderr") or not isinstance(score, int | float):
            continue
        error = scores.get(f"{kind}_stderr,{chosen}")
        values = {}
        for question_task, sample in samples:
            value = sample.get(kind)
            if sample.get("filter", chosen) == chosen and isinstance(value, bool | int | float):
                key = f"{question_task}/{sample['doc_id']}/{str(sample.get('doc_hash', ''))[:8]}"
                values[key] = float(value)
        is_mean = bool(values) and math.isclose(sum(values.values()) / len(values), score, abs_tol=1e-9)
        metrics.append(
            Metric(
                name=name,
                value=float(score),
                error=float(error) if isinstance(error, int | float) and not math.isnan(error) else None,
                lower_is_better=directions.get(kind) is False,
                values=values if is_mean else {},
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


def difference(policy: Metric, base: Metric) -> tuple[float, float | None]:
    """Subtract the base's score, with the standard error: over the questions if both have the same, else of the two.

    >>> one = Metric("acc,none", 0.75, 0.25, False, {"a": 1.0, "b": 1.0, "c": 0.0, "d": 1.0})
    >>> two = Metric("acc,none", 0.5, 0.29, False, {"a": 1.0, "b": 0.0, "c": 0.0, "d": 1.0})
    >>> difference(one, two)
    (0.25, 0.25)
    """
    value = policy.value - base.value
    if policy.values and policy.values.keys() == base.values.keys():
        pairs = np.array([policy.values[key] - base.values[key] for key in policy.values])
        return value, float(pairs.std(ddof=1) / np.sqrt(len(pairs))) if len(pairs) > 1 else None
    known = policy.error is not None and base.error is not None
    return value, math.hypot(policy.error or 0.0, base.error or 0.0) if known else None
