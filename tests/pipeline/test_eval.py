"""Evaluation: the same samples and summary whether or not it was killed, graded and counted as stored."""

import json
import os
import re
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import Forked, kill_at
from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.grading.math import extract_boxed
from lightning_weave.progress import Progress
from lightning_weave.report.results import run_points, show_results, summaries
from lightning_weave.stages import eval as stage
from lightning_weave.stages.prompts import render_problems
from pipeline.evaluated import evaluation_recipe, folder_of, sampled_tokens
from tiny import make_world, run_of

QUIET = Progress(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    return evaluation_recipe(tmp_path)


def test_samples_are_what_the_model_said(recipe: dict) -> None:
    stage.evaluate(run_of(recipe), QUIET, only=["base"])
    samples = list(read_samples(folder_of(recipe) / "samples.jsonl"))
    assert [(sample.problem, sample.sample) for sample in samples] == [(f"q{n}", s) for n in range(6) for s in range(3)]
    tokenizer = AutoTokenizer.from_pretrained(recipe["student"]["model"])
    for sample in samples:
        assert sample.tokens <= 14
        assert (sample.finish == "length") == (sample.tokens == 14) or sample.finish == "stop"
        assert sample.answer == extract_boxed(sample.text)
        assert len(tokenizer.encode(sample.text, add_special_tokens=False)) <= sample.tokens
        assert all(0 <= cut <= len(sample.text) for cut in sample.cuts.values())
    summary = read_summary(folder_of(recipe) / "summary.json")
    assert summary.accuracy == pytest.approx(100 * sum(sample.correct for sample in samples) / len(samples))
    assert summary.tokens == pytest.approx(sum(sample.tokens for sample in samples) / len(samples))
    assert [point.budget for point in summary.budgets] == [5, 9]
    assert summary.budgets[0].tokens <= 5


@pytest.mark.slow
def test_a_model_that_answers_is_graded_right(recipe: dict, tmp_path: Path) -> None:
    """Teach a copy of the student one answer by heart, and find exactly that problem solved."""
    path = Path(recipe["student"]["model"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    prompt = tokenizer.encode("Question: 3+1\nAnswer:")
    answer = [*tokenizer.encode(" \\boxed{4}"), tokenizer.eos_token_id]
    ids = torch.tensor([[*prompt, *answer]])
    labels = torch.tensor([[-100] * len(prompt) + answer])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(tmp_path / "taught")
    tokenizer.save_pretrained(tmp_path / "taught")
    recipe["policies"] = {"taught": {"model": str(tmp_path / "taught")}}
    recipe["eval"] |= {"temperature": 0.0, "samples": 1}
    stage.evaluate(run_of(recipe), QUIET, only=["taught"])
    samples = {sample.problem: sample for sample in read_samples(folder_of(recipe, "taught") / "samples.jsonl")}
    assert samples["q3"].correct
    assert (samples["q3"].answer, samples["q3"].finish, samples["q3"].tokens) == ("4", "stop", len(answer))
    assert samples["q3"].why == "equal"
    others = [sample for name, sample in samples.items() if name != "q3"]
    assert not any(sample.correct for sample in others)


@pytest.mark.slow
def test_every_policy_gets_a_row_and_a_point(recipe: dict) -> None:
    run = run_of(recipe)
    stage.evaluate(run, QUIET)
    assert {point["policy"]: point["weights"] for point in run_points(run)} == {"base": {}, "other": {}}
    out = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    show_results(run, out)
    assert "other" in out.export_text()
    out.file.close()


@pytest.mark.slow
def test_up_to_date_evaluations_are_not_touched_and_those_by_another_protocol_stand_beside(recipe: dict) -> None:
    stage.evaluate(run_of(recipe), QUIET, only=["base"])
    path = folder_of(recipe) / "samples.jsonl"
    before = (path.stat().st_mtime_ns, path.read_bytes())
    recipe["eval"]["batch_size"] = 3  # execution only
    stage.evaluate(run_of(recipe), QUIET, only=["base"])
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    recipe["eval"]["seed"] = 7
    stage.evaluate(run_of(recipe), QUIET, only=["base"])
    other = folder_of(recipe) / path.name
    assert other.parent.parent == path.parent.parent
    assert other.read_bytes() != before[1]
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before, "never overwritten"
    recipe["eval"]["seed"] = 42
    assert folder_of(recipe) == path.parent
    assert summaries(run_of(recipe))["base"][0].settings["seed"] == 42


def test_an_evaluation_that_is_wanted_again_is_found_and_not_sampled(recipe: dict, tmp_path: Path) -> None:
    stage.evaluate(run_of(recipe), QUIET, only=["other"])
    sampled = sampled_tokens(recipe)
    before = {path: path.stat().st_mtime_ns for path in folder_of(recipe, "other").iterdir()}
    changed = {**recipe, "policies": {"other": {"model": str(tmp_path / "acc-pre")}}}
    made = run_of(changed).stage("eval", "other", recipe["eval"]["benchmarks"][0])
    assert made.state() == "missing", "another model"
    made.begin()  # and killed
    link = made.directory / made.path
    assert link.resolve() == made.folder.resolve()
    renamed = {**recipe, "policies": {"same": recipe["policies"]["other"]}}
    for wanted, name in ((recipe, "other"), (renamed, "same")):
        stage.evaluate(run_of(wanted), QUIET, only=[name])
        assert (link.parent.parent / name / link.name / "samples.jsonl").samefile(
            *[p for p in before if p.suffix == ".jsonl"]
        )
    assert {path: path.stat().st_mtime_ns for path in folder_of(recipe, "other").iterdir()} == before
    assert sampled_tokens(recipe) == sampled > 0


def test_a_policy_may_have_a_system_prompt_of_its_own(recipe: dict, tmp_path: Path) -> None:
    student = recipe["student"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}=\n{% endfor %}"
    tokenizer.save_pretrained(student)
    recipe["policies"] = {"asked": {"model": student, "system": "7+7"}}
    recipe["eval"] |= {"chat": True, "format": "plain"}
    stage.evaluate(run_of(recipe), QUIET)
    everyone = {**recipe, "name": "everyone", "policies": {}, "eval": {**recipe["eval"], "system": "7+7"}}
    stage.evaluate(run_of(everyone), QUIET)
    asked, plain, expected = (
        (folder_of(one, policy) / "samples.jsonl").read_text()
        for one, policy in ((recipe, "asked"), (recipe, "base"), (everyone, "base"))
    )
    assert asked == expected != plain
    paths = stage.export_lm_eval(run_of(recipe), tmp_path / "lm-eval", datetime(2026, 1, 2))
    shown = [json.loads(path.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"] for path in paths]
    assert shown == ["0+1=\n", "7+7=\n0+1=\n"]
    with pytest.raises(InputError, match=r"policies\.asked\.system needs a chat template"):
        check_recipe({**recipe, "eval": {**recipe["eval"], "chat": False}})


def test_an_untrained_composition_is_refused_with_the_command(recipe: dict, tmp_path: Path) -> None:
    recipe |= {key: make_world(tmp_path / "again")[key] for key in ("anchors", "compositions")}
    with pytest.raises(InputError, match=r"lweave train tiny.toml --only both"):
        stage.evaluate(run_of(recipe), QUIET, only=["both"])
    with pytest.raises(InputError, match="no such policy"):
        stage.evaluate(run_of(recipe), QUIET, only=["nobody"])


def test_one_policy_is_evaluated_and_shown_where_models_of_others_are_missing(
    recipe: dict, tmp_path: Path, forked: Forked
) -> None:
    """A checkpoint that is yet to be made is needed by whoever asks for it, and by nobody else."""
    recipe["policies"] = {"later": {"model": str(tmp_path / "later")}}
    recipe["anchors"] = {"unmade": {"post": str(tmp_path / "unmade"), "pre": recipe["student"]["model"]}}
    recipe["compositions"] = {"woven": {"weights": {"unmade": 1.0}, "alpha": 1.0}}
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(check_recipe(recipe)))
    ended = forked.lweave("eval", file, "--only", "base")
    assert ended.code == 0, ended.said
    assert "Samples and summaries" in ended.said
    assert list(summaries(run_of(recipe))) == ["base"]
    for name, missing in (("later", "later"), ("woven", "unmade")):
        ended = forked.lweave("eval", file, "--only", name)
        assert ended.code == 2
        assert str(tmp_path / missing) in ended.said


def test_lm_eval_files_hold_the_same_samples(recipe: dict, tmp_path: Path) -> None:
    run = run_of(recipe)
    stage.evaluate(run, QUIET, only=["base"])
    (path,) = stage.export_lm_eval(run, tmp_path / "lm-eval", datetime(2026, 1, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = list(read_samples(folder_of(recipe) / "samples.jsonl"))
    assert [text for line in lines for text in line["resps"][0]] == [sample.text for sample in samples]
    assert lines[0]["arguments"]["gen_args_0"]["arg_0"] == "Question: 0+1\nAnswer:"


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_files(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    recipe["eval"] |= {"samples": 12, "block": 4, "budgets": []}
    stage.evaluate(run_of(recipe), QUIET, only=["base"])
    expected = {name: (folder_of(recipe) / name).read_bytes() for name in ("samples.jsonl", "summary.json")}

    recipe["runs"] = str(tmp_path / "killed")
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(check_recipe(recipe)))
    command = ["eval", file, "--only", "base"]
    for kill in (kill_at(action, r"/blocks-[^/]*/\.tmp-") for action in ("write", "rename", "write")):
        before = blocks_done(recipe)
        assert forked.lweave(*command, **kill).code == -signal.SIGKILL
        assert blocks_done(recipe) > before
    assert forked.lweave(*command).code == 0
    assert {name: (folder_of(recipe) / name).read_bytes() for name in expected} == expected


def blocks_done(recipe: dict) -> int:
    return len(list(folder_of(recipe).glob("blocks-*/[0-9]*.jsonl")))


@pytest.mark.slow
def test_the_program_evaluates_a_checkpoint_without_a_recipe(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    command = ["eval", "--model", recipe["student"]["model"], "--set", f"runs={tmp_path / 'own'}"]
    sets = ["--set", "eval.samples=2", "--set", "eval.max_tokens=8", "--set", "eval.chat=false"]
    path = recipe["eval"]["benchmarks"][0].removeprefix("file:")  # as init --bench takes it
    ended = forked.lweave(*command, "--bench", path, *sets)
    assert ended.code == 0, ended.said
    assert re.search(r"^student\b", ended.said, re.MULTILINE), "the table has its name"
    assert (tmp_path / "own" / "student" / "eval" / "base" / "sums" / "summary.json").exists()
    ended = forked.lweave(*command, "--bench", "aime-1999")
    assert ended.code == 2
    assert "aime-1999" in ended.said
    ended = forked.lweave(*command)
    assert ended.code == 2
    assert "nothing to evaluate: no benchmark is named" in ended.said


@pytest.mark.slow
def test_two_checkpoints_of_one_name_do_not_share_a_run(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    runs = tmp_path / "runs"
    student, bench = recipe["student"]["model"], recipe["eval"]["benchmarks"][0]
    finals = [tmp_path / "first" / "train" / name / "final" for name in ("a", "b")]
    for copy in (*finals, tmp_path / "elsewhere" / "first-a"):
        shutil.copytree(student, copy)
    sets = [
        "--set",
        f"runs={runs}",
        "--set",
        "eval.samples=1",
        "--set",
        "eval.max_tokens=4",
        "--set",
        "eval.chat=false",
    ]

    def run(*arguments: object) -> tuple[int, str]:
        ended = forked.lweave("eval", *arguments, *sets)
        return ended.code, ended.said

    assert [run("--model", final, "--bench", bench)[0] for final in finals] == [0, 0]
    assert sorted(path.name for path in runs.iterdir()) == ["first-a", "first-b"]
    ended, text = run("--model", tmp_path / "elsewhere" / "first-a", "--bench", bench)
    assert ended == 2
    assert "is the run of another checkpoint" in text
    assert "--set name=NAME" in text

    for wrong, message in (
        (["--model", tmp_path / "nowhere", "--bench", bench], "nowhere"),
        (
            ["--model", finals[0], "--set", "name=new", "--bench", "file:missing.jsonl"],
            "eval.benchmarks = 'missing.jsonl'",
        ),
    ):
        ended, text = run(*wrong)
        assert ended == 2
        assert message in text
    assert sorted(path.name for path in runs.iterdir()) == ["first-a", "first-b"], "wrong input leaves nothing behind"
    file = tmp_path / "r.toml"
    file.write_text(dump_recipe(check_recipe(recipe)))
    ended, text = run(file, "--model", finals[0])
    assert ended == 2
    assert "remove --model" in text


def test_a_template_asks_from_the_problems_own_columns(recipe: dict, tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+1", "answer": str(n + 1), "unit": "km"} for n in range(2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["eval"] |= {"format": "{problem}:{unit}"}
    run = run_of(recipe)
    benchmark = load_benchmark(recipe["eval"]["benchmarks"][0])
    rendered = render_problems(benchmark, run.student.tokenizer, run.recipe.eval, None)
    assert [one.text for one in rendered] == ["0+1:km", "1+1:km"]
    for wrong in ("{place}", "{answer}"):  # the answer is never shown
        recipe["eval"]["format"] = f"{{problem}}{wrong}"
        with pytest.raises(InputError, match=rf"eval.format: problem 1: no column '{wrong[1:-1]}'"):
            stage.evaluate(run_of(recipe), QUIET, only=["base"])
