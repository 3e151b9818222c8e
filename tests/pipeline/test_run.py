"""A whole recipe with one command: everything once, and afterwards only what a change reaches."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.directory import with_others
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.stages import run as run_stage
from lightning_weave.stages.costs import read_spent
from lightning_weave.store.ledger import read_ledger
from lightning_weave.views.clean import unneeded_folders
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)
PARTS = ("prompts", "rollout", "reference", "score", "train", "eval")


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path, prompts=4)
    bench = save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    recipe["compositions"] = {name: recipe["compositions"][name] for name in ("acc-only", "both")}
    return recipe


def written(run: Run) -> dict[str, int]:
    """When each file of the stages was written, of this recipe's and of all others."""
    folders = [path for part in PARTS for path in run.directory.glob(f"{part}*")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(run.directory)): path.stat().st_mtime_ns for path in files}


@pytest.mark.slow
def test_everything_is_made_once_and_then_only_what_a_change_reaches(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    run_stage.run_all(run, QUIET)
    assert {stage.state() for stage in run.everything()} == {"complete"}
    before = written(run)
    run_stage.run_all(run_of(recipe), QUIET)
    assert written(run) == before
    weights = recipe["compositions"]["both"]["weights"]
    recipe["compositions"]["both"]["weights"] = {"acc": 0.25, "brief": 0.75}
    changed = run_of(recipe)
    run_stage.run_all(changed, QUIET)
    assert {stage.state() for stage in (*run.everything(), *changed.everything())} == {"complete"}
    assert not list(run.directory.rglob("stage.json"))
    after = written(run)
    assert {path: after[path] for path in before} == before, "nothing of the old ones was touched"
    new = {path.rpartition("@")[0] for path in after.keys() - before.keys()}
    assert new == {"train/both", "eval/both/bench"}
    spent = read_spent(run.directory)
    assert {(row["stage"], row["name"]) for row in spent.discarded} == {("train", "both"), ("eval", "both/bench")}
    assert [row["name"] for row in spent.kept if row["stage"] == "train"] == ["acc-only", "both"]

    recipe["compositions"]["both"]["weights"] = weights
    ledger = read_ledger(run.directory)
    run_stage.run_all(run_of(recipe), QUIET)
    assert written(run) == after, "changing back writes nothing"
    assert read_ledger(run.directory) == ledger
    for path in ("train/both", "eval/both/bench"):
        (wanted,) = [stage for stage in run.everything() if stage.path == path]
        assert (run.directory / path).resolve() == wanted.folder.resolve()


@pytest.mark.slow
def test_other_names_cost_nothing(recipe: dict[str, Any]) -> None:
    """Names of anchors and compositions decide nothing: what is there is found under its earlier name."""
    run = run_of(recipe)
    run_stage.run_all(run, QUIET)
    before = written(run)
    ledger = read_ledger(run.directory)
    recipe["anchors"] = {f"the-{name}": anchor for name, anchor in reversed(recipe["anchors"].items())}
    recipe["compositions"] = {
        f"the-{name}": {"weights": {f"the-{anchor}": weight for anchor, weight in one["weights"].items()}}
        for name, one in recipe["compositions"].items()
    }
    renamed = run_of(recipe)
    assert {stage.state() for stage in renamed.everything()} == {"complete"}
    run_stage.run_all(renamed, QUIET)
    assert written(run) == before
    assert read_ledger(run.directory) == ledger
    assert (run.directory / "train" / "the-both" / "final" / "config.json").is_file()
    assert (run.directory / "eval" / "the-both" / "bench" / "samples.jsonl").is_file()
    assert with_others(renamed).policies == ["base", "the-acc-only", "the-both"], "not a second time"


@pytest.mark.slow
def test_a_file_system_without_symlinks_is_enough(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    run = run_of(recipe)
    run_stage.run_all(run, QUIET)
    assert {stage.state() for stage in run.everything()} == {"complete"}
    before = written(run)
    run_stage.run_all(run_of(recipe), QUIET)
    assert written(run) == before
    assert not [path for path in run.directory.rglob("*") if path.is_symlink() or ".tmp-" in path.name]
    spent = read_spent(run.directory)
    assert (len(spent.kept), spent.discarded) == (len(read_ledger(run.directory)), [])
    recipe["compositions"]["both"]["alpha"] = 3.0
    assert (
        unneeded_folders([run_of(recipe)])
        == [stage.folder for stage in run.everything() if "/both" in stage.path][::-1]
    )
    assert list(summaries(run_of(recipe))) == ["base", "acc-only"]


def test_only_keeps_what_the_named_policies_need(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(recipe)
    whole = [step.path for step in run.everything()]

    def only(policy: str) -> Run:
        return run.derive(recipe=run_stage.narrow(run, [policy]))

    paths = [step.path for step in only("acc-only").everything()]
    assert [path for path in whole if path not in paths] == [
        "score/brief-post",
        "score/brief-pre",
        "train/both",
        "eval/both/bench",
    ]
    prints = {step.path: step.fingerprint for step in run.everything()}
    assert all(prints[step.path] == step.fingerprint for step in only("acc-only").everything())
    assert [step.path for step in only("base").everything()] == ["eval/base/bench"]
    with pytest.raises(InputError, match="--only acc: no such policy; this recipe has base, acc-only, both"):
        run_stage.narrow(run, ["acc"])
    cases = {name: {"wrong": [name], "right": ["base"]} for name in ("acc-only", "both")}
    shown = run_stage.narrow(run_of({**recipe, "report": {"cases": cases, "students": ["both"]}}), ["acc-only"]).report
    assert (list(shown.cases), shown.students) == (["acc-only"], [])


def test_only_finds_the_folders_of_the_whole(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Of two models of one name the first has the plain folder, unless only the second is wanted."""
    for anchor in ("acc", "brief"):
        Path(recipe["anchors"][anchor]["post"]).rename(tmp_path / f"{anchor}-models")
        (tmp_path / anchor).mkdir()
        recipe["anchors"][anchor]["post"] = str((tmp_path / f"{anchor}-models").rename(tmp_path / anchor / "post"))
    recipe["compositions"] = {"brief-only": {"weights": {"brief": 1.0}}}
    run = run_of(recipe)
    post = run.scores_of("brief")[0]
    assert [stage.path for stage in (run.scores_of("acc")[0], post)] == ["score/post", "score/brief.post"]
    only = run.derive(recipe=run_stage.narrow(run, ["brief-only"]))
    assert only.scores_of("brief")[0].path == "score/post"
    assert only.scores_of("brief")[0].fingerprint == post.fingerprint
    post.begin()
    assert only.scores_of("brief")[0].folder == post.folder
