"""A whole recipe with one command: everything once, and afterwards only what a change makes stale."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.errors import InputError
from lightning_weave.pipeline import run
from lightning_weave.progress import Progress
from lightning_weave.runs.costs import read_spent
from lightning_weave.runs.steps import Steps
from tiny import make_world, save_prompts, steps_of

QUIET = Progress(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path, prompts=4)
    bench = save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    recipe["compositions"] = {name: recipe["compositions"][name] for name in ("acc-only", "both")}
    return recipe


def written(steps: Steps) -> dict[str, int]:
    """When each file of the stages was written."""
    folders = [steps.store.run_dir / step.path for step in steps.everything()]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(steps.store.run_dir)): path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_everything_is_made_once_and_then_only_what_is_stale(recipe: dict[str, Any]) -> None:
    steps = steps_of(recipe)
    run.run(steps, QUIET)
    assert {steps.store.stage(step).state() for step in steps.everything()} == {"done"}
    before = written(steps)
    run.run(steps_of(recipe), QUIET)
    assert written(steps) == before
    recipe["compositions"]["both"]["weights"] = {"acc": 0.25, "brief": 0.75}
    changed = steps_of(recipe)
    with pytest.raises(InputError) as refused:
        run.run(changed, QUIET)
    said = str(refused.value)
    assert "train/both" in said
    assert "compositions.both.weights.acc: 0.5 -> 0.25" in said
    assert "eval/both/bench" in said
    assert "score" not in said
    assert "of device time" in said
    assert "--yes" in said
    assert written(steps) == before, "nothing was touched"
    run.run(changed, QUIET, yes=True)
    assert not list(steps.store.run_dir.rglob(".aside-*")), "the new ones are whole"
    assert not list(steps.store.run_dir.rglob("step.json"))
    spent = read_spent(steps.store.run_dir)
    assert {(row["stage"], row["name"]) for row in spent.discarded} == {("train", "both"), ("eval", "both/bench")}
    assert [row["name"] for row in spent.kept if row["stage"] == "train"] == ["acc-only", "both"]
    after = written(changed)
    touched = {path.split("/")[1] for path in after if after[path] != before.get(path)}
    assert touched == {"both"}
    assert {changed.store.stage(step).state() for step in changed.everything()} == {"done"}


def test_only_keeps_what_the_named_policies_need(recipe: dict[str, Any], tmp_path: Path) -> None:
    steps = steps_of(recipe)
    whole = [step.path for step in steps.everything()]
    paths = [step.path for step in run.narrowed(steps, ["acc-only"]).everything()]
    assert [path for path in whole if path not in paths] == [
        "score/brief-post",
        "score/brief-pre",
        "train/both",
        "eval/both/bench",
    ]
    prints = {step.path: step.fingerprint for step in steps.everything()}
    assert all(prints[step.path] == step.fingerprint for step in run.narrowed(steps, ["acc-only"]).everything())
    assert [step.path for step in run.narrowed(steps, ["base"]).everything()] == ["eval/base/bench"]
    with pytest.raises(InputError, match="--only acc: no such policy; this recipe has base, acc-only, both"):
        run.narrowed(steps, ["acc"])


def test_only_renames_no_folder(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Of two models of one name the first has the plain folder, also when only the second is wanted."""
    for anchor in ("acc", "brief"):
        Path(recipe["anchors"][anchor]["post"]).rename(tmp_path / f"{anchor}-models")
        (tmp_path / anchor).mkdir()
        recipe["anchors"][anchor]["post"] = str((tmp_path / f"{anchor}-models").rename(tmp_path / anchor / "post"))
    recipe["compositions"] = {"brief-only": {"weights": {"brief": 1.0}}}
    steps = steps_of(recipe)
    only = run.narrowed(steps, ["brief-only"])
    assert only.scores_of("brief")[0].path == steps.scores_of("brief")[0].path
    assert steps.scores_of("brief")[0].path.startswith("score/post-")
