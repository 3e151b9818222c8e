"""AES and the Pareto front, against loops and by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from lightning_weave import maths
from lightning_weave.maths import aes, aes_of_means, mean_aes, pareto_front

properties = settings(max_examples=150, deadline=None, derandomize=True)
percent, length = st.floats(0, 100), st.floats(1, 40_000)


@properties
@given(percent, length, st.floats(0.1, 100), length)
def test_aes_agrees_with_the_cases_of_the_paper(acc, tokens, base_acc, base_tokens):
    assert aes(acc, tokens, base_acc, base_tokens) == pytest.approx(oracle.aes(acc, tokens, base_acc, base_tokens))


def test_losing_costs_more_than_gaining_earns():
    assert aes(60, 1000, 50, 1000) == pytest.approx(0.6)
    assert aes(40, 1000, 50, 1000) == pytest.approx(-1.0)
    assert aes(50, 800, 50, 1000) == pytest.approx(0.2)


def test_base_without_a_correct_answer_has_no_score():
    assert math.isnan(aes(50, 900, 0, 1000))
    assert math.isnan(aes(0, 900, 0.0, 1000))
    policy, base = [(50, 900), (60, 900)], [(0, 1000), (50, 1000)]
    assert math.isnan(mean_aes(policy, base))
    assert aes_of_means(policy, base) == pytest.approx(oracle.aes(55, 900, 25, 1000))


def test_mean_of_scores_and_score_of_means_differ():
    policy, base = [(30, 900), (80, 2000)], [(20, 1000), (90, 1500)]
    assert mean_aes(policy, base) == pytest.approx((oracle.aes(30, 900, 20, 1000) + oracle.aes(80, 2000, 90, 1500)) / 2)
    assert aes_of_means(policy, base) == pytest.approx(oracle.aes(55, 1450, 55, 1250))
    assert mean_aes(base, base) == aes_of_means(base, base) == 0


@pytest.mark.parametrize("function", [mean_aes, aes_of_means])
def test_benchmarks_must_pair_up(function):
    with pytest.raises(ValueError):
        function([(50, 900)], [(50, 900), (60, 800)])
    assert math.isnan(function([], []))


@properties
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=12))
def test_front_agrees_with_loops(points):
    assert pareto_front(points) == oracle.pareto_front(points)


def test_front_keeps_ties_and_drops_the_dominated():
    points = [(80.0, 900.0), (80.0, 900.0), (80.0, 950.0), (79.0, 900.0), (70.0, 500.0), (math.nan, 1.0)]
    assert pareto_front(points) == [0, 1, 4]
    assert pareto_front([]) == []


def test_every_equation_is_listed_and_nothing_else():
    modules = {"losses", "metrics", "shifts"}
    constants = {"LOG_FLOOR", "LOG_RESIDUAL_FLOOR", "RESIDUAL_FLOOR"}
    functions = {
        *("policy_shift", "compose_shifts", "with_other", "tilted_target", "log_residual_loss", "reverse_kl"),
        *("forward_kl", "total_variation", "sampled_kl", "direct_opd_loss", "expected_kl", "solve_alpha_for_kl"),
        *("shift_covariance", "aes", "mean_aes", "aes_of_means", "pareto_front"),
    }
    assert {name for name in dir(maths) if not name.startswith("__")} == modules | constants | functions
    assert all(callable(getattr(maths, name)) for name in functions)
