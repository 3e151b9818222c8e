"""summary.json: the results of one policy on one benchmark, and averages over benchmarks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.bench.definitions import Benchmark, content_digest, ids_digest
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.statistics import (
    BudgetPoint,
    Comparison,
    ProblemMeans,
    Regrade,
    budget_curve,
    clustered_error,
    compare,
    grid,
    pass_at_k,
)
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.store.files import read_json, write_json

ASKED = ("format", "chat", "thinking", "system", "quantization")  # settings of an evaluation's stage
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

    @property
    def means(self) -> ProblemMeans:
        """Return the per-problem means for the paired bootstrap."""
        values = np.array([self.problem_accuracy, self.problem_tokens], dtype=np.float64)
        return ProblemMeans(self.benchmark, tuple(self.problems), values[0], values[1])


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
    table = grid(samples)
    count = table.correct.shape[1]
    return Summary(
        benchmark=benchmark.name,
        label=benchmark.label,
        kind=benchmark.kind,
        samples=count,
        accuracy=100 * float(table.correct.mean()),  # Avg@k (evaluation-accuracy), not pass@k
        accuracy_error=100 * clustered_error(table.correct),
        tokens=float(table.tokens.mean()),
        tokens_error=clustered_error(table.tokens),
        truncated=float(table.truncated.mean()),
        no_answer=float(1 - table.answered.mean()),
        pass_at={k: pass_at_k(table.correct, k) for k in (2**power for power in range(count.bit_length()))},
        budgets=budget_curve(samples, budgets, regrade) if regrade else [],
        settings=settings,
        ids=ids_digest(benchmark.problems),
        content=content_digest(benchmark.problems),
        problems=list(table.problems),
        problem_accuracy=(100 * table.correct.mean(axis=1)).tolist(),
        problem_tokens=table.tokens.mean(axis=1).tolist(),
        official_differs=sum(sample.official is not None for sample in samples),
        error=_explain_no_answers(benchmark, samples),
    )


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
        matching = []
        for summary in policy:
            match = next((other for other in base if other.benchmark == summary.benchmark), None)
            if match is None:
                raise InputError(
                    f"the base was not evaluated on {summary.benchmark}. Evaluate it there or omit the benchmark."
                )
            if why := differing(summary, match):
                raise InputError(f"{summary.benchmark}: policy and base are not comparable: {why}")
            matching.append(match.means)
        comparison = compare([summary.means for summary in policy], matching, resamples, seed)
    return Overall(
        accuracy=math.fsum(summary.accuracy for summary in policy) / len(policy),
        accuracy_error=math.hypot(*(summary.accuracy_error for summary in policy)) / len(policy),
        tokens=math.fsum(summary.tokens for summary in policy) / len(policy),
        tokens_error=math.hypot(*(summary.tokens_error for summary in policy)) / len(policy),
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
