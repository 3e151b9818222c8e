"""Decode-time composition: the target that is sampled from is the one that would be trained towards."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.stages import decoding, preview
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import load_prompts, render_problems
from lightning_weave.stages.score import make_cache
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.data import compose
from lightning_weave.types import Request, SamplingSettings
from rows import block_of, read_row
from tiny import make_tokenizer, make_world, run_of, save_model

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    root = tmp_path_factory.mktemp("preview")
    recipe = make_world(root, prompts=6)
    problems = [{"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
    (root / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    bench = f"file:{root / 'sums.jsonl'}"
    recipe["anchors"]["told"] = {**recipe["anchors"]["acc"], "post_prompt": {"template": "{prompt} {answer}"}}
    recipe["tags"] = {"rules": {"long": r"\d.\d.\d.\d.\d"}}
    recipe["compositions"]["routed"] = {"weights": {"long": {"acc": 1.0}, "default": {"acc": 0.25, "brief": 0.75}}}
    recipe["compositions"]["told"] = {"weights": {"told": 1.0}}
    student = Path(recipe["student"]["model"])  # anchors with its tokens, and the student itself
    recipe["anchors"]["near"] = {"post": str(save_model(root / "near", "student", "qwen3", 9, student))}
    recipe["anchors"]["near"]["pre"] = str(student)
    recipe["anchors"]["hinted"] = {"model": "student", "post_prompt": {"template": "{prompt} {answer}"}}
    recipe["compositions"]["near"] = {"weights": {"near": 0.5, "hinted": 0.5}}
    recipe["eval"] = {"benchmarks": [bench], "samples": 2, "max_tokens": 6, "chat": False}
    return recipe


@pytest.mark.parametrize("name", ["acc-only", "both", "told", "routed", "near"])
@pytest.mark.slow
def test_the_live_target_is_the_cached_one(recipe: dict, name: str) -> None:
    """At every decision of real trajectories: candidates, residual, masked positions, non-candidates' odds."""
    run = run_of(recipe)
    make_cache(run, QUIET)
    cache = open_cache(run, name)
    target = decoding.open_target(run, name, {})
    target.anchors.set_prompts(load_prompts(run, {"answer"}))
    student = Checkpoint(str(run.student.path)).load(torch.float32, torch.device("cpu"))
    vocabulary, masked = len(make_tokenizer("student")), 0
    for number in range(6):
        row = read_row(cache, number)
        batch, places = (
            compose(block_of([row]), cache.weights, 2.0),
            np.flatnonzero(cache.block([number]).kept(cache.weights)),
        )
        expected = dict(zip(places.tolist(), batch.log_q_NO, strict=True))
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()
        logits_TV = student(ids[None]).logits[0, len(row.prompt_ids) - 1 : -1, :vocabulary]
        request = Request(row.prompt_ids.tolist(), number // 2, number % 2)
        for place, logits_V in enumerate(logits_TV):
            log_q_V = target([request], [row.response_ids[:place].tolist()], logits_V[None])[0]
            torch.testing.assert_close(log_q_V.exp().sum(), torch.tensor(1.0), atol=1e-5, rtol=0)
            if place not in expected:
                masked += 1
                torch.testing.assert_close(log_q_V, torch.log_softmax(logits_V, dim=-1))
                continue
            candidates = torch.tensor(row.candidate_ids_TC[place]).long()
            torch.testing.assert_close(log_q_V[candidates], expected[place][:-1], atol=2e-5, rtol=1e-5)
            others = torch.ones(vocabulary, dtype=torch.bool).scatter(0, candidates, False)
            torch.testing.assert_close(
                torch.logsumexp(log_q_V[others], dim=0), expected[place][-1], atol=2e-5, rtol=1e-5
            )
            log_b_V = torch.log_softmax(logits_V, dim=-1)[others]
            shifted = log_q_V[others] - log_b_V
            torch.testing.assert_close(shifted, shifted.mean().expand_as(shifted), atol=1e-5, rtol=0)
    assert (masked > 0) == (name != "near"), "the masked branch was exercised"


@pytest.mark.slow
def test_anchors_with_the_students_tokens_read_each_token_once(recipe: dict, tmp_path: Path) -> None:
    """Rows of several lengths that end one after another: the distribution is that of reading them as a whole."""
    run = run_of({**recipe, "runs": str(tmp_path)})
    benchmark = load_eval_benchmark(run.recipe, recipe["eval"]["benchmarks"][0])
    problems = [
        replace(one, question=one.question + "+1" * (place // 2)) for place, one in enumerate(benchmark.problems)
    ]
    benchmark = replace(benchmark, problems=tuple(problems))
    prompts = render_problems(benchmark, run.student.tokenizer, run.recipe.eval, None)
    kept, whole = (decoding.open_target(run, "near", {}) for _ in range(2))
    whole = replace(whole, anchors=replace(whole.anchors, grows=False))
    read = Counter[str]()
    for name, target in (("kept", kept), ("whole", whole)):
        target.anchors.set_prompts(prompts)
        target.anchors.load()
        for scorer in {id(one.scorer): one.scorer for one in target.anchors.loaded.values()}.values():
            scorer.body.model.base_model.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: read.update({name: kwargs["input_ids"].numel()}), with_kwargs=True
            )

    def both(requests: list[Request], responses: list[list[int]], logits_NV: torch.Tensor) -> torch.Tensor:
        found = kept(requests, responses, logits_NV)
        torch.testing.assert_close(found, whole(requests, responses, logits_NV), atol=1e-5, rtol=1e-5)
        return found

    sampler = decoding.open_decoder(run, "base", {})
    sampler.tilt = both
    requests = [Request(one.token_ids, number, sample) for number, one in enumerate(prompts) for sample in range(3)]
    responses = sampler.sample(requests, SamplingSettings(max_tokens=24, temperature=1.0, top_p=1.0, seed=3))
    assert len({len(one.ids) for one in responses}) > 3
    assert read["kept"] < read["whole"] / 4


def test_a_preview_prints_a_table_and_is_not_made_twice(recipe: dict, tmp_path: Path) -> None:
    recipe = {**recipe, "runs": str(tmp_path)}
    out = Console(record=True, width=140, quiet=False, file=(tmp_path / "out.txt").open("w"))
    found = preview.preview(run_of(recipe), QUIET, out, problems=3, only=["both"])
    assert list(found) == ["base", "both"]
    assert [len(summary.problems) for summary in found["both"]] == [3]
    samples = tmp_path / "tiny" / "preview" / "both" / "sums" / "samples.jsonl"
    before = samples.stat().st_mtime_ns
    preview.preview(run_of(recipe), QUIET, out, problems=3, only=["both"])
    assert samples.stat().st_mtime_ns == before
    assert "both" in out.export_text()
    out.file.close()


def test_what_cannot_be_previewed_is_refused(recipe: dict, tmp_path: Path) -> None:
    recipe = {**recipe, "runs": str(tmp_path)}
    recipe["compositions"] = {
        "budget": {"weights": {"acc": 1.0}, "kl_budget": 0.1},
        "live": {"weights": {"acc": 1.0}, "method": "online"},
    }
    with pytest.raises(InputError, match="kl_budget"):
        preview.preview(run_of(recipe), QUIET, Console(quiet=True), problems=1, only=["budget"])
    with pytest.raises(InputError, match="--only live: its method is online"):
        preview.preview(run_of(recipe), QUIET, Console(quiet=True), problems=1, only=["live"])
    with pytest.raises(InputError, match=r"no composition .* can be previewed: budget \(.*kl_budget.*live \("):
        preview.preview(run_of(recipe), QUIET, Console(quiet=True), problems=1)
    assert list(tmp_path.iterdir()) == [], "refused before anything was sampled"

    recipe["compositions"]["both"] = {"weights": {"acc": 0.5, "brief": 0.5}}
    with pytest.raises(InputError, match="--only bth: no such composition; these can be previewed: both"):
        preview.preview(run_of(recipe), QUIET, Console(quiet=True), problems=1, only=["bth"])
    run = run_of(recipe)
    found = preview.preview(run, QUIET, Console(quiet=True), problems=1)
    assert list(found) == ["base", "both"], "the others are left out"
    assert {row["stage"] for row in read_ledger(run.directory)} == {"preview"}
