"""Ranks that see different files on one disk do what rank 0 sees to be done."""

import os
from pathlib import Path

import pytest

from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import Stage
from train.cached import make_run
from train.launch import on_ranks


def train_with_a_late_view(run: Run) -> None:
    if os.environ["RANK"] == "1":  # the disk does not show it yet what training has written
        real = Stage.state
        Stage.state = lambda stage: "missing" if "train" in stage.folder.parts else real(stage)  # type: ignore[method-assign]
    make_students(run, Progress(quiet=True))


@pytest.mark.slow
def test_rank_0_says_what_is_to_be_trained(tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=4)
    for name in run.recipe.compositions:
        run.stage("train", name).record([])  # all of it is done, as rank 0 sees it
    assert on_ranks(2, train_with_a_late_view, run) == [0, 0]
