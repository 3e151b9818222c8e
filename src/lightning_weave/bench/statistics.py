"""Standard errors and confidence intervals. Problems are independent; samples of the same problem are not.

AIME has 30 problems, so the standard error of an accuracy is 6 to 7 points; differences between two policies on the
same problems are more precise. The bootstrap resamples problems within each benchmark, policy and base together.

A policy that is trained with several seeds is the mean over them, problem by problem. Both kinds of chance enter its
intervals: the distance from the estimate to each end of the bootstrap interval and the half-width of the t interval of
the seeds' means are added in quadrature. With two seeds t is 12.7, with three 4.3: few seeds say little about others.

AES is asymmetric: a relative loss of accuracy counts 5 times, a gain 3 times. A policy equal to its base except for
sampling noise therefore has a negative expected AES: 4 (s/m)^2 - 2 s / (m sqrt(pi)) for accuracies of mean m and
standard error s, for example -0.06 for 60 +- 4. A score that close to 0 is no evidence of harm.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from lightning_weave.bench.samples import Sample
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.maths.metrics import aes

FloatArray = NDArray[np.float64]
CHUNK = 1000  # resamples in memory at a time
TAIL = 50 * (1 - 0.95)  # percent on either side of an interval


@dataclass(frozen=True)
class ProblemMeans:
    """One policy on one benchmark: mean accuracy (0 to 100) and mean tokens of every problem."""

    benchmark: str
    problems: tuple[str, ...]
    accuracy: FloatArray
    tokens: FloatArray
    seeds_S2: FloatArray | None = None  # accuracy and tokens of each training seed, if these are means over several


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval: percentiles over resampled problems, widened by the spread of seeds."""

    estimate: float
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """Differences between a policy and its base, or between two policies."""

    accuracy: Interval  # points gained
    tokens: Interval  # tokens added
    aes: Interval


@dataclass(frozen=True)
class Comparison:
    """A policy against its base, per benchmark and averaged (aes)."""

    benchmarks: dict[str, Contrast]
    average: Contrast


def clustered_error(values: NDArray[np.generic]) -> float:
    """Compute the standard error of the mean of problems x samples, clustered by problem; NaN for one problem."""
    means = values.astype(np.float64).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")


def standard_error(values_S: Sequence[float] | FloatArray) -> float:
    """Compute the standard error of a mean over training seeds; 0 for one, whose spread is unknown."""
    return float(np.std(values_S, ddof=1)) / math.sqrt(len(values_S)) if len(values_S) > 1 else 0.0


def seed_error(*groups: Sequence[float] | FloatArray) -> float:
    """Compute the half-width of the 95 % t interval of a mean over training seeds, or of a difference of two (Welch).

    A policy with one seed adds nothing: its spread is unknown.

    >>> round(seed_error([1.0, 2.0, 3.0]), 2), seed_error([1.0]), round(seed_error([1, 2, 3], [1, 2, 3]), 2)
    (2.48, 0.0, 2.27)
    """
    error = math.hypot(*map(standard_error, groups))
    if not error:
        return 0.0
    freedom = error**4 / sum(standard_error(values) ** 4 / (len(values) - 1) for values in groups if len(values) > 1)
    return float(stdtrit(freedom, 1 - TAIL / 100)) * error


def compare(
    policy: Sequence[ProblemMeans], base: Sequence[ProblemMeans], resamples: int = 10_000, seed: int = 0
) -> Comparison:
    """Bootstrap the differences between a policy and its base, and the AES of the policy."""
    both = _bootstrap(policy, policy, base, resamples, seed)
    differences = (both[..., 0] - both[..., 2], both[..., 1] - both[..., 3], _scores(both))
    contrasts = {
        means.benchmark: _contrast([values[[number]] for values in differences], [seed_means([means], [base[number]])])
        for number, means in enumerate(policy)
    }
    return Comparison(contrasts, _contrast(differences, [seed_means(policy, base)]))


