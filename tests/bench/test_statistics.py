"""Analytic cases, brute force over explicit draws, and coverage on simulated evaluations."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from lightning_weave.bench.statistics import (
    ProblemMeans,
    clustered_error,
    compare,
    contrast,
    matched_difference,
    resample,
)
from lightning_weave.errors import Mismatch
from lightning_weave.maths.metrics import aes, mean_aes


def means(accuracy, tokens, name: str = "X") -> ProblemMeans:
    problems = tuple(f"p{k}" for k in range(len(accuracy)))
    return ProblemMeans(name, problems, np.array(accuracy, dtype=float), np.array(tokens, dtype=float))


def random_means(rng: np.random.Generator, n: int, name: str = "X") -> ProblemMeans:
    return means(100 * rng.beta(2, 2, n), rng.uniform(1000, 9000, n), name)


def test_clustered_error_of_identical_samples_ignores_them():
    """64 copies of a sample are worth one: the error is that of the problems alone."""
    one = np.array([[1.0], [0.0], [0.0], [1.0], [1.0]])
    assert clustered_error(np.repeat(one, 64, axis=1)) == pytest.approx(one.std(ddof=1) / math.sqrt(5))


def test_clustered_error_is_the_sandwich_estimate():
    """Cluster-robust variance of a mean, written as the sum of squared residual sums per cluster."""
    values = np.random.default_rng(3).normal(size=(12, 7))
    centre, total = values.mean(), 0.0
    for row in values:
        total += sum(value - centre for value in row) ** 2
    robust = math.sqrt(12 / 11 * total) / values.size
    assert clustered_error(values) == pytest.approx(robust)
    assert math.isnan(clustered_error(values[:1]))


def test_clustered_error_is_the_spread_of_repeated_evaluations():
    """Evaluate 4,000 times on 30 fresh problems: the errors stated must match the spread that is seen."""
    rng = np.random.default_rng(5)
    ability = rng.beta(0.6, 0.6, size=(4000, 30, 1))
    correct = rng.random((4000, 30, 8)) < ability
    stated = math.sqrt(np.mean([clustered_error(run) ** 2 for run in correct]))
    assert stated == pytest.approx(correct.mean(axis=(1, 2)).std(), rel=0.04)
    naive = correct[0].std() / math.sqrt(correct[0].size)
    assert naive < 0.6 * stated  # counting samples as independent would claim far too much


def test_resampling_follows_the_exact_bootstrap_distribution():
    """With three problems all 27 draws can be listed."""
    values = np.array([[1.0], [4.0], [10.0]])
    exact = [np.mean(draw) for draw in itertools.product(values[:, 0], repeat=3)]
    drawn = np.concatenate([values[rows, 0].mean(axis=1) for rows in resample(3, 40_000, seed=0, name="X")])
    for value in sorted(set(exact)):
        share = exact.count(value) / 27
        assert np.isclose(drawn, value).mean() == pytest.approx(share, abs=4 * math.sqrt(share / 40_000))


def brute_force(policy, base, resamples, seed):
    """Every statistic of every draw, in loops over the very problems that were drawn."""
    drawn = [np.concatenate(list(resample(len(one.problems), resamples, seed, one.benchmark))) for one in policy]
    rows = []
    for b in range(resamples):
        mine, theirs = [], []
        for k, draws in enumerate(drawn):
            mine.append(
                tuple(sum(x[i] for i in draws[b]) / len(draws[b]) for x in (policy[k].accuracy, policy[k].tokens))
            )
            theirs.append(
                tuple(sum(x[i] for i in draws[b]) / len(draws[b]) for x in (base[k].accuracy, base[k].tokens))
            )
        rows.append((mine, theirs))
    return rows


def test_comparison_equals_brute_force_over_the_same_draws():
    rng = np.random.default_rng(7)
    sizes = {"A": 9, "B": 14, "C": 5}
    policy = [random_means(rng, n, name) for name, n in sizes.items()]
    base = [random_means(rng, n, name) for name, n in sizes.items()]
    got = compare(policy, base, resamples=300, seed=11)
    rows = brute_force(policy, base, 300, 11)
    points = [[(one.accuracy.mean(), one.tokens.mean()) for one in side] for side in (policy, base)]

    def check(interval, statistic):
        low, high = np.percentile([statistic(*row) for row in rows], [2.5, 97.5])
        assert (interval.estimate, interval.low, interval.high) == pytest.approx((statistic(*points), low, high))

    for k, name in enumerate(sizes):
        check(got.benchmarks[name].accuracy, lambda mine, theirs, k=k: mine[k][0] - theirs[k][0])
        check(got.benchmarks[name].tokens, lambda mine, theirs, k=k: mine[k][1] - theirs[k][1])
        check(got.benchmarks[name].aes, lambda mine, theirs, k=k: aes(*mine[k], *theirs[k]))
    check(got.average.accuracy, lambda mine, theirs: np.mean([m[0] - t[0] for m, t in zip(mine, theirs, strict=True)]))
    check(got.average.tokens, lambda mine, theirs: np.mean([m[1] - t[1] for m, t in zip(mine, theirs, strict=True)]))
    check(got.average.aes, mean_aes)


def test_pairing_removes_the_difficulty_of_problems():
    """A policy 3 points better on every problem: certain, though each accuracy alone is known to 8 points."""
    base = means(np.linspace(0, 90, 30), np.linspace(1e3, 9e3, 30))
    policy = means(base.accuracy + 3, base.tokens - 100)
    got = compare([policy], [base], resamples=500).benchmarks["X"]
    assert (got.accuracy.low, got.accuracy.high) == pytest.approx((3, 3))
    assert (got.tokens.low, got.tokens.high) == pytest.approx((-100, -100))
    assert clustered_error(base.accuracy[:, None]) > 4


def test_the_order_of_problems_does_not_matter_but_their_identity_does():
    rng = np.random.default_rng(2)
    base, policy = random_means(rng, 20), random_means(rng, 20)
    turn = rng.permutation(20)
    shuffled = ProblemMeans("X", tuple(base.problems[i] for i in turn), base.accuracy[turn], base.tokens[turn])
    assert compare([policy], [shuffled], 200) == compare([policy], [base], 200)
    with pytest.raises(Mismatch, match="same problems"):
        compare([policy], [random_means(rng, 19)], 200)
    with pytest.raises(Mismatch, match="same problems"):
        compare([policy], [random_means(rng, 20, "Y")], 200)


def test_intervals_of_a_benchmark_do_not_depend_on_the_others():
    rng = np.random.default_rng(4)
    a, b = [random_means(rng, 10, "A") for _ in range(2)], [random_means(rng, 12, "B") for _ in range(2)]
    alone = compare([a[0]], [a[1]], 400).benchmarks["A"]
    assert compare([b[0], a[0]], [b[1], a[1]], 400).benchmarks["A"] == alone
    assert compare([a[0]], [a[1]], 400, seed=1).benchmarks["A"] != alone


def test_chunks_are_one_stream():
    whole = np.random.default_rng([0, 0xB7B2364B]).integers(5, size=(2500, 5))  # crc32 of "X"
    assert np.array_equal(np.concatenate(list(resample(5, 2500, 0, "X"))), whole)


def test_the_same_samples_score_exactly_zero():
    policy = random_means(np.random.default_rng(1), 25)
    got = compare([policy], [policy], 300)
    for interval in (got.average.aes, got.average.accuracy):
        assert (interval.estimate, interval.low, interval.high) == (0, 0, 0)


def test_a_base_without_correct_answers_has_no_aes():
    base, policy = means([0, 0, 0], [10, 20, 30]), means([0, 50, 0], [10, 10, 10])
    got = compare([policy], [base], 200).average.aes
    assert math.isnan(got.estimate)
    assert math.isnan(got.low)
    rare = compare([policy], [means([0, 50, 0], [10, 20, 30])], 20_000).average.aes
    assert rare.estimate == pytest.approx(0.5)
    assert rare.low <= rare.estimate <= rare.high


def simulate(rng: np.random.Generator, ability: np.ndarray, samples: int, tokens: float) -> ProblemMeans:
    n = len(ability)
    correct = rng.binomial(samples, ability) / samples
    return means(100 * correct, rng.normal(tokens, 300, n))


def test_intervals_cover_the_truth():
    """400 evaluations of 40 problems drawn from a population whose true gain is known: 95 % should cover it."""
    rng = np.random.default_rng(9)
    hits = {"accuracy": 0, "tokens": 0}
    for run in range(400):
        ability = rng.uniform(0.1, 0.8, 40)
        gain = rng.uniform(0, 0.2, 40)  # 10 points on average
        base, policy = simulate(rng, ability, 8, 5000), simulate(rng, ability + gain, 8, 4800)
        got = compare([policy], [base], 400, seed=run).average
        hits["accuracy"] += got.accuracy.low <= 10 <= got.accuracy.high
        hits["tokens"] += got.tokens.low <= -200 <= got.tokens.high
    for count in hits.values():
        assert 0.91 <= count / 400 <= 0.98


def test_aes_of_an_equal_policy_is_negative_by_its_kink():
    """Base and policy drawn from one distribution, apart by noise only.

    With relative difference d, AES is 4 d - |d|; d has spread sqrt(2) s / m and mean (s / m)^2, for an accuracy of mean
    m and error s. So AES expects 4 (s / m)^2 - 2 s / (m sqrt(pi)): negative unless the accuracy is hardly known.
    """
    rng = np.random.default_rng(13)
    ability = rng.uniform(0.1, 0.9, 30)
    correct = rng.binomial(4, ability, size=(2, 20_000, 30)).mean(axis=2) / 4
    scores = [aes(mine, 1000, theirs, 1000) for mine, theirs in zip(*correct.tolist(), strict=True)]
    error = np.std(scores) / math.sqrt(len(scores))
    ratio = math.sqrt((ability * (1 - ability)).sum() / 4) / ability.sum()
    assert np.mean(scores) < -10 * error
    assert np.mean(scores) == pytest.approx(4 * ratio**2 - 2 * ratio / math.sqrt(math.pi), abs=4 * error)


def test_a_contrast_of_two_policies_is_the_difference_of_their_scores() -> None:
    rng = np.random.default_rng(3)

    def means(name: str, level: float) -> ProblemMeans:
        ids = tuple(f"p{n}" for n in range(40))
        return ProblemMeans(name, ids, rng.uniform(level, 100, 40), rng.uniform(10, 60, 40))

    base, one, two = ([means(name, level) for name in ("x", "y")] for level in (20.0, 50.0, 30.0))
    found = contrast(one, two, base, resamples=400)
    scores = [compare(policy, base, resamples=400).average for policy in (one, two)]
    assert found.aes.estimate == pytest.approx(scores[0].aes.estimate - scores[1].aes.estimate)
    assert found.accuracy.estimate == pytest.approx(scores[0].accuracy.estimate - scores[1].accuracy.estimate)
    assert found.aes.low < found.aes.estimate < found.aes.high
    same = contrast(one, one, base, resamples=400)
    assert (same.aes.low, same.aes.high, same.tokens.high) == (0.0, 0.0, 0.0)


def test_a_contrast_is_paired_by_problem_whatever_their_order() -> None:
    rng = np.random.default_rng(5)
    base, one = random_means(rng, 30), random_means(rng, 30)
    turn = rng.permutation(30)
    turned = ProblemMeans("X", tuple(one.problems[i] for i in turn), one.accuracy[turn], one.tokens[turn])
    found = contrast([one], [turned], [base], resamples=200)
    assert (found.accuracy.low, found.accuracy.high, found.aes.high) == pytest.approx((0, 0, 0), abs=1e-9)


def trained(rng: np.random.Generator, ability: np.ndarray, seeds: int, spread: float) -> ProblemMeans:
    """A policy whose seeds differ by `spread` points, each measured with noise: the mean over them, by problem."""
    shape = (seeds, len(ability))
    accuracy = ability + rng.normal(0, spread, (seeds, 1)) + rng.normal(0, 20, shape)
    tokens = rng.normal(300, 20, shape) + rng.normal(0, spread, (seeds, 1))
    found = means(accuracy.mean(axis=0), tokens.mean(axis=0))
    return replace(found, seeds_S2=np.stack([accuracy.mean(axis=1), tokens.mean(axis=1)], axis=1))


@pytest.mark.parametrize("spread", [0.0, 6.0, 20.0])
def test_intervals_of_three_seeds_cover_the_truth_whichever_chance_is_the_larger(spread: float) -> None:
    """Fresh problems and fresh seeds each time; without the spread of seeds the interval would claim too much."""
    rng, covered, alone, contrasted = np.random.default_rng(8), [], [], []
    for _ in range(150):
        ability, gain = rng.normal(50, 20, 60), rng.normal(5, 15, 60)
        base = means(ability + rng.normal(0, 20, 60), np.full(60, 300.0))
        one, two = (trained(rng, ability + own, 3, spread) for own in (gain, 0))
        for found, (policy, other) in ((covered, (one, base)), (alone, (replace(one, seeds_S2=None), base))):
            interval = compare([policy], [other], 200).average.accuracy
            found.append(interval.low <= 5 <= interval.high)
        interval = contrast([one], [two], [base], 200).accuracy
        contrasted.append(interval.low <= 5 <= interval.high)
    assert np.mean(covered) > 0.9
    assert np.mean(contrasted) > 0.9
    assert spread < 20 or np.mean(alone) < 0.6


def test_the_spread_of_seeds_is_a_t_interval_of_the_mean_over_benchmarks() -> None:
    """Without variance between problems only the seeds are left; two policies as in Welch's test."""
    values = {"X": [[50.0, 100], [54, 110], [61, 120]], "Y": [[10.0, 300], [12, 280], [20, 290]]}
    policy = [replace(means([np.mean(some, 0)[0]] * 4, [np.mean(some, 0)[1]] * 4, name), seeds_S2=np.array(some))
              for name, some in values.items()]  # fmt: skip
    base = [means([40.0] * 4, [200.0] * 4, name) for name in values]
    found = compare(policy, base, 50)
    by_seed = np.mean([values["X"], values["Y"]], axis=0)
    low, high = stats.t.interval(0.95, 2, by_seed[:, 0].mean() - 40, by_seed[:, 0].std(ddof=1) / math.sqrt(3))
    assert (found.average.accuracy.low, found.average.accuracy.high) == pytest.approx((low, high))
    low, high = stats.t.interval(0.95, 2, 110 - 200, 10 / math.sqrt(3))
    assert (found.benchmarks["X"].tokens.low, found.benchmarks["X"].tokens.high) == pytest.approx((low, high))
    scores = [np.mean([aes(*values[name][seed], 40, 200) for name in values]) for seed in range(3)]
    half = stats.t.ppf(0.975, 2) * np.std(scores, ddof=1) / math.sqrt(3)
    score = found.average.aes
    assert (score.estimate - score.low, score.high - score.estimate) == pytest.approx((half, half))
    other = [replace(policy[0], seeds_S2=policy[0].seeds_S2[:2])]
    between = contrast(policy[:1], other, base[:1], 50).accuracy
    welch = stats.ttest_ind([50.0, 54, 61], [50.0, 54], equal_var=False).confidence_interval()
    assert between.high - between.low == pytest.approx(welch.high - welch.low)


