"""Engines on a Ray cluster (`make test-ray`): each has several shards at once, so that the end of one is no gap."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny
from cluster.clustered import world
from lightning_weave.cluster.connect import connect
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline.flow import make_rollouts
from lightning_weave.progress import Progress
from lightning_weave.runs.costs import costs
from lightning_weave.runs.steps import Steps
from lightning_weave.store.ledger import read_ledger
from programs import write_program

QUIET = Progress(quiet=True)
STAND_IN = Path(__file__).parents[1] / "stand_in"


def made(steps: Steps) -> dict[str, bytes]:
    root = steps.store.run_dir
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
    engine = {"engine": "vllm", "python": str(python), "parity": 1e9}
    recipe |= {"anchors": {}, "compositions": {}, "machine": {"threads": 1, "workers": 1}}
    recipe["rollout"] |= engine
    recipe["eval"] |= engine
    alone, there = (tiny.steps_of({**recipe, "runs": str(tmp_path / name)}) for name in ("alone", "there"))
    hold(0)
    make_rollouts(alone, QUIET)
    eval_stage.run(alone, QUIET, ["base"])
    there.store.run_dir.mkdir(parents=True)
    shutil.copy(alone.store.run_dir / "parity.jsonl", there.store.run_dir)  # which asks for a few rows alone
    hold(16)
    make_rollouts(there, QUIET, connect(None).do)
    eval_stage.run(there, QUIET, ["base"], connect(None).do)
    assert len(made(alone)) == 12 + 2
    assert made(there) == made(alone)
    for stage, cost in costs(read_ledger(there.store.run_dir), "stage").items():
        assert cost.starting > 0, stage
        assert cost.busy > 0, stage
        assert cost.idle is not None, stage
        assert 0 <= cost.idle < 1, stage
