"""Engines on a Ray cluster (`make test-ray`): each has several shards at once, so that the end of one is no gap."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from cluster.clustered import world
from lightning_weave.cluster import connect
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import rollout
from lightning_weave.stages.costs import costs
from lightning_weave.store.ledger import read_ledger
from programs import write_program

QUIET = Progress(quiet=True)
STAND_IN = Path(__file__).parents[1] / "stand_in"


def made(run: Run) -> dict[str, bytes]:
    root = run.directory
    files = [*root.glob("rollout/*.safetensors"), *root.rglob("samples.jsonl"), *root.rglob("summary.json")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_an_engine_gets_the_next_shards_before_the_first_is_whole(cluster: Any, tmp_path: Path) -> None:
    """It answers nothing before it has sixteen requests: of two shards, or of four blocks."""
    python = tmp_path / "python"

    def hold(requests: int) -> None:
        paths = os.pathsep.join(path for path in (str(STAND_IN), *sys.path) if path)
        variables = (f"PYTHONPATH={paths}", f"STAND_IN_RECORDS={tmp_path}", f"STAND_IN_TOGETHER={requests}")
        write_program(python, "env", *variables, sys.executable)

    recipe = world(tmp_path)
    recipe["engine"] = {"rollout": "vllm", "eval": "vllm", "python": str(python), "parity": 1e9}
    recipe |= {"anchors": {}, "compositions": {}, "machine": {"threads": 1, "workers": 1}}
    alone, there = (tiny.run_of({**recipe, "runs": str(tmp_path / name)}) for name in ("alone", "there"))
    hold(0)
    rollout.rollout(alone, QUIET)
    eval_stage.evaluate(alone, QUIET, ["base"])
    there.directory.mkdir(parents=True)
    shutil.copy(alone.directory / "parity.jsonl", there.directory)  # which asks for a few rows alone
    hold(16)
    rollout.rollout(there, QUIET, connect(None))
    eval_stage.evaluate(there, QUIET, ["base"], connect(None))
    assert len(made(alone)) == 12 + 2
    assert made(there) == made(alone)
    for stage, cost in costs(read_ledger(there.directory), "stage").items():
        assert cost.starting > 0, stage
        assert cost.busy > 0, stage
        assert cost.idle is not None, stage
        assert 0 <= cost.idle < 1, stage
