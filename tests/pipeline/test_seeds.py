"""`train.seeds`: replicates of a composition that differ by their seed, and results that are means over them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import metadata_load
from rich.console import Console

import lightning_weave as lw
from lightning_weave.cli.commands import app
from lightning_weave.config import check_recipe, dump_recipe, load_recipe
from lightning_weave.directory import with_others
from lightning_weave.progress import Progress
from lightning_weave.report.results import read_results, run_points, summaries
from lightning_weave.run import Run
from lightning_weave.stages.run import narrow
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.sweep import extend, plan_sweep
from lightning_weave.views import export, status
from lightning_weave.views.clean import forget, unneeded_folders
from report.evaluated import write_evaluations
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)
SEEDS = ["both", "both~2", "both~3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose cache is complete and whose composition is trained with its first seed."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("seeds")
    recipe = make_world(root, prompts=8)
    bench = save_prompts(root / "bench.jsonl", 40, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 6, "chat": False}
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    recipe["report"] = {"students": []}
    recipe["train"] |= {"lora": {"rank": 2, "targets": "all-linear"}}
    (root / "r.toml").write_text(dump_recipe(check_recipe(recipe)))
    make_cache(open_run(root / "r.toml"), QUIET)
    make(root / "r.toml")
    return root / "r.toml"


@pytest.fixture(scope="module")
def trained(recipe: Path) -> Run:
    """With three seeds, and evaluations that differ from seed to seed."""
    make(recipe, "train.seeds=3")
    run = open_run(recipe)
    results = {"base": (0.4, 200.0), "both": (0.6, 150.0), "both~2": (0.7, 140.0), "both~3": (0.5, 130.0)}
    write_evaluations(run, results)
    return run


def make(recipe: Path, *sets: str) -> None:
    """Train by the command."""
    app(["train", str(recipe), *(word for change in sets for word in ("--set", change))], standalone_mode=False)


def open_run(recipe: Path, *sets: str) -> Run:
    return Run(load_recipe(recipe, sets or ["train.seeds=3"]), str(recipe))


def weights(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def test_further_seeds_reuse_the_first_and_equal_what_is_trained_by_hand(recipe: Path, trained: Run) -> None:
    first, *others = (trained.stage("train", name) for name in SEEDS)
    assert first.fingerprint == open_run(recipe, "train.seeds=1").stage("train", "both").fingerprint
    assert first.manifest_path.stat().st_mtime_ns < min(one.manifest_path.stat().st_mtime_ns for one in others)
    assert len({weights(one.folder) for one in (first, *others)}) == 3
    for number, one in enumerate(others, start=1):
        same = {**one.settings, "train": {**one.settings["train"], "seed": 1234}}
        assert one.settings["train"]["seed"] == 1234 + number
        assert same == first.settings
        assert [each.fingerprint for each in one.inputs] == [each.fingerprint for each in first.inputs]
    by_hand = recipe.parent / "by-hand"
    shutil.copytree(trained.directory, by_hand / "tiny", symlinks=True)
    for folder in (by_hand / "tiny" / "train").glob("both*"):
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    make(recipe, f"runs={by_hand}", "train.seed=1236")
    assert weights(by_hand / "tiny" / "train" / "both") == weights(others[1].folder)
    again = open_run(recipe, "train.seed=1236").stage("train", "both")
    assert (again.folder, again.complete) == (others[1].folder, True), "found under the name of the replicate"


def test_rows_are_means_over_seeds_with_intervals_that_contain_their_spread(trained: Run) -> None:
    each, (pooled,) = summaries(trained, each_seed=True), summaries(trained)["both"]
    assert list(each) == ["base", *SEEDS]
    assert list(summaries(trained)) == ["base", "both"]
    accuracy = [each[name][0].accuracy for name in SEEDS]
    assert pooled.accuracy == pytest.approx(sum(accuracy) / 3)
    assert [one.accuracy for one in pooled.seeds] == accuracy
    table, alone = read_results(trained), read_results(trained, each_seed=True)
    assert table.loc[("", "both"), ("Average", "accuracy")] == pytest.approx(pooled.accuracy)
    width, widths = (
        [one.loc[("", name), ("Average", "aes_high")] - one.loc[("", name), ("Average", "aes_low")] for name in names]
        for one, names in ((table, ["both"]), (alone, SEEDS))
    )
    assert width[0] > max(widths), "seeds that differ by ten points say little about a fourth"
    base, point = run_points(trained)
    assert (point["policy"], point["seeds"], "seeds" in base) == ("both", 3, False)
    assert "seeds" not in run_points(open_run(Path(str(trained.arguments)), "train.seeds=1"))[1]


def test_an_older_or_unequal_seed_is_not_averaged_with_the_others(recipe: Path, trained: Run) -> None:
    """A report takes the newest folder where the recipe's own is missing: one with another alpha does not count."""
    other = load_recipe(recipe, ["train.seeds=3", "compositions.both.alpha=3"])
    found = Run(other, existing=True)
    assert [one.accuracy for one in summaries(found)["both"][0].seeds] == [
        one.accuracy for one in summaries(trained)["both"][0].seeds
    ], "all three are of the same older recipe"
    folder = recipe.parent / "unequal"
    shutil.copytree(trained.directory, folder / "tiny", symlinks=True)
    make(recipe, f"runs={folder}", "compositions.both.alpha=3")
    moved = Run(other.model_copy(update={"runs": str(folder)}), existing=True)
    write_evaluations(Run(moved.recipe), {"both": (0.9, 100.0)})
    assert summaries(moved)["both"][0].seeds == ()
    make(recipe, f"runs={folder}", "compositions.both.alpha=3", "train.seeds=3")
    moved = Run(moved.recipe, existing=True)
    assert summaries(moved)["both"][0].seeds == (), "the others are trained again, but not evaluated"
    assert summaries(moved)["both"][0].accuracy == summaries(moved, each_seed=True)["both"][0].accuracy


