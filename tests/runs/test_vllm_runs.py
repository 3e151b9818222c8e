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
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.worker_process import WorkerProcess
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import reference, rollout
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
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


def logprobs(model: Path, run: Run) -> np.ndarray:
    """What a student thinks of the run's responses."""
    rows = run.stage("rollout").open(Rollouts, 0).read()
    pairs = list(zip(rows.prompt_ids, rows.response_ids, strict=True))
    loaded = Checkpoint(str(model)).load(torch.float32, torch.device("cpu"))
    scored = Scorer.from_model(loaded, run.student.vocabulary).candidates(pairs, 4)
    return np.concatenate([sampled_T for *_, sampled_T in scored])


def test_one_anchor_by_vllm_beside_others_by_transformers_trains_the_same_student(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["engine"] |= {"rollout": "hf"}
    experts = Path(save(tmp_path / "experts", "experts").name)
    pair = {"post": str(moved(tmp_path / "experts-post", experts)), "pre": str(experts)}
    started: list[Any] = []
    launch = WorkerProcess._launch
    monkeypatch.setattr(WorkerProcess, "_launch", lambda self: (started.append(self), launch(self))[1])
    made = {}
    for engine in ("hf", "vllm"):
        own = {"engine": engine, "options": EAGER} if engine == "vllm" else {}
        recipe["anchors"] = {"acc": recipe["anchors"]["acc"], "big": pair | own}
        recipe["compositions"] = {"both": {"weights": {"acc": 0.5, "big": 0.5}}}
        run = tiny.run_of({**recipe, "runs": str(tmp_path / engine)})
        make_cache(run, QUIET)
        make_students(run, QUIET)
        made[engine] = run
    assert len(started) == 2  # of the pair that vLLM scores, and of nothing else
    for role in ("post", "pre"):
        folders = [run.stage("score", run.side("big", role)) for run in made.values()]
        for shard in range(3):
            by_hf, by_vllm = (stage.open(Scores, shard).read() for stage in folders)
            np.testing.assert_allclose(by_vllm.logp.flat, by_hf.logp.flat, atol=2e-4)
            np.testing.assert_allclose(by_vllm.mass.flat, by_hf.mass.flat, atol=2e-4)
    start = logprobs(Path(made["hf"].student.path), made["hf"])
    by_hf, by_vllm = (logprobs(run.directory / "train/both/final", run) for run in made.values())
    learned = np.abs(by_hf - start).mean()
    assert learned > 0.01
    assert np.abs(by_vllm - by_hf).mean() < 0.01 * learned


def test_the_student_in_its_own_context_has_no_shift(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides are scored by vLLM, with rows of many lengths; a context that changes nothing moves nothing."""
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["engine"] |= {"rollout": "hf", "score": "vllm"}
    recipe["anchors"] = {
        "itself": {"model": "student", "post_prompt": {"template": "{prompt}"}},
        "other": {"model": "student", "post_prompt": {"template": "{prompt} {prompt}"}},
    }
    recipe["compositions"] = {"both": {"weights": {"itself": 0.5, "other": 0.5}}}
    started: list[Any] = []
    launch = WorkerProcess._launch
    monkeypatch.setattr(WorkerProcess, "_launch", lambda self: (started.append(self), launch(self))[1])
    run = tiny.run_of(recipe)
    make_cache(run, QUIET)
    assert started
    assert len({stage.folder for stage in run.scores_of("itself")}) == 2
    cache = open_cache(run, "both")
    block = cache.block(range(len(cache)))
    itself, other = block.r_KPC
    assert block.valid_KP[0].any()
    assert not itself.any()
    assert other.any()


def test_students_of_low_rank_are_adapters_in_one_engine(
    tmp_path: Path, vllm_python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["engine"] |= {"rollout": "hf"}
    recipe["train"] |= {"lora": {"rank": 4}, "learning_rate": 1e-2}
    recipe["compositions"] = {name: recipe["compositions"][name] for name in ("acc-only", "both")}
    recipe["eval"] |= {"adapters": True}
    recipe["engine"] |= {"options": EAGER}
    run = tiny.run_of(recipe)
    make_cache(run, QUIET)
    make_students(run, QUIET)
    started: list[Any] = []
    launch = WorkerProcess._launch
    monkeypatch.setattr(WorkerProcess, "_launch", lambda self: (started.append(self), launch(self))[1])
    eval_stage.evaluate(run, QUIET)
    assert len(started) == 1
    benchmark = run.recipe.eval.benchmarks[0]
    assert {run.stage("eval", name, benchmark).state() for name in run.policies} == {"complete"}
    # Each adapter was compared with its merged checkpoint, which is another model than the student.
    rows = [row for row in read_lines(run.directory / "parity.jsonl") if row["engine"].endswith("adapter")]
    assert len({row["model"] for row in rows}) == 2
    assert max(row["gap"] for row in rows) < 2e-4
    merged = logprobs(run.policy("both").path, run)
    assert np.abs(merged - logprobs(run.student.path, run)).mean() > 0.01


def test_vllm_samples_trajectories_that_the_reference_accepts(
    vllm_python: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny.run_of(make_recipe(tmp_path, vllm_python))
    with caplog.at_level(logging.INFO, "lightning_weave"):
        rollout.rollout(run, QUIET)
    print(next(line for line in caplog.messages if "agree" in line))
    reference.reference(run, QUIET)
    rollouts, found = run.stage("rollout"), run.stage("reference")
    assert (rollouts.state(), found.state()) == ("complete", "complete")
    rows = [rollouts.open(Rollouts, shard).read() for shard in range(3)]
    assert sum(len(shard.prompt_R) for shard in rows) == 24
    sampled = np.concatenate([found.open(Candidates, shard).read().sampled_logp.flat for shard in range(3)])
    assert np.isfinite(sampled).all()
    # Drawn from the student: its own tokens are as likely as its entropy says, not as if drawn from anything else.
    assert sampled.mean() > -np.log(40)
    before = [path.read_bytes() for path in sorted(rollouts.folder.glob("*.safetensors"))]
    for path in rollouts.folder.glob("*.safetensors"):
        path.unlink()
    rollout.rollout(run, QUIET)
    assert [path.read_bytes() for path in sorted(rollouts.folder.glob("*.safetensors"))] == before


def test_vllm_evaluates(vllm_python: str, tmp_path: Path) -> None:
    run = tiny.run_of(make_recipe(tmp_path, vllm_python))
    eval_stage.evaluate(run, QUIET, ["base"])
    folder = run.stage("eval", "base", run.recipe.eval.benchmarks[0]).folder
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
    recipe["engine"] |= {"reference": "vllm", "options": {"enforce_eager": True}}
    recipe["eval"] |= {"chat": True, "samples": 1, "max_tokens": 24}
    run = tiny.run_of(recipe)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        rollout.rollout(run, QUIET)
    print(next(line for line in caplog.messages if "agree" in line))
    reference.reference(run, QUIET)
    assert check_reference(run, read_cache(run, None)[:4], tolerance=2e-4) > 0
    eval_stage.evaluate(run, QUIET, ["base"])
