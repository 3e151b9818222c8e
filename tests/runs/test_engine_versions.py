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
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline.flow import make_cache
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
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


def steps_with(python: Path, root: Path) -> Steps:
    """The student samples and scores with the engine, and so does one anchor; the other is read by transformers."""
    recipe = tiny.make_world(root / "world", prompts=6)
    engine = {"engine": "vllm", "python": str(python), "parity": 1e9}
    problems = tiny.save_prompts(root / "problems.jsonl", 6, seed=9)
    recipe |= {"runs": str(root / "runs"), "score": {"python": str(python), "parity": 1e9}}
    recipe["anchors"]["acc"]["engine"] = "vllm"
    recipe["rollout"] |= {**engine, "prompts_per_shard": 2}
    recipe["reference"] |= engine
    recipe["eval"] = {**engine, "benchmarks": [f"file:{problems}"], "samples": 2, "max_tokens": 9, "chat": False}
    return tiny.steps_of(recipe)


def stages_of(steps: Steps) -> dict[str, Stage]:
    benchmark = steps.recipe.eval.benchmarks[0]
    made = [*steps.cache, steps.eval("base", benchmark)]
    return {step.path: steps.store.stage(step) for step in made}


@pytest.mark.slow
def test_every_stage_says_what_made_it_and_a_mixture_is_said(
    install: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = steps_with(install("0.32.0"), tmp_path)
    make_cache(steps, QUIET)
    eval_stage.run(steps, QUIET, ["base"])
    stages = stages_of(steps)
    engines = {path: (stage.manifest() or {}).get("engines") for path, stage in stages.items()}
    assert engines.pop("prompts", None) is None
    assert {path for path, names in engines.items() if names == [HERE]} == {"score/brief-post", "score/brief-pre"}
    assert {tuple(names or ()) for path, names in engines.items() if "brief" not in path} == {("vllm 0.32.0, float32",)}

    install("0.33.1")
    before = {path: stage.manifest_path.read_bytes() for path, stage in stages.items()}
    make_cache(steps, QUIET)
    eval_stage.run(steps, QUIET, ["base"])
    assert {path: stage.manifest_path.read_bytes() for path, stage in stages.items()} == before, "nothing is stale"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    rollout = stages["rollout"]
    rollout.shard_path(1).unlink()
    with caplog.at_level(logging.WARNING, "lightning_weave"):
        make_cache(steps, QUIET)
    said = "rollout: what is missing is now made with vllm 0.33.1, float32; the rest was made with vllm 0.32.0, float32"
    assert [line for line in caplog.messages if "made with" in line] == [f"warning: {said}"]
    both = ["vllm 0.32.0, float32", "vllm 0.33.1, float32"]
    assert (rollout.manifest() or {})["engines"] == both
    assert sorted(path.suffix for path in rollout.folder.iterdir()) == [".json", *[".safetensors"] * 3]
    (line,) = [one.why for one in status.look(steps) if one.step.path == "rollout"]
    assert line.endswith("made with vllm 0.32.0, float32 and with vllm 0.33.1, float32")


def test_a_recipe_that_is_changed_before_a_shard_is_there_forgets_its_engine(tmp_path: Path) -> None:
    steps = tiny.steps_of(tiny.make_world(tmp_path))
    stage = steps.store.stage(steps.prompts)
    stage.begin()
    assert stage.note_engine("vllm 1, float32") == []
    assert stage.note_engine("vllm 2, float32") == ["vllm 1, float32"]
    recipe = tiny.make_world(tmp_path)
    changed = tiny.steps_of({**recipe, "prompts": recipe["prompts"] | {"take": 3}})
    other = changed.store.stage(changed.prompts)
    assert (stage.state(), other.state()) == ("missing", "missing")
    other.begin()
    assert other.engines() == []