def contrast(
    one: Sequence[ProblemMeans],
    two: Sequence[ProblemMeans],
    base: Sequence[ProblemMeans],
    resamples: int = 10_000,
    seed: int = 0,
) -> Contrast:
    """Bootstrap the first policy minus the second, averaged over benchmarks, both scored against the same base."""
    first, second = (_bootstrap(one, policy, base, resamples, seed) for policy in (one, two))
    differences = (first[..., 0] - second[..., 0], first[..., 1] - second[..., 1], _scores(first) - _scores(second))
    return _contrast(differences, [seed_means(one, base), seed_means(two, base)])


def _contrast(differences: Sequence[FloatArray], seeds: Sequence[FloatArray]) -> Contrast:
    """Average accuracy, tokens and AES over benchmarks, with the errors of seeds of these policies."""
    errors = (seed_error(*(values_S3[:, column] for values_S3 in seeds)) for column in range(3))
    return Contrast(*(_interval(one.mean(axis=0), error) for one, error in zip(differences, errors, strict=True)))


def seed_means(policy: Sequence[ProblemMeans], base: Sequence[ProblemMeans]) -> FloatArray:
    """Compute accuracy, tokens and AES of each training seed, averaged over benchmarks: seeds x 3.

    Where benchmarks have different seeds, these are the first of each; one with a single seed adds its mean.
    """
    count = min((len(one.seeds_S2) for one in policy if one.seeds_S2 is not None), default=1)
    scores_BS3 = []
    for one, reference in zip(policy, base, strict=True):
        mean = np.array([[one.accuracy.mean(), one.tokens.mean()]])
        seeds_S2 = np.repeat(mean, count, axis=0) if one.seeds_S2 is None else one.seeds_S2[:count]
        level = (reference.accuracy.mean(), reference.tokens.mean())
        scores_BS3.append([(*seed, aes(seed[0], seed[1], *level)) for seed in seeds_S2.tolist()])
    return np.mean(scores_BS3, axis=0)


