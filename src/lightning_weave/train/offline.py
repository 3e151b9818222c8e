"""Offline training: the whole of a composition is in the cache, and only the student is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lightning_weave.cache.reader import Cache
from lightning_weave.cache.shifts import anchor_pair
from lightning_weave.cache.sources import Sharpened, Source, Teacher, deal_groups
from lightning_weave.config import Distilled, SelfDistilled
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import measure
from lightning_weave.train.dose import find_dose
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.training import Job, make_fit, make_schedule, open_trainee


@dataclass(frozen=True)
class Leg:
    """One leg of a sequence: where it starts from, and which share of the prompts is its own."""

    start: Path | None = None  # None: the student that made the cache
    part: tuple[float, float] = (0.0, 1.0)


def train_offline(
    steps: Steps,
    name: str,
    stage: Stage,
    ranks: Ranks,
    dtype: torch.dtype,
    progress: Progress,
    leg: Leg | None = None,
) -> None:
    """Fit one composition to the cache."""
    leg = leg or Leg()
    cache = open_cache(steps, name)
    groups, epochs = len(cache) // steps.recipe.rollout.responses, steps.recipe.compositions[name].epochs
    schedule = make_schedule(steps.recipe, groups, leg.part, epochs)
    dose = find_dose(steps, name, cache, schedule)
    fit = make_fit(steps, name, open_trainee(steps, ranks, dtype, leg.start), cache, dose.alpha, ranks, stage)
    job = Job(steps, name, stage, schedule, fit, progress)
    with measure(steps.store.run_dir, "train", name, method=steps.recipe.compositions[name].method) as meter:
        job.say(str(dose))
        figures = dose.figures() | ({} if leg.start else job.check(dtype))
        figures |= job.fit_all(job.go_to_start(), meter)
        job.finish(figures)


def open_cache(steps: Steps, name: str) -> Cache:
    """Open what a composition is trained on: the shifts of its anchors, a teacher, or the student sharpened."""
    composition = steps.recipe.compositions[name]
    pairs = [anchor_pair(steps, anchor, weight) for anchor, weight in sorted(composition.used.items())]
    sources: Sequence[Source]
    match composition:
        case Distilled():
            sources = [Teacher(pair.name, pair.post, composition.alpha) for pair in pairs]
        case SelfDistilled():
            sources = [Sharpened(composition.sharpen, composition.alpha)]
        case _:
            sources = pairs
    rollouts, reference = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
    if composition.method != "mixture":
        return Cache(rollouts, reference, sources)
    responses = steps.recipe.rollout.responses
    groups = reference.require()["rows"] // responses
    dealt = deal_groups(groups, [source.weight for source in sources], steps.recipe.train.seed)
    return Cache(rollouts, reference, sources, np.repeat(dealt, responses))
