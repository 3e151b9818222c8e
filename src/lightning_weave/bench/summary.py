"""summary.json: the results of one policy on one benchmark, or on one task of lm-evaluation-harness, and averages."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from lightning_weave.bench.definitions import Benchmark, content_digest, ids_digest
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.statistics import (
    BudgetPoint,
    Comparison,
    FloatArray,
    ProblemMeans,
    Regrade,
    budget_curve,
    clustered_error,
    compare,
    grid,
    pass_at_k,
    seed_error,
    seed_means,
    standard_error,
)
from lightning_weave.errors import InputError, Mismatch, WeaveError
from lightning_weave.store.files import read_json, write_json

SUMMARY = "summary.json"
ASKED = ("format", "chat", "thinking", "system", "quantization")  # settings of an evaluation's stage
Z = 1.96  # standard errors in half a 95 % interval
PROTOCOL = ("temperature", "top_p", "max_tokens", "grading", *ASKED)  # equal, or two results are not compared


@dataclass(frozen=True)
class Summary:
    """One policy on one benchmark. Accuracies are 0 to 100, shares 0 to 1, errors clustered by problem."""

    benchmark: str
    label: str
    kind: str
    samples: int  # per problem
    accuracy: float
    accuracy_error: float
    tokens: float
    tokens_error: float
    truncated: float
    no_answer: float
    pass_at: dict[int, float]
    budgets: list[BudgetPoint]
    settings: dict[str, Any]
    ids: str  # digest
    content: str  # digest
    problems: list[str]
    problem_accuracy: list[float]
    problem_tokens: list[float]
    official_differs: int = 0  # samples that the official LiveCodeBench runner is known to judge otherwise
    error: str | None = None  # why the accuracy is not a measure of the policy
    seeds: tuple["Summary", ...] = ()  # of each training seed, if this is their mean; never in a file

    @property
    def means(self) -> ProblemMeans:
        """Return the per-problem means for the paired bootstrap."""
        values = np.array([self.problem_accuracy, self.problem_tokens], dtype=np.float64)
        seeds_S2 = np.array([[one.accuracy, one.tokens] for one in self.seeds]) if self.seeds else None
        return ProblemMeans(self.benchmark, tuple(self.problems), values[0], values[1], seeds_S2)


@dataclass(frozen=True)
class Overall:
    """Unweighted means over benchmarks, and the comparison with the base if one is given."""

    accuracy: float
    accuracy_error: float
    tokens: float
    tokens_error: float
    comparison: Comparison | None


def summarise(
    benchmark: Benchmark,
    samples: Sequence[Sample],
    settings: dict[str, Any],
    budgets: Iterable[int] = (),
    regrade: Regrade | None = None,
) -> Summary:
    """Compute the results of one policy on one benchmark; `regrade` is called only for budgets."""
    if {sample.problem for sample in samples} != {problem.id for problem in benchmark.problems}:
        raise Mismatch(
            f"the samples of {benchmark.name} are not of its {len(benchmark.problems)} problems. Re-run eval."
        )
    if budgets and regrade is None:
        raise ValueError("budgets need `regrade`, to grade the truncated responses")
    rows = grid(samples)
    correct = np.array([[sample.correct for sample in row] for row in rows.values()], dtype=bool)
    tokens = np.array([[sample.tokens for sample in row] for row in rows.values()], dtype=np.int64)
    count = correct.shape[1]
    return Summary(
        benchmark=benchmark.name,
        label=benchmark.label,
        kind=benchmark.kind,
        samples=count,
        accuracy=100 * float(correct.mean()),  # Avg@k (evaluation-accuracy), not pass@k
        accuracy_error=100 * clustered_error(correct),
        tokens=float(tokens.mean()),
        tokens_error=clustered_error(tokens),
        truncated=float(np.mean([sample.finish == "length" for sample in samples])),
        no_answer=float(1 - np.mean([sample.answer is not None for sample in samples])),
        pass_at={k: pass_at_k(correct, k) for k in (2**power for power in range(count.bit_length()))},
        budgets=budget_curve(samples, budgets, regrade) if regrade else [],
        settings=settings,
        ids=ids_digest(benchmark.problems),
        content=content_digest(benchmark.problems),
        problems=list(rows),
        problem_accuracy=(100 * correct.mean(axis=1)).tolist(),
        problem_tokens=tokens.mean(axis=1).tolist(),
        official_differs=sum(sample.official is not None for sample in samples),
        error=_explain_no_answers(benchmark, samples),
    )


def pool(seeds: Sequence[Summary]) -> Summary:
    """Average one policy over training seeds, problem by problem."""
    if len(seeds) == 1:
        return seeds[0]

    def mean(key: str) -> Any:
        return np.mean([getattr(one, key) for one in seeds], axis=0).tolist()

    keys = ("accuracy", "tokens", "truncated", "no_answer", "problem_accuracy", "problem_tokens")
    budgets = [[astuple(point) for point in one.budgets] for one in seeds]
    pooled = replace(
        seeds[0],
        **{key: mean(key) for key in keys},
        pass_at={k: float(np.mean([one.pass_at[k] for one in seeds])) for k in seeds[0].pass_at},
        budgets=[BudgetPoint(round(budget), *rest) for budget, *rest in np.mean(budgets, axis=0).tolist()],
        official_differs=sum(one.official_differs for one in seeds),
        error=next((one.error for one in seeds if one.error), None),
        seeds=tuple(seeds),
    )
    accuracy_error, tokens_error = (_mean_error([pooled], key) for key in ("accuracy", "tokens"))
    return replace(pooled, accuracy_error=accuracy_error, tokens_error=tokens_error)


def half_interval(policy: Sequence[Summary], key: str) -> float:
    """Compute half the 95 % interval of a mean over benchmarks, from its problems and its seeds."""
    error, seeds_S = _chances(policy, key)
    return math.hypot(Z * error, seed_error(seeds_S))


def _mean_error(policy: Sequence[Summary], key: str) -> float:
    """Compute the standard error of a mean over benchmarks, from its problems and its seeds."""
    error, seeds_S = _chances(policy, key)
    return math.hypot(error, standard_error(seeds_S))


def _chances(policy: Sequence[Summary], key: str) -> tuple[float, FloatArray]:
    """Compute the standard error that is due to problems, and the mean of each seed."""
    errors = [
        clustered_error(np.array([getattr(one, f"problem_{key}")]).T) if one.seeds else getattr(one, f"{key}_error")
        for one in policy
    ]
    means = [one.means for one in policy]
    return math.hypot(*errors) / len(policy), seed_means(means, means)[:, 0 if key == "accuracy" else 1]


def _explain_no_answers(benchmark: Benchmark, samples: Sequence[Sample]) -> str | None:
    """Explain why no response had an answer, if none had: the accuracy of 0 then measures the prompt or the grader."""
    if any(sample.answer is not None for sample in samples):
        return None
    cut = sum(sample.finish == "length" for sample in samples)
    if 2 * cut > len(samples):
        return (
            f"no answer was found in any of {len(samples)} responses, and {cut} of them were cut off. "
            "Raise eval.max_tokens, or check that the prompt fits the model (eval.format, eval.chat)"
        )
    form = "a program in triple backticks" if benchmark.kind == "code" else "an answer that the grader can read"
    return (
        f"no answer was found in any of {len(samples)} responses. The prompt must ask for {form}: set eval.format, "
        f"or another grader in eval.graders.{benchmark.slug}"
    )


def combine(
    policy: Sequence[Summary], base: Sequence[Summary] | None = None, resamples: int = 10_000, seed: int = 0
) -> Overall:
    """Average a policy over benchmarks and compare it with its base, benchmark by benchmark (aes)."""
    if not policy:
        raise InputError("there are no results to average. Run eval first.")
    comparison = None
    if base is not None:
        bases = {one.benchmark: one for one in base}
        for name, summary in ((one.benchmark, one) for one in policy):
            if name not in bases:
                raise InputError(f"the base was not evaluated on {name}. Evaluate it there or omit the benchmark.")
            if why := differing(summary, bases[name]):
                raise InputError(f"{name}: policy and base are not comparable: {why}")
        matching = [bases[one.benchmark].means for one in policy]
        comparison = compare([one.means for one in policy], matching, resamples, seed)
    return Overall(
        accuracy=math.fsum(summary.accuracy for summary in policy) / len(policy),
        accuracy_error=_mean_error(policy, "accuracy"),
        tokens=math.fsum(summary.tokens for summary in policy) / len(policy),
        tokens_error=_mean_error(policy, "tokens"),
        comparison=comparison,
    )


def differing(one: Summary, base: Summary) -> str:
    """Name the settings by which a result and the base's cannot be compared; empty if they can."""
    found = named_differences(PROTOCOL, one.settings, base.settings)
    return ", ".join([*found, *(["another content of the benchmark"] if one.content != base.content else [])])


