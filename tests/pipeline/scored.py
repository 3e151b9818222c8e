"""The tiny world with its cache made, and its compositions trained: where the ways of training are compared."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from lightning_weave.pipeline.flow import make_cache, make_students
from lightning_weave.progress import Progress
from tiny import make_world, steps_of

QUIET = Progress(quiet=True)
HALF = {"acc": 0.5, "brief": 0.5}


def make_scored(folder: Path) -> dict:
    """Make a world and score it; returns its recipe."""
    recipe = make_world(folder)
    steps = steps_of(recipe)
    make_cache(steps, QUIET)
    return recipe


def trained(recipe: dict, **compositions: dict) -> dict[str, dict[str, torch.Tensor]]:
    recipe = {**recipe, "compositions": compositions}
    steps = steps_of(recipe)
    make_students(steps, QUIET)
    folder = steps.store.run_dir / "train"
    return {name: load_file(folder / name / "final" / "model.safetensors") for name in compositions}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
