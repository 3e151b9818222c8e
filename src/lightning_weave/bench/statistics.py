"""Standard errors and confidence intervals. Problems are independent; samples of the same problem are not.

AIME has 30 problems, so the standard error of an accuracy is 6 to 7 points; differences between two policies on the
same problems are more precise. The bootstrap resamples problems within each benchmark, policy and base together.

AES is asymmetric: a relative loss of accuracy counts 5 times, a gain 3 times. A policy equal to its base except for
sampling noise therefore has a negative expected AES: 4 (s/m)^2 - 2 s / (m sqrt(pi)) for accuracies of mean m and
standard error s, for example -0.06 for 60 +- 4. A score that close to 0 is no evidence of harm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_weave.errors import Mismatch
from lightning_weave.maths.metrics import aes

FloatArray = NDArray[np.float64]
CHUNK = 1000  # resamples in memory at a time


@dataclass(frozen=True)
class ProblemMeans:
    """One policy on one benchmark: mean accuracy (0 to 100) and mean tokens of every problem."""

    benchmark: str
    problems: tuple[str, ...]
    accuracy: FloatArray
    tokens: FloatArray


@dataclass(frozen=True)
class Interval:
    """An estimate with its percentile interval; `undefined` is the share of resamples without a value."""

    estimate: float
    low: float
    high: float
    undefined: float = 0.0


@dataclass(frozen=True)
class Contrast:
    """Differences between a policy and its base, or between two policies."""

    accuracy: Interval  # points gained
    tokens: Interval  # tokens added
    aes: Interval


@dataclass(frozen=True)
class Comparison:
    """A policy against its base, per benchmark and averaged (aes); `aes_of_means` scores the averages instead."""

    benchmarks: dict[str, Contrast]
    average: Contrast
    aes_of_means: Interval


def clustered_error(values: NDArray[np.generic]) -> float:
    """Compute the standard error of the mean of problems x samples, clustered by problem; NaN for one problem."""
    means = values.astype(np.float64).mean(axis=1)
    return float(means.std(ddof=1) / np.sqrt(len(means))) if len(means) > 1 else float("nan")


def compare(
    policy: Sequence[ProblemMeans],
    base: Sequence[ProblemMeans],
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Comparison:
    """Bootstrap differences and AES over problems, base and policy resampled together."""
    both = _bootstrap(policy, base, resamples, seed)
    differences = (both[..., 0] - both[..., 2], both[..., 1] - both[..., 3], _scores(both))
    contrasts = {
        means.benchmark: Contrast(*(_interval(values[number], level) for values in differences))
        for number, means in enumerate(policy)
    }
    average = Contrast(*(_interval(values.mean(axis=0), level) for values in differences))
    return Comparison(contrasts, average, _interval(_scores(both.mean(axis=0)), level))


def contrast(
    one: Sequence[ProblemMeans],
    two: Sequence[ProblemMeans],
    base: Sequence[ProblemMeans],
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Contrast:
    """Bootstrap the first policy minus the second, averaged over benchmarks, both scored against the same base."""
    first, second = (_bootstrap(policy, base, resamples, seed) for policy in (one, two))
    differences = (first[..., 0] - second[..., 0], first[..., 1] - second[..., 1], _scores(first) - _scores(second))
    return Contrast(*(_interval(values.mean(axis=0), level) for values in differences))


def _bootstrap(policy: Sequence[ProblemMeans], base: Sequence[ProblemMeans], resamples: int, seed: int) -> FloatArray:
    """Compute means of (accuracy, tokens, base accuracy, base tokens): benchmarks x (1 + resamples) x 4.

    The first of each benchmark are the means as measured.
    """
    chunks = []
    for means, base_means in zip(policy, base, strict=True):
        values = _paired(means, base_means)
        measured = values.mean(axis=0, keepdims=True)
        chunks.append(np.concatenate([measured, resampled_means(values, resamples, seed, means.benchmark)]))
    return np.stack(chunks)


def resample(n: int, resamples: int, seed: int, name: str) -> Iterator[NDArray[np.int64]]:
    """Draw problems with replacement, in chunks of resamples x problems.

    Each benchmark has its own random stream, so adding another one does not change its intervals.
    """
    rng = np.random.default_rng([seed, crc32(name.encode())])
    for start in range(0, resamples, CHUNK):
        yield rng.integers(n, size=(min(CHUNK, resamples - start), n))


def resampled_means(values: FloatArray, resamples: int, seed: int, name: str) -> FloatArray:
    """Average each column of problems x columns over the resampled problems."""
    n, columns = values.shape
    chunks = [
        np.stack([values[drawn, column].mean(axis=1) for column in range(columns)], axis=1)
        for drawn in resample(n, resamples, seed, name)
    ]
    return np.concatenate(chunks)


def _paired(policy: ProblemMeans, base: ProblemMeans) -> FloatArray:
    """Match policy and base by problem: columns accuracy, tokens, base accuracy, base tokens."""
    where = {problem: row for row, problem in enumerate(base.problems)}
    if policy.benchmark != base.benchmark or sorted(policy.problems) != sorted(base.problems):
        raise Mismatch(
            f"{policy.benchmark} of the policy and {base.benchmark} of the base do not have the same problems. "
            f"Evaluate both on the same source."
        )
    rows = [where[problem] for problem in policy.problems]
    return np.stack([policy.accuracy, policy.tokens, base.accuracy[rows], base.tokens[rows]], axis=1)


def _scores(means: FloatArray) -> FloatArray:
    """Compute the AES of every (accuracy, tokens, base accuracy, base tokens)."""
    flat = means.reshape(-1, 4).tolist()
    return np.array([aes(*row) for row in flat]).reshape(means.shape[:-1])


def _interval(values: FloatArray, level: float) -> Interval:
    """Take the first value as the estimate and percentiles of the others, NaN left out."""
    estimate = float(values[0])
    resampled = values[1:]
    known = resampled[~np.isnan(resampled)]
    undefined = 1.0 - len(known) / max(len(resampled), 1)
    if np.isnan(estimate) or not len(known):
        return Interval(estimate, float("nan"), float("nan"), undefined)
    tail = 50 * (1 - level)
    low, high = np.percentile(known, [tail, 100 - tail]).tolist()
    return Interval(estimate, low, high, undefined)
