"""How strong a composition is: weight / alpha per anchor, and how many nats per token its target asks for."""

from dataclasses import dataclass

import torch

from lightning_weave.cache.reader import Cache
from lightning_weave.config import ALPHA, Composition, Distilled, Mixture, Sequential
from lightning_weave.errors import InputError
from lightning_weave.maths import expected_kl, reverse_kl, solve_alpha_for_kl, tilted_target
from lightning_weave.runs.steps import Steps
from lightning_weave.train.data import compose
from lightning_weave.train.schedule import Schedule

SAMPLED_UPDATES = 8  # of the first epoch, on which a dose is measured


@dataclass(frozen=True)
class Dose:
    """What a composition asks of the student, measured on a sample of the cache."""

    alpha: float
    per_anchor: dict[str, float]
    target_kl: float  # KL(q || b), nats per token
    start_kl: float  # KL(b || q): what training starts from

    def __str__(self) -> str:
        dose = in_words(self.per_anchor)
        return f"alpha {self.alpha:.4g}, {dose}; the target is {self.target_kl:.4f} nats per token away"

    def figures(self) -> dict[str, float]:
        return {"alpha": self.alpha, "target_kl": self.target_kl, "start_kl": self.start_kl}


def anchor_doses(composition: Composition, alpha: float) -> dict[str, float]:
    """w / alpha of every anchor: all that a target depends on.

    In a mixture, and in a sequence at full dose, an anchor acts alone at weight 1. A teacher's target has no dose.
    """
    match composition:
        case Distilled():
            return {}
        case Mixture() | Sequential(dose="full"):
            return dict.fromkeys(composition.used, 1 / alpha)
        case _:
            return {anchor: weight / alpha for anchor, weight in composition.used.items()}


def in_words(doses: dict[str, float]) -> str:
    """Name the dose of every anchor."""
    return "dose " + (", ".join(f"{anchor} {dose:g}" for anchor, dose in doses.items()) or "none")


def find_dose(steps: Steps, name: str, cache: Cache, schedule: Schedule) -> Dose:
    """Measure a composition's dose, solving for alpha where the recipe gives a KL budget."""
    composition = steps.recipe.compositions[name]
    updates = min(SAMPLED_UPDATES, len(schedule))
    rows = [number for update in range(updates) for number in schedule.rows(update)]
    batch = compose(cache.block(rows), cache.weights, ALPHA)  # whatever the alpha: behaviour and shift are what is read
    if composition.alpha is not None:
        alpha = composition.alpha
    else:
        assert composition.kl_budget is not None, "it stands instead of alpha"
        alpha = _solve(name, batch.log_b_NO, batch.r_NC, composition.kl_budget)
    log_q_NO = tilted_target(batch.log_b_NO, batch.r_NC, alpha)
    return Dose(
        alpha,
        anchor_doses(composition, alpha),
        _mean(expected_kl(log_q_NO, batch.log_b_NO)),
        _mean(reverse_kl(batch.log_b_NO, log_q_NO, 1.0)),
    )


def _solve(name: str, log_b_NO: torch.Tensor, r_NC: torch.Tensor, budget: float) -> float:
    try:
        return solve_alpha_for_kl(log_b_NO, r_NC, budget)
    except ValueError as error:
        raise InputError(f"compositions.{name}.kl_budget = {budget:g}: {error}") from None


def _mean(values: torch.Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
