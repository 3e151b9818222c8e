"""The constants of the cost formulas, fitted to the paper's table of GPU hours (tab. training-cost).

The table has four settings. `leave_one_out` predicts each of them with constants fitted to the other three;
`lweave plan` uses constants fitted to all four.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_weave.plan.architecture import Shape
from lightning_weave.plan.costs import (
    HOUR,
    Constants,
    Hours,
    PlannedMachine,
    Workload,
    offline_hours,
    online_hours,
    online_work,
)
from lightning_weave.plan.find import shipped_shape
from lightning_weave.plan.gpus import CALIBRATED

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

    @property
    def label(self) -> str:
        return f"{self.student.split('/')[1]}, {len(self.models) // 2}"

    @property
    def shapes(self) -> tuple[Shape, list[Shape]]:
        return shipped_shape(self.student), [shipped_shape(model) for model in self.models]


PAPER = tuple(
    PaperSetting(*column)
    for column in (  # student, models, hours of rollout, reference, scoring, training, total, online
        ("Qwen/Qwen3-1.7B", KLEAR + DECS, 1.59, 0.49, 2.93, 2.17, 7.17, 15.65),
        ("Qwen/Qwen3-4B", KLEAR, 3.50, 0.62, 1.76, 2.43, 8.31, 15.49),
        ("Qwen/Qwen3-4B", KLEAR + DECS, 3.50, 0.62, 2.93, 2.53, 9.58, 17.64),
        ("Qwen/Qwen3-4B", KLEAR + DECS + MIMO, 3.50, 0.62, 4.95, 2.48, 11.55, 19.66),
    )
)


def calibrate(settings: Sequence[PaperSetting] = PAPER) -> Constants:
    """Fit the constants stage by stage, weighting every figure by its relative error."""
    seconds_per_token, utilisation = _fit_forward(settings)
    constants = Constants(
        forward_seconds_per_token=seconds_per_token,
        forward_utilisation=utilisation,
        passes_per_epoch=1.0,
        sampling_seconds=_fit_sampling(settings),
        online_share=1.0,
        online_seconds_per_round=0.0,
    )
    one_pass = [predict(setting, constants).train for setting in settings]
    constants = replace(constants, passes_per_epoch=_mean_ratio([setting.train for setting in settings], one_pass))
    work = [online_work(predict(setting, constants), PAPER_LOAD) for setting in settings]
    lost, share = _fit_line(work, [1.0] * len(work), [setting.online for setting in settings])
    return replace(constants, online_share=share, online_seconds_per_round=lost * HOUR / PAPER_LOAD.rounds)


def predict(setting: PaperSetting, constants: Constants) -> Hours:
    """Predict one column of the table."""
    student, models = setting.shapes
    return offline_hours(student, models, PAPER_LOAD, constants, PAPER_MACHINE)


@dataclass(frozen=True)
class Prediction:
    """One column of the table, predicted by constants fitted to the other three."""

    setting: PaperSetting
    hours: Hours
    online: float


def leave_one_out() -> list[Prediction]:
    """Predict every setting by constants fitted to the others."""
    predictions = []
    for setting in PAPER:
        constants = calibrate([other for other in PAPER if other is not setting])
        hours = predict(setting, constants)
        predictions.append(Prediction(setting, hours, online_hours(hours, PAPER_LOAD, constants, PAPER_MACHINE)))
    return predictions


def _fit_forward(settings: Sequence[PaperSetting]) -> tuple[float, float]:
    """Fit a + b x operations to all forward passes: the student's, and each setting's anchors together."""
    figures: list[tuple[float, float, float]] = []  # operations, passes, measured hours
    for setting in settings:
        student, models = setting.shapes
        scoring = sum(PAPER_LOAD.forward_work(model) for model in models)
        figures.append((PAPER_LOAD.forward_work(student), 1, setting.reference))
        figures.append((scoring, len(models), setting.score))
    fixed, hours_per_operation = _fit_line(*zip(*figures, strict=True))
    return fixed * HOUR / PAPER_LOAD.tokens, 1 / (hours_per_operation * HOUR * CALIBRATED.peak)


def _fit_sampling(settings: Sequence[PaperSetting]) -> float:
    tokens = PAPER_LOAD.trajectories * PAPER_LOAD.response_tokens
    products = [tokens * setting.shapes[0].multiplied for setting in settings]
    return _mean_ratio([setting.rollout * HOUR for setting in settings], products)


def _fit_line(x: Sequence[float], ones: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Least squares of a x ones + b x over relative errors; returns a, b."""
    target = np.array(y)
    scale = max(x)  # operations are of the order of 1e17
    columns = np.stack([np.array(ones) / target, np.array(x) / scale / target], axis=1)
    a, b = np.linalg.lstsq(columns, np.ones(len(target)), rcond=None)[0]
    return float(a), float(b) / scale


def _mean_ratio(measured: Sequence[float], predicted: Sequence[float]) -> float:
    """Geometric mean of measured / predicted."""
    return float(np.exp(np.mean(np.log(np.array(measured) / np.array(predicted)))))
