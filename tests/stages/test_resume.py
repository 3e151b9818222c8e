"""Rollouts and scores are the same bytes whether killed and resumed, on one rank or on two."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.config import check_recipe, dump_recipe
from tiny import make_world

PROGRAM = Path(__file__).with_name("resume.py")
RANKS = ({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"})
Run = Callable[..., list[int]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run command lines side by side; gives the signal that ended each, or minus its exit code."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(*jobs: dict[str, Any]) -> list[int]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(jobs) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.stdout.close()
    process.wait()


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, run: Run) -> dict[str, Path]:
    """The same recipe three times, in run directories of their own: undisturbed, killed, and on two ranks."""
    root = tmp_path_factory.mktemp("resume")
    world = make_world(root, prompts=20)
    world["rollout"]["prompts_per_shard"] = 2
    files = {}
    for name in ("whole", "killed", "ranks"):
        recipe = check_recipe(world | {"runs": str(root / name)})
        files[name] = root / f"{name}.toml"
        files[name].write_text(dump_recipe(recipe))
    return files


def contents(recipe: Path, stage: str) -> dict[str, bytes]:
    folder = recipe.parent / recipe.stem / "tiny" / stage
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def disturb(run: Run, recipes: dict[str, Path], stage: str, shards: int) -> None:
    whole, killed, ranks = recipes["whole"], recipes["killed"], recipes["ranks"]
    assert run({"arguments": [stage, str(whole)]}) == [0]
    expected = contents(whole, stage)
    assert sum(name.endswith(".safetensors") for name in expected) == shards
    for kill in ("write", "rename"):
        finished = _finished(killed, stage)
        assert run({"arguments": [stage, str(killed)], "kill": kill}) == [signal.SIGKILL]
        now = _finished(killed, stage)
        assert len(finished) < len(now) < shards
        assert all(expected[name] == content for name, content in now.items())
    assert run({"arguments": [stage, str(killed)]}) == [0]
    assert contents(killed, stage) == expected
    two = [{"arguments": [stage, str(ranks)], "environment": rank} for rank in RANKS]
    assert run(*two) == [0, 0]
    assert contents(ranks, stage) == expected


def _finished(recipe: Path, stage: str) -> dict[str, bytes]:
    """Whole shards, by their final names."""
    found = contents(recipe, stage)
    return {name: content for name, content in found.items() if name.endswith(".safetensors") and ".tmp-" not in name}


@pytest.mark.slow
def test_rollouts_and_scores_survive_kills_and_do_not_depend_on_ranks(run: Run, recipes: dict[str, Path]) -> None:
    disturb(run, recipes, "rollout", shards=10)
    assert run(*({"arguments": ["reference", str(recipe)]} for recipe in recipes.values())) == [0, 0, 0]
    assert contents(recipes["killed"], "reference") == contents(recipes["whole"], "reference")
    disturb(run, recipes, "score", shards=40)
    assert run({"arguments": ["verify", str(recipes["killed"])]}) == [0]
