"""Anchors one after the other: the sequential baseline, at matched trajectories and updates.

Each leg gets its share of the prompts and so of the updates. A later leg samples anew from the student that the leg
before it left behind: a small run of its own, below this composition's folder, with the ordinary stages.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_weave.config import Joint, Sequential
from lightning_weave.errors import InputError
from lightning_weave.pipeline import prompts as prompts_stage
from lightning_weave.pipeline import reference, rollout, score
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, Step, append_line, write_atomic
from lightning_weave.store.ledger import LEDGER, read_ledger
from lightning_weave.train.card import model_card
from lightning_weave.train.offline import Leg, train_offline
from lightning_weave.train.parallel import Ranks


@dataclass(frozen=True)
class LegRun:
    """One leg: the recipe that it is trained by, and the share of the prompts that is its own."""

    steps: Steps
    part: tuple[float, float]
    leg: Leg
    samples: bool  # anew, from the student of the leg before

    @property
    def name(self) -> str:
        return next(iter(self.steps.recipe.compositions))

    @property
    def stage(self) -> Stage:
        return self.steps.store.stage(self.steps.train(self.name))

    def made(self) -> list[Step]:
        """The steps that are this leg's own: its training and, where it samples anew, a cache."""
        cache = [step for step in self.steps.everything() if step.path.split("/")[0] not in ("train", "eval")]
        return [*(cache if self.samples else []), self.steps.train(self.name)]


def train_in_sequence(
    steps: Steps, name: str, stage: Stage, ranks: Ranks, dtype: torch.dtype, progress: Progress
) -> None:
    """Train leg after leg and keep the last one's student. Resumable within and between legs."""
    final = None
    for leg in legs(steps, name):
        if leg.samples:
            _make_cache(steps, leg, ranks, progress)
        if leg.stage.state() != "done":
            train_offline(leg.steps, leg.name, leg.stage, ranks, dtype, progress, leg.leg)
        final = leg.stage.folder / "final"
    if ranks.first:
        assert final is not None, "a sequence has a leg"
        _keep(steps, name, stage, final)
    ranks.wait()


def legs(steps: Steps, name: str) -> Iterator[LegRun]:
    """The legs of a sequence in their order, up to the first whose student has not been made."""
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Sequential), composition.method
    count = len(composition.sequence)
    prompts = steps.store.stage(steps.prompts).require()["rows"]
    final = None
    if prompts < count:
        raise InputError(f"compositions.{name}.sequence: {prompts} prompts cannot be shared among {count} legs")
    for number, anchor in enumerate(composition.sequence):
        part = (1 - (number + 1) / count, 1 - number / count)  # the first leg gets the last share
        own = _leg_composition(composition, anchor)
        if number == 0 or not composition.resample:
            leg = LegRun(_on_first_cache(steps, f"{name}/leg-{number + 1}", own), part, Leg(final, part), False)
        else:
            assert final is not None, "a leg has come before"
            first, last = (round(end * prompts) for end in part)
            own_steps = _on_own_cache(steps, name, number, own, final, last - first)
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
    return Steps(recipe, steps.arguments)


def _on_own_cache(steps: Steps, name: str, number: int, composition: Joint, student: Path, prompts: int) -> Steps:
    """A run of its own, with the student of the leg before and a share of this run's prompts."""
    recipe, folder = steps.recipe, steps.store.run_dir / "train" / name
    anchor, source = next(iter(composition.weights)), prompts_stage.path_of(steps)
    own = recipe.model_copy(
        update={
            "name": f"leg-{number + 1}",
            "runs": str(folder),
            "student": recipe.student.model_copy(update={"model": str(student), "revision": None}),
            "prompts": recipe.prompts.model_copy(update={"source": str(source), "take": prompts}),
            "rollout": recipe.rollout.model_copy(update={"from_": None}),
            "anchors": {anchor: recipe.anchors[anchor]},
            "compositions": {f"{name}.leg-{number + 1}": composition},
            "policies": {},
        }
    )
    return Steps(own, steps.arguments)


def _make_cache(steps: Steps, leg: LegRun, ranks: Ranks, progress: Progress) -> None:
    """Sample and score the leg's own share of the prompts."""
    _same_threads(steps, leg.steps)
    if ranks.first:
        _share_prompts(steps, leg)
    for stage in (rollout, reference, score):
        ranks.wait()
        stage.run(leg.steps, progress)
    ranks.wait()


def _share_prompts(steps: Steps, leg: LegRun) -> None:
    if leg.steps.store.stage(leg.steps.prompts).state() != "done":
        everything = read_prompts(prompts_stage.path_of(steps))
        first, last = (round(end * len(everything)) for end in leg.part)
        prompts_stage.keep(leg.steps, everything[first:last], {})


def _same_threads(steps: Steps, leg_steps: Steps) -> None:
    kept = steps.store.run_dir / "machine.json"
    if kept.exists():
        write_atomic(leg_steps.store.run_dir / kept.name, kept.read_bytes())


def _keep(steps: Steps, name: str, stage: Stage, final: Path) -> None:
    """Make the last leg's student this composition's, and put what the legs cost on the run's ledger."""
    unfinished, target = stage.folder / ".tmp-final", stage.folder / "final"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(final, unfinished)
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Sequential), composition.method
    legs = composition.sequence
    write_atomic(unfinished / "README.md", model_card(steps, name, {"legs": legs}).encode())
    shutil.rmtree(target, ignore_errors=True)
    os.rename(unfinished, target)
    booked = read_ledger(steps.store.run_dir)
    for folder in sorted(stage.folder.glob("leg-*")):
        for row in read_ledger(folder):
            spent = {**row, "stage": "train", "name": name, "method": "sequential"}
            if spent not in booked:  # by an earlier training of this composition
                append_line(steps.store.run_dir / LEDGER, spent)
    stage.record(sorted(target.iterdir()), {"legs": legs})
