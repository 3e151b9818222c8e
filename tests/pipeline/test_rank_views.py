"""Ranks that see different files on one disk do what rank 0 sees to be done."""

import os
from pathlib import Path

import pytest

from lightning_weave.pipeline.flow import make_students
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from train.cached import make_run
from train.launch import on_ranks


def train_with_a_late_view(steps: Steps) -> None:
    if os.environ["RANK"] == "1":  # the disk does not show it yet what training has written
        real = Stage.state
        Stage.state = lambda stage: "missing" if "train" in stage.folder.parts else real(stage)  # type: ignore[method-assign]
    make_students(steps, Progress(quiet=True))


@pytest.mark.slow
def test_rank_0_says_what_is_to_be_trained(tmp_path: Path) -> None:
    steps = make_run(tmp_path, groups=4)
    for name in steps.recipe.compositions:
        steps.store.stage(steps.train(name)).record([])  # all of it is done, as rank 0 sees it
    assert on_ranks(2, train_with_a_late_view, steps) == [0, 0]
