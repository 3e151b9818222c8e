"""Rollouts as a stage: which rows are where, and what makes them anew."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages import rollout
from lightning_weave.stages.work import Job, run_jobs, set_up
from lightning_weave.store.ledger import read_ledger
from lightning_weave.types import FINISH_REASONS, Rollouts
from pipeline.small_runs import QUIET, make_recipe, run_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes")


def shards(run: Run) -> list[Rollouts]:
    stage = run.stage("rollout")
    return [stage.open(Rollouts, shard).read() for shard in range(len(stage.require()["shards"]))]


def test_every_prompt_has_its_responses_in_order(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    found = shards(run)
    assert [len(shard.prompt_R) for shard in found] == [8, 4]  # four prompts to a shard, two responses each
    assert np.concatenate([shard.prompt_R for shard in found]).tolist() == [n // 2 for n in range(12)]
    assert np.concatenate([shard.response_R for shard in found]).tolist() == [0, 1] * 6
    lines = (run.directory / "prompts" / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["token_ids"] for line in lines]
    rows = [row for shard in found for row in zip(shard.prompt_R, shard.prompt_ids, strict=True)]
    assert all(ids.tolist() == prompts[number] for number, ids in rows)
    tokens = sum(len(shard.response_ids.flat) for shard in found)
    assert read_ledger(run.directory)[-1]["tokens"] == tokens


def test_a_row_ends_with_a_stop_token_or_at_the_limit(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    folder = Path(recipe["student"]["model"])
    stops = {*json.loads((folder / "generation_config.json").read_text())["eos_token_id"]}
    rows = [row for shard in shards(run) for row in zip(shard.response_ids, shard.finish_R, strict=True)]
    for ids, finish in rows:
        stopped = FINISH_REASONS[finish] == "stop"
        assert (ids[-1] in stops) == stopped
        assert not stops & set(ids[:-1].tolist())
        assert stopped or len(ids) == 12
    assert len({tuple(ids) for ids, _ in rows}) == len(rows)  # top_k = 1 of the checkpoint would make pairs alike


def test_temperature_zero_is_the_likeliest_token(recipe: dict[str, Any]) -> None:
    recipe["rollout"] |= {"temperature": 0.0, "responses": 1}
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    model = AutoModelForCausalLM.from_pretrained(recipe["student"]["model"], dtype=torch.float32)
    for shard in shards(run):
        for prompt, response in zip(shard.prompt_ids, shard.response_ids, strict=True):
            with torch.no_grad():
                logits_TV = model(torch.from_numpy(np.concatenate([prompt, response])).long()[None]).logits[0, :, :269]
            assert logits_TV[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == response.tolist()


@pytest.mark.slow
def test_nothing_is_sampled_twice_and_a_new_seed_samples_anew(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    first, sessions = shards(run), len(read_ledger(run.directory))
    rollout.rollout(run_of(recipe), QUIET)
    assert len(read_ledger(run.directory)) == sessions
    recipe["rollout"]["seed"] = 43
    fresh = run_of(recipe)
    assert fresh.stage("rollout").state() == "missing"
    rollout.rollout(fresh, QUIET)
    same = [np.array_equal(a.response_ids.flat, b.response_ids.flat) for a, b in zip(first, shards(fresh), strict=True)]
    assert not any(same)


@pytest.mark.slow
def test_execution_settings_are_no_reason_to_sample_anew(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    first = [shard.response_ids.flat.tolist() for shard in shards(run)]
    recipe["rollout"]["batch_size"] = 64
    assert run_of(recipe).stage("rollout").complete
    recipe["runs"] += "-again"  # sampled for real with other batches
    again = run_of(recipe)
    rollout.rollout(again, QUIET)
    assert [shard.response_ids.flat.tolist() for shard in shards(again)] == first


def test_ranks_share_the_shards(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of(recipe)
    pending = [0, 2, 3, 5, 6, 7]
    monkeypatch.setenv("WORLD_SIZE", "3")
    found: list[list[int]] = []
    job = Job("rollout", pending, lambda run: nullcontext(lambda shards: found.append(shards) or iter(())))
    for rank in "012":
        monkeypatch.setenv("RANK", rank)
        run_jobs([job], run, QUIET)
    assert found == [[0, 3, 6], [7], [2, 5]]


def test_the_thread_count_is_measured_once_per_run(recipe: dict[str, Any]) -> None:
    del recipe["machine"]
    run = run_of(recipe)
    set_up(run)
    kept = json.loads((run.directory / "machine.json").read_text())["threads"]
    assert torch.get_num_threads() == kept >= 1
    (run.directory / "machine.json").write_text('{"threads": 2}')
    set_up(run)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused(recipe: dict[str, Any]) -> None:
    recipe["machine"]["device"] = "cuda"
    with pytest.raises(InputError, match=r'machine\.device = "cuda": no CUDA device'):
        rollout.rollout(run_of(recipe), QUIET)
