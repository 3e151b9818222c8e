"""Anchors whose sides read different contexts: every cached number against whole logits after the text by hand."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from lightning_weave.checks.preflight import preflight
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.plan.architecture import find_gpu
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan
from lightning_weave.run import Role
from lightning_weave.stages import preview
from lightning_weave.stages.caches import open_cache
from lightning_weave.store.ledger import read_ledger
from lightning_weave.views.doctor import examine
from pipeline.expected import check_scores, read_cache
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of, save_prompts

pytestmark = pytest.mark.slow

ROLES: tuple[Role, ...] = ("post", "pre")
HINT = {"prefix": "the ", "template": "{prompt} an {answer}."}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes")
    recipe["anchors"]["one"] = {"model": recipe["anchors"]["one"]["post"], "post_prompt": HINT}
    return recipe


def _prompts(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    path = Path(recipe["runs"]) / "small" / "prompts" / "prompts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _in_context(recipe: dict[str, Any], rows: list[dict[str, Any]], texts: dict[int, str]) -> list[dict[str, Any]]:
    """The rows of a cache, had the student been asked these texts."""
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    ids = {number: tokenizer(text, add_special_tokens=False)["input_ids"] for number, text in texts.items()}
    return [{**row, "prompt_ids": ids[row["prompt"]]} for row in rows]


@pytest.mark.slow
def test_scores_in_a_context_are_those_of_whole_logits_after_its_text(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    asked = _prompts(recipe)
    texts = {n: f"the {one['messages'][0]['content']} an {one['answer']}." for n, one in enumerate(asked)}
    whole, _ = check_scores(run, _in_context(recipe, read_cache(run, "post"), texts), "post")
    assert whole > 80
    check_scores(run, read_cache(run, "pre"), "pre")
    assert [row["name"] for row in read_ledger(run.directory) if row["stage"] == "score"] == [
        run.score_names[run.side("one", role)] for role in ROLES
    ]
    cache = open_cache(run, "only")
    assert np.abs(cache.block(range(len(cache))).r_KPC).max() > 0.1
    leak = next(finding for finding in examine(run) if finding.check == "leak")
    assert leak.verdict == "note"
    assert "nats of shift on sampled tokens" in leak.text
    block = cache.block(range(len(cache)))
    sampled = (block.candidates.ids.flat == block.sampled_P[:, None]) & block.valid_KP[0][:, None]
    assert leak.figures["nats"] == pytest.approx(np.abs(block.r_KPC[0][sampled]).sum())


def test_rows_without_an_id_have_the_columns_that_a_context_names(recipe: dict[str, Any]) -> None:
    del recipe["prompts"]["columns"]["id"]
    run = make_cache(recipe)
    asked = _prompts(recipe)
    texts = {n: f"the {one['messages'][0]['content']} an {one['answer']}." for n, one in enumerate(asked)}
    check_scores(run, _in_context(recipe, read_cache(run, "post"), texts), "post")


def test_contexts_that_read_the_same_have_no_shift(recipe: dict[str, Any]) -> None:
    """The student itself, so that one forward pass is compared with the same one."""
    recipe["anchors"]["one"] = {"model": "student", "post_prompt": {"template": "{prompt}"}}
    cache = open_cache(make_cache(recipe), "only")
    block = cache.block(range(len(cache)))
    assert block.valid_KP.all()
    assert not block.r_KPC.any()


def test_the_student_with_its_own_prompts_is_taken_from_the_reference(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers are those of whole logits, it is loaded for the other side only, and the plan counts it once."""
    recipe["anchors"]["one"] = {"model": "student", "post_prompt": HINT}
    run = make_cache(recipe)
    post, pre = (run.stage("score", run.side("one", role)) for role in ROLES)
    monkeypatch.setattr(Checkpoint, "load", None)
    shutil.rmtree(pre.folder)
    run = make_cache(recipe)
    whole, _ = check_scores(run, read_cache(run, "pre"), "pre")
    assert whole > 80
    assert pre.engines() == run.stage("reference").engines()
    plan = make_plan(run.recipe, PlannedMachine(find_gpu("H100"), 1))
    assert [bool(row.operations) for row in plan.stages if row.stage == "score"] == [True, False]
    shutil.rmtree(post.folder)
    with pytest.raises(TypeError):
        make_cache(recipe)