def named_differences(keys: Iterable[str], own: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    """Name the settings that differ, with their values where these are short."""
    found = []
    for key in keys:
        values = ["unset" if settings.get(key) is None else str(settings[key]) for settings in (own, base)]
        if values[0] != values[1]:
            long = max(map(len, values)) > 40 or "\n" in "".join(values)
            found.append(f"another {key}" if long else f"{key} = {values[0]} (base: {values[1]})")
    return found


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json; NaN becomes null, because JSON has no NaN."""
    fields = asdict(summary)
    del fields["seeds"]
    for name in ("accuracy_error", "tokens_error"):  # NaN for a single problem
        fields[name] = None if math.isnan(fields[name]) else fields[name]
    fields["pass_at"] = {str(k): value for k, value in summary.pass_at.items()}
    write_json(path, fields)


def read_summary(path: Path) -> Summary:
    """Read summary.json."""
    fields = read_json(path)
    try:
        for name in ("accuracy_error", "tokens_error"):
            fields[name] = math.nan if fields[name] is None else fields[name]
        fields["pass_at"] = {int(k): value for k, value in fields["pass_at"].items()}
        fields["budgets"] = [BudgetPoint(**point) for point in fields["budgets"]]
        return Summary(**fields)
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a summary of this version ({error}). Re-run eval.") from error


@dataclass(frozen=True)
class Metric:
    """One score of the harness, with its standard error if it has one."""

    name: str  # METRIC,FILTER
    value: float
    error: float | None
    lower_is_better: bool
    values: dict[str, float]  # by question; empty if the score is not their mean
    seeds: Sequence[float] = ()  # of each training seed, if this is their mean


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


def read_result(folder: Path) -> TaskResult:
    """Read summary.json."""
    data = read_json(folder / SUMMARY)
    return TaskResult(data["task"], data["harness"], [Metric(**one) for one in data["metrics"]])


def pool_task(seeds: Sequence[TaskResult]) -> TaskResult:
    """Average one task over training seeds, question by question."""
    if len(seeds) == 1:
        return seeds[0]
    metrics = []
    for metric in seeds[0].metrics:
        each = [one for result in seeds for one in result.metrics if one.name == metric.name]
        scores = [one.value for one in each]
        same = all(one.values.keys() == metric.values.keys() for one in each)
        values = {key: fmean(one.values[key] for one in each) for key in metric.values} if same else {}
        error = metric.error
        if len(values) > 1:
            error = clustered_error(np.array([[*values.values()]]).T)
        if error is not None:
            error = math.hypot(error, standard_error(scores))
        metrics.append(replace(metric, value=fmean(scores), error=error, values=values, seeds=scores))
    return replace(seeds[0], metrics=metrics)


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
        if len(pairs) < 2:
            return value, None
        return value, math.hypot(pairs.std(ddof=1) / np.sqrt(len(pairs)), standard_error(policy.seeds))
    known = policy.error is not None and base.error is not None
    return value, math.hypot(policy.error or 0.0, base.error or 0.0) if known else None
