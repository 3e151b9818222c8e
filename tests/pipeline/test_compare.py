"""`lweave compare`: what it adds, what it leaves out and why, and the table at matched tokens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from lightning_weave import Run
from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.summary import summarise
from lightning_weave.cli import app
from lightning_weave.config import check_recipe
from lightning_weave.directory import with_others
from lightning_weave.errors import InputError
from lightning_weave.stages.compare import alternatives, frontier_of, measure
from report.evaluated import draw_samples, write_evaluations
from tiny import make_world, save_model


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One anchor trained from the student, one of another architecture and tokenizer."""
    root = tmp_path_factory.mktemp("compare")
    recipe = make_world(root, prompts=8)
    student = Path(recipe["student"]["model"])
    recipe["anchors"]["acc"] = {
        "post": str(save_model(root / "tuned", "student", "qwen3", 9, student)),
        "pre": str(student),
    }
    problems = [{"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(4)]
    (root / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {
        "benchmarks": [f"file:{root / 'sums.jsonl'}"],
        "samples": 2,
        "max_tokens": 40,
        "chat": False,
        "final": " \\boxed{",
    }
    return recipe


def write(recipe: dict[str, Any], folder: Path) -> Path:
    path = folder / "tiny.toml"
    path.write_text(tomli_w.dumps({**recipe, "runs": str(folder / "runs")}))
    return path


def lweave(*words: str | Path) -> str:
    """Run a command in this process; returns what it prints to standard output."""
    ended = CliRunner().invoke(app, list(map(str, words)))
    if ended.exception is not None:
        raise ended.exception
    return ended.stdout


def test_wrong_names_are_refused_before_anything_is_made(recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write(recipe, tmp_path)
    for words, message in (
        (["--composition", "nobody"], "--composition nobody: must be one of acc-only, brief-only, both"),
        (["--composition", "both", "--also", "nobody"], "--also nobody: no such policy"),
        (["--composition", "both", "--only", "nobody"], "--only nobody: no such alternative; there are both-linear"),
    ):
        with pytest.raises(InputError) as error:  # exit code 2
            lweave("compare", file, *words)
        assert message in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_row_is_the_mean_of_all_seeds_so_no_single_seed_is_compared(recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write({**recipe, "train": {**recipe["train"], "seeds": 2}}, tmp_path)
    for words in (["--composition", "both~2"], ["--composition", "both", "--also", "acc-only~2"]):
        with pytest.raises(InputError, match=rf"^{words[-2]} {words[-1]}: "):
            lweave("compare", file, *words, "--dry-run")


def test_the_demos_recipe_names_the_command_that_makes_its_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    demo = Path(__file__).parents[2] / "recipes" / "demo.toml"
    with pytest.raises(InputError, match=r"lweave demo.* runs/demo-world$"):
        lweave("compare", demo, "--composition", "weave-50", "--dry-run")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_lists_what_would_be_made_and_what_is_left_out(recipe: dict[str, Any], tmp_path: Path) -> None:
    said = lweave("compare", write(recipe, tmp_path), "--composition", "both", "--dry-run")
    for stage in ("train/both", "train/teacher-acc", "train/both-mixture", "train/both-flip", "merge/both-blend"):
        assert stage in said
    assert "left out: both-linear, both-task-arithmetic, both-ties, both-dare: weights.brief: " in said
    assert "left out: both-capped: not yet" in said
    assert not (tmp_path / "runs").exists()


def test_levels_are_points_of_the_frontier_and_contexts_are_prompts(recipe: dict[str, Any]) -> None:
    data = json.loads(json.dumps(recipe))
    data["anchors"]["told"] = {"model": "student", "post_prompt": {"system": "Be brief."}}
    data["prompts"]["chat"] = True
    weights = {"high": {"acc": 1.0}, "low": {"told": 1.0}}
    data["compositions"]["dial"] = {"levels": weights, "default": "low", "control": {"prefix": "{level} "}}
    run = Run(data)
    assert frontier_of(run.recipe, "dial") == ["dial", "dial@high", "dial@low"]
    assert frontier_of(run.recipe, "both") == ["acc-only", "brief-only", "both"]
    tables = {name: table for name, _, table in alternatives(run, "dial")}
    assert tables["prompt-told"] == {"system": "Be brief."}
    assert tables["dial-capped"] == {"budget": ""}


def test_switches_of_the_chat_template_are_alternatives(recipe: dict[str, Any], tmp_path: Path) -> None:
    data = json.loads(json.dumps(recipe))
    data["student"]["model"] = str(shutil.copytree(recipe["student"]["model"], tmp_path / "student"))
    switches = {"enable_thinking": {"thinking": False}, "reasoning_effort": {"template": {"reasoning_effort": "low"}}}

    def found() -> list[dict[str, Any]]:
        return [table for name, _, table in alternatives(Run(data), "both") if name.startswith("asked-")]

    for variable, table in switches.items():
        (tmp_path / "student" / "chat_template.jinja").write_text("{{ messages }}{{ " + variable + " }}")
        data["eval"] |= {"chat": True, "thinking": True}
        assert found() == [table]
        data["eval"]["thinking"] = False
        assert ({"thinking": False} in found()) is False
        data["eval"]["chat"] = False
        assert found() == []


def test_alternatives_are_trained_as_the_composition_is(recipe: dict[str, Any]) -> None:
    data = json.loads(json.dumps(recipe))
    data["compositions"]["both"] |= {"epochs": 3, "kl_budget": 0.1, "objective": "direct-opd"}
    tables = {name: table for name, _, table in alternatives(Run(data), "both")}
    assert {name: table.get("epochs") for name, table in tables.items() if "method" in table} == dict.fromkeys(
        ("teacher-acc", "teacher-brief", "both-mixture", "both-flip", "both-shuffle"), 3
    )
    mixture = tables["both-mixture"]
    assert (mixture["kl_budget"], mixture["objective"]) == (0.1, "direct-opd")
    assert "kl_budget" not in tables["teacher-acc"]


def test_weights_by_tag_have_no_merge(recipe: dict[str, Any]) -> None:
    """The table of all other prompts is not the composition; its teachers are those of every table."""
    data = json.loads(json.dumps(recipe))
    data["tags"] = {"rules": {"sum": r"\+"}}
    data["compositions"]["both"] = {"weights": {"sum": {"acc": 1.0}, "default": {"brief": 1.0}}}
    tables = {name for name, *_ in alternatives(Run(data), "both")}
    assert {"teacher-acc", "teacher-brief", "both-flip"} <= tables
    assert not tables & {"both-linear", "both-ties", "both-mixture", "both-blend"}


def test_the_cap_waits_for_every_seed(recipe: dict[str, Any], tmp_path: Path) -> None:
    """The length of one seed is not that of the composition."""
    data = {**recipe, "runs": str(tmp_path), "train": {**recipe["train"], "seeds": 2}}
    (tmp_path / "tiny").mkdir()

    def cap() -> Any:
        return {name: table for name, _, table in alternatives(Run(data), "both")}["both-capped"]["budget"]

    write_evaluations(Run(data), {"base": (0.5, 30.0), "both": (0.5, 20.0)})
    assert cap() == ""
    write_evaluations(Run(data), {"both~2": (0.5, 36.0)})
    assert cap() == pytest.approx(28, abs=5)


def test_what_another_composition_beats_in_both_is_no_point_of_the_frontier(recipe: dict[str, Any]) -> None:
    """It has a distance from the line, as an alternative has; so has the base."""
    bench = load_benchmark(recipe["eval"]["benchmarks"][0])
    places = {"base": (0.2, 400.0), "acc-only": (1.0, 200.0), "brief-only": (0.0, 100.0), "both-flip": (0.0, 300.0)}
    found = {name: [summarise(bench, draw_samples(bench, name, *place, 4), {})] for name, place in places.items()}
    rows = measure(found, ["base", "brief-only", "acc-only"], ["both-flip"])
    assert {name for name, row in rows.items() if row.on_frontier} == {"acc-only", "brief-only"}
    for name in ("base", "both-flip"):
        difference = rows[name].difference
        assert difference is not None
        assert difference.estimate == pytest.approx(rows[name].accuracy - 100)


@pytest.mark.slow
def test_a_comparison_makes_what_is_missing_and_stays(recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write(recipe, tmp_path)
    rows = json.loads(lweave("compare", file, "--composition", "both", "--also", "acc-only", "--json"))
    found = {row["policy"]: row for row in rows if "left_out" not in row}
    frontier = {"base", "acc-only", "brief-only", "both"}
    assert {name for name, row in found.items() if row["on_frontier"]} <= frontier
    assert found.keys() - frontier == {
        *("both-blend", "both-capped", "both-decoded", "teacher-acc", "teacher-brief"),
        *("both-mixture", "both-flip", "both-shuffle"),
    }
    assert {row["policy"] for row in rows if "left_out" in row} == {
        f"both-{method}" for method in ("linear", "task-arithmetic", "ties", "dare")
    }
    assert all(row["difference"] is None for row in found.values() if row["on_frontier"])
    assert {row["problems"] for row in found.values()} == {4}
    assert {name: row["models"] for name, row in found.items() if row["models"] > 1} == {"both-decoded": 4}
    assert found["both-capped"]["seconds"] == 0 < found["both"]["seconds"]
    ends = found["acc-only"]["seconds"] + found["brief-only"]["seconds"]
    assert found["both-blend"]["seconds"] > ends, "the students that are blended are made first"

    directory = tmp_path / "runs" / "tiny"
    assert (directory / "compare" / "compare-both.svg").exists()
    before = sorted(directory.rglob("manifest.json"))
    stamps = [path.stat().st_mtime_ns for path in before]
    said = lweave("compare", file, "--composition", "both")
    assert "both-decoded" in said
    assert "both-ties, both-dare: weights.brief: " in said
    assert sorted(directory.rglob("manifest.json")) == before
    assert [path.stat().st_mtime_ns for path in before] == stamps
    known = with_others(Run(check_recipe({**recipe, "runs": str(tmp_path / "runs")}))).policies
    assert {"both-flip", "both-blend", "both-decoded"} <= set(known)
    lweave("report", file)
    assert (directory / "report" / "figures" / "compare-both.svg").exists()

    rows = json.loads(lweave("compare", file, "--composition", "acc-only", "--only", "acc-only-ties", "--json"))
    assert [row["policy"] for row in rows] == ["base", "acc-only", "acc-only-ties"]
