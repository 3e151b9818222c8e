"""A miniature world from nothing to points, twice the same, and once more on two ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.store import read_json
from lightning_weave.world import demo
from tiny_world.build import build_world

QUIET = Progress(quiet=True)
SMALL = [
    "prompts.take=16",
    "rollout.max_tokens=24",
    "rollout.prompts_per_shard=4",
    "train.epochs=1",
    "train.prompts_per_round=8",
    "train.updates_per_round=2",
    "eval.samples=2",
    "eval.max_tokens=24",
    "eval.block=16",
    "machine.threads=1",
]
IGNORED = {"metrics.jsonl", "README.md", "manifest.json"}  # they hold times, or where the run is


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("demo")
    build_world(root / "runs" / "demo-world", seed=3, size="miniature")
    return root


def small_demo(place: Path, monkeypatch: pytest.MonkeyPatch, *sets: str) -> Run:
    monkeypatch.chdir(place)
    return demo.load_demo([*SMALL, *sets])


@pytest.fixture(scope="module")
def first(place: Path) -> Run:
    """The demo, run once for those that it is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        run = small_demo(place, patch)
        demo.run(run, QUIET, Console(quiet=True))
    return run


def contents(run: Run) -> dict[str, bytes]:
    root = run.directory
    kept = ("prompts", "rollout", "reference", "score", "train", "eval")
    files = [path for part in kept for path in (root / part).rglob("*") if path.is_file() and path.name not in IGNORED]
    return {str(path.relative_to(root)): path.read_bytes() for path in files if "checkpoints" not in path.parts}


@pytest.mark.slow
def test_the_demo_runs_twice_with_identical_results(place: Path, first: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    second = small_demo(place, monkeypatch, "runs=again")
    points = read_json(first.directory / "report" / "points.json")
    assert [point["policy"] for point in points][:3] == ["base", "accuracy-only", "brevity-only"]
    assert all(
        {"weights", "alpha", "accuracy", "tokens", "aes", "aes_low", "aes_high"} <= point.keys() for point in points
    )
    assert (first.directory / "report" / "index.html").exists()

    demo.run(second, QUIET, Console(quiet=True))
    one, two = contents(first), contents(second)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_make_the_same_cache_and_nearly_the_same_students(
    place: Path, first: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    together = small_demo(place, monkeypatch, "runs=together")
    recipe = tmp_path / "together.toml"
    recipe.write_text(dump_recipe(check_recipe(together.recipe.model_dump(by_alias=True, exclude_unset=True))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "lightning_weave.cli", "run", str(recipe)]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    assert done.returncode == 0, done.stderr
    one, two = contents(first), contents(together)
    cached = [name for name in one if name.startswith(("rollout", "reference", "score", "eval/base"))]
    assert len(cached) > 20
    assert [name for name in cached if one[name] != two[name]] == []
    for name in first.recipe.compositions:
        weights = [
            load_file(run.directory / "train" / name / "final" / "model.safetensors") for run in (first, together)
        ]
        for key in weights[0]:  # exported in float16
            torch.testing.assert_close(weights[0][key], weights[1][key], atol=2e-3, rtol=2e-3)
