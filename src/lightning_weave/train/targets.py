"""A composition's target as data, with the alpha that training would use."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_weave.cache.reader import Cache
from lightning_weave.cache.targets import Targets, find_targets
from lightning_weave.errors import InputError
from lightning_weave.runs.caches import open_cache
from lightning_weave.runs.steps import Steps
from lightning_weave.train.dose import find_dose
from lightning_weave.train.schedule import make_schedule


@dataclass(frozen=True)
class TargetReader:
    """The cache of a composition, read as targets."""

    cache: Cache
    alpha: float

    def __call__(self, rows: Sequence[int]) -> Targets:
        return find_targets(self.cache.block(rows), self.cache.weights, self.alpha)


def open_targets(steps: Steps, name: str) -> TargetReader:
    """Open the cache of a composition."""
    if name not in steps.recipe.compositions:
        raise InputError(f"{name!r}: no such composition; this recipe has {', '.join(steps.recipe.compositions)}")
    composition = steps.recipe.compositions[name]
    if composition.method in ("online", "sequential"):
        raise InputError(f"compositions.{name} is {composition.method}: its targets are made while it trains")
    cache = open_cache(steps, name)
    schedule = make_schedule(steps.recipe, len(cache) // steps.recipe.rollout.responses, epochs=composition.epochs)
    return TargetReader(cache, find_dose(steps, name, cache, schedule).alpha)
