"""Open the cache of a run: with the shifts of a composition, or of every anchor that is scored."""

from collections.abc import Sequence

import numpy as np

from lightning_weave.cache.reader import Cache
from lightning_weave.cache.sources import PairSource, SharpenedSource, ShiftSource, TeacherSource, deal_groups
from lightning_weave.config import Distilled, SelfDistilled
from lightning_weave.runs.steps import Steps


def anchor_pair(steps: Steps, anchor: str, weight: float = 1.0) -> PairSource:
    """Find the two scored models of one anchor."""
    post, pre = (steps.store.stage(step) for step in steps.scores_of(anchor))
    return PairSource(anchor, post, pre, weight, steps.recipe.anchors[anchor].validity)


def open_scored(steps: Steps) -> Cache | None:
    """Open the cache with every anchor whose two models are scored; None before the reference is done."""
    if not steps.recipe.anchors:
        return None
    stages = [steps.store.stage(step) for step in (steps.rollout, steps.reference)]
    if any(stage.state() != "done" for stage in stages):
        return None
    pairs = [anchor_pair(steps, name) for name in steps.recipe.anchors]
    scored = [pair for pair in pairs if all(stage.state() == "done" for stage in pair.stages)]
    return Cache(stages[0], stages[1], scored)


def open_cache(steps: Steps, name: str) -> Cache:
    """Open what a composition is trained on: the shifts of its anchors, a teacher, or the student sharpened."""
    composition = steps.recipe.compositions[name]
    pairs = [anchor_pair(steps, anchor, weight) for anchor, weight in sorted(composition.used.items())]
    sources: Sequence[ShiftSource]
    match composition:
        case Distilled():
            sources = [TeacherSource(pair.name, pair.post, composition.alpha) for pair in pairs]
        case SelfDistilled():
            sources = [SharpenedSource(composition.sharpen, composition.alpha)]
        case _:
            sources = pairs
    rollouts = steps.store.stage(steps.rollout)
    reference = steps.store.stage(steps.reference)
    if composition.method != "mixture":
        return Cache(rollouts, reference, sources)
    responses = steps.recipe.rollout.responses
    groups = reference.require()["rows"] // responses
    dealt = deal_groups(groups, [source.weight for source in sources], steps.recipe.train.seed)
    return Cache(rollouts, reference, sources, np.repeat(dealt, responses))
