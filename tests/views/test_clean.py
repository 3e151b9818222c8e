"""clean removes what no recipe needs, after it was agreed to, and nothing else."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.pipeline.flow import make_students
from lightning_weave.views import clean
from pipeline.small_runs import QUIET, make_cache, make_recipe, steps_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def files_of(run_dir: Path) -> set[str]:
    """What there is, but for what says who holds the run."""
    return {str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file() and path.name != ".lock"}


@pytest.mark.slow
def test_what_no_recipe_needs_is_listed_and_removed_only_when_agreed(recipe: dict[str, Any]) -> None:
    recipe["compositions"]["second"] = {"weights": {"one": 1.0}, "alpha": 1.0}
    steps = make_cache(recipe)
    make_students(steps, QUIET)
    run_dir = steps.store.run_dir
    other = {**recipe, "compositions": {"only": recipe["compositions"]["only"]}}
    (run_dir / ".aside-rollout@0123").mkdir()
    (run_dir / ".aside-rollout@0123" / "00000.safetensors").write_bytes(b"x" * 5000)
    (run_dir / "train" / "only" / ".tmp-final").mkdir()
    (run_dir / "eval" / "gone" / "bench").mkdir(parents=True)
    before = files_of(run_dir)
    with pytest.raises(InputError) as refused:
        clean.run([steps_of(other)], Console(quiet=True), yes=False)
    said = str(refused.value)
    for name in ("train/second ", "train/only/checkpoints", ".aside-rollout@0123", ".tmp-final", "eval/gone"):
        assert name in said, name
    assert "train/second/" not in said, "the whole of it goes"
    assert re.search(r"set aside[^\n]*:\n +\.aside-rollout@0123 +5\.0 kB", said)
    assert "of device time" in said
    assert "To remove them: --yes" in said
    assert files_of(run_dir) == before
    kept = clean.run([steps_of(other), steps_of(recipe)], Console(quiet=True), yes=True)
    assert run_dir / "train" / "second" not in kept
    assert {steps.store.stage(step).state() for step in steps.everything() if "eval" not in step.path} == {"done"}
    clean.run([steps_of(other)], Console(quiet=True), yes=True)
    assert not (run_dir / "train" / "second").exists()
    left = files_of(run_dir)
    assert {step.path.split("/")[0] for step in steps.everything()} - {"eval"} <= {name.split("/")[0] for name in left}
    out = StringIO()
    assert clean.run([steps_of(other)], Console(file=out, width=200), yes=False) == []
    assert "nothing to remove" in out.getvalue()
    assert files_of(run_dir) == left


@pytest.mark.slow
def test_checkpoints_that_a_training_will_resume_from_are_kept(recipe: dict[str, Any]) -> None:
    steps = make_cache(recipe)
    make_students(steps, QUIET)
    folder = steps.store.stage(steps.train("only")).folder
    position = next(folder.glob("checkpoints/*/position.json"))
    position.write_text(json.dumps({**json.loads(position.read_text()), "fingerprint": "another"}))
    assert clean.unneeded([steps]) == []


def test_recipes_of_different_runs_are_refused(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    with pytest.raises(InputError, match="not of"):
        clean.run([steps_of(recipe), steps_of({**recipe, "name": "another"})], Console(quiet=True), yes=True)
