"""Offline training: the whole of a composition is in the cache, and only the student is loaded."""

from dataclasses import dataclass

from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.runs.caches import open_cache
from lightning_weave.runs.steps import Steps
from lightning_weave.store.ledger import measure
from lightning_weave.train.dose import find_dose
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.training import TrainContext, Training, make_fit, open_trainee


@dataclass(frozen=True)
class Leg:
    """One leg of a sequence: where it starts from, and which share of the prompts is its own."""

    start: Checkpoint | None = None  # None: the student that made the cache
    part: tuple[float, float] = (0.0, 1.0)


def train_offline(steps: Steps, name: str, context: TrainContext, leg: Leg | None = None) -> None:
    """Fit one composition to the cache."""
    leg = leg or Leg()
    composition = steps.recipe.compositions[name]
    cache = open_cache(steps, name)
    groups = len(cache) // steps.recipe.rollout.responses
    schedule = make_schedule(steps.recipe, groups, leg.part, composition.epochs)
    dose = find_dose(steps, name, cache, schedule)
    trainee = open_trainee(steps, context, leg.start)
    fit = make_fit(steps, name, trainee, cache, alpha=dose.alpha, ranks=context.ranks)
    training = Training(steps, name, schedule, fit, context.progress)
    spent = {"method": composition.method, "fingerprint": training.stage.step.fingerprint}
    with measure(steps.store.run_dir, "train", name, **spent) as meter:
        training.say(str(dose))
        figures = dose.figures() | ({} if leg.start else training.check(context.dtype))
        figures |= training.fit_all(training.go_to_start(), meter)
        training.finish(figures)
