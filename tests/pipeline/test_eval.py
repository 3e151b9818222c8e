"""Evaluation: the same samples and summary whether or not it was killed, graded and counted as stored."""

import json
import os
import shutil
import signal
from datetime import datetime
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import Forked, kill_at
from grading import problems
from lightning_weave.bench.definitions import Benchmark, Problem, load_benchmark
from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.config import Grading, check_recipe, dump_recipe
from lightning_weave.errors import InputError, StaleInput
from lightning_weave.grading.math import extract_boxed
from lightning_weave.pipeline import eval as stage
from lightning_weave.progress import Progress
from lightning_weave.report.results import points, policy_rows, show_results, summaries
from lightning_weave.runs.evaluation import prompt_texts
from lightning_weave.runs.grade import Grader
from lightning_weave.store.ledger import read_ledger
from models.small_models import small_model
from tiny import make_world, steps_of
from tokens.samples import byte_level

QUIET = Progress(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    recipe = make_world(tmp_path)
    recipe |= {"anchors": {}, "compositions": {}, "policies": {"other": {"model": str(tmp_path / "brief-pre")}}}
    problems = [{"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {
        "benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"],
        "samples": 3,
        "max_tokens": 14,
        "chat": False,
        "profile": "paper",
        "block": 4,
        "budgets": [5, 9],
    }
    return recipe


def folder_of(recipe: dict, policy: str = "base") -> Path:
    steps = steps_of(recipe)
    return steps.store.stage(steps.eval(policy, recipe["eval"]["benchmarks"][0])).folder


def test_samples_are_what_the_model_said(recipe: dict) -> None:
    stage.run(steps_of(recipe), QUIET, only=["base"])
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
    stage.run(steps_of(recipe), QUIET, only=["taught"])
    samples = {sample.problem: sample for sample in read_samples(folder_of(recipe, "taught") / "samples.jsonl")}
    assert samples["q3"].correct
    assert (samples["q3"].answer, samples["q3"].finish, samples["q3"].tokens) == ("4", "stop", len(answer))
    assert samples["q3"].why == "equal"
    others = [sample for name, sample in samples.items() if name != "q3"]
    assert not any(sample.correct for sample in others)


@pytest.mark.slow
def test_every_policy_gets_a_row_and_a_point(recipe: dict) -> None:
    steps = steps_of(recipe)
    stage.run(steps, QUIET)
    rows = policy_rows(summaries(steps))
    assert [row.policy for row in rows] == ["base", "other"]
    assert {point["policy"]: point["weights"] for point in points(steps, rows)} == {"base": {}, "other": {}}
    out = Console(record=True, width=120, file=open(os.devnull, "w"))  # noqa: SIM115
    show_results(steps, out)
    assert "other" in out.export_text()
    out.file.close()


@pytest.mark.slow
def test_up_to_date_evaluations_are_not_touched_and_those_by_another_protocol_stand_beside(recipe: dict) -> None:
    stage.run(steps_of(recipe), QUIET, only=["base"])
    path = folder_of(recipe) / "samples.jsonl"
    before = (path.stat().st_mtime_ns, path.read_bytes())
    recipe["eval"]["batch_size"] = 3  # execution only
    stage.run(steps_of(recipe), QUIET, only=["base"])
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before
    recipe["eval"]["seed"] = 7
    stage.run(steps_of(recipe), QUIET, only=["base"])
    other = folder_of(recipe) / path.name
    assert other.parent.parent == path.parent.parent
    assert other.read_bytes() != before[1]
    assert (path.stat().st_mtime_ns, path.read_bytes()) == before, "never overwritten"
    recipe["eval"]["seed"] = 42
    assert folder_of(recipe) == path.parent
    assert summaries(steps_of(recipe))["base"][0].settings["seed"] == 42


def test_an_evaluation_that_is_wanted_again_is_put_back_and_not_sampled(recipe: dict, tmp_path: Path) -> None:
    stage.run(steps_of(recipe), QUIET, only=["other"])
    sampled = sampled_tokens(recipe)
    before = (folder_of(recipe, "other") / "samples.jsonl").read_bytes()
    changed = {**recipe, "policies": {"other": {"model": str(tmp_path / "acc-pre")}}}
    steps = steps_of(changed)
    made = steps.store.stage(steps.eval("other", recipe["eval"]["benchmarks"][0]))
    assert made.state() == "stale", "another model is no other protocol"
    made.begin()  # and killed
    stage.run(steps_of(recipe), QUIET, only=["other"])
    assert (folder_of(recipe, "other") / "samples.jsonl").read_bytes() == before
    assert sampled_tokens(recipe) == sampled > 0


def test_a_policy_may_have_a_system_prompt_of_its_own(recipe: dict, tmp_path: Path) -> None:
    student = recipe["student"]["model"]
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}=\n{% endfor %}"
    tokenizer.save_pretrained(student)
    recipe["policies"] = {"asked": {"model": student, "system": "7+7"}}
    recipe["eval"] |= {"chat": True, "format": "plain"}
    stage.run(steps_of(recipe), QUIET)
    everyone = {**recipe, "name": "everyone", "policies": {}, "eval": {**recipe["eval"], "system": "7+7"}}
    stage.run(steps_of(everyone), QUIET)
    asked, plain, expected = (
        (folder_of(one, policy) / "samples.jsonl").read_text()
        for one, policy in ((recipe, "asked"), (recipe, "base"), (everyone, "base"))
    )
    assert asked == expected != plain
    paths = stage.export_lm_eval(steps_of(recipe), tmp_path / "lm-eval", datetime(2026, 1, 2))
    shown = [json.loads(path.read_text().splitlines()[0])["arguments"]["gen_args_0"]["arg_0"] for path in paths]
    assert shown == ["0+1=\n", "7+7=\n0+1=\n"]
    with pytest.raises(InputError, match=r"policies\.asked\.system needs a chat template"):
        check_recipe({**recipe, "eval": {**recipe["eval"], "chat": False}})