@pytest.mark.parametrize("prompt", ["student", "native"])
@pytest.mark.slow
def test_a_system_turn_is_rendered_by_the_chat_template(recipe: dict[str, Any], prompt: str) -> None:
    """By the student's, and projected; or by the anchor's own, which writes its BOS."""
    recipe["prompts"]["chat"] = True
    recipe["anchors"]["one"] |= {"post_prompt": {"system": "that"}, "prompt": prompt}
    run = make_cache(recipe)
    rows = read_cache(run, "post")
    contents = [one["messages"][0]["content"] for one in _prompts(recipe)]
    if prompt == "student":
        texts = {n: f"[system] that\n[user] {content}\n[me]" for n, content in enumerate(contents)}
        check_scores(run, _in_context(recipe, rows, texts), "post")
    else:
        tokenizer = AutoTokenizer.from_pretrained(recipe["anchors"]["one"]["model"])
        texts = {n: f"<s>[system] that\n[user] {content}\n[it]" for n, content in enumerate(contents)}
        own = {n: tokenizer(text, add_special_tokens=False)["input_ids"] for n, text in texts.items()}
        check_scores(run, rows, "post", prompts=own)


def test_a_row_without_the_column_is_refused_by_id_or_masked(recipe: dict[str, Any], tmp_path: Path) -> None:
    rows = [json.loads(line) for line in save_prompts(tmp_path / "prompts.jsonl").read_text().splitlines()]
    for row in rows[:5]:
        row["hint"] = f"an {row['id']}"
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["anchors"]["one"]["post_prompt"] = {"template": "{prompt} {hint}"}
    run = run_of(recipe)
    said = [finding for finding in preflight(run) if finding.check == "context"]
    assert [finding.about for finding in said] == ["anchors.one.post_prompt"]
    assert "names {hint}, a column that the row of prompt p5 lacks" in said[0].text
    with pytest.raises(InputError, match=r'prompt p5 lacks\. Fill it in, or set missing = "mask"'):
        make_cache(recipe)
    recipe["anchors"]["one"]["missing"] = "mask"
    run = make_cache(recipe)
    cache = open_cache(run, "only")
    ids = [prompt["id"] for prompt in _prompts(recipe)]
    for number in range(len(cache)):
        block = cache.block([number])
        assert block.valid_KP.any() == (ids[block.rollouts.prompt_R[0]] != "p5")
    recipe["anchors"]["one"]["post_prompt"] = {"template": "{prompt} {hnit}"}
    with pytest.raises(InputError, match=r"names \{hnit\}, a column that no row has"):
        make_cache(recipe)


def test_a_context_is_scored_once_and_a_new_one_leaves_the_others(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    recipe["anchors"]["two"] = {**recipe["anchors"]["one"], "pre_prompt": {"prefix": "an "}}
    run = make_cache(recipe)
    assert len(run.score_names) == 3
    ran = [row["name"] for row in read_ledger(run.directory) if row["stage"] == "score"]
    assert sorted(ran) == sorted(run.score_names.values())
    assert run.score_names[run.side("one", "pre")] == "post", "without a context it has the checkpoint's name"


def test_a_preview_reads_the_problems_in_context(recipe: dict[str, Any], tmp_path: Path) -> None:
    problems = [{"id": f"q{n}", "problem": f"the {n}", "answer": str(n)} for n in range(2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 1, "max_tokens": 3, "chat": False}
    found = preview.preview(run_of(recipe), QUIET, Console(quiet=True), problems=2)
    assert [len(summary.problems) for summary in found["only"]] == [2]
