"""How sure a number is: problems are the independent unit, samples of one problem are not.

AIME has 30 problems, so an accuracy alone is known to 6 or 7 points; differences between two policies on the same
problems are known better. The bootstrap draws problems anew within each benchmark, base and policy together.

AES is kinked: it charges 5 for a loss and pays 3 for a gain. A policy that equals its base and differs only by the
noise of sampling therefore has a negative expected AES: 4 (s/m)^2 - 2 s / (m sqrt(pi)) for accuracies of mean m and
error s, which is -0.06 when 60 is known to 4 points. A score that far below 0 is no evidence of harm.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from lightning_weave.errors import Mismatch
from lightning_weave.maths.metrics import aes

FloatArray = NDArray[np.float64]
CHUNK = 1000  # resamples held in memory at once


@dataclass(frozen=True)
class ProblemMeans:
    """One policy on one benchmark: mean correctness (0 to 100) and tokens of every problem."""

    benchmark: str
    problems: tuple[str, ...]
    accuracy: FloatArray
    tokens: FloatArray


@dataclass(frozen=True)
class Interval:
    """An estimate with its percentile interval; `undefined` is the share of resamples that have no value."""

    estimate: float
    low: float
    high: float
    undefined: float = 0.0


@dataclass(frozen=True)
class Contrast:
    """A policy against its base."""

    accuracy: Interval  # points gained
    tokens: Interval  # tokens added
    aes: Interval


@dataclass(frozen=True)
class Comparison:
    """A policy against its base, on each benchmark and averaged (aes); `aes_of_means` scores the averages instead."""

    benchmarks: dict[str, Contrast]
    average: Contrast
    aes_of_means: Interval


def clustered_error(values: NDArray[np.generic]) -> float:
    """Give the standard error of the mean of problems x samples, clustered by problem; NaN for one problem."""
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
    accuracy, tokens, scores = both[..., 0] - both[..., 2], both[..., 1] - both[..., 3], _scores(both)
    contrasts = {
        mine.benchmark: Contrast(*(_interval(values[k], level) for values in (accuracy, tokens, scores)))
        for k, mine in enumerate(policy)
    }
    average = Contrast(*(_interval(values.mean(axis=0), level) for values in (accuracy, tokens, scores)))
    return Comparison(contrasts, average, _interval(_scores(both.mean(axis=0)), level))


def contrast(
    one: Sequence[ProblemMeans],
    two: Sequence[ProblemMeans],
    base: Sequence[ProblemMeans],
    resamples: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
) -> Contrast:
    """Bootstrap one policy minus another, averaged over benchmarks, both scored against the same base."""
    first, second = (_bootstrap(policy, base, resamples, seed) for policy in (one, two))
    differences = (first[..., 0] - second[..., 0], first[..., 1] - second[..., 1], _scores(first) - _scores(second))
    return Contrast(*(_interval(values.mean(axis=0), level) for values in differences))


def _bootstrap(policy: Sequence[ProblemMeans], base: Sequence[ProblemMeans], resamples: int, seed: int) -> FloatArray:
    """Means of (accuracy, tokens, base accuracy, base tokens): benchmarks x (1 + resamples) x 4, as measured first."""
    pairs = [_paired(mine, theirs) for mine, theirs in zip(policy, base, strict=True)]
    point = np.stack([values.mean(axis=0) for values in pairs])[:, None]  # (benchmarks, 1, 4)
    drawn = np.stack(
        [resampled_means(values, resamples, seed, mine.benchmark) for values, mine in zip(pairs, policy, strict=True)]
    )  # (benchmarks, resamples, 4)
    return np.concatenate([point, drawn], axis=1)


def resample(n: int, resamples: int, seed: int, name: str) -> Iterator[NDArray[np.int64]]:
    """Draw problems with replacement, in chunks of resamples x problems.

    The stream belongs to the benchmark, so adding another benchmark leaves its intervals as they were.
    """
    rng = np.random.default_rng([seed, crc32(name.encode())])
    for start in range(0, resamples, CHUNK):
        yield rng.integers(n, size=(min(CHUNK, resamples - start), n))


def resampled_means(values: FloatArray, resamples: int, seed: int, name: str) -> FloatArray:
    """Average each column of problems x columns over resampled problems."""
    n, columns = values.shape
    chunks = [
        np.stack([values[drawn, column].mean(axis=1) for column in range(columns)], axis=1)
        for drawn in resample(n, resamples, seed, name)
    ]
    return np.concatenate(chunks)


def _paired(policy: ProblemMeans, base: ProblemMeans) -> FloatArray:
    """Line up policy and base by problem: columns accuracy, tokens, base accuracy, base tokens."""
    where = {problem: row for row, problem in enumerate(base.problems)}
    if policy.benchmark != base.benchmark or sorted(policy.problems) != sorted(base.problems):
        raise Mismatch(
            f"{policy.benchmark} and {base.benchmark} of the base do not have the same problems, so nothing can be "
            f"paired. Evaluate both on the same source."
        )
    rows = [where[problem] for problem in policy.problems]
    return np.stack([policy.accuracy, policy.tokens, base.accuracy[rows], base.tokens[rows]], axis=1)


def _scores(means: FloatArray) -> FloatArray:
    """Score every (accuracy, tokens, base accuracy, base tokens)."""
    flat = means.reshape(-1, 4).tolist()
    return np.array([aes(*row) for row in flat]).reshape(means.shape[:-1])


def _interval(values: FloatArray, level: float) -> Interval:
    """Take the first value as the estimate and percentiles of the others, where they have a value."""
    estimate, drawn = float(values[0]), values[1:]
    known = drawn[~np.isnan(drawn)]
    if np.isnan(estimate) or not len(known):
        return Interval(estimate, float("nan"), float("nan"), 1.0 - len(known) / max(len(drawn), 1))
    tail = 50 * (1 - level)
    low, high = np.percentile(known, [tail, 100 - tail]).tolist()
    return Interval(estimate, low, high, 1.0 - len(known) / len(drawn))
