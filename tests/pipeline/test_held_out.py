"""Without benchmarks, a part of the user's own prompts is the benchmark, and is not trained on."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_weave.checks.preflight import preflight
from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.plan import plan
from lightning_weave.plan.architecture import find_gpu
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan
from lightning_weave.prompts import read_prompts
from lightning_weave.report import report
from lightning_weave.run import explain_missing
from lightning_weave.stages.run import run_all
from lightning_weave.views.status import look
from pipeline.small_runs import QUIET, make_recipe, run_of, save_prompts

pytestmark = pytest.mark.slow


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", train={"prompts_per_round": 4, "updates_per_round": 1})
    save_prompts(tmp_path / "prompts.jsonl", 44)
    recipe["prompts"] |= {"format": "{problem} {kind}"}
    rows = [json.loads(line) | {"kind": "x"} for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    rows.append(rows[0] | {"id": "copy", "prompt": rows[0]["prompt"].upper(), "kind": "y"})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe.pop("eval", None)
    return recipe


def test_a_run_evaluates_on_prompts_that_it_does_not_train_on(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    assert run.recipe.eval.benchmarks == ["held-out"]
    assert run.recipe.eval.max_tokens == 12, "as long as the rollouts"
    run_all(run, QUIET)
    samples = run.directory / "eval" / "only" / "held-out" / "samples.jsonl"
    held_out = [json.loads(line)["problem"] for line in samples.read_text().splitlines()]
    assert (len(set(held_out)), len(held_out)) == (20, 80)
    trained = {prompt.id for prompt in read_prompts(run.prompts_file)}
    assert not trained & set(held_out)
    assert ("p0" in held_out) == ("copy" not in trained), "the same words are the same problem"
    counts = run.stage("prompts").require()["report"]
    assert (counts["read"], counts["held_out"] + counts["kept"]) == (45, 45)
    planned = make_plan(run.recipe, PlannedMachine(find_gpu("H100"), 1))
    assert planned.trajectories == 2 * 25
    assert planned.benchmarks["held-out"] > 0


def test_the_same_problems_whatever_else_the_recipe_says(recipe: dict[str, Any]) -> None:
    stages = []
    for take in (3, 12):
        recipe["prompts"]["take"] = take
        stages.append(run_of(recipe).stage("eval", "base", "held-out").fingerprint)
    assert len(set(stages)) == 1
    recipe["prompts"]["dedup"] = "normalised"
    assert run_of(recipe).stage("eval", "base", "held-out").fingerprint not in stages


@pytest.mark.parametrize(
    "change",
    [
        {"eval": {"benchmarks": []}},
        {"rollout": {"from": "own.jsonl"}},
        {"prompts": {"source": "prompts.jsonl", "columns": {"prompt": "prompt"}}},
    ],
)
def test_nothing_is_held_out(recipe: dict[str, Any], change: dict[str, Any]) -> None:
    assert check_recipe({**recipe, **change}).eval.benchmarks == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout": {"from": "own.jsonl"}}, "rollout.from brings its own prompts"),
        ({"prompts": {"source": "prompts.jsonl"}}, "prompts.columns.answer"),
    ],
)
def test_what_cannot_be_held_out_is_refused(recipe: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_recipe({**recipe, **change, "eval": {"benchmarks": ["held-out"]}})


def test_without_an_evaluation_a_run_ends_with_its_students(recipe: dict[str, Any]) -> None:
    run = run_of({**recipe, "eval": {"benchmarks": []}})
    run_all(run, QUIET)
    assert [stage.path for stage in run.everything() if not stage.complete] == []
    assert not (run.directory / "eval").exists()


def test_every_view_tells_of_it(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(recipe)
    found = {finding.check: finding.text for finding in preflight(run)}
    assert found["held-out"] == "20 of 45 rows are held out for evaluation, and not trained on"
    assert "eval/base/held-out" in [status.path for status in look(run)]
    console = Console(width=200)
    plan.run(run.recipe, PlannedMachine(find_gpu("H100"), 1), None, False, console)
    assert "per policy (held-out)" in capsys.readouterr().out
    run_all(run, QUIET)
    page = report.run([run], QUIET).read_text()
    assert "held-out is a part of the run&#39;s own prompts that was not trained on" in page
    other = run_of({**recipe, "eval": {"benchmarks": []}})
    assert explain_missing(other.stage("prompts")).startswith('"held-out" in eval.benchmarks: 10%, 20 to 200 -> unset')
