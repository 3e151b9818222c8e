"""Results live on disk: whatever a command made in a run directory is seen by every later one, and kept."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lightning_weave as lw
from lightning_weave.cli.commands import writing
from lightning_weave.directory import as_found, older_stages, with_others
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report import report
from lightning_weave.report.results import other_protocols, summaries
from lightning_weave.run import Run
from lightning_weave.stages import run as run_stage
from lightning_weave.views import clean as forget
from lightning_weave.views import status
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("known")
    recipe = make_world(root, prompts=4)
    bench = save_prompts(root / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 2, "max_tokens": 8, "chat": False, "profile": "paper"}
    recipe["report"] = {"students": []}
    recipe["train"] |= {"epochs": 1}
    return recipe


def make(recipe: dict[str, Any]) -> Run:
    run = run_of(recipe)
    with writing(run):
        run_stage.run_all(run, QUIET)
    return run


def page_of(run: Run) -> str:
    return report.run([run], QUIET).read_text()


def table_of(run: Run) -> str:
    return (run.directory / "report" / "tables" / "results.md").read_text()


@pytest.mark.slow
def test_a_run_directory_knows_all_that_was_made_in_it(world: dict[str, Any], tmp_path: Path) -> None:
    world = {**world, "runs": str(tmp_path / "runs")}
    both = {"both": world["compositions"]["both"]}
    brief = {"brief": world["anchors"]["brief"]}
    only = {"weights": {"brief": 1.0}}
    first = make({**world, "compositions": both, "policies": {"other": {"model": world["anchors"]["acc"]["pre"]}}})
    second = make({**world, "anchors": brief, "compositions": {"brief-only": only}})
    good = summaries(first)
    assert list(summaries(second)) == ["base", "brief-only"]
    known = with_others(second)
    assert known.policies == ["base", "brief-only", "both", "other"]
    assert list(known.recipe.anchors) == ["brief", "acc"]
    assert summaries(known).keys() == good.keys() | {"brief-only"}
    opened = lw.Run.open(second.directory, quiet=True)
    assert opened.recipe == known.recipe
    assert {row["state"] for row in opened.status()} == {"complete"}
    assert [point["policy"] for point in opened.points()] == known.policies
    assert opened.points() == lw.Run(second.recipe, quiet=True).points()
    page = page_of(second)
    assert "older" not in table_of(second)
    for policy in known.policies:
        assert policy in page
        assert f"| {policy} |" in table_of(second)
    out = StringIO()
    found = status.run(second, Console(file=out, width=200))
    assert {one.path for one in found} == {step.path for step in second.everything()}
    assert "Everything is up to date." in out.getvalue()
    assert "train/both" not in out.getvalue(), "a name that leads to it is as good as a recipe"

    # Another protocol is another folder; what the recipe says is in the table, and so is the other.
    before = {path: path.read_bytes() for path in (first.directory / "eval").rglob("*.jsonl")}
    fewer = {**world, "compositions": both, "eval": {**world["eval"], "samples": 1}}
    third = make(fewer)
    assert {path: path.read_bytes() for path in before} == before, "never overwritten"
    assert len(list((first.directory / "eval").rglob("samples.jsonl"))) == len(before) + 2
    assert {len(results[0].problems) for results in summaries(third).values()} == {3}
    assert list(other_protocols(third)) == ["samples = 2"]
    page_of(third)
    assert "***samples = 2***" in table_of(third)
    assert table_of(third).count("| both |") == 2
    # A protocol that nothing was evaluated by: the page still has the results.
    page = page_of(run_of({**fewer, "eval": {**fewer["eval"], "samples": 3}}))
    assert "Nothing is evaluated by this recipe&#39;s protocol" in page
    assert table_of(third).count("| both |") == 2

    # Removing one is a command.
    with pytest.raises(InputError, match=r"(?s)train/both@\w{8} .*eval/both .*--yes"):
        forget.forget(second, "both", Console(quiet=True), yes=False)
    forget.forget(second, "both", Console(quiet=True), yes=True)
    assert with_others(second).policies == ["base", "brief-only", "other"]
    assert not list((second.directory / "train").glob("both*"))
    assert not (second.directory / "train" / "both").is_symlink()
    with pytest.raises(InputError, match="--policy nobody: "):
        forget.forget(second, "nobody", Console(quiet=True), yes=True)
    with pytest.raises(InputError, match=r"--policy \*: "):
        forget.forget(second, "*", Console(quiet=True), yes=True)


@pytest.mark.slow
def test_a_report_on_a_changed_recipe_shows_what_is_there_and_how_it_differs(
    world: dict[str, Any], tmp_path: Path
) -> None:
    world = {**world, "runs": str(tmp_path / "runs"), "compositions": {"both": world["compositions"]["both"]}}
    run = make(world)
    good = page_of(run)
    rows = table_of(run)
    points = json.loads((run.directory / "report" / "points.json").read_text())
    changed = run_of({**world, "compositions": {"both": {"weights": {"acc": 0.25, "brief": 0.75}}}})
    assert list(older_stages(changed)) == ["train/both", "eval/both/bench"]
    page = page_of(changed)
    assert "both (older recipe)" in page
    assert "compositions.both.weights.acc: 0.5 -&gt; 0.25" in page
    assert table_of(changed) == rows.replace("| both |", "| both (older recipe) |")
    assert json.loads((run.directory / "report" / "points.json").read_text()) == points, "the weights it has"
    # A change that reaches everything: the cache, the loom and all rows are still there.
    changed = run_of({**world, "rollout": {**world["rollout"], "max_tokens": 10}})
    assert "rollout" in older_stages(changed)
    page = page_of(changed)
    assert "rollout.max_tokens: 12 -&gt; 10" in page
    assert len(page) > 0.95 * len(good)
    assert as_found(changed).stage("reference").folder == run.stage("reference").folder
    assert changed.stage("reference").state() == "missing"
    assert page_of(run) == good


@pytest.mark.slow
def test_a_directory_is_opened_with_what_its_recipe_would_not_compute_again(
    world: dict[str, Any], tmp_path: Path
) -> None:
    """What another recipe made of another cache has results to show, and is nothing that is left to do."""
    world = {**world, "runs": str(tmp_path / "runs"), "compositions": {"both": world["compositions"]["both"]}}
    make(world)
    shorter = {**world, "rollout": {**world["rollout"], "max_tokens": 10}}
    shorter["anchors"] = {"brief": world["anchors"]["brief"]}
    run = make({**shorter, "compositions": {"brief-only": {"weights": {"brief": 1.0}}}})
    opened = lw.Run.open(run.directory, quiet=True)
    assert opened.policies == ["base", "brief-only"]
    assert {row["state"] for row in opened.status()} == {"complete"}
    assert sorted(point["policy"] for point in opened.points()) == ["base", "both", "brief-only"]
