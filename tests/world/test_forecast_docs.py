"""The tables of docs/appendix/forecast.md: simulations against a truth that is computed; how pairs are compared."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forecast_simulation import Walk, by_segment, estimates, trust_table
from forecast_simulation import simulated_trials as trials
from lightning_weave.stages.forecast import effective_samples
from tiny_world.claims import World
from tiny_world.forecasts import Pair, choice_table, load_grid, rank_correlation, summary_table


def test_the_command_starts() -> None:
    script = Path(__file__).parents[2] / "scripts" / "forecast-docs"
    assert subprocess.run([sys.executable, script, "--help"], capture_output=True).returncode == 0


def test_the_truth_of_a_walk_is_what_its_samples_show() -> None:
    walk = Walk(30, 0.01)
    drawn = walk.sample(4000, [0.0, 1.0], np.random.default_rng(0))
    for place, dose in enumerate((0.0, 1.0)):
        weight_R = drawn.weight_DR[place]
        samples = effective_samples(drawn.weight_DR)[place]
        assert samples > 1000
        for values_R, truth in zip((drawn.right_R, drawn.tokens_R), walk.truth(dose), strict=True):
            mean = weight_R @ values_R / weight_R.sum()
            assert abs(mean - truth) < 4 * values_R.std() / np.sqrt(samples)


def test_the_style_costs_kl_and_changes_nothing_else() -> None:
    plain, styled = Walk(100, 1e-9), Walk(100, 0.05)
    assert styled.truth(0.5) == pytest.approx(plain.truth(0.5), rel=0.03)
    log_b, targets = styled.log_b()[0, 0], [walk.target(0.1)[0, 0] for walk in (styled, plain)]  # nothing can end here
    kl, without = ((np.exp(log_q) * (log_q - log_b)).sum(axis=1).mean() for log_q in targets)
    fillers = np.exp(log_b[:, 3:]).sum(axis=1).mean()
    assert kl - without == pytest.approx(0.05 * 0.1**2 * fillers, rel=0.05)  # it grows with the square of a small dose


def test_estimators_agree_where_nothing_is_asked() -> None:
    drawn = Walk(30, 0.01).sample(200, [0.0, 1e-6], np.random.default_rng(0))
    for figure, values_R in enumerate((drawn.right_R, drawn.tokens_R)):
        found = estimates(drawn.weight_DR, values_R, 1e-6 * drawn.score_R, [1.0], figure)
        assert list(found.values()) == pytest.approx([values_R.mean()] * len(found), rel=1e-4)
        assert by_segment(drawn)[figure] == pytest.approx(values_R.mean(), rel=1e-4)


def test_the_table_of_trust_has_all_trials() -> None:
    found = trials(5)
    assert len(found) == 5 * 5 * 5 * 2
    assert "400 and more" in trust_table({"simulated": found})


def pair(share: float, alpha: float, forecast: float, measured: float, trusted: bool = True, near: bool = True) -> Pair:
    tokens = {"tokens": 50 - 20 * share, "tokens_low": 30, "tokens_high": 60}
    figures = {"accuracy": 80 + forecast, "accuracy_low": 79 + forecast, "accuracy_high": 81 + forecast}
    point = {"policy": f"{share}-{alpha}", "weights": {"brevity": share}, "alpha": alpha, "trusted": trusted}
    known = {"accuracy": 80 + measured, "tokens": 50 - 20 * share, "aes": measured}
    return Pair(
        {**point, **tokens, **figures, "aes": forecast, "effective_samples": 99, "reachable": near},
        known | {f"{figure}_error": 0.5 for figure in ("accuracy", "tokens", "aes")},
    )


def test_pairs_are_compared() -> None:
    pairs = [pair(0.0, 2.0, 0, 1), pair(0.5, 2.0, 1, 2), pair(0.5, 1.0, 2, 3.5), pair(1.0, 1.0, 9, 0, trusted=False)]
    assert pairs[0].is_covered("accuracy")
    assert not pairs[2].is_covered("accuracy")
    assert not pairs[2].is_covered("accuracy", deviations=1.96)
    assert rank_correlation(pairs[:3], "accuracy") == 1
    row = summary_table({"one": pairs}).splitlines()[2]
    assert row.startswith("| one | 3 of 4 | 1.2 | -1.2 | 1.00 | 67% |")
    chosen = choice_table({"one": [*pairs, pair(0.25, 0.5, 8, 0, near=False)]}).splitlines()[2]
    assert chosen == "| one | 0.5-1.0 | 3.50 | 0.5-2.0 | 2.00 | 3.50 |"  # what is not trusted or too far is not chosen


def test_the_grid_has_three_alphas_of_five_shares() -> None:
    recipe = load_grid(World(), 1, ["name=x"]).recipe
    assert recipe.name == "x-1"
    assert len(recipe.compositions) == 15
    assert len({one.alpha for one in recipe.compositions.values()}) == 3
