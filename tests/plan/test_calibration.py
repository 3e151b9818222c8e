"""Predictions against the paper's table, on the page and within the goals."""

from dataclasses import replace
from pathlib import Path

import pytest

from calibration import (
    PAPER,
    PAPER_LOAD,
    PAPER_MACHINE,
    calibrate,
    calibration_page,
    leave_one_out,
    online_hours,
)
from counts import kinds_table
from lightning_weave.plan.architecture import find_gpu, find_shape
from lightning_weave.plan.costs import CONSTANTS, PlannedMachine, offline_hours

PAGE = Path(__file__).parents[2] / "docs" / "appendix" / "plan.md"


def test_settings_that_were_left_out_are_predicted_within_the_goals() -> None:
    for setting, hours, online in leave_one_out():
        assert hours.total == pytest.approx(setting.total, rel=0.15)
        assert online == pytest.approx(setting.online, rel=0.15)
        assert online / hours.total == pytest.approx(setting.online / setting.total, rel=0.15)


def test_five_compositions_sharing_the_cache_cost_what_the_paper_projects() -> None:
    hours = PAPER[3].predict(calibrate())
    amortised = 5 * online_hours(hours, calibrate()) / (hours.cache + 5 * hours.train)
    assert amortised == pytest.approx(98.30 / 21.47, rel=0.15)


def test_constants_are_found_again_in_what_they_predict() -> None:
    """Calibrating on a table that the formulas predicted returns the constants of the prediction."""
    constants = calibrate()
    made = []
    for setting in PAPER:
        hours = setting.predict(constants)
        online = online_hours(hours, constants)
        made.append(
            replace(
                setting,
                rollout=hours.rollout,
                reference=hours.reference,
                score=sum(hours.score),
                train=hours.train,
                online=online,
            )
        )
    again = calibrate(made)
    for name, value in vars(constants).items():
        assert getattr(again, name) == pytest.approx(value, rel=1e-6), name


def test_one_kind_of_gpu_is_scaled_from_another() -> None:
    setting = PAPER[2]
    student = find_shape(setting.student)
    models = [find_shape(model) for model in setting.models]
    slower = offline_hours(student, models, PAPER_LOAD, PlannedMachine(find_gpu("a100"), 8))
    usual = offline_hours(student, models, PAPER_LOAD, PAPER_MACHINE)
    for slow, fast in ((slower.reference, usual.reference), (slower.rollout, usual.rollout)):
        assert 3.35 / 2.04 < slow / fast < 67 / 19.5  # between the ratios of bandwidth and of float32
    given = PlannedMachine(find_gpu("H100"), 8, 1.0, 1000.0)
    own = offline_hours(student, [], PAPER_LOAD, given, dtypes=dict.fromkeys(("reference", "train"), "bfloat16"))
    assert own.rollout == pytest.approx(12800 * 2048 / 1000 / 3600)
    assert own.reference == pytest.approx(PAPER_LOAD.forward_flops(student) / 989e12 / 3600)


def test_the_package_has_the_fitted_constants() -> None:
    fitted = calibrate()
    for name, value in vars(CONSTANTS).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-9), name


def shown(part: str) -> str:
    return PAGE.read_text(encoding="utf-8").partition(f"<!-- {part} -->\n")[2].partition(f"<!-- /{part} -->")[0]


def test_the_page_shows_the_calibration() -> None:
    assert shown("calibration") == calibration_page()


def test_the_page_shows_what_a_token_costs_and_that_is_within_the_goals() -> None:
    """Training 4B at 8k at most 75 microseconds per token, scoring within 1.2 times of the body alone."""
    table = kinds_table()
    assert shown("kinds") == table
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    cells = {stage: [float(cell or 0) for cell in figures] for stage, *figures in rows}
    assert cells["train, compiled"][-1] <= 75
    *body, head, _, everything = cells["score"]
    assert everything == pytest.approx(sum(body) + head, abs=0.11)
    assert everything <= 1.2 * sum(body)
