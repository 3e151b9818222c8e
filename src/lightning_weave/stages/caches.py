"""Open the cache of a run with the sources of shifts that a composition is trained on."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Cache
from lightning_weave.cache.shifts import (
    PairSource,
    SharpenedSource,
    ShiftRules,
    ShiftSource,
    TeacherSource,
    assign_groups,
)
from lightning_weave.config import Distilled, SelfDistilled
from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages.prompts import load_prompts, tag_columns, tag_of
from lightning_weave.types import Prompt


def anchor_pair(run: Run, anchor: str, weight: float = 1.0) -> PairSource:
    """Find the two scored models of one anchor."""
    return PairSource(anchor, *run.scores_of(anchor), weight, ShiftRules.from_anchor(run.recipe.anchors[anchor]))


def open_scored(run: Run) -> Cache | None:
    """Open the cache with every anchor whose two models are scored; None before the reference is done."""
    if not run.recipe.anchors:
        return None
    stages = [run.stage("rollout"), run.stage("reference")]
    if any(not stage.complete for stage in stages):
        return None
    pairs = [anchor_pair(run, name) for name in run.recipe.anchors]
    scored = [pair for pair in pairs if all(stage.complete for stage in pair.stages)]
    return Cache(stages[0], stages[1], scored)


def open_cache(run: Run, name: str) -> Cache:
    """Open what a composition is trained on: the shifts of its anchors, a teacher, or the student sharpened."""
    composition = run.recipe.compositions[name]
    pairs = [anchor_pair(run, anchor, weight) for anchor, weight in sorted(composition.used.items())]
    sources: Sequence[ShiftSource]
    match composition:
        case Distilled():
            sources = [TeacherSource(pair.name, pair.post, composition.alpha, pair.rules) for pair in pairs]
        case SelfDistilled():
            sources = [SharpenedSource(composition.sharpen, composition.alpha)]
        case _:
            sources = pairs
    reference = run.stage("reference")
    weight_GK = None  # of each prompt; None: the same for all
    if composition.method == "mixture":
        groups = reference.require()["rows"] // run.recipe.rollout.responses
        dealt = assign_groups(groups, [source.weight for source in sources], run.recipe.train.seed)
        weight_GK = np.eye(len(sources), dtype=np.float32)[dealt]  # one source alone
    elif composition.routes:
        weight_GK = routed_weights(run, name, load_prompts(run, tag_columns(run.recipe)))
    weight_RK = None if weight_GK is None else np.repeat(weight_GK, run.recipe.rollout.responses, axis=0)
    return Cache(run.stage("rollout"), reference, sources, weight_RK, run.stage("proposal") if run.sampler else None)


def routed_weights(run: Run, name: str, asked: Sequence[Prompt]) -> NDArray[np.float32]:
    """The weights of each prompt over the anchors of a composition, in the order of their names."""
    composition = run.recipe.compositions[name]
    anchors = sorted(composition.used)
    weights = []
    for one in asked:
        tag = tag_of(run.recipe, one)
        shares = composition.shares(tag) if composition.method != "self" else {}
        if shares is None:
            raise InputError(
                f"prompt {one.id} has the tag {tag!r}, for which compositions.{name}.weights has no table. Add "
                f"{tag} = {{ ... }} or default = {{ ... }} to them"
            )
        weights.append([shares.get(anchor, 0.0) for anchor in anchors])
    return np.array(weights, np.float32).reshape(len(asked), len(anchors))
