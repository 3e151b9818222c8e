"""The vLLM engine: for real where its environment is there (`make test-vllm`), its ways to fail everywhere."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import VOCABULARY, small_model

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.types import Request, SamplingSettings
from programs import write_program

PLAIN = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=24, seed=42)
STOP = frozenset({2, 3, 4, 5})


def some_requests() -> list[Request]:
    rng = np.random.default_rng(7)
    prompts = [rng.integers(6, VOCABULARY, size=length).tolist() for length in (1, 3, 3, 7, 12, 30)]
    return [Request(ids, prompt, response) for prompt, ids in enumerate(prompts) for response in range(4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the engine takes (heads of 32), whose padding rows would win, with a greedy generation_config."""
    path = tmp_path_factory.mktemp("checkpoint")
    model = small_model("qwen3", head_dim=32, tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] *= 8
    model.generation_config.update(do_sample=True, top_k=1, eos_token_id=[50])
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def sampler(checkpoint: Path, vllm_python: str) -> Iterator[VLLMSampler]:
    with VLLMSampler(
        checkpoint, STOP, VOCABULARY, "float32", python=vllm_python, options={"enforce_eager": True}
    ) as sampler:
        yield sampler


@pytest.mark.vllm
def test_the_engine_and_the_scorer_agree_on_every_sampled_token(checkpoint: Path, sampler: VLLMSampler) -> None:
    requests = some_requests()
    drawn = sampler.sample(requests, PLAIN)
    model = Checkpoint(str(checkpoint)).load(torch.float32, torch.device("cpu"))
    rows = [(request.prompt_ids, row.ids) for request, row in zip(requests, drawn, strict=True)]
    # The engine counts the padding in its normalisation; so must the scorer, to be comparable.
    scored = Scorer.from_model(model, model.config.vocab_size).candidates(rows, 8)
    theirs = np.concatenate([row.logprobs for row in drawn])
    ours = np.concatenate([sampled_T for *_, sampled_T in scored])
    assert len(ours) == len(theirs) > 200
    assert np.abs(ours - theirs).mean() < 0.01
    assert np.abs(ours - theirs).max() < 0.01


@pytest.mark.vllm
def test_the_engine_keeps_to_the_settings(sampler: VLLMSampler) -> None:
    requests = some_requests()
    drawn = sampler.sample(requests, PLAIN)
    assert {response.finish for response in drawn} == {"stop", "length"}
    for response in drawn:
        assert max(response.ids) < VOCABULARY  # although the padding has most of the mass
        assert not STOP & set(response.ids[:-1])
        assert (response.ids[-1] in STOP) == (response.finish == "stop")
        assert response.finish == "stop" or len(response.ids) == PLAIN.max_tokens
    # Neither top_k = 1 nor the eos of the generation_config counts.
    assert len({tuple(response.ids) for response in drawn[:4]}) == 4
    assert any(50 in response.ids[:-1] for response in drawn)


@pytest.mark.vllm
def test_a_seed_gives_the_same_trajectories_again(sampler: VLLMSampler) -> None:
    requests = some_requests()
    drawn = sampler.sample(requests, PLAIN)
    assert sampler.sample(requests, PLAIN) == drawn
    other = sampler.sample(requests, SamplingSettings(1.0, 1.0, PLAIN.max_tokens, 43))
    assert sum(a == b for a, b in zip(drawn, other, strict=True)) < len(requests) / 2


@pytest.mark.vllm
def test_two_threads_sample_at_once_and_each_gets_its_own(sampler: VLLMSampler) -> None:
    requests = some_requests()
    parts = [requests[:5], requests[5:]]
    with ThreadPoolExecutor(2) as threads:
        drawn = list(threads.map(lambda part: sampler.sample(part, PLAIN), parts))
    for part, rows in zip(parts, drawn, strict=True):
        read = sampler.score([[*request.prompt_ids, *row.ids] for request, row in zip(part, rows, strict=True)])
        for request, row, logprobs in zip(part, rows, read, strict=True):
            assert row.logprobs == pytest.approx(logprobs[len(request.prompt_ids) - 1 :], abs=0.01)


@pytest.mark.vllm
def test_the_context_limit_ends_a_response_or_refuses_a_prompt(sampler: VLLMSampler) -> None:
    assert sampler.limit == 64
    long = Request([9] * 60, 0, 0)
    response = sampler.sample([long], SamplingSettings(1.0, 1.0, 24, 1))[0]
    assert len(response.ids) <= 4
    with pytest.raises(InputError, match="prompt 3 has 64 tokens"):
        sampler.sample([Request([9] * 64, 3, 0)], PLAIN)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_environment_without_the_engine_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be imported by .*python.*the key python"):
        VLLMSampler(tmp_path, STOP, VOCABULARY)


def test_a_python_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"the engine's Python '/no/such/python' \(key python of an engine's section\) cannot be run"
    ):
        VLLMSampler(tmp_path, STOP, VOCABULARY, python="/no/such/python")


def test_an_engine_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    python = write_program(tmp_path / "python", sys.executable, "-c", "import sys; sys.exit('the GPU is on fire')")
    with pytest.raises(WeaveError, match="ended with code 1; its last output: the GPU is on fire"):
        VLLMSampler(tmp_path, STOP, VOCABULARY, python=str(python))


def test_an_engine_that_dies_in_the_middle_of_a_line_is_reported(tmp_path: Path) -> None:
    python = tmp_path / "python"
    begun = '{"index": 0, "ids": [1'
    python.write_text(f"#!/bin/sh\nread line\necho '{{\"limit\": 64}}'\nread line\nprintf '{begun}'\nexit 3\n")
    python.chmod(0o755)
    with (
        VLLMSampler(tmp_path, STOP, VOCABULARY, python=str(python)) as engine,
        pytest.raises(WeaveError, match="the vLLM process failed: it ended with code 3"),
    ):
        engine.sample([Request([5], 0, 0)], PLAIN)


def test_what_an_engine_has_started_ends_with_it(tmp_path: Path) -> None:
    python, number = tmp_path / "python", tmp_path / "number"
    python.write_text(f"#!/bin/sh\nread line\nsleep 1000 &\necho $! > {number}\necho '{{\"limit\": 64}}'\nread line\n")
    python.chmod(0o755)
    VLLMSampler(tmp_path, STOP, VOCABULARY, python=str(python)).close()
    status = Path(f"/proc/{number.read_text().strip()}/status")
    end = time.monotonic() + 60  # a killed process needs its turn to end; left alone this one sleeps for longer
    while time.monotonic() < end and _runs(status):
        time.sleep(0.01)
    assert not _runs(status)


def _runs(status: Path) -> bool:
    with suppress(OSError):  # it has ended, perhaps between two looks
        return "zombie" not in status.read_text()  # of a container that reaps nobody
    return False


def test_the_cause_behind_a_general_failure_is_shown(tmp_path: Path) -> None:
    answer = '{"error": "RuntimeError: Engine core initialization failed. See root cause above."}'
    log = "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] ValueError: No available memory for the cache blocks."
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nread line\necho '{log}' >&2\necho '{answer}'\n")
    python.chmod(0o755)
    with pytest.raises(WeaveError, match=r"core initialization failed(.|\n)*first error was ValueError: No available"):
        VLLMSampler(tmp_path, STOP, VOCABULARY, python=str(python))
