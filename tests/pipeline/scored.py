"""The tiny world with its cache made, and its compositions trained: where the ways of training are compared."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from lightning_weave.progress import Progress
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from tiny import make_world, run_of

QUIET = Progress(quiet=True)
HALF = {"acc": 0.5, "brief": 0.5}


def make_scored(folder: Path) -> dict:
    """Make a world and score it; returns its recipe."""
    recipe = make_world(folder)
    run = run_of(recipe)
    make_cache(run, QUIET)
    return recipe


def copied(recipe: dict, folder: Path) -> dict:
    """The same cache in another place, where nothing is trained yet: what is trained twice is found there."""
    shutil.copytree(Path(recipe["runs"]), folder / "runs", symlinks=True, ignore=shutil.ignore_patterns("train"))
    return {**recipe, "runs": str(folder / "runs")}


def trained(recipe: dict, **compositions: dict) -> dict[str, dict[str, torch.Tensor]]:
    recipe = {**recipe, "compositions": compositions}
    run = run_of(recipe)
    make_students(run, QUIET)
    folder = run.directory / "train"
    return {name: load_file(folder / name / "final" / "model.safetensors") for name in compositions}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
