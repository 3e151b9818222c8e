"""Open the cache of a run: with the shifts of a composition, or of every anchor that is scored."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.reader import Cache
from lightning_weave.cache.sources import (
    PairSource,
    SharpenedSource,
    ShiftRules,
    ShiftSource,
    TeacherSource,
    deal_groups,
)
from lightning_weave.config import Distilled, SelfDistilled
from lightning_weave.errors import InputError
from lightning_weave.runs.prompts import Asked, asked_prompts, tag_columns, tag_of
from lightning_weave.runs.steps import Steps


def anchor_pair(steps: Steps, anchor: str, weight: float = 1.0) -> PairSource:
    """Find the two scored models of one anchor."""
    post, pre = (steps.store.stage(step) for step in steps.scores_of(anchor))
    return PairSource(anchor, post, pre, weight, ShiftRules.of(steps.recipe.anchors[anchor]))


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
    proposal = steps.store.stage(steps.proposal) if steps.sampler else None
    responses = steps.recipe.rollout.responses
    if composition.method == "mixture":
        groups = reference.require()["rows"] // responses
        dealt = deal_groups(groups, [source.weight for source in sources], steps.recipe.train.seed)
        weight_GK = np.eye(len(sources), dtype=np.float32)[dealt]  # one source alone
    elif composition.routes:
        weight_GK = routed_weights(steps, name, asked_prompts(steps, tag_columns(steps.recipe)))
    else:
        return Cache(rollouts, reference, sources, proposal=proposal)
    return Cache(rollouts, reference, sources, np.repeat(weight_GK, responses, axis=0), proposal)


def routed_weights(steps: Steps, name: str, asked: Sequence[Asked]) -> NDArray[np.float32]:
    """The weights of each prompt over the anchors of a composition, in the order of their names."""
    composition = steps.recipe.compositions[name]
    anchors = sorted(composition.used)
    weights = []
    for one in asked:
        tag = tag_of(steps.recipe, one)
        shares = composition.shares(tag) if composition.method != "self" else {}
        if shares is None:
            raise InputError(
                f"prompt {one.prompt.id} has the tag {tag!r}, for which compositions.{name}.weights has no table. Add "
                f"{tag} = {{ ... }} or default = {{ ... }} to them"
            )
        weights.append([shares.get(anchor, 0.0) for anchor in anchors])
    return np.array(weights, np.float32).reshape(len(asked), len(anchors))