def test_commands_name_a_composition_or_one_of_its_seeds(recipe: Path, trained: Run, tmp_path: Path) -> None:
    """Everything that lists stages has the replicates; what describes targets, which they share, has one."""
    assert trained.policies == ["base", *SEEDS]
    assert [stage.path for stage in trained.stages("train", ["both"])] == [f"train/{name}" for name in SEEDS]
    assert [stage.path for stage in trained.stages("train", ["both~3"])] == ["train/both~3"]
    assert list(narrow(trained, ["both"]).compositions) == SEEDS
    paths = [one.path for one in status.run(trained, Console(quiet=True))]
    assert [path for path in paths if path.startswith("train/")] == [f"train/{name}" for name in SEEDS]
    assert unneeded_folders([trained]) == []
    planned = extend(trained, plan_sweep(trained.recipe, [0.25]))
    assert [name for name in planned.recipe.compositions if name not in SEEDS] == [
        f"brief-0.250{seed}" for seed in ("", "~2", "~3")
    ]
    shutil.copytree(trained.directory, tmp_path / "tiny", symlinks=True)
    moved = open_run(recipe, "train.seeds=3", f"runs={tmp_path}")
    forget(moved, "both", Console(quiet=True), yes=True)
    assert not list((tmp_path / "tiny").glob("*/both*"))


def test_one_seed_can_be_run_and_the_directory_keeps_the_whole_recipe(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.directory, tmp_path / "tiny", symlinks=True)
    sets = ["train.seeds=3", f"runs={tmp_path}"]
    shutil.rmtree(open_run(Path(str(trained.arguments)), *sets).stage("train", "both~2").folder)
    lw.Run(str(trained.arguments), sets, quiet=True).run(until="train", only=["both~2"])
    assert open_run(tmp_path / "tiny" / "recipe.toml").stage("train", "both~2").complete
    assert list(load_recipe(tmp_path / "tiny" / "recipe.toml").compositions) == SEEDS


