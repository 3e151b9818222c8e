"""What a run has still to make."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from lightning_weave.errors import InputError
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Step


@dataclass(frozen=True)
class Todo:
    """What a run has still to make, by the names of the recipe."""

    prompts: bool
    rollout: bool
    anchors: list[str]  # still to be scored, or live while a composition trains
    compositions: list[str]
    benchmarks: dict[str, list[str]]  # policy -> benchmarks
    tasks: bool = False  # of another harness
    online: bool = False  # a composition samples while it trains, with the engine of the rollouts

    @classmethod
    def of(cls, steps: Steps, verb: str = "run") -> "Todo":
        """Look at all of the run, or at no more than one of its commands and the cache need."""
        recipe = steps.recipe
        trained = recipe.compositions if verb in ("run", "train") else ()
        evaluated = steps.policies if verb in ("run", "eval") else ()
        policies = steps.policies if verb in ("run", "eval", "harness") else ()
        tasks = any(
            is_pending(steps, partial(steps.harness, name, task)) for name in policies for task in recipe.harness.tasks
        )
        compositions = [name for name in trained if is_pending(steps, partial(steps.train, name))]
        sampling = [name for name in compositions if recipe.compositions[name].samples]
        online = any(recipe.compositions[name].method == "online" for name in compositions)
        cached = steps.needs_cache
        anchors = [
            anchor
            for anchor in recipe.anchors
            if any(anchor in recipe.compositions[name].used for name in sampling)
            or (cached and any(is_pending(steps, partial(_score, steps, anchor, number)) for number in (0, 1)))
        ]
        benchmarks = {
            policy: [name for name in recipe.eval.benchmarks if is_pending(steps, partial(steps.eval, policy, name))]
            for policy in evaluated
        }
        rollout = cached and is_pending(steps, lambda: steps.rollout)
        prompts = (rollout or online) and is_pending(steps, lambda: steps.prompts)
        benchmarks = {name: todo for name, todo in benchmarks.items() if todo}
        return cls(prompts, rollout, anchors, compositions, benchmarks, tasks=tasks, online=online)

    @property
    def stages(self) -> set[str]:
        """The stages that load a model. The reference goes with the rollouts."""
        work = {"rollout": self.rollout, "reference": self.rollout, "score": self.anchors, "train": self.compositions}
        return {stage for stage, does in work.items() if does}

    @property
    def nothing(self) -> bool:
        return not (self.prompts or self.rollout or self.anchors or self.compositions or self.benchmarks or self.tasks)


def is_pending(steps: Steps, step: Callable[[], Step]) -> bool:
    """Say whether a step has to be made. One whose models or data cannot be read has: what is wrong is found later."""
    try:
        return steps.store.stage(step()).state() != "done"
    except InputError:
        return True


def _score(steps: Steps, anchor: str, number: int) -> Step:
    return steps.scores_of(anchor)[number]
