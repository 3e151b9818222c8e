"""summary.json: what one policy did on one benchmark, and averages across benchmarks."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.bench.definitions import Benchmark, content_digest, ids_digest
from lightning_weave.bench.metrics import BudgetPoint, Regrade, accuracy, budget_curve, grid, pass_at_k
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.statistics import Comparison, ProblemMeans, clustered_error, compare
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.store.files import read_json, write_json

PROTOCOL = ("temperature", "top_p", "max_tokens", "grading")  # settings that base and policy must share


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

    @property
    def means(self) -> ProblemMeans:
        """Give what the paired bootstrap needs."""
        values = np.array([self.problem_accuracy, self.problem_tokens], dtype=np.float64)
        return ProblemMeans(self.benchmark, tuple(self.problems), values[0], values[1])


@dataclass(frozen=True)
class Overall:
    """Unweighted means over benchmarks, and the comparison with the base if there is one."""

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
    """Measure the samples of one policy on one benchmark; `regrade` is asked only for budgets."""
    if {sample.problem for sample in samples} != {problem.id for problem in benchmark.problems}:
        raise Mismatch(
            f"the samples of {benchmark.name} are not of its {len(benchmark.problems)} problems. Run eval again."
        )
    if budgets and regrade is None:
        raise ValueError("budgets need a way to grade the cut responses")
    laid = grid(samples)
    count = laid.correct.shape[1]
    return Summary(
        benchmark=benchmark.name,
        label=benchmark.label,
        kind=benchmark.kind,
        samples=count,
        accuracy=accuracy(laid.correct),
        accuracy_error=100 * clustered_error(laid.correct),
        tokens=float(laid.tokens.mean()),
        tokens_error=clustered_error(laid.tokens),
        truncated=float(laid.truncated.mean()),
        no_answer=float(1 - laid.answered.mean()),
        pass_at={k: pass_at_k(laid.correct, k) for k in _powers(count)},
        budgets=budget_curve(samples, budgets, regrade) if regrade else [],
        settings=settings,
        ids=ids_digest(benchmark.problems),
        content=content_digest(benchmark.problems),
        problems=list(laid.problems),
        problem_accuracy=(100 * laid.correct.mean(axis=1)).tolist(),
        problem_tokens=laid.tokens.mean(axis=1).tolist(),
        official_differs=sum(sample.official is not None for sample in samples),
    )


def combine(
    policy: Sequence[Summary], base: Sequence[Summary] | None = None, resamples: int = 10_000, seed: int = 0
) -> Overall:
    """Average a policy over benchmarks and compare it with its base, benchmark by benchmark (aes)."""
    if not policy:
        raise InputError("there is no summary to combine. Run eval first.")
    comparison = None
    if base is not None:
        theirs = [_counterpart(mine, base) for mine in policy]
        comparison = compare([mine.means for mine in policy], [one.means for one in theirs], resamples, seed)
    return Overall(
        accuracy=math.fsum(mine.accuracy for mine in policy) / len(policy),
        accuracy_error=math.hypot(*(mine.accuracy_error for mine in policy)) / len(policy),
        tokens=math.fsum(mine.tokens for mine in policy) / len(policy),
        tokens_error=math.hypot(*(mine.tokens_error for mine in policy)) / len(policy),
        comparison=comparison,
    )


def write_summary(path: Path, summary: Summary) -> None:
    """Write summary.json; a number that does not exist is null, since JSON has no NaN."""
    write_json(path, _without_nan(asdict(summary)))


def read_summary(path: Path) -> Summary:
    """Read summary.json back."""
    fields = read_json(path)
    try:
        return Summary(
            **{
                **fields,
                "accuracy_error": _number(fields["accuracy_error"]),
                "tokens_error": _number(fields["tokens_error"]),
                "pass_at": {int(k): value for k, value in fields["pass_at"].items()},
                "budgets": [BudgetPoint(**point) for point in fields["budgets"]],
            }
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: not a summary of this version ({error}). Run eval again.") from error


def _counterpart(mine: Summary, base: Sequence[Summary]) -> Summary:
    theirs = next((one for one in base if one.benchmark == mine.benchmark), None)
    if theirs is None:
        raise InputError(f"the base was not evaluated on {mine.benchmark}. Evaluate it there too, or leave it out.")
    for key in PROTOCOL:
        if mine.settings.get(key) != theirs.settings.get(key):
            raise InputError(
                f"{mine.benchmark}: the policy was evaluated with {key} = {mine.settings.get(key)}, its base with "
                f"{theirs.settings.get(key)}, so they do not compare. Evaluate both alike."
            )
    return theirs


def _powers(count: int) -> list[int]:
    return [2**power for power in range(count.bit_length()) if 2**power <= count]


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _without_nan(value: Any) -> Any:
    match value:
        case float():
            return None if math.isnan(value) else value
        case dict():
            return {str(key): _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case _:
            return value
