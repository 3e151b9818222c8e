"""Tasks of another harness: its files in the run, its scores in the tables, one task after another as they finish.

A package stands in for lm_eval here; tests/test_harness.py runs the real one.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.report import tables
from lightning_weave.report.results import result_rows
from tiny import save_model, steps_of

STAND_IN = Path(__file__).parents[1] / "stand_in"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints, of which the second is called final, which knows more."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    student = save_model(tmp_path / "student", "student", "qwen3", 1)
    shutil.copytree(student, tmp_path / "other" / "final")
    data = {
        "name": "tiny",
        "runs": str(tmp_path / "runs"),
        "student": {"model": str(student)},
        "policies": {"other": {"model": str(tmp_path / "other" / "final")}},
        "machine": {"threads": 1},
    }
    path = tmp_path / "tiny.toml"
    path.write_text(dump_recipe(check_recipe(data)))
    return path


def lweave(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    return f"{result.output}{result.exception or ''}"


@pytest.mark.slow
def test_scores_and_files_of_a_harness_are_kept_and_shown(recipe: Path, tmp_path: Path) -> None:
    said = lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums, words")
    assert "sums exact_match↑" in said
    assert "0.833* ±0.200 (+0.333 ±0.333)" in said  # 5 of 6 against 3: three turned right, one wrong
    folder = tmp_path / "runs" / "tiny" / "eval" / "other" / "lm-eval-sums"
    files = {entry["file"] for entry in json.loads((folder / "manifest.json").read_text())["shards"]}
    assert files == {"summary.json", "results_2026-01-01.json", "samples_sums_2026-01-01.jsonl"}
    asked = json.loads((folder / "results_2026-01-01.json").read_text())["asked"]
    assert asked["model"]["pretrained"] == str(tmp_path / "other" / "final")
    assert asked["model"]["dtype"] == "float32"
    assert asked["apply_chat_template"] is False  # the tokenizer has no template

    before = (folder / "manifest.json").stat().st_mtime_ns
    lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums,words")
    assert (folder / "manifest.json").stat().st_mtime_ns == before  # finished is finished
    beside = lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums", "--set", "harness.limit=2")
    assert "0.500" in beside
    assert len(list(folder.parent.glob("lm-eval-sums@*"))) == 1  # another protocol stands beside

    report = lweave("report", recipe)  # a recipe that does not name the tasks: the run directory knows them
    page = (tmp_path / "runs" / "tiny" / "report" / "index.html").read_text()
    assert "exact_match ↑" in page, report
    assert "±0.200 (+0.333 ±0.333)" in page
    chosen = lweave(
        "eval", recipe, "--harness", "lm-eval", "--tasks", "sums", "--set", "harness.metrics.sums=perplexity"
    )
    assert "sums perplexity↓" in chosen


def test_every_form_of_the_table_has_the_columns(recipe: Path) -> None:
    lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums")
    rows = result_rows(steps_of(check_recipe({**_data(recipe), "harness": {"tasks": ["sums"]}})), {})
    assert [row.policy for row in rows] == ["base", "other"]
    assert "| other | **0.833** ±0.200 (+0.333 ±0.333) |" in tables.markdown(rows)
    assert r"{\scriptsize $\pm 0.200 (+0.333 \pm 0.333)$}" in tables.latex(rows)
    header, _, line = tables.to_csv(rows).splitlines()
    values = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(values["sums exact_match difference"]) == pytest.approx(1 / 3)
    assert "standard error" in tables.legend(rows)


def test_what_is_finished_of_several_tasks_stays(recipe: Path, tmp_path: Path) -> None:
    said = lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums,breaks,words")
    assert "the lm-evaluation-harness process failed: RuntimeError: the data are gone" in said
    made = tmp_path / "runs" / "tiny" / "eval" / "base"
    assert (made / "lm-eval-sums" / "manifest.json").exists()
    assert not (made / "lm-eval-words").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--harness", "lm-eval", "--tasks", "summs"], "has no task 'summs'. Did you mean sums?"),
        (["--harness", "lm-eval"], "--harness lm-eval: which tasks?"),
        (["--tasks", "sums"], "--tasks sums: of which harness?"),
        (
            ["--harness", "lm-eval", "--tasks", "sums", "--set", "harness.include=."],
            "harness.include = '.' is Python that would run here",
        ),
        (
            ["--harness", "lm-eval", "--tasks", "sums", "--set", "harness.python=/no/python"],
            "Python '/no/python' (key python of an engine's section) cannot be run",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(recipe: Path, arguments: list[str], said: str) -> None:
    assert said in lweave("eval", recipe, *arguments)


def _data(recipe: Path) -> dict:
    import tomllib

    return tomllib.loads(recipe.read_text())
