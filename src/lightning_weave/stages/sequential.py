"""Anchors one after the other: the sequential baseline, at matched trajectories and updates.

Each leg gets its share of the prompts and so of the updates. A later leg samples anew from the student that the leg
before it left behind: a small run of its own, below this composition's folder, with the ordinary stages.
"""

import os
import shutil
from pathlib import Path

import torch

from lightning_weave.config import Composition
from lightning_weave.progress import Progress
from lightning_weave.stages import reference, rollout, score
from lightning_weave.stages.card import model_card
from lightning_weave.stages.offline import Leg, train_offline
from lightning_weave.stages.steps import Steps
from lightning_weave.store import Stage, append_line, write_atomic
from lightning_weave.store.ledger import LEDGER, read_ledger
from lightning_weave.train.parallel import Ranks


def train_in_sequence(
    steps: Steps, name: str, stage: Stage, ranks: Ranks, dtype: torch.dtype, progress: Progress
) -> None:
    """Train leg after leg and keep the last one's student. Resumable within and between legs."""
    composition = steps.recipe.compositions[name]
    legs, final = len(composition.sequence), None
    for number, anchor in enumerate(composition.sequence):
        # Prompts are ranked, and a smaller `take` is the front of a larger one: the first leg gets the last share.
        part = (1 - (number + 1) / legs, 1 - number / legs)
        own = _leg_composition(composition, anchor)
        if number == 0 or not composition.resample:
            leg_steps, leg = _on_first_cache(steps, f"{name}/leg-{number + 1}", own), Leg(final, part)
        else:
            leg_steps = _on_own_cache(steps, name, number, own, _required(final), ranks, progress)
            leg = Leg(None, (0.0, 1.0))
        leg_name = next(iter(leg_steps.recipe.compositions))
        leg_stage = leg_steps.store.stage(leg_steps.train(leg_name))
        if leg_stage.state() != "done":
            train_offline(leg_steps, leg_name, leg_stage, ranks, dtype, progress, leg)
        final = leg_stage.folder / "final"
    if ranks.first:
        _keep(steps, name, stage, _required(final))
    ranks.wait()


def _leg_composition(composition: Composition, anchor: str) -> Composition:
    weight = composition.weights[anchor] if composition.dose == "matched" else 1.0
    return Composition(
        weights={anchor: weight},
        normalize=False,
        alpha=composition.alpha,
        objective=composition.objective,
        epochs=composition.epochs,
    )


def _on_first_cache(steps: Steps, name: str, composition: Composition) -> Steps:
    recipe = steps.recipe.model_copy(update={"compositions": {name: composition}})
    return Steps(recipe, steps.arguments)


def _on_own_cache(
    steps: Steps,
    name: str,
    number: int,
    composition: Composition,
    student: Path,
    ranks: Ranks,
    progress: Progress,
) -> Steps:
    """Sample and score a fresh share of the prompts with the student of the leg before."""
    recipe, folder = steps.recipe, steps.store.run_dir / "train" / name
    legs = len(recipe.compositions[name].sequence)
    taken = steps.store.stage(steps.prompts).require()["rows"]
    anchor = next(iter(composition.weights))
    own = recipe.model_copy(
        update={
            "name": f"leg-{number + 1}",
            "runs": str(folder),
            "student": recipe.student.model_copy(update={"model": str(student), "revision": None}),
            "prompts": recipe.prompts.model_copy(update={"take": taken // legs}),
            "anchors": {anchor: recipe.anchors[anchor]},
            "compositions": {"leg": composition},
            "policies": {},
        }
    )
    leg_steps = Steps(own, steps.arguments)
    _same_threads(steps, leg_steps)
    rollout.run(leg_steps, progress)
    ranks.wait()
    reference.run(leg_steps, progress)
    ranks.wait()
    score.run(leg_steps, progress)
    ranks.wait()
    return leg_steps


def _same_threads(steps: Steps, leg_steps: Steps) -> None:
    kept = steps.store.run_dir / "machine.json"
    if kept.exists():
        write_atomic(leg_steps.store.run_dir / kept.name, kept.read_bytes())


def _keep(steps: Steps, name: str, stage: Stage, final: Path) -> None:
    """Make the last leg's student this composition's, and put what the legs cost on the run's ledger."""
    unfinished, target = stage.folder / ".tmp-final", stage.folder / "final"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(final, unfinished)
    legs = steps.recipe.compositions[name].sequence
    write_atomic(unfinished / "README.md", model_card(steps, name, {"legs": legs}).encode())
    shutil.rmtree(target, ignore_errors=True)
    os.rename(unfinished, target)
    for folder in sorted(stage.folder.glob("leg-*")):
        for row in read_ledger(folder):
            append_line(steps.store.run_dir / LEDGER, {**row, "stage": "train", "name": name, "method": "sequential"})
    stage.record(sorted(target.iterdir()), {"legs": legs})


def _required(path: Path | None) -> Path:
    assert path is not None, "a leg has come before"
    return path
