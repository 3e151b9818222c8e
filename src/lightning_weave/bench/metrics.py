"""Metrics over the samples of one benchmark (appendix: Metrics and Aggregation).

Accuracies are 0 to 100, shares 0 to 1.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.bench.samples import Sample
from lightning_weave.errors import InputError, Mismatch

# Samples with their truncated texts -> which are correct. One call for all, because grading code uses every core.
Regrade = Callable[[list[tuple[Sample, str]]], list[bool]]


@dataclass(frozen=True)
class Grid:
    """The samples of a benchmark as arrays of problems x samples."""

    problems: tuple[str, ...]
    correct: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    truncated: NDArray[np.bool_]
    answered: NDArray[np.bool_]


@dataclass(frozen=True)
class BudgetPoint:
    """The same samples, truncated at `budget` tokens."""

    budget: int
    accuracy: float
    tokens: float
    truncated: float


def grid(samples: Iterable[Sample]) -> Grid:
    """Arrange samples as problems x samples; every problem must have the same sample numbers."""
    by_problem: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        of_problem = by_problem.setdefault(sample.problem, {})
        if sample.sample in of_problem:
            raise Mismatch(f"problem {sample.problem} has sample {sample.sample} twice. Re-run eval.")
        of_problem[sample.sample] = sample
    if not by_problem:
        raise InputError("there are no samples to measure. Run eval first.")
    count = max(map(len, by_problem.values()))
    for problem, of_problem in by_problem.items():
        if sorted(of_problem) != list(range(count)):
            raise Mismatch(f"problem {problem} has {len(of_problem)} of {count} samples. Re-run eval to finish it.")
    rows = [[of_problem[number] for number in range(count)] for of_problem in by_problem.values()]
    return Grid(
        tuple(by_problem),
        np.array([[sample.correct for sample in row] for row in rows], dtype=bool),
        np.array([[sample.tokens for sample in row] for row in rows], dtype=np.int64),
        np.array([[sample.finish == "length" for sample in row] for row in rows], dtype=bool),
        np.array([[sample.answer is not None for sample in row] for row in rows], dtype=bool),
    )


def accuracy(correct: NDArray[np.bool_]) -> float:
    """Average correctness over all samples (evaluation-accuracy): Avg@k, not pass@k."""
    return 100 * float(correct.mean())


def pass_at_k(correct: NDArray[np.bool_], k: int) -> float:
    """Estimate how often at least one of k samples is correct (the unbiased estimator).

    >>> pass_at_k(np.array([[True, False], [False, False]]), 2)
    50.0
    """
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise InputError(f"pass@{k} needs between 1 and {n} samples per problem; sample more or lower k.")
    missed = [math.comb(n - right, k) / math.comb(n, k) for right in correct.sum(axis=1).tolist()]
    return 100 * (1 - math.fsum(missed) / len(missed))


def budget_curve(samples: Sequence[Sample], budgets: Iterable[int], regrade: Regrade) -> list[BudgetPoint]:
    """Truncate the samples at each token budget and grade what is left."""
    return [_at_budget(samples, budget, regrade) for budget in sorted(budgets)]


def _at_budget(samples: Sequence[Sample], budget: int, regrade: Regrade) -> BudgetPoint:
    longer = [sample for sample in samples if sample.tokens > budget]
    verdicts = regrade([(sample, _cut(sample, budget)) for sample in longer]) if longer else []
    assert len(verdicts) == len(longer), "one verdict for each truncated response"
    correct = sum(verdicts) + sum(sample.correct for sample in samples if sample.tokens <= budget)
    tokens = sum(min(sample.tokens, budget) for sample in samples)
    truncated = sum(sample.tokens > budget or sample.finish == "length" for sample in samples)
    return BudgetPoint(budget, 100 * correct / len(samples), tokens / len(samples), truncated / len(samples))


def _cut(sample: Sample, budget: int) -> str:
    if budget not in sample.cuts:
        budgets = ", ".join(map(str, sorted(sample.cuts))) or "none"
        raise InputError(
            f"token budget {budget} was not recorded when sampling (recorded: {budgets}), and text cannot be "
            f"truncated at tokens afterwards. Use a recorded budget, or sample again with this one."
        )
    return sample.text[: sample.cuts[budget]]
