"""A rehearsal with real vLLM: what it samples and answers with, and a student that it cannot load."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.config import check_recipe, dump_recipe
from runs.test_engines import make_recipe
from tiny import save_model

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def rehearse(folder: Path, recipe: dict[str, Any]) -> tuple[int, str]:
    """Rehearse a recipe; returns the exit code, and what was said in one line."""
    (folder / "r.toml").write_text(dump_recipe(check_recipe({**recipe, "runs": "runs"})))
    command = [Path(sys.executable).with_name("lweave"), "rehearse", "r.toml", "--trust"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return ended.returncode, " ".join((ended.stdout + ended.stderr).split())


def test_vllm_samples_a_double_and_answers_with_the_export(vllm_python: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    for file in tmp_path.rglob("*.safetensors"):
        file.unlink()
    code, said = rehearse(tmp_path, recipe)
    assert code == 0, said
    for line in (
        "responses of Qwen3ForCausalLM, sampled with vLLM",
        "updates of Qwen3ForCausalLM (joint), saved and exported",
        "eval/base: 1 benchmark answered by Qwen3ForCausalLM, with vLLM, and graded",
        "eval/both: 1 benchmark answered by the exported Qwen3ForCausalLM, with vLLM, and graded",
        "Next: lweave run r.toml",
    ):
        assert line in said, said


def test_a_student_that_vllm_cannot_run_is_found_at_its_stage(vllm_python: str, tmp_path: Path) -> None:
    """Its heads are of 8 numbers, and transformers samples, scores and trains it."""
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["student"]["model"] = str(save_model(tmp_path / "narrow", "student", "qwen3", 1))
    recipe["engine"] |= {"rollout": "hf"}
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    code, said = rehearse(tmp_path, recipe)
    assert code == 1, said
    assert "doubles/narrow: the vLLM process failed" in said
    assert 'If this vLLM cannot run the model, set engine.eval to "hf"' in said
    assert "The rehearsal stopped before eval/base/problems was made" in said
