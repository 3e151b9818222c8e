"""Anchors one after the other: the sequential baseline, at matched trajectories and updates.

Each leg gets its share of the prompts and so of the updates. A later leg samples again, from the student that the leg
before it left behind: a small run of its own, below this composition's folder, with the ordinary stages.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lightning_weave.config import Joint, Sequential
from lightning_weave.errors import InputError
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, Step, whole_directory
from lightning_weave.train.card import model_card
from lightning_weave.train.inner import book, make_inner_cache
from lightning_weave.train.offline import Leg, train_offline
from lightning_weave.train.training import TrainContext, give_back
from lightning_weave.types import Prompt


@dataclass(frozen=True)
class LegRun:
    """One leg: the recipe that it is trained by, and the share of the prompts that is its own."""

    steps: Steps
    part: tuple[float, float]
    leg: Leg
    samples: bool  # again, from the student of the leg before

    @property
    def name(self) -> str:
        return next(iter(self.steps.recipe.compositions))

    @property
    def stage(self) -> Stage:
        return self.steps.store.stage(self.steps.train(self.name))

    def made(self) -> list[Step]:
        """The steps that are this leg's own: its training and, where it samples again, a cache."""
        return [*(self.steps.cache if self.samples else []), self.steps.train(self.name)]


def train_in_sequence(steps: Steps, name: str, context: TrainContext) -> None:
    """Train leg after leg and keep the last one's student. Resumable within and between legs."""
    final = None
    for leg in legs(steps, name):
        if leg.samples:
            make_inner_cache(steps, leg.steps, _share(steps, leg), context)
        if leg.stage.state() != "done":
            train_offline(leg.steps, leg.name, context, leg.leg)
            give_back()
        final = leg.stage.folder / "final"
    if context.ranks.first:
        assert final is not None, "a sequence has a leg"
        _keep(steps, name, final)
    context.ranks.wait()


def legs(steps: Steps, name: str) -> Iterator[LegRun]:
    """The legs of a sequence in their order, up to the first whose student has not been made."""
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Sequential), composition.method
    final: Path | None = None
    count = len(composition.sequence)
    prompts = steps.store.stage(steps.prompts).require()["rows"]
    if prompts < count:
        raise InputError(f"compositions.{name}.sequence: {prompts} prompts cannot be shared among {count} legs")
    for number, anchor in enumerate(composition.sequence):
        part = (1 - (number + 1) / count, 1 - number / count)  # the first leg gets the last share
        own = _leg_composition(composition, anchor)
        if number == 0 or not composition.resample:
            start = None if final is None else steps.student.at(final)
            leg = LegRun(_on_first_cache(steps, f"{name}/leg-{number + 1}", own), part, Leg(start, part), False)
        else:
            assert final is not None, "a leg has come before"
            first, last = (round(end * prompts) for end in part)
            own_steps = _on_own_cache(steps, name, own, number=number, student=final, prompts=last - first)
            leg = LegRun(own_steps, part, Leg(), True)
        yield leg
        final = leg.stage.folder / "final"
        if not final.exists():
            return


def _leg_composition(composition: Sequential, anchor: str) -> Joint:
    weight = composition.weights[anchor] if composition.dose == "matched" else 1.0
    return Joint(
        weights={anchor: weight},
        normalize=False,
        alpha=composition.alpha,
        objective=composition.objective,
        epochs=composition.epochs,
    )


def _on_first_cache(steps: Steps, name: str, composition: Joint) -> Steps:
    recipe = steps.recipe.model_copy(update={"compositions": {name: composition}})
    return Steps(recipe, steps.arguments, steps.trust)


def _on_own_cache(steps: Steps, name: str, composition: Joint, *, number: int, student: Path, prompts: int) -> Steps:
    """A run of its own, with the student of the leg before and a share of this run's prompts."""
    recipe = steps.recipe
    folder = steps.store.run_dir / "train" / name
    anchor = next(iter(composition.weights))
    own_prompts = recipe.prompts.model_copy(update={"source": str(steps.prompts_file), "take": prompts})
    if recipe.rollout.from_ is None and any(recipe.side(anchor, role).context.columns for role in ROLES):
        own_prompts = recipe.prompts  # contexts read columns of its rows
    own = recipe.model_copy(
        update={
            "name": f"leg-{number + 1}",
            "runs": str(folder),
            "student": recipe.student.model_copy(update={"model": str(student), "revision": None}),
            "prompts": own_prompts,
            "rollout": recipe.rollout.model_copy(update={"from_": None}),
            "anchors": {anchor: recipe.anchors[anchor]},
            "compositions": {f"{name}.leg-{number + 1}": composition},
            "policies": {},
        }
    )
    return Steps(own, steps.arguments, steps.trust)


def _share(steps: Steps, leg: LegRun) -> list[Prompt]:
    everything = read_prompts(steps.prompts_file)
    first, last = (round(end * len(everything)) for end in leg.part)
    return everything[first:last]


def _keep(steps: Steps, name: str, final: Path) -> None:
    """Make the last leg's student this composition's, and put what the legs cost on the run's ledger."""
    stage = steps.store.stage(steps.train(name))
    target = stage.folder / "final"
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Sequential), composition.method
    legs = composition.sequence
    with whole_directory(target) as unfinished:
        # Without the last leg's adapter, which is one to the student of the leg before.
        shutil.copytree(final, unfinished, ignore=shutil.ignore_patterns("adapter"), dirs_exist_ok=True)
        (unfinished / "README.md").write_text(model_card(steps, name, {"legs": legs}), encoding="utf-8")
    book(steps, name, "sequential", sorted(stage.folder.glob("leg-*")))
    stage.record(sorted(target.iterdir()), {"legs": legs})
