"""Predictions beside the paper's table, on the page and within the goals."""

from pathlib import Path

import pytest

from lightning_weave.plan.calibration import PAPER, PAPER_LOAD, PAPER_MACHINE, calibrate, leave_one_out, predict
from lightning_weave.plan.calibration_page import calibration_page
from lightning_weave.plan.costs import PlannedMachine, online_hours
from lightning_weave.plan.gpus import find_gpu

PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def test_settings_that_were_left_out_are_predicted_within_the_goals() -> None:
    for prediction in leave_one_out():
        setting, total = prediction.setting, prediction.hours.total
        assert total == pytest.approx(setting.total, rel=0.25)
        assert prediction.online == pytest.approx(setting.online, rel=0.25)
        assert prediction.online / total == pytest.approx(setting.online / setting.total, rel=0.15)


def test_five_compositions_sharing_the_cache_cost_what_the_paper_projects() -> None:
    hours = predict(PAPER[3], calibrate())
    amortised = 5 * online_hours(hours, PAPER_LOAD, calibrate(), PAPER_MACHINE) / (hours.cache + 5 * hours.train)
    assert amortised == pytest.approx(98.30 / 21.47, rel=0.15)


def test_constants_are_found_again_in_what_they_predict() -> None:
    """A table that the formulas made themselves gives back the constants that made it."""
    from dataclasses import replace

    constants = calibrate()
    made = []
    for setting in PAPER:
        hours = predict(setting, constants)
        online = online_hours(hours, PAPER_LOAD, constants, PAPER_MACHINE)
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
    setting, constants = PAPER[2], calibrate()
    student, models = setting.shapes
    from lightning_weave.plan.costs import offline_hours

    slower = offline_hours(student, models, PAPER_LOAD, constants, PlannedMachine(find_gpu("a100"), 8))
    usual = offline_hours(student, models, PAPER_LOAD, constants, PAPER_MACHINE)
    assert slower.reference / usual.reference == pytest.approx(989 / 312)
    assert slower.rollout / usual.rollout == pytest.approx(3.35 / 2.04)
    own = offline_hours(student, models, PAPER_LOAD, constants, PlannedMachine(find_gpu("H100"), 8, 1.0, 1000.0))
    assert own.rollout == pytest.approx(12800 * 2048 / 1000 / 3600)
    assert own.reference == pytest.approx(PAPER_LOAD.forward_work(student) / 989e12 / 3600)


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = page.partition("<!-- calibration -->\n")[2].partition("<!-- /calibration -->")[0]
    assert shown == calibration_page()
