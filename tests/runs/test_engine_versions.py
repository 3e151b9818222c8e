"""What made a stage is in its manifest, by version and dtype: it makes nothing stale, and a mixture is said."""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import tiny
from faults.test_engine_kills import ENGINE
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages.score import make_cache
from lightning_weave.store import Stage
from lightning_weave.views import status

QUIET = Progress(quiet=True)
HERE = f"transformers {transformers.__version__}, torch {torch.__version__}, float32"


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], Path]:
    """Puts a version of an engine into an environment; gives its Python."""
    script, python = tmp_path / "engine.py", tmp_path / "python"

    def installed(version: str) -> Path:
        script.write_text(ENGINE.replace("0.32.0", version))
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o755)
        return python

    return installed


def run_with(python: Path, root: Path) -> Run:
    """The student samples and scores with the engine, and so does one anchor; the other is read by transformers."""
    recipe = tiny.make_world(root / "world", prompts=6)
    stages = dict.fromkeys(("rollout", "reference", "eval"), "vllm")
    problems = tiny.save_prompts(root / "problems.jsonl", 6, seed=9)
    recipe |= {"runs": str(root / "runs"), "engine": {**stages, "python": str(python), "parity": 1e9}}
    recipe["anchors"]["acc"]["engine"] = "vllm"
    recipe["rollout"] |= {"prompts_per_shard": 2}
    recipe["eval"] = {"benchmarks": [f"file:{problems}"], "samples": 2, "max_tokens": 9, "chat": False}
    return tiny.run_of(recipe)


def stages_of(run: Run) -> dict[str, Stage]:
    benchmark = run.recipe.eval.benchmarks[0]
    cache = [stage for verb in ("rollout", "reference", "score") for stage in run.stages(verb)]
    made = [*cache, run.stage("eval", "base", benchmark)]
    return {step.path: step for step in made}


@pytest.mark.slow
def test_every_stage_says_what_made_it_and_a_mixture_is_said(
    install: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_with(install("0.32.0"), tmp_path)
    make_cache(run, QUIET)
    eval_stage.evaluate(run, QUIET, ["base"])
    stages = stages_of(run)
    engines = {path: (stage.manifest() or {}).get("engines") for path, stage in stages.items()}
    assert engines.pop("prompts", None) is None
    assert {path for path, names in engines.items() if names == [HERE]} == {"score/brief-post", "score/brief-pre"}
    assert {tuple(names or ()) for path, names in engines.items() if "brief" not in path} == {("vllm 0.32.0, float32",)}

    install("0.33.1")
    before = {path: stage.manifest_path.read_bytes() for path, stage in stages.items()}
    make_cache(run, QUIET)
    eval_stage.evaluate(run, QUIET, ["base"])
    assert {path: stage.manifest_path.read_bytes() for path, stage in stages.items()} == before, "nothing is stale"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    rollout = stages["rollout"]
    rollout.shard_path(1).unlink()
    with caplog.at_level(logging.WARNING, "lightning_weave"):
        make_cache(run, QUIET)
    said = (
        "rollout: what is missing is now computed with vllm 0.33.1, float32; "
        "the rest was computed with vllm 0.32.0, float32"
    )
    assert [line for line in caplog.messages if "computed with" in line] == [f"warning: {said}"]
    both = ["vllm 0.32.0, float32", "vllm 0.33.1, float32"]
    assert (rollout.manifest() or {})["engines"] == both
    assert sorted(path.suffix for path in rollout.folder.iterdir()) == [".json", *[".safetensors"] * 3]
    (line,) = [one.why for one in status.look(run) if one.path == "rollout"]
    assert line.endswith("made with vllm 0.32.0, float32 and with vllm 0.33.1, float32")


def test_a_recipe_that_is_changed_before_a_shard_is_there_forgets_its_engine(tmp_path: Path) -> None:
    run = tiny.run_of(tiny.make_world(tmp_path))
    stage = run.stage("prompts")
    stage.begin()
    assert stage.note_engine("vllm 1, float32") == []
    assert stage.note_engine("vllm 2, float32") == ["vllm 1, float32"]
    recipe = tiny.make_world(tmp_path)
    changed = tiny.run_of({**recipe, "prompts": recipe["prompts"] | {"take": 3}})
    other = changed.stage("prompts")
    assert (stage.state(), other.state()) == ("missing", "missing")
    other.begin()
    assert other.engines() == []
