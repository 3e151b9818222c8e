"""Tasks of another harness: its files in the run, its scores in the tables, one task after another as they finish.

A package stands in for lm_eval here; tests/test_harness.py runs the real one.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from lightning_weave.bench.lm_eval_worker import use_plain_decoding
from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.report import tables
from lightning_weave.report.results import read_results
from tiny import run_of, save_model

STAND_IN = Path(__file__).parents[1] / "stand_in"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two checkpoints, of which the second is called final, which knows more."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), os.environ.get("PYTHONPATH", "")]))
    student = save_model(tmp_path / "student", "student", "qwen3", 1)
    save_model(tmp_path / "other" / "final", "student", "qwen3", 2)
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
    limited = lweave("eval", recipe, "--harness", "lm-eval", "--tasks", "sums", "--set", "harness.args.limit=2")
    assert "0.500" in limited
    assert len(list(folder.parent.glob("lm-eval-sums@*"))) == 2  # another protocol is another folder

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
    results = read_results(run_of(check_recipe({**_data(recipe), "harness": {"tasks": ["sums"]}})))
    table = tables.format_results(results)
    assert [policy for _, policy in results.index] == ["base", "other"]
    assert "| other | **0.833** ±0.200 (+0.333 ±0.333) |" in tables.markdown(table)
    assert r"{\scriptsize $\pm 0.200 (+0.333 \pm 0.333)$}" in tables.latex(table)
    header, _, line = tables.to_csv(results).splitlines()
    values = dict(zip(header.split(","), line.split(","), strict=True))
    assert float(values["sums exact_match difference"]) == pytest.approx(1 / 3)
    assert "standard error" in tables.legend(results)


def test_a_chat_template_writes_the_date_of_the_run(recipe: Path, tmp_path: Path) -> None:
    template = "{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}"
    (tmp_path / "student" / "chat_template.jinja").write_text(template)
    ask = ("eval", recipe, "--harness", "lm-eval", "--tasks", "sums", "--only", "base", "--set")
    folders = []
    for day, written in (("2026-01-31", "31 Jan 2026: Hi"), ("2026-02-01", "01 Feb 2026: Hi")):
        said = lweave(*ask, f"date={day}")
        folders.append((tmp_path / "runs" / "tiny" / "eval" / "base" / "lm-eval-sums").resolve())
        assert json.loads((folders[-1] / "results_2026-01-01.json").read_text())["rendered"] == written, said
    assert folders[0] != folders[1], "another day is another evaluation"


def test_a_task_that_was_asked_otherwise_has_no_difference_to_the_base(recipe: Path) -> None:
    ask = ("eval", recipe, "--harness", "lm-eval", "--tasks", "sums")
    lweave(*ask, "--only", "base")
    said = lweave(*ask, "--only", "other", "--set", "harness.args.num_fewshot=5")
    results = read_results(run_of(check_recipe(_data(recipe))))  # names no task: the last of each policy
    assert results.xs("other", level="policy")["sums", "exact_match↑"].notna().all()
    assert results["sums", "difference"].isna().all()
    assert {cell.mark for cell in tables.format_results(results)["sums", "exact_match↑"]} == {""}
    assert tables.not_compared(results) == [
        "other on sums is not compared with the base: num_fewshot = 5 (base: unset)."
    ]
    assert "(+0.333" not in said


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
        (["--harness", "lm-eval"], "--harness lm-eval: no tasks"),
        (["--tasks", "sums"], "--tasks sums: add --harness lm-eval"),
        (
            ["--harness", "lm-eval", "--tasks", "sums", "--set", "harness.include=."],
            'harness.include = "." runs code or a program with your permissions',
        ),
        (
            ["--harness", "lm-eval", "--tasks", "sums", "--set", "harness.python=/no/python", "--trust"],
            "Python '/no/python' (key python of an engine's section) cannot be run",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(recipe: Path, arguments: list[str], said: str) -> None:
    assert said in lweave("eval", recipe, *arguments)


def _data(recipe: Path) -> dict:
    import tomllib

    return tomllib.loads(recipe.read_text())


def test_a_checkpoint_does_not_decide_how_a_task_is_decoded(tmp_path: Path) -> None:
    """With top_k = 1 in its generation_config.json, sampling would be greedy, whatever the task asks for."""
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "student", "student", "qwen3", 1))
    model.generation_config.update(do_sample=True, top_k=1, repetition_penalty=1.5, eos_token_id=[3])

    def samples() -> set[tuple[int, ...]]:
        ids = torch.tensor([[1, 2]])
        drawn = (model.generate(ids, do_sample=True, max_new_tokens=6, pad_token_id=0) for _ in range(8))
        return {tuple(one[0].tolist()) for one in drawn}

    assert len(samples()) == 1
    use_plain_decoding(SimpleNamespace(model=model))
    assert len(samples()) > 1
    config = model.generation_config
    assert (config.eos_token_id, config.top_k, config.repetition_penalty or 1.0) == ([3], 0, 1.0)
