"""Scores of accuracy against tokens, in plain Python."""

import math
from collections.abc import Sequence

AccuracyTokens = tuple[float, float]  # accuracy, mean response tokens


def aes(acc: float, tokens: float, base_acc: float, base_tokens: float) -> float:
    """Score a policy against its base on one benchmark (aes); NaN where the base has no correct answer.

    Relative tokens saved, plus 3 times the relative gain in accuracy or minus 5 times the relative loss.

    >>> aes(75.0, 750, 50.0, 1000)  # a quarter of the tokens saved, half as many again correct
    1.75
    """
    if base_acc == 0 or base_tokens == 0:
        return math.nan
    saved = (base_tokens - tokens) / base_tokens
    gain = (acc - base_acc) / base_acc
    return saved + (3 if gain >= 0 else 5) * gain


def mean_aes(policy: Sequence[AccuracyTokens], base: Sequence[AccuracyTokens]) -> float:
    """Average the scores of all benchmarks, as the paper defines it; NaN if any score is."""
    return _mean([aes(*point, *base_point) for point, base_point in zip(policy, base, strict=True)])


def aes_of_means(policy: Sequence[AccuracyTokens], base: Sequence[AccuracyTokens]) -> float:
    """Score the averaged accuracy and tokens, as some of the paper's printed rows do."""
    if len(policy) != len(base):
        raise ValueError(f"policy has {len(policy)} benchmarks, base has {len(base)}")
    return aes(*_mean_point(policy), *_mean_point(base))


def pareto_front(points: Sequence[AccuracyTokens]) -> list[int]:
    """Find the points that no other dominates (more accuracy for no more tokens, or as much for fewer).

    Returns indices in the given order. Of equal points all or none are returned; points with a NaN never are.

    >>> pareto_front([(80, 900), (70, 500), (75, 900), (70, 500)])
    [0, 1, 3]
    """
    indices = [i for i, point in enumerate(points) if not any(map(math.isnan, point))]
    return [i for i in indices if not any(_dominates(points[j], points[i]) for j in indices)]


def _dominates(one: AccuracyTokens, two: AccuracyTokens) -> bool:
    return one[0] >= two[0] and one[1] <= two[1] and tuple(one) != tuple(two)


def _mean_point(points: Sequence[AccuracyTokens]) -> AccuracyTokens:
    return _mean([acc for acc, _ in points]), _mean([tokens for _, tokens in points])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
