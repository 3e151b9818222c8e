"""Results live on disk: whatever a command made in a run directory is seen by every later one, and kept."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_weave.cli.options import writing
from lightning_weave.errors import InputError
from lightning_weave.pipeline import run
from lightning_weave.progress import Progress
from lightning_weave.report import report
from lightning_weave.report.results import other_protocols, summaries
from lightning_weave.runs.known import as_it_stands, differing, with_known
from lightning_weave.runs.steps import Steps
from lightning_weave.views import forget, status
from tiny import make_world, save_prompts, steps_of

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("known")
    recipe = make_world(root, prompts=4)
    bench = save_prompts(root / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 2, "max_tokens": 8, "chat": False, "profile": "paper"}
    recipe["report"] = {"students": [], "trajectories": 4}
    recipe["train"] |= {"epochs": 1}
    return recipe


def make(recipe: dict[str, Any]) -> Steps:
    steps = steps_of(recipe)
    with writing(steps):
        run.run(steps, QUIET)
    return steps


def page_of(steps: Steps) -> str:
    return report.run([steps], QUIET).read_text()


def table_of(steps: Steps) -> str:
    return (steps.store.run_dir / "report" / "tables" / "results.md").read_text()


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
    known = with_known(second)
    assert known.policies == ["base", "brief-only", "both", "other"]
    assert list(known.recipe.anchors) == ["brief", "acc"]
    assert summaries(known).keys() == good.keys() | {"brief-only"}
    page = page_of(second)
    assert "stale" not in table_of(second)
    for policy in known.policies:
        assert policy in page
        assert f"| {policy} |" in table_of(second)
    out = StringIO()
    found = status.run(second, Console(file=out, width=200))
    assert {one.step.path for one in found} == {step.path for step in second.everything()}
    assert "Everything is up to date." in out.getvalue()
    assert "train/both" in out.getvalue()
    assert "not in this recipe" in out.getvalue()

    # Another protocol stands beside; what the recipe says is in the table, and so is the other.
    before = {path: path.read_bytes() for path in (first.store.run_dir / "eval").rglob("*.jsonl")}
    fewer = {**world, "compositions": both, "eval": {**world["eval"], "samples": 1}}
    third = make(fewer)
    assert {path: path.read_bytes() for path in before} == before, "never overwritten"
    assert {len(results[0].problems) for results in summaries(third).values()} == {3}
    assert list(other_protocols(third)) == ["samples = 2"]
    page_of(third)
    assert "***samples = 2***" in table_of(third)
    assert table_of(third).count("| both |") == 2
    # A protocol that nothing was evaluated by: the page still has the results.
    page = page_of(steps_of({**fewer, "eval": {**fewer["eval"], "samples": 3}}))
    assert "Nothing is evaluated by this recipe&#39;s protocol" in page
    assert table_of(third).count("| both |") == 2

    # Removing one is a command.
    with pytest.raises(InputError, match=r"(?s)train/both.*eval/both.*--yes"):
        forget.run(second, "both", Console(quiet=True), yes=False)
    forget.run(second, "both", Console(quiet=True), yes=True)
    assert with_known(second).policies == ["base", "brief-only", "other"]
    assert "compositions.both" not in (second.store.run_dir / "made.toml").read_text()
    assert not (second.store.run_dir / "train" / "both").exists()
    with pytest.raises(InputError, match="--policy nobody: nothing of it"):
        forget.run(second, "nobody", Console(quiet=True), yes=True)


@pytest.mark.slow
def test_a_report_on_a_changed_recipe_shows_what_is_there_as_stale(world: dict[str, Any], tmp_path: Path) -> None:
    world = {**world, "runs": str(tmp_path / "runs"), "compositions": {"both": world["compositions"]["both"]}}
    steps = make(world)
    good = page_of(steps)
    rows = table_of(steps)
    points = json.loads((steps.store.run_dir / "report" / "points.json").read_text())
    changed = steps_of({**world, "compositions": {"both": {"weights": {"acc": 0.25, "brief": 0.75}}}})
    assert list(differing(changed)) == ["train/both", "eval/both/bench"]
    page = page_of(changed)
    assert "both (stale)" in page
    assert "compositions.both.weights.acc: 0.5 -&gt; 0.25" in page
    assert table_of(changed) == rows.replace("| both |", "| both (stale) |")
    assert json.loads((steps.store.run_dir / "report" / "points.json").read_text()) == points, "the weights it has"
    # A change that reaches everything: the cache, the loom and all rows are still there.
    changed = steps_of({**world, "rollout": {**world["rollout"], "max_tokens": 10}})
    assert "rollout" in differing(changed)
    page = page_of(changed)
    assert "rollout.max_tokens: 12 -&gt; 10" in page
    assert len(page) > 0.95 * len(good)
    assert as_it_stands(changed).store.stage(as_it_stands(changed).reference).state() == "done"
    assert changed.store.stage(changed.reference).state() == "stale"
    assert page_of(steps) == good