def test_a_matched_difference_is_the_distance_from_the_line_between_points() -> None:
    """Against brute force over the same draws; beyond the longest point its accuracy counts, before the first none."""
    rng = np.random.default_rng(5)
    short, long, other = ([random_means(rng, 12, name) for name in ("X", "Y")] for _ in range(3))

    def at(tokens: float) -> list[ProblemMeans]:
        shift = tokens - np.mean([one.tokens.mean() for one in other])
        return [means(one.accuracy, one.tokens + shift, one.benchmark) for one in other]

    places = {}
    for name, one in (("short", short), ("long", long)):
        places[name] = np.mean([[each.tokens.mean(), each.accuracy.mean()] for each in one], axis=0)
    (x1, y1), (x2, y2) = sorted(map(tuple, places.values()))
    mine = np.mean([one.accuracy.mean() for one in other])
    middle = at((x1 + 3 * x2) / 4)
    found = matched_difference(middle, [short, long], resamples=200, seed=3)
    assert found.estimate == pytest.approx(mine - (y1 + 3 * y2) / 4)
    assert matched_difference(at(x2 + 500), [short, long], resamples=1).estimate == pytest.approx(mine - y2)
    assert math.isnan(matched_difference(at(x1 - 500), [short, long], resamples=1).estimate)

    draws = [list(np.concatenate(list(resample(12, 200, 3, name)))) for name in ("X", "Y")]
    values = []
    for rows in zip(*draws, strict=True):
        drawn = [
            np.mean(
                [[each.tokens[row].mean(), each.accuracy[row].mean()] for each, row in zip(one, rows, strict=True)],
                axis=0,
            )
            for one in (middle, short, long)
        ]
        (x, y), *points = drawn
        (x1, y1), (x2, y2) = sorted(map(tuple, points))
        if x >= x1:
            values.append(y - (y2 if x >= x2 else y1 + (y2 - y1) * (x - x1) / (x2 - x1)))
    assert [found.low, found.high] == pytest.approx(np.percentile(values, [2.5, 97.5]).tolist())


def test_a_matched_difference_contains_the_spread_of_seeds_of_the_policy_and_of_each_point() -> None:
    """Without variance between problems: Welch's t over how far each seed moves the difference."""

    def seeds(*values: tuple[float, float]) -> list[ProblemMeans]:
        accuracy, tokens = np.mean(values, axis=0)
        return [replace(means([accuracy] * 4, [tokens] * 4), seeds_S2=np.array(values))]

    short, long = [means([40.0] * 4, [100.0] * 4)], seeds((78.0, 300.0), (80.0, 300.0), (82.0, 300.0))
    other = seeds((60.0, 200.0), (62.0, 200.0), (67.0, 200.0))
    found = matched_difference(other, [short, long], resamples=50)
    assert found.estimate == pytest.approx(63 - 60)  # the line is at 60 halfway
    half_moves = [39.0, 40.0, 41.0]  # a point halfway along the line moves by half of what its end does
    welch = stats.ttest_ind([60.0, 62.0, 67.0], half_moves, equal_var=False).confidence_interval()
    assert found.high - found.low == pytest.approx(welch.high - welch.low)
