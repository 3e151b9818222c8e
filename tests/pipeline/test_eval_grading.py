"""Grading in an evaluation: the user's own, another one later, and what cannot be graded."""

import json
import os
from pathlib import Path

import pytest
import torch
from rich.console import Console

from grading import problems
from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.config import Grading
from lightning_weave.errors import InputError
from lightning_weave.grading.graders import Grader
from lightning_weave.progress import Progress
from lightning_weave.report.results import show_results
from lightning_weave.stages import eval as stage
from lightning_weave.store.ledger import read_ledger
from models.small_models import small_model
from pipeline.evaluated import evaluation_recipe, folder_of, sampled_tokens
from tiny import run_of
from tokens.samples import byte_level

QUIET = Progress(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    return evaluation_recipe(tmp_path)


@pytest.mark.parametrize("profile", ["paper", "math-verify"])
@pytest.mark.parametrize("reference", ["4", "\\boxed{4}", "so \\boxed{4}"])
def test_a_reference_may_be_boxed_as_a_response_is(profile: str, reference: str) -> None:
    problem = Problem("p", "2 + 2?", reference)
    grader = Grader(Benchmark("file:x", "x", "math", (problem,), 1, 8), Grading(kind=profile))
    graded = grader.grade([(problem, "it is \\boxed{4}"), (problem, "it is \\boxed{5}")])
    assert [one.correct for one in graded] == [True, False]


PROGRAM = "```python\nprint(sum(map(int, open(0).read().split())))\n```"


def save_programmer(folder: Path) -> Path:
    """A checkpoint that answers every question with the same program, which is one token of its vocabulary."""
    tokenizer = byte_level([], added=(PROGRAM,), special=("<|end|>", "<|pad|>"))
    tokenizer.eos_token, tokenizer.pad_token = "<|end|>", "<|pad|>"
    program, end = tokenizer.convert_tokens_to_ids([PROGRAM, "<|end|>"])
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": end}
    model = small_model("llama", 0, **shape).requires_grad_(True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for text in ["Print the sum.\n```\n\n<|im_start|>assistant\n"] * 40:
        ids = torch.tensor([[*tokenizer.encode(text), program, end]])
        labels = torch.cat([torch.full((1, ids.shape[1] - 2), -100), ids[:, -2:]], dim=1)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_sample_says_where_the_official_runner_judges_otherwise(
    recipe: dict, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`open(0)` is right in a real process; the official runner fails it. A wrong program is wrong for both."""
    rows = [{**row, "question_content": "Print the sum."} for row in (problems.ADD, problems.LINES)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["policies"] = {"programmer": {"model": str(save_programmer(tmp_path / "programmer"))}}
    recipe["eval"] |= {"temperature": 0.0, "samples": 1, "budgets": [], "unsafe_local": True}
    stage.evaluate(run_of(recipe), QUIET, only=["programmer"])
    assert "programs run WITHOUT a sandbox" in capfd.readouterr().err
    path = folder_of(recipe, "programmer") / "samples.jsonl"
    right, wrong = read_samples(path)
    assert (right.text, right.tokens, right.correct, right.official) == (PROGRAM, 2, True, "open(0)")
    assert (wrong.text, wrong.correct, wrong.why, wrong.official) == (PROGRAM, False, "wrong answer", None)
    summary = read_summary(path.with_name("summary.json"))
    assert (summary.accuracy, summary.official_differs) == (50.0, 1)


@pytest.mark.parametrize(
    "change", [{"profile": "math-verify"}, {"budgets": [3]}, {"profile": "math-verify", "budgets": []}]
)
@pytest.mark.slow
def test_another_grading_samples_nothing_anew(recipe: dict, tmp_path: Path, change: dict) -> None:
    def evaluated(runs: str, **section: object) -> tuple[dict[str, bytes], int]:
        run = run_of({**recipe, "runs": str(tmp_path / runs), "eval": {**recipe["eval"], **section}})
        stage.evaluate(run, Progress(quiet=True), ["base"])
        made = run.stage("eval", "base", recipe["eval"]["benchmarks"][0])
        assert made.complete
        names = ("samples.jsonl", "summary.json", "manifest.json")
        sampled = sum(row["tokens"] for row in read_ledger(run.directory))
        return {name: (made.folder / name).read_bytes() for name in names}, sampled

    before, sampled = evaluated("again", budgets=[3, 5])
    after, in_all = evaluated("again", **{"budgets": [3, 5], **change})
    assert after == evaluated("fresh", **{"budgets": [3, 5], **change})[0], "as if it had been graded so at once"
    assert after != before
    assert in_all == sampled > 0
    assert evaluated("again", budgets=[3, 4], seed=7)[1] > sampled, "anything else is sampled anew"


def test_a_policy_that_never_answers_is_an_error_and_not_a_zero(recipe: dict) -> None:
    run = run_of(recipe)
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    stage.evaluate(run, progress, only=["base"])
    summary = read_summary(folder_of(recipe) / "summary.json")
    assert (summary.accuracy, summary.no_answer) == (0.0, 1.0)
    assert summary.error is not None
    assert "no answer was found in any of 18 responses" in summary.error
    assert [line for line in said if line.startswith("error: eval/base/sums: no answer")]
    with open(os.devnull, "w") as nowhere:
        out = Console(record=True, width=400, file=nowhere)
        show_results(run, out)
    assert "error: base on sums: no answer was found" in out.export_text()


def test_a_changed_grader_samples_nothing_anew(recipe: dict, tmp_path: Path) -> None:
    """Also where only the content of the user's own function changed."""
    own = tmp_path / "my.py"
    own.write_text("def grade(response, answer):\n    return True\n")
    stage.evaluate(run_of(recipe, trust=True), QUIET, only=["base"])
    before = sampled_tokens(recipe)
    accuracies = []
    for grader in ("exact", "regex:[^0-9]*$", f"{own}:grade"):
        recipe["eval"]["graders"] = {"sums": grader}
        stage.evaluate(run_of(recipe, trust=True), QUIET, only=["base"])
        accuracies.append(read_summary(folder_of(recipe) / "summary.json").accuracy)
    own.write_text("def grade(response, answer):\n    return False\n")
    run = run_of(recipe, trust=True)
    assert run.stage("eval", "base", recipe["eval"]["benchmarks"][0]).state() == "missing"
    stage.evaluate(run, QUIET, only=["base"])
    assert read_summary(folder_of(recipe) / "summary.json").accuracy == 0
    assert accuracies[-1] == 100
    assert sampled_tokens(recipe) == before > 0


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ("nowhere.py:grade", "eval.graders.sums.*no such file"),
        ("code", "LiveCodeBench rows"),
        ("choice", "problem q0: the answer '1' is not the letter"),
    ],
)
def test_a_grader_that_cannot_work_is_refused_before_sampling(recipe: dict, grader: object, message: str) -> None:
    recipe["eval"]["graders"] = {"sums": grader}
    with pytest.raises(InputError, match=message):
        stage.evaluate(run_of(recipe, trust=True), QUIET, only=["base"])
    assert sampled_tokens(recipe) == 0


def test_a_function_that_fails_is_named_with_its_problem(recipe: dict, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def grade(response, answer):\n    return response[100000]\n")
    recipe["eval"]["graders"] = {"sums": f"{tmp_path / 'my.py'}:grade"}
    with pytest.raises(InputError, match=r"my.py:grade failed on problem q0 \(IndexError"):
        stage.evaluate(run_of(recipe, trust=True), QUIET, only=["base"])