def matched_difference(
    policy: Sequence[ProblemMeans], frontier: Sequence[Sequence[ProblemMeans]], resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Bootstrap the accuracy of a policy minus that of a frontier at the same tokens, averaged over benchmarks.

    Between its points the frontier is a straight line; beyond the longest it is as accurate as that one. NaN for a
    policy that is shorter than all of them.
    """

    def above(places: FloatArray) -> float:
        """Accuracy of the first place minus that of the line through the others, at its tokens."""
        line = places[1:][places[1:, 1].argsort()]
        return float(places[0, 0] - np.interp(places[0, 1], line[:, 1], line[:, 0], left=np.nan))

    # (accuracy, tokens) of the policy and of each point, as measured and resampled by the same draws of problems
    each = (policy, *frontier)
    places = np.stack([_bootstrap(policy, one, one, resamples, seed)[..., :2].mean(axis=0) for one in each], axis=1)
    by_seed = []  # of each policy, the others as measured
    for number, one in enumerate(each):
        moved = np.repeat(places[:1], len(seeds := seed_means(one, one)[:, :2]), axis=0)
        moved[:, number] = seeds
        by_seed.append([value for value in map(above, moved) if not math.isnan(value)])
    return _interval(np.array([*map(above, places)]), seed_error(*by_seed))


def _bootstrap(
    order: Sequence[ProblemMeans],
    policy: Sequence[ProblemMeans],
    base: Sequence[ProblemMeans],
    resamples: int,
    seed: int,
) -> FloatArray:
    """Compute means of (accuracy, tokens, base accuracy, base tokens): benchmarks x (1 + resamples) x 4.

    Policy and base are paired by problem, in the same `order` for policies that are compared with each other. The first
    of each benchmark are the means as measured.
    """
    chunks = []
    for first, mine, theirs in zip(order, policy, base, strict=True):
        names = {sides.benchmark for sides in (first, mine, theirs)}
        if len(names) > 1 or not set(first.problems) == set(mine.problems) == set(theirs.problems):
            raise Mismatch(
                f"{' and '.join(sorted(names))} of policy and base do not have the same problems. "
                "Evaluate both on the same source."
            )
        columns = []
        for side in (mine, theirs):
            where = {problem: row for row, problem in enumerate(side.problems)}
            rows = [where[problem] for problem in first.problems]
            columns += [side.accuracy[rows], side.tokens[rows]]
        values = np.stack(columns, axis=1)
        means = [values.mean(axis=0, keepdims=True)]
        for drawn in resample(len(values), resamples, seed, mine.benchmark):
            means.append(np.stack([values[drawn, column].mean(axis=1) for column in range(4)], axis=1))
        chunks.append(np.concatenate(means))
    return np.stack(chunks)


def resample(n: int, resamples: int, seed: int, name: str) -> Iterator[NDArray[np.int64]]:
    """Draw problems with replacement, in chunks of resamples x problems.

    Each benchmark has its own random stream, so adding another one does not change its intervals.
    """
    rng = np.random.default_rng([seed, crc32(name.encode())])
    for start in range(0, resamples, CHUNK):
        yield rng.integers(n, size=(min(CHUNK, resamples - start), n))


def _scores(means: FloatArray) -> FloatArray:
    """Compute the AES of every (accuracy, tokens, base accuracy, base tokens)."""
    flat = means.reshape(-1, 4).tolist()
    return np.array([aes(*row) for row in flat]).reshape(means.shape[:-1])


def _interval(values: FloatArray, error: float = 0.0) -> Interval:
    """Take the first value as the estimate and percentiles of the others, NaN left out, and add the error of seeds."""
    estimate, resampled = float(values[0]), values[1:]
    known = resampled[~np.isnan(resampled)]
    if np.isnan(estimate) or not len(known):
        return Interval(estimate, float("nan"), float("nan"))
    low, high = np.percentile(known, [TAIL, 100 - TAIL]).tolist()
    if error:
        low, high = estimate - math.hypot(estimate - low, error), estimate + math.hypot(high - estimate, error)
    return Interval(estimate, low, high)


# Samples with their truncated texts -> which are correct. One call for all, because grading code uses every core.
Regrade = Callable[[list[tuple[Sample, str]]], list[bool]]


@dataclass(frozen=True)
class BudgetPoint:
    """The same samples, truncated at `budget` tokens."""

    budget: int
    accuracy: float
    tokens: float
    truncated: float


def grid(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Arrange samples by problem and number; every problem must have the same sample numbers."""
    by_problem: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        of_problem = by_problem.setdefault(sample.problem, {})
        if sample.sample in of_problem:
            raise Mismatch(f"problem {sample.problem} has sample {sample.sample} twice. Re-run eval.")
        of_problem[sample.sample] = sample
    if not by_problem:
        raise InputError("no samples to measure. Run eval first.")
    count = max(map(len, by_problem.values()))
    for problem, of_problem in by_problem.items():
        if sorted(of_problem) != list(range(count)):
            raise Mismatch(f"problem {problem} has {len(of_problem)} of {count} samples. Re-run eval to finish it.")
    return {problem: [some[number] for number in range(count)] for problem, some in by_problem.items()}


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
    points = []
    for budget in sorted(budgets):
        shortened = []
        for sample in samples:
            if sample.tokens > budget:
                if budget not in sample.cuts:
                    recorded = ", ".join(map(str, sorted(sample.cuts))) or "none"
                    raise InputError(
                        f"token budget {budget} was not recorded when sampling (recorded: {recorded}), and text cannot "
                        f"be truncated at tokens afterwards. Use a recorded budget, or sample again with this one."
                    )
                shortened.append((sample, sample.text[: sample.cuts[budget]]))
        verdicts = regrade(shortened) if shortened else []
        assert len(verdicts) == len(shortened), "one verdict for each truncated response"
        correct = sum(verdicts) + sum(sample.correct for sample in samples if sample.tokens <= budget)
        tokens = sum(min(sample.tokens, budget) for sample in samples)
        truncated = sum(sample.tokens > budget or sample.finish == "length" for sample in samples)
        n = len(samples)
        points.append(BudgetPoint(budget, 100 * correct / n, tokens / n, truncated / n))
    return points
