"""Fit the constants of `lweave plan` to the paper's table of GPU hours (tab. training-cost).

The table has four settings. `leave_one_out` predicts each of them with constants fitted to the other three; the package
has the constants fitted to all four. There are five: an efficiency for each of four stages, and the time that the
paper's online training loses per round. What else it costs is what offline training costs: it samples twice as many
trajectories, and reads of each only the sampled tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_weave.plan.architecture import CALIBRATED, find_shape
from lightning_weave.plan.costs import HOUR, Constants, Hours, PlannedMachine, Workload, offline_hours

# 3,200 prompts x 4 responses of at most 2,048 tokens, which thinking models nearly always reach. The paper does not
# state the length of its prompts; 150 tokens is typical of DAPO.
PAPER_LOAD = Workload(
    trajectories=12800, prompt_tokens=150, response_tokens=2048, epochs=2, rounds=100, trajectories_per_round=256
)
PAPER_MACHINE = PlannedMachine(CALIBRATED, gpus=8)
KLEAR = ("Kwai-Klear/Klear-Reasoner-8B", "Qwen/Qwen3-8B-Base")
DECS = ("pixas/DECS_1.5B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B")
MIMO = ("XiaomiMiMo/MiMo-7B-RL-0530", "XiaomiMiMo/MiMo-7B-Base")


@dataclass(frozen=True)
class PaperConstants(Constants):
    """What describes the paper's program: also what its online training loses."""

    online_seconds_per_round: float = 0.0  # in GPU time


@dataclass(frozen=True)
class PaperSetting:
    """One column of the table, in GPU hours."""

    student: str
    models: tuple[str, ...]
    rollout: float
    reference: float
    score: float
    train: float
    total: float
    online: float

    def predict(self, constants: Constants) -> Hours:
        """Predict the column."""
        models = [find_shape(model) for model in self.models]
        return offline_hours(find_shape(self.student), models, PAPER_LOAD, PAPER_MACHINE, constants)


PAPER = tuple(
    PaperSetting(*column)
    for column in (  # student, models, hours of rollout, reference, scoring, training, total, online
        ("Qwen/Qwen3-1.7B", KLEAR + DECS, 1.59, 0.49, 2.93, 2.17, 7.17, 15.65),
        ("Qwen/Qwen3-4B", KLEAR, 3.50, 0.62, 1.76, 2.43, 8.31, 15.49),
        ("Qwen/Qwen3-4B", KLEAR + DECS, 3.50, 0.62, 2.93, 2.53, 9.58, 17.64),
        ("Qwen/Qwen3-4B", KLEAR + DECS + MIMO, 3.50, 0.62, 4.95, 2.48, 11.55, 19.66),
    )
)


def online_hours(offline: Hours, constants: PaperConstants) -> float:
    """Predict the same composition trained online by the paper's program, as in its table."""
    return offline.total + PAPER_LOAD.rounds * constants.online_seconds_per_round / HOUR


def calibrate(settings: Sequence[PaperSetting] = PAPER) -> PaperConstants:
    """Fit the constants stage by stage, weighting every figure by its relative error."""

    def mean_ratio(counted: Sequence[float], measured: Sequence[float]) -> float:
        """Geometric mean of counted / measured."""
        return float(np.exp(np.mean(np.log(np.array(counted) / np.array(measured)))))

    hours = [setting.predict(Constants(1.0, 1.0, 1.0, 1.0)) for setting in settings]
    constants = PaperConstants(
        rollout=mean_ratio([each.rollout for each in hours], [setting.rollout for setting in settings]),
        reference=mean_ratio([each.reference for each in hours], [setting.reference for setting in settings]),
        score=mean_ratio([sum(each.score) for each in hours], [setting.score for setting in settings]),
        train=mean_ratio([each.train for each in hours], [setting.train for setting in settings]),
    )
    lost = [setting.online - setting.predict(constants).total for setting in settings]
    weights = [setting.online**-2 for setting in settings]
    per_round = float(np.average(lost, weights=weights)) / PAPER_LOAD.rounds
    return replace(constants, online_seconds_per_round=per_round * HOUR)


def leave_one_out() -> list[tuple[PaperSetting, Hours, float]]:
    """Predict every setting, offline and online, by constants fitted to the others."""
    predictions = []
    for setting in PAPER:
        constants = calibrate([other for other in PAPER if other is not setting])
        hours = setting.predict(constants)
        predictions.append((setting, hours, online_hours(hours, constants)))
    return predictions


def calibration_page() -> str:
    """Write the tables of docs/appendix/plan.md."""

    def row(setting: PaperSetting, *figures: tuple[float, float]) -> str:
        label = f"{setting.student.split('/')[1]}, {len(setting.models) // 2}"
        cells = [f"{predicted:.2f} / {paper:.2f} ({predicted / paper - 1:+.0%})" for predicted, paper in figures]
        return f"| {' | '.join([label, *cells])} |"

    stages = ["| setting | rollout | reference | anchor scoring | training |", "| --- | --- | --- | --- | --- |"]
    totals = ["| setting | offline | online | ratio |", "| --- | --- | --- | --- |"]
    for paper, hours, online in leave_one_out():
        measured = [paper.rollout, paper.reference, paper.score, paper.train]
        predicted = [hours.rollout, hours.reference, sum(hours.score), hours.train]
        stages.append(row(paper, *zip(predicted, measured, strict=True)))
        ratio = online / hours.total, paper.online / paper.total
        totals.append(row(paper, (hours.total, paper.total), (online, paper.online), ratio))
    constants = calibrate()
    fitted = {
        "efficiency of rollout": f"{constants.rollout:.2f}",
        "efficiency of reference": f"{constants.reference:.2f}",
        "efficiency of scoring": f"{constants.score:.2f}",
        "efficiency of training": f"{constants.train:.2f}",
        "lost per round of online training": f"{constants.online_seconds_per_round:.0f} GPU seconds",
    }
    lines = ["| constant, fitted to all four | |", "| --- | --- |"]
    lines += [f"| {name} | {value} |" for name, value in fitted.items()]
    return "\n".join([*stages, "", *totals, "", *lines]) + "\n"
