import itertools
import random

import numpy as np
import pytest

from lightning_weave.bench.samples import Sample
from lightning_weave.bench.statistics import BudgetPoint, budget_curve, grid, pass_at_k
from lightning_weave.errors import InputError, Mismatch


def sample(problem: str, number: int, correct: bool = False, tokens: int = 10, finish="stop", answer="1") -> Sample:
    return Sample(problem, number, 0, tokens, finish, "", answer, correct, "")


def test_grid_sorts_by_problem_and_sample_number():
    samples = [
        sample("b", 1, True, 7),
        sample("a", 0, tokens=3, finish="length", answer=None),
        sample("b", 0, tokens=5),
    ]
    laid = grid([*samples, sample("a", 1, True, 4)])
    assert list(laid) == ["b", "a"]
    assert [[one.tokens for one in row] for row in laid.values()] == [[5, 7], [3, 4]]
    assert [[one.correct for one in row] for row in laid.values()] == [[False, True], [False, True]]
    assert [[one.finish for one in row] for row in laid.values()] == [["stop", "stop"], ["length", "stop"]]
    assert [[one.answer for one in row] for row in laid.values()] == [["1", "1"], [None, "1"]]


def test_unfinished_samples_are_refused():
    with pytest.raises(Mismatch, match="problem b has 1 of 2 samples"):
        grid([sample("a", 0), sample("a", 1), sample("b", 0)])
    with pytest.raises(Mismatch, match="problem b has 2 of 2 samples"):
        grid([sample("a", 0), sample("a", 1), sample("b", 0), sample("b", 2)])
    with pytest.raises(Mismatch, match="sample 0 twice"):
        grid([sample("a", 0), sample("a", 0)])
    with pytest.raises(InputError, match="no samples"):
        grid([])


def test_a_problem_with_one_success_of_four_counts_a_quarter():
    correct = np.array([[True, False, False, False], [False] * 4, [True] * 4])
    assert pass_at_k(correct, 4) == pytest.approx(100 * 2 / 3)
    assert pass_at_k(correct, 1) == pytest.approx(100 * 5 / 12)


def test_pass_at_k_is_the_share_of_all_subsets():
    rng = np.random.default_rng(0)
    correct = rng.random((4, 6)) < [[0.1], [0.4], [0.7], [0.0]]
    for k in range(1, 7):
        hits = [any(row[list(chosen)]) for row in correct for chosen in itertools.combinations(range(6), k)]
        assert pass_at_k(correct, k) == pytest.approx(100 * np.mean(hits))
    with pytest.raises(InputError, match="pass@7 needs between 1 and 6 samples"):
        pass_at_k(correct, 7)


def test_budget_curve_cuts_the_same_samples():
    """Words as tokens: a response is right once its last word so far is `right`."""
    rng = random.Random(1)
    budgets = [1, 3, 5, 8]
    words = [[rng.choice(["right", "wrong"]) for _ in range(rng.randint(1, 8))] for _ in range(40)]
    samples = []
    for number, own in enumerate(words):
        cuts = {budget: len(" ".join(own[:budget])) for budget in budgets if budget < len(own)}
        finish = "length" if len(own) == 8 else "stop"
        text = " ".join(own)
        samples.append(Sample("p", number, 0, len(own), finish, text, None, text.endswith("right"), "", cuts))
    curve = budget_curve(samples, reversed(budgets), lambda cut: [text.endswith("right") for _, text in cut])
    expected = [
        BudgetPoint(
            budget,
            100 * sum(own[:budget][-1] == "right" for own in words) / 40,
            sum(min(len(own), budget) for own in words) / 40,
            sum(len(own) > budget or len(own) == 8 for own in words) / 40,
        )
        for budget in budgets
    ]
    assert [point.budget for point in curve] == budgets
    for got, want in zip(curve, expected, strict=True):
        assert (got.accuracy, got.tokens, got.truncated) == pytest.approx((want.accuracy, want.tokens, want.truncated))
    assert curve[-1].accuracy == pytest.approx(100 * np.mean([sample.correct for sample in samples]))


def test_budgets_that_were_not_noted_are_refused():
    cut = Sample("p", 0, 0, 10, "stop", "abc", None, False, "", {4: 1})
    with pytest.raises(InputError, match=r"budget 5 was not recorded .*recorded: 4"):
        budget_curve([cut], [5], lambda cut: [True] * len(cut))