def test_an_untrained_composition_is_refused_with_the_command(recipe: dict, tmp_path: Path) -> None:
    recipe |= {key: make_world(tmp_path / "again")[key] for key in ("anchors", "compositions")}
    with pytest.raises(StaleInput, match=r"lweave train tiny.toml --only both"):
        stage.run(steps_of(recipe), QUIET, only=["both"])
    with pytest.raises(InputError, match="no such policy"):
        stage.run(steps_of(recipe), QUIET, only=["nobody"])


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
    assert list(summaries(steps_of(recipe))) == ["base"]
    for name, missing in (("later", "later"), ("woven", "unmade")):
        ended = forked.lweave("eval", file, "--only", name)
        assert ended.code == 2
        assert str(tmp_path / missing) in ended.said


def test_lm_eval_files_hold_the_same_samples(recipe: dict, tmp_path: Path) -> None:
    steps = steps_of(recipe)
    stage.run(steps, QUIET, only=["base"])
    (path,) = stage.export_lm_eval(steps, tmp_path / "lm-eval", datetime(2026, 1, 2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    samples = list(read_samples(folder_of(recipe) / "samples.jsonl"))
    assert [text for line in lines for text in line["resps"][0]] == [sample.text for sample in samples]
    assert lines[0]["arguments"]["gen_args_0"]["arg_0"] == "Question: 0+1\nAnswer:"


@pytest.mark.slow
def test_killed_and_resumed_gives_the_same_files(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    recipe["eval"] |= {"samples": 12, "block": 4, "budgets": []}
    stage.run(steps_of(recipe), QUIET, only=["base"])
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
    stage.run(steps_of(recipe), QUIET, only=["programmer"])
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
        steps = steps_of({**recipe, "runs": str(tmp_path / runs), "eval": {**recipe["eval"], **section}})
        stage.run(steps, Progress(quiet=True), ["base"])
        made = steps.store.stage(steps.eval("base", recipe["eval"]["benchmarks"][0]))
        assert made.state() == "done"
        names = ("samples.jsonl", "summary.json", "manifest.json")
        sampled = sum(row["tokens"] for row in read_ledger(steps.store.run_dir))
        return {name: (made.folder / name).read_bytes() for name in names}, sampled

    before, sampled = evaluated("again", budgets=[3, 5])
    after, in_all = evaluated("again", **{"budgets": [3, 5], **change})
    assert after == evaluated("fresh", **{"budgets": [3, 5], **change})[0], "as if it had been graded so at once"
    assert after != before
    assert in_all == sampled > 0
    assert evaluated("again", budgets=[3, 4], seed=7)[1] > sampled, "anything else is sampled anew"


def blocks_done(recipe: dict) -> int:
    return len(list(folder_of(recipe).glob("blocks-*/[0-9]*.jsonl")))


@pytest.mark.slow
def test_the_program_evaluates_a_checkpoint_without_a_recipe(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    command = ["eval", "--model", recipe["student"]["model"], "--set", f"runs={tmp_path / 'own'}"]
    sets = ["--set", "eval.samples=2", "--set", "eval.max_tokens=8", "--set", "eval.chat=false"]
    ended = forked.lweave(*command, "--bench", recipe["eval"]["benchmarks"][0], *sets)
    assert ended.code == 0, ended.said
    assert "base" in ended.said
    assert (tmp_path / "own" / "student" / "eval" / "base" / "sums" / "summary.json").exists()
    ended = forked.lweave(*command, "--bench", "aime-1999")
    assert ended.code == 2
    assert "aime-1999" in ended.said


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
    assert "leave out --model" in text


def sampled_tokens(recipe: dict) -> int:
    return sum(row["tokens"] for row in read_ledger(steps_of(recipe).store.run_dir))


def test_a_policy_that_never_answers_is_an_error_and_not_a_zero(recipe: dict) -> None:
    steps = steps_of(recipe)
    said: list[str] = []
    progress = Progress(quiet=True)
    progress.say = said.append  # type: ignore[method-assign]
    stage.run(steps, progress, only=["base"])
    summary = read_summary(folder_of(recipe) / "summary.json")
    assert (summary.accuracy, summary.no_answer) == (0.0, 1.0)
    assert summary.error is not None
    assert "no answer was found in any of 18 responses" in summary.error
    assert [line for line in said if line.startswith("error: eval/base/sums: no answer")]
    with open(os.devnull, "w") as nowhere:
        out = Console(record=True, width=400, file=nowhere)
        show_results(steps, out)
    assert "error: base on sums: no answer was found" in out.export_text()


def test_a_template_asks_from_the_problems_own_columns(recipe: dict, tmp_path: Path) -> None:
    rows = [{"problem": f"{n}+1", "answer": str(n + 1), "unit": "km"} for n in range(2)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe["eval"] |= {"template": "{problem}:{unit}"}
    steps = steps_of(recipe)
    benchmark = load_benchmark(recipe["eval"]["benchmarks"][0])
    assert prompt_texts(benchmark, steps.student.tokenizer, steps.recipe.eval) == ["0+1:km", "1+1:km"]
    for wrong in ("{place}", "{answer}"):  # the answer is never shown
        recipe["eval"]["template"] = f"{{problem}}{wrong}"
        with pytest.raises(InputError, match=rf"eval.template: problem 1: no column '{wrong[1:-1]}'"):
            stage.run(steps_of(recipe), QUIET, only=["base"])


def test_a_changed_grader_samples_nothing_anew(recipe: dict, tmp_path: Path) -> None:
    """Also where only the content of the user's own function changed."""
    own = tmp_path / "my.py"
    own.write_text("def grade(response, answer):\n    return True\n")
    stage.run(steps_of(recipe, trust=True), QUIET, only=["base"])
    before = sampled_tokens(recipe)
    accuracies = []
    python = {"kind": "python", "function": f"{own}:grade"}
    for grader in ("exact", {"kind": "regex", "pattern": "[^0-9]*$"}, python):
        recipe["eval"]["graders"] = {"sums": grader}
        stage.run(steps_of(recipe, trust=True), QUIET, only=["base"])
        accuracies.append(read_summary(folder_of(recipe) / "summary.json").accuracy)
    own.write_text("def grade(response, answer):\n    return False\n")
    steps = steps_of(recipe, trust=True)
    assert steps.store.stage(steps.eval("base", recipe["eval"]["benchmarks"][0])).state() == "missing"
    stage.run(steps, QUIET, only=["base"])
    assert read_summary(folder_of(recipe) / "summary.json").accuracy == 0
    assert accuracies[-1] == 100
    assert sampled_tokens(recipe) == before > 0


@pytest.mark.parametrize(
    ("grader", "message"),
    [
        ({"kind": "python", "function": "nowhere.py:grade"}, "eval.graders.sums.function.*no such file"),
        ("code", "LiveCodeBench rows"),
        ("choice", "problem q0: the answer '1' is not the letter"),
    ],
)
def test_a_grader_that_cannot_work_is_refused_before_sampling(recipe: dict, grader: object, message: str) -> None:
    recipe["eval"]["graders"] = {"sums": grader}
    with pytest.raises(InputError, match=message):
        stage.run(steps_of(recipe, trust=True), QUIET, only=["base"])
    assert sampled_tokens(recipe) == 0


def test_a_function_that_fails_is_named_with_its_problem(recipe: dict, tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def grade(response, answer):\n    return response[100000]\n")
    rule = {"kind": "python", "function": f"{tmp_path / 'my.py'}:grade"}
    recipe["eval"]["graders"] = {"sums": rule}
    with pytest.raises(InputError, match=r"my.py:grade failed on problem q0 \(IndexError"):
        stage.run(steps_of(recipe, trust=True), QUIET, only=["base"])
