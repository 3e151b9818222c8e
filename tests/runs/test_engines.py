"""Engines other than our own: refused when they disagree with the scorer, and real vLLM where its environment is."""

import json
import logging
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import tiny
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.errors import Mismatch
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline import prompts, reference
from lightning_weave.pipeline.flow import make_rollouts
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.engines import longest_context
from lightning_weave.runs.steps import Steps
from lightning_weave.types import Candidates, Prompt, Rollouts

QUIET = Progress(quiet=True)
# Speaks the protocol of the engine's process: settings, then jobs; answers every request with the same response.
ENGINE = """
import json, sys
known = json.load(open(sys.argv[1]))
json.loads(sys.stdin.readline())
print(json.dumps({"limit": 100}), flush=True)
for line in sys.stdin:
    prompts = json.loads(line)["prompts"]
    print(json.dumps({"responses": [known[" ".join(map(str, ids))] for ids in prompts]}), flush=True)
"""


def make_recipe(root: Path, python: str) -> dict:
    """The tiny world with a student whose heads are large enough for vLLM, and a problem file."""
    recipe = tiny.make_world(root)
    tokenizer = tiny.make_tokenizer("student")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = Qwen3Config(
        **shape,
        vocab_size=-(-len(tokenizer) // 16) * 16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # opinions, so that a disagreement could be seen
    folder = root / "large-heads"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    problems = tiny.save_prompts(root / "problems.jsonl", 5, seed=9)
    recipe["student"]["model"] = str(folder)
    options = {"gpu_memory_utilization": 0.2, "enforce_eager": True}  # of a machine that others use too
    recipe["rollout"] |= {"engine": "vllm", "python": python, "options": options}
    recipe["eval"] = {
        "engine": "vllm",
        "python": python,
        "options": options,
        "benchmarks": [f"file:{problems}"],
        "samples": 3,
        "max_tokens": 12,
        "chat": False,
    }
    return recipe


@pytest.fixture
def false_engine(tmp_path: Path) -> tuple[dict, Path]:
    """A recipe whose engine says what a file says."""
    script, known, python = tmp_path / "engine.py", tmp_path / "known.json", tmp_path / "python"
    script.write_text(ENGINE)
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {script} {known}\n")
    python.chmod(0o755)
    return make_recipe(tmp_path / "world", str(python)), known


def made_prompts(steps: Steps) -> list[Prompt]:
    prompts.run(steps, QUIET)
    return read_prompts(steps.prompts_file)


def write_known(recipe: dict, known: Path, error: float) -> None:
    """Let the engine answer every prompt with the first tokens of the vocabulary, its log-probs off by `error`."""
    steps = tiny.steps_of(recipe)
    model = AutoModelForCausalLM.from_pretrained(steps.student.path, dtype=torch.float32)
    answers = {}
    for prompt in made_prompts(steps):
        ids = prompt.token_ids
        response = [1, 2, 3]
        with torch.no_grad():
            logp_TV = model(torch.tensor([ids + response])).logits[0].log_softmax(-1)
        logps = [float(logp_TV[len(ids) - 1 + place, token]) + error for place, token in enumerate(response)]
        answers[" ".join(map(str, ids))] = {"ids": response, "finish": "length", "logprobs": logps}
    known.write_text(json.dumps(answers))


def test_an_engine_that_agrees_may_sample(false_engine: tuple[dict, Path], caplog: pytest.LogCaptureFixture) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.001)
    steps = tiny.steps_of(recipe)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        make_rollouts(steps, QUIET)
    assert "vLLM and the scorer agree to 1.0e-03 nats per token" in caplog.text
    rows = steps.store.stage(steps.rollout).open(Rollouts, 0).read()
    assert {tuple(ids) for ids in rows.response_ids} == {(1, 2, 3)}


def test_an_engine_that_disagrees_is_refused_with_the_figure(false_engine: tuple[dict, Path]) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=-0.25)
    steps = tiny.steps_of(recipe)
    message = r"disagree by 0\.2500 nats per token, more than rollout\.parity = 0\.05 \(12 tokens"
    with pytest.raises(Mismatch, match=message):
        make_rollouts(steps, QUIET)
    assert steps.store.stage(steps.rollout).state() == "missing"
    patient = tiny.steps_of({**recipe, "rollout": recipe["rollout"] | {"parity": 0.3}})
    make_rollouts(patient, QUIET)
    assert patient.store.stage(patient.rollout).state() == "done"


def test_an_engine_that_says_nan_does_not_agree(false_engine: tuple[dict, Path]) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=float("nan"))
    with pytest.raises(Mismatch, match="disagree by nan"):
        make_rollouts(tiny.steps_of(recipe), QUIET)


def test_room_is_made_for_the_longest_prompt_and_never_beyond_the_model(tmp_path: Path) -> None:
    student = Checkpoint(str(tiny.save_model(tmp_path / "student", "student", "qwen3", 1)))  # made for 256 tokens
    assert longest_context(student, [[1] * 5, [1] * 9], 40) == 49
    assert longest_context(student, [[1] * 250], 40) == 256


@pytest.fixture(scope="module")
def vllm_python() -> str:
    python = os.environ.get("LWEAVE_VLLM_PYTHON")
    if not python:
        pytest.skip("LWEAVE_VLLM_PYTHON does not name the Python of an environment with vLLM")
    return python


@pytest.mark.vllm
@pytest.mark.timeout(900)
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


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_evaluates(vllm_python: str, tmp_path: Path) -> None:
    steps = tiny.steps_of(make_recipe(tmp_path, vllm_python))
    eval_stage.run(steps, QUIET, ["base"])
    folder = steps.store.stage(steps.eval("base", steps.recipe.eval.benchmarks[0])).folder
    samples = list(read_samples(folder / "samples.jsonl"))
    assert len(samples) == 15
    assert {sample.finish for sample in samples} <= {"stop", "length"}
    assert read_summary(folder / "summary.json").settings["engine"] == "vllm"


@pytest.mark.vllm
@pytest.mark.timeout(1800)
def test_a_real_checkpoint_goes_through_vllm(
    vllm_python: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rollout, reference and evaluation of a real checkpoint (SmolLM2-135M-Instruct) that LWEAVE_SMOLLM2 names."""
    checkpoint = os.environ.get("LWEAVE_SMOLLM2")
    if not checkpoint:
        pytest.skip("LWEAVE_SMOLLM2 does not name a checkpoint directory")
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["student"]["model"] = checkpoint
    recipe["prompts"] |= {"chat": True, "take": 4}
    recipe["rollout"] |= {"max_tokens": 24}
    recipe["eval"] |= {"chat": True, "samples": 1, "max_tokens": 24}
    steps = tiny.steps_of(recipe)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        make_rollouts(steps, QUIET)
    print(next(line for line in caplog.messages if "agree" in line))
    reference.run(steps, QUIET)
    eval_stage.run(steps, QUIET, ["base"])
    assert steps.store.stage(steps.reference).state() == "done"
