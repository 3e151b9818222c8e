"""A command on a Ray cluster is killed among its shards and started again (`make test-ray`): the same bytes."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tiny
from cluster.clustered import world
from faults.test_engine_kills import ENGINE
from lightning_weave.config import dump_recipe
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.score import make_cache
from programs import write_program

QUIET = Progress(quiet=True)
# Every engine does its first job, and begins no other before it is let go.
HOLD = """
    held.append(None)
    while len(held) > 1 and not pathlib.Path(__file__ + ".go").exists():
        pathlib.Path(__file__ + ".reached").touch()
        time.sleep(0.05)
    if "positions" in job:"""


def with_engine(root: Path) -> dict[str, Any]:
    """A recipe whose samples and scores come from an engine that can be held."""
    script = root / "engine.py"
    held = ENGINE.replace('\n    if "positions" in job:', HOLD).replace("import array", "import time, array")
    script.write_text(f"held = []\n{held}")
    python = write_program(root / "python", sys.executable, script)
    recipe = world(root)
    engine = {"rollout": "vllm", "score": "vllm", "python": str(python), "parity": 1e9}
    recipe |= {"engine": engine, "machine": {"threads": 1, "workers": 2}}
    return recipe


def shards(run: Run) -> dict[str, bytes]:
    root = run.directory
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("[0-9]*.safetensors")}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_killed_command_resumes_with_the_shards_that_are_there(cluster: Any, tmp_path: Path) -> None:
    recipe = with_engine(tmp_path)
    go, reached = tmp_path / "engine.py.go", tmp_path / "engine.py.reached"
    go.touch()
    alone = tiny.run_of({**recipe, "runs": str(tmp_path / "alone")})
    make_cache(alone, QUIET)
    run = tiny.run_of({**recipe, "runs": str(tmp_path / "killed")})
    run.directory.mkdir(parents=True)
    shutil.copy(alone.directory / "parity.jsonl", run.directory)  # an engine's first job is a shard
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(run.recipe))

    def command(verb: str) -> list[str]:
        words = [sys.executable, "-m", "lightning_weave.cli", verb, str(file), "--trust"]
        return [*words, "--cluster", "ray", "--address", cluster.address]

    for verb, after in (("rollout", 12), ("reference", 24), ("score", 24 + 4 * 12)):
        before = len(shards(run))
        if verb != "reference":  # transformers makes it
            go.unlink()
            reached.unlink(missing_ok=True)
            killed = subprocess.Popen(command(verb), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not (reached.exists() and len(shards(run)) > before):
                assert killed.poll() is None, "it has ended by itself"
                time.sleep(0.1)
            os.kill(killed.pid, signal.SIGKILL)
            assert killed.wait() == -signal.SIGKILL
            assert before < len(shards(run)) < after
            go.touch()
        done = subprocess.run(command(verb), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert len(shards(run)) == after
    assert shards(run) == shards(alone)
