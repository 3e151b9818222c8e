"""The scripts of docs/clusters.md: bash accepts them, and an array of tasks makes what one process makes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tiny
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.progress import Progress
from lightning_weave.stages import rollout
from programs import write_program

PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"


def scripts() -> dict[str, str]:
    blocks = re.findall(r"```bash\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return {re.search(r"# ([\w.]+)[ :]", block)[1]: block for block in blocks}


def test_bash_accepts_every_script() -> None:
    assert set(scripts()) == {"submit.sh", "shards.sbatch", "train.sbatch"}
    for name, text in scripts().items():
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
        assert (done.returncode, done.stderr) == (0, ""), name


def run_script(folder: Path, script: str, command: list[str], **variables: str) -> None:
    """Run one of the page's scripts in a folder whose programs come first."""
    environment = {**os.environ, **variables, "PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(
        command, input=scripts()[script], text=True, check=True, cwd=folder, env=environment, capture_output=True
    )


def test_every_stage_waits_for_the_one_before(tmp_path: Path) -> None:
    """Submit with a Slurm that only writes down what it is asked and numbers the jobs."""
    stub = tmp_path / "sbatch"
    stub.write_text('#!/bin/bash\necho "$@" >> asked\nwc -l < asked | tr -d " "\n')
    stub.chmod(0o755)
    run_script(tmp_path, "submit.sh", ["bash", "-eu"])
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[-1] for line in asked] == ["rollout", "reference", "score", "train.sbatch", "eval"]
    waits = [re.search(r"afterok:(\d+)", line) for line in asked]
    assert [wait and wait[1] for wait in waits] == [None, "1", "2", "3", "4"]


@pytest.mark.slow
@pytest.mark.ranks
def test_an_array_of_tasks_makes_what_one_process_makes(tmp_path: Path) -> None:
    recipe = {**tiny.make_world(tmp_path / "models"), "runs": str(tmp_path / "runs")}
    (tmp_path / "mine.toml").write_text(dump_recipe(check_recipe(recipe)))
    write_program(tmp_path / "lweave", sys.executable, "-m", "lightning_weave.cli")
    alone = tiny.run_of({**recipe, "runs": str(tmp_path / "alone")})
    rollout.rollout(alone, Progress(quiet=True))
    made = tmp_path / "runs" / "tiny" / "rollout"
    for task in ("1", "0"):
        assert not (made / "manifest.json").exists()
        tasks = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": "2"}
        run_script(tmp_path, "shards.sbatch", ["bash", "-s", "rollout"], **tasks)
    assert len(json.loads((made / "manifest.json").read_text())["shards"]) == 3
    for path in alone.stage("rollout").folder.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes()
