"""A tiny world with its cache, made once; every test gets a run directory of its own."""

import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.progress import Progress
from lightning_weave.stages.score import make_cache
from tiny import make_world, run_of

Recipe = dict[str, Any]
QUIET = Progress(quiet=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Rollouts, candidates and scores of the tiny world, through the stages."""
    torch.set_num_threads(1)
    recipe = make_world(tmp_path_factory.mktemp("robust") / "world", prompts=8)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    recipe["train"] |= {"epochs": 1, "checkpoint_every": 1}
    make_cache(run_of(recipe), QUIET)
    return recipe


@pytest.fixture
def make_run(cached: Recipe, tmp_path: Path) -> Callable[[str], Recipe]:
    """Copy the cached run: what it holds is named by content, so it is done under any name of the directory."""

    def copy(name: str) -> Recipe:
        shutil.copytree(cached["runs"], tmp_path / name, symlinks=True)
        return deepcopy(cached) | {"runs": str(tmp_path / name)}

    return copy


@pytest.fixture
def recipe(cached: Recipe, tmp_path: Path) -> Recipe:
    """The same recipe, with nothing made yet."""
    return deepcopy(cached) | {"runs": str(tmp_path / "runs")}
