"""Whole stages with real vLLM engines: anchors of mixed engines, and students as adapters in one engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from lightning_weave.models.engine_process import EngineProcess
from lightning_weave.models.hf import hf_scorer
from lightning_weave.models.load import load_model
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline.flow import make_cache, make_students
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines
from lightning_weave.types import Rollouts, Scores
from models.test_vllm_body import save
from runs.test_engines import make_recipe

QUIET = Progress(quiet=True)
EAGER = {"enforce_eager": True}
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]  # engine after engine


def moved(folder: Path, start: Path) -> Path:
    """Save a checkpoint that has moved a little from another."""
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    torch.manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * weight.std() * torch.randn_like(weight))
    model.save_pretrained(folder)
    tiny.make_tokenizer("student").save_pretrained(folder)
    return folder


def logprobs(model: Path, steps: Steps) -> np.ndarray:
    """What a student thinks of the run's responses."""
    rows = steps.store.stage(steps.rollout).open(Rollouts, 0).read()
    pairs = list(zip(rows.prompt_ids, rows.response_ids, strict=True))
    loaded = load_model(model, dtype=torch.float32, device=torch.device("cpu"))
    scored = hf_scorer(loaded, steps.student.vocabulary).candidates(pairs, 4)
    return np.concatenate([sampled_T for *_, sampled_T in scored])


def test_one_anchor_by_vllm_beside_others_by_transformers_trains_the_same_student(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["rollout"] |= {"engine": "hf"}
    experts = Path(save(tmp_path / "experts", "experts").name)
    pair = {"post": str(moved(tmp_path / "experts-post", experts)), "pre": str(experts)}
    started: list[Any] = []
    launch = EngineProcess._launch
    monkeypatch.setattr(EngineProcess, "_launch", lambda self: (started.append(self), launch(self))[1])
    made = {}
    for engine in ("hf", "vllm"):
        recipe["score"] = {"python": vllm_python}
        own = {"engine": engine, "options": EAGER} if engine == "vllm" else {}
        recipe["anchors"] = {"acc": recipe["anchors"]["acc"], "big": pair | own}
        recipe["compositions"] = {"both": {"weights": {"acc": 0.5, "big": 0.5}}}
        steps = tiny.steps_of({**recipe, "runs": str(tmp_path / engine)})
        make_cache(steps, QUIET)
        make_students(steps, QUIET)
        made[engine] = steps
    assert len(started) == 2  # of the pair that vLLM scores, and of nothing else
    for role in ("post", "pre"):
        folders = [steps.store.stage(steps.score(steps.side("big", role))) for steps in made.values()]
        for shard in range(3):
            by_hf, by_vllm = (stage.open(Scores, shard).read() for stage in folders)
            np.testing.assert_allclose(by_vllm.logp.flat, by_hf.logp.flat, atol=2e-4)
            np.testing.assert_allclose(by_vllm.mass.flat, by_hf.mass.flat, atol=2e-4)
    start = logprobs(Path(made["hf"].student.path), made["hf"])
    by_hf, by_vllm = (logprobs(steps.store.run_dir / "train/both/final", steps) for steps in made.values())
    learned = np.abs(by_hf - start).mean()
    assert learned > 0.01
    assert np.abs(by_vllm - by_hf).mean() < 0.01 * learned


def test_students_of_low_rank_are_adapters_in_one_engine(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["rollout"] |= {"engine": "hf"}
    recipe["train"] |= {"lora": {"rank": 4}, "learning_rate": 1e-2}
    recipe["compositions"] = {name: recipe["compositions"][name] for name in ("acc-only", "both")}
    recipe["eval"] |= {"adapters": True, "options": EAGER}
    steps = tiny.steps_of(recipe)
    make_cache(steps, QUIET)
    make_students(steps, QUIET)
    started: list[Any] = []
    launch = EngineProcess._launch
    monkeypatch.setattr(EngineProcess, "_launch", lambda self: (started.append(self), launch(self))[1])
    eval_stage.run(steps, QUIET)
    assert len(started) == 1
    benchmark = steps.recipe.eval.benchmarks[0]
    assert {steps.store.stage(steps.eval(name, benchmark)).state() for name in steps.policies} == {"done"}
    # Each adapter was compared with its merged checkpoint, which is another model than the student.
    rows = [row for row in read_lines(steps.store.run_dir / "parity.jsonl") if row["engine"].endswith("adapter")]
    assert len({row["model"] for row in rows}) == 2
    assert max(row["gap"] for row in rows) < 2e-4
    merged = logprobs(steps.policy("both").path, steps)
    assert np.abs(merged - logprobs(steps.student.path, steps)).mean() > 0.01
