"""The cluster files of examples/: their commands as processes, with the variables that the cluster would set."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import yaml

from lightning_weave.api import Run
from ports import held_port
from tiny import make_world

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    """A recipe, and an environment in which lweave, python3 and torchrun are those of this Python."""
    recipe = make_world(tmp_path)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    (tmp_path / "mine.toml").write_text(tomli_w.dumps(recipe))
    programs = tmp_path / "bin"
    programs.mkdir()
    modules = {"lweave": "-m lightning_weave.cli", "torchrun": "-m torch.distributed.run", "python3": ""}
    for name, module in modules.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (programs / name).chmod(0o755)
    source = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": source, "HERE": str(tmp_path)}


BASH = shutil.which("bash") or ""


def start(place: dict[str, str], command: list[str], variables: dict[str, str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, cwd=place["HERE"], env={**place, **variables}, stderr=subprocess.PIPE)


def states(place: dict[str, str]) -> set[str]:
    return {row["state"] for row in Run(Path(place["HERE"]) / "mine.toml", quiet=True).status()}


@pytest.mark.slow
@pytest.mark.ranks
def test_the_kubernetes_jobs_make_a_student(place: dict[str, str]) -> None:
    cache, train = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())

    def container(job: Any) -> tuple[list[str], dict[str, str]]:
        (one,) = job["spec"]["template"]["spec"]["containers"]
        return [*one["command"], *one["args"]], {each["name"]: each["value"] for each in one["env"]}

    command, variables = container(train)
    waiting = start(place, command, {**variables, "GPUS": "1", "PAUSE": "1"})  # before the cache is there
    command, variables = container(cache)
    assert variables["WORLD_SIZE"] == str(cache["spec"]["completions"])
    indexes = [{**variables, "JOB_COMPLETION_INDEX": str(one)} for one in range(cache["spec"]["completions"])]
    for process in [*(start(place, command, each) for each in indexes), waiting]:
        _, said = process.communicate()
        assert process.returncode == 0, said.decode()
    assert states(place) == {"complete"}


@pytest.mark.slow
@pytest.mark.ranks
def test_the_skypilot_task_makes_a_student(place: dict[str, str]) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    nodes = {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
    with held_port() as port:
        script = task["run"].replace("29500", str(port))
        variables = {
            **task["envs"],
            **nodes,
            "STORE": f"file://{place['HERE']}/store",
            "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        }
        process = start(place, [BASH, "-c", script], variables)
        _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert states(place) == {"complete"}
    shutil.rmtree(Path(place["HERE"]) / "runs")  # the machine is gone; another continues from the store
    with held_port() as port:
        script = task["run"].replace("29500", str(port))
        process = start(place, [BASH, "-c", script], {**variables, "SKYPILOT_NUM_GPUS_PER_NODE": "1"})
        _, said = process.communicate()
    assert process.returncode == 0, said.decode()
    assert b"updates/s" not in said, "nothing is trained again"
    assert states(place) == {"complete"}


@pytest.mark.slow
def test_the_skypilot_task_computes_nothing_that_it_cannot_keep(place: dict[str, str]) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    variables = {**task["envs"], "STORE": f"file://{place['HERE']}/mine.toml/store", "SKYPILOT_NODE_RANK": "0"}
    process = start(place, [BASH, "-c", task["run"]], variables)
    _, said = process.communicate()
    assert process.returncode == 1, said.decode()
    assert variables["STORE"] in said.decode()
    assert not list(Path(place["HERE"]).glob("runs/tiny/*@*"))
