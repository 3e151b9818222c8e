"""Ranks that see different files on one disk do what rank 0 sees to be done."""

import os
import socket
from pathlib import Path

import pytest

from lightning_weave.pipeline.flow import make_students
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from train.cached import make_run
from train.launch import SERVER

HANGING = 100  # seconds


def train_with_a_late_view(steps: Steps, rank: int, port: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}
    if rank == 1:  # the disk does not show it yet what training has written
        real = Stage.state
        Stage.state = lambda stage: "missing" if "train" in stage.folder.parts else real(stage)  # type: ignore[method-assign]
    make_students(steps, Progress(quiet=True))


@pytest.mark.slow
def test_rank_0_says_what_is_to_be_trained(tmp_path: Path) -> None:
    steps = make_run(tmp_path, groups=4)
    for name in steps.recipe.compositions:
        steps.store.stage(steps.train(name)).record([])  # all of it is done, as rank 0 sees it
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [SERVER.Process(target=train_with_a_late_view, args=(steps, rank, port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANGING)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0, 0]