def test_a_merge_of_students_has_a_replicate_for_each_of_their_seeds(trained: Run, tmp_path: Path) -> None:
    shutil.copytree(trained.directory, tmp_path / "tiny", symlinks=True)
    merges = [
        f'policies.{name}={{merge = "linear", weights = {{{part} = 0.5}}}}'
        for name, part in (("blend", "both"), ("other", "acc"))
    ]
    run = open_run(Path(str(trained.arguments)), "train.seeds=3", f"runs={tmp_path}", *merges)
    assert run.policies == ["base", *SEEDS, "blend", "other", "blend~2", "blend~3"]
    for number in ("", "~2", "~3"):
        (student,) = run.stage("merge", f"blend{number}").inputs
        assert student.fingerprint == trained.stage("train", f"both{number}").fingerprint
    assert list(narrow(run, ["blend"]).policies) == ["blend", "blend~2", "blend~3"]
    assert "~" not in dump_recipe(run.recipe)
    write_evaluations(run, {"blend": (0.5, 160.0), "blend~2": (0.6, 150.0), "blend~3": (0.7, 140.0)})
    found = summaries(run)
    assert list(found) == ["base", "both", "blend"]
    assert len(found["blend"][0].seeds) == 3


def test_a_recipe_is_written_without_its_replicates(trained: Run) -> None:
    written = dump_recipe(trained.recipe)
    assert "~" not in written
    assert "seeds = 3" in written
    assert check_recipe(
        json.loads(json.dumps(trained.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)))
    )
    assert list(check_recipe(lw.Recipe.load(trained.arguments).model_dump(mode="json", by_alias=True)).compositions)
    fewer = with_others(open_run(Path(str(trained.arguments)), "train.seeds=1"))
    assert fewer.policies == ["base", "both"], "a recipe with one seed stands on one"


@pytest.mark.parametrize("seeds", ["0", "-1", "three", "1.5"])
def test_wrong_numbers_of_seeds_are_refused(recipe: Path, seeds: str) -> None:
    with pytest.raises(lw.InputError, match=f"train.seeds = .*{seeds}"):
        make(recipe, f"train.seeds={seeds}")


def test_names_of_replicates_cannot_be_taken(recipe: Path) -> None:
    with pytest.raises(lw.InputError, match=r"both~2.*must be a plain name"):
        load_recipe(recipe, ['compositions."both~2".weights={acc = 1.0}'])


def test_levels_of_replicates_are_policies() -> None:
    levels = {"low": {"acc": 1.0}, "high": {"acc": 0.5, "brief": 0.5}}
    effort = {"levels": levels, "default": "low", "control": {"prefix": "{level}+"}}
    anchors = {name: {"post": f"{name}+", "pre": f"{name}-"} for name in ("acc", "brief")}
    data: dict[str, Any] = {"name": "r", "student": {"model": "s"}, "anchors": anchors, "train": {"seeds": 2}}
    run = run_of({**data, "compositions": {"effort": effort}, "prompts": {"chat": False}})
    assert run.policies[1:] == [f"effort{seed}{level}" for seed in ("", "~2") for level in ("", "@low", "@high")]
    assert run.composition_of("effort~2@low") == "effort~2"
    assert run.recipe.asked("effort~2@low").level == "low"


def test_the_card_with_its_report_states_seeds_and_problems(trained: Run, tmp_path: Path) -> None:
    folder = export.card(trained, "both", tmp_path / "student", QUIET)
    assert weights(trained.stage("train", "both").folder) == (folder / "model.safetensors").read_bytes()
    card = (folder / "README.md").read_text()
    assert "These weights, of training seed 1234, number 1 of 3: bench" in card
    assert card.count("| both |") == 1
    own, mean = (summaries(trained, each_seed=seed)["both"][0] for seed in (True, False))
    (result,) = metadata_load(folder / "README.md")["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == round(own.accuracy, 2), "of these weights, and the mean next to it"
    assert f"(mean of all: {mean.accuracy:.2f} ± " in result["metrics"][0]["name"]
    page = (folder / "report" / "index.html").read_text()
    sentences = ("3 seeds × 40 problems", "with 3 training seeds", "Training seeds: 3.", "single training seeds")
    assert [one for one in sentences if one not in page] == []
    assert "Not evaluated yet" not in page
    table = (folder / "report" / "tables" / "results.md").read_text()
    assert table.count("| both |") == 1
    assert "Training seeds: 3." in table
    assert "AES high,Seeds," in (folder / "report" / "tables" / "results.csv").read_text()
