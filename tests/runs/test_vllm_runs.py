"""Whole stages with real vLLM engines: cache and evaluation, anchors of mixed engines, students as adapters."""

import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.models.engine_process import EngineProcess
from lightning_weave.models.hf import hf_scorer
from lightning_weave.models.load import load_model
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline import reference
from lightning_weave.pipeline.flow import make_cache, make_rollouts, make_students
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines
from lightning_weave.types import Candidates, Rollouts, Scores
from models.test_vllm_body import save
from pipeline.expected import check_reference, read_cache
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


def test_vllm_samples_trajectories_that_the_reference_accepts(
    vllm_python: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = tiny.steps_of(make_recipe(tmp_path, vllm_python))
    with caplog.at_level(logging.INFO, "lightning_weave"):
        make_rollouts(steps, QUIET)
    print(next(line for line in caplog.messages if "agree" in line))
    reference.run(steps, QUIET)
    rollouts, found = steps.store.stage(steps.rollout), steps.store.stage(steps.reference)
    assert (rollouts.state(), found.state()) == ("done", "done")
    rows = [rollouts.open(Rollouts, shard).read() for shard in range(3)]
    assert sum(len(shard.prompt_R) for shard in rows) == 24
    sampled = np.concatenate([found.open(Candidates, shard).read().sampled_logp.flat for shard in range(3)])
    assert np.isfinite(sampled).all()
    # Drawn from the student: its own tokens are as likely as its entropy says, not as if drawn from anything else.
    assert sampled.mean() > -np.log(40)
    before = [path.read_bytes() for path in sorted(rollouts.folder.glob("*.safetensors"))]
    for path in rollouts.folder.glob("*.safetensors"):
        path.unlink()
    make_rollouts(steps, QUIET)
    assert [path.read_bytes() for path in sorted(rollouts.folder.glob("*.safetensors"))] == before


def test_vllm_evaluates(vllm_python: str, tmp_path: Path) -> None:
    steps = tiny.steps_of(make_recipe(tmp_path, vllm_python))
    eval_stage.run(steps, QUIET, ["base"])
    folder = steps.store.stage(steps.eval("base", steps.recipe.eval.benchmarks[0])).folder
    samples = list(read_samples(folder / "samples.jsonl"))
    assert len(samples) == 15
    assert {sample.finish for sample in samples} <= {"stop", "length"}
    assert read_summary(folder / "summary.json").settings["engine"] == "vllm"


def test_a_real_checkpoint_goes_through_vllm(
    vllm_python: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rollout, reference and evaluation of a real checkpoint (SmolLM2-135M-Instruct) that LWEAVE_SMOLLM2 names."""
    checkpoint = os.environ.get("LWEAVE_SMOLLM2")
    if not checkpoint:
        pytest.fail("LWEAVE_SMOLLM2 does not name a checkpoint directory: make test-vllm")
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["student"]["model"] = checkpoint
    recipe["prompts"] |= {"chat": True, "take": 4}
    recipe["rollout"] |= {"max_tokens": 24}
    recipe["reference"] = {"engine": "vllm", "python": vllm_python, "options": {"enforce_eager": True}}
    recipe["eval"] |= {"chat": True, "samples": 1, "max_tokens": 24}
    steps = tiny.steps_of(recipe)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        make_rollouts(steps, QUIET)
    print(next(line for line in caplog.messages if "agree" in line))
    reference.run(steps, QUIET)
    assert check_reference(steps, read_cache(steps, None)[:4], tolerance=2e-4) > 0
    eval_stage.run(steps, QUIET, ["base"])
