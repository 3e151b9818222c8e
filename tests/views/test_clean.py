"""clean removes what no recipe needs, after it was agreed to, and nothing else."""

import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tiny
from lightning_weave.cli.commands import writing
from lightning_weave.errors import InputError
from lightning_weave.stages.run import make_students
from lightning_weave.stages.sweep import Planned, extend
from lightning_weave.store import Stage
from lightning_weave.views import clean
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of
from report.evaluated import write_evaluations


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def files_of(run_dir: Path) -> dict[str, int]:
    """What there is and when it was written, but for what says who holds the run."""
    files = [path for path in run_dir.rglob("*") if path.is_file() and path.name not in (".lock", ".holder")]
    return {str(path.relative_to(run_dir)): path.stat().st_mtime_ns for path in files}


def train(recipe: dict[str, Any]) -> Path:
    """Train what a recipe says, as a command does; returns the folder of `only`."""
    run = run_of(recipe)
    with writing(run):
        make_students(run, QUIET)
    return run.stage("train", "only").folder


@pytest.mark.slow
def test_what_no_recipe_needs_is_listed_and_removed_only_when_agreed(recipe: dict[str, Any]) -> None:
    second = {**recipe, "compositions": {"only": {"weights": {"one": 1.0}, "alpha": 1.0}}}
    run = make_cache(recipe)
    old = train(second)
    new = train(recipe)
    run_dir = run.directory
    (run_dir / "rollout@01234567").mkdir()
    (run_dir / "rollout@01234567" / "00000.safetensors").write_bytes(b"x" * 5000)
    (new / ".tmp-final").mkdir()
    (run_dir / "eval" / "gone" / "bench@01234567").mkdir(parents=True)
    listed = {
        "rollout@01234567": "5.0 kB",
        f"train/{old.name}": r"\d.* of device time",
        f"train/{new.name}/checkpoints": r"\d.*",
        f"train/{new.name}/.tmp-final": "0 bytes",
        "eval/gone/bench@01234567": "0 bytes",
    }
    before = files_of(run_dir)
    with pytest.raises(InputError) as refused:
        clean.run([run_of(recipe)], Console(quiet=True), yes=False)
    lines = str(refused.value).splitlines()
    found = dict(re.fullmatch(r"  (\S+)  (.*)", line).groups() for line in lines if line.startswith("  "))  # type: ignore[union-attr]
    assert found.keys() == listed.keys()
    assert all(re.fullmatch(pattern, found[name]) for name, pattern in listed.items()), found
    assert "To remove them: --yes. To keep those of another recipe: --also RECIPE" in lines[-1]
    assert files_of(run_dir) == before
    kept = clean.run([run_of(recipe), run_of(second)], Console(quiet=True), yes=True)
    assert {str(path.relative_to(run_dir)) for path in kept} == {
        *(listed.keys() - {f"train/{old.name}"}),
        f"train/{old.name}/checkpoints",
    }
    assert {
        stage.state() for one in (run, run_of(second)) for stage in one.everything() if "eval" not in stage.path
    } == {"complete"}
    before = files_of(run_dir)
    assert clean.run([run_of(recipe)], Console(quiet=True), yes=True) == [old]
    assert files_of(run_dir) == {name: time for name, time in before.items() if old.name not in name}
    out = StringIO()
    assert clean.run([run_of(recipe)], Console(file=out, width=200), yes=False) == []
    assert "nothing to remove" in out.getvalue()


def test_the_newest_preview_of_a_composition_is_kept(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    first, last = (Stage(run.directory, "preview/only/aime-2024", {"problems": count}) for count in (5, 20))
    for stage in (first, last):
        stage.begin()
    assert clean.unneeded_folders([run]) == [first.folder]


@pytest.mark.slow
def test_what_the_directorys_recipe_or_a_name_of_a_sweep_leads_to_is_kept(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    own = train(recipe)
    plan = [Planned("one-0.500", run.recipe.compositions["only"].model_copy(update={"alpha": 5.0}), False)]
    swept = extend(run, plan)
    make_students(swept, QUIET, ["one-0.500"])
    other = {**recipe, "compositions": {"another": {"weights": {"one": 1.0}, "alpha": 7.0}}}
    assert clean.unneeded_folders([run_of(other)]) == [], "recipe.toml names one, a link the other"
    folder = swept.stage("train", "one-0.500").folder
    assert clean.unneeded_folders([run]) == []
    (run.directory / "train" / "one-0.500").unlink()
    assert clean.unneeded_folders([run]) == [folder]
    (run.directory / "recipe.toml").unlink()
    assert clean.unneeded_folders([run_of(other)]) == [folder], "the plain name still leads to the first"
    (run.directory / "train" / "only").unlink()
    assert clean.unneeded_folders([run_of(other)]) == sorted([folder, own])


@pytest.mark.slow
def test_a_link_to_what_is_removed_goes_and_others_stay(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    old = train(recipe)
    new = train({**recipe, "compositions": {"only": {"weights": {"one": 1.0}, "alpha": 1.0}}})
    (run.directory / "train" / "only").unlink()
    (run.directory / "train" / "only").symlink_to(old.name)  # the last command that failed wanted the old one
    clean.run(
        [run_of({**recipe, "compositions": {"only": {"weights": {"one": 1.0}, "alpha": 1.0}}})],
        Console(quiet=True),
        yes=True,
    )
    assert not old.exists()
    assert new.is_dir()
    assert [path for path in run.directory.rglob("*") if path.is_symlink() and not path.exists()] == []
    assert (run.directory / "rollout").is_symlink()


@pytest.mark.slow
def test_where_models_are_gone_what_names_lead_to_is_kept(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    folder = train(recipe)
    wrong = {**recipe, "anchors": {"one": {"post": "/gone", "pre": "/gone-too"}}}
    (run.directory / "score" / "other@01234567").mkdir()
    assert clean.unneeded_folders([run_of(wrong)]) == [run.directory / "score" / "other@01234567"]
    assert folder.is_dir()


def test_recipes_of_different_runs_are_refused(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    with pytest.raises(InputError, match="not of"):
        clean.run([run_of(recipe), run_of({**recipe, "name": "another"})], Console(quiet=True), yes=True)


def test_a_level_whose_name_could_be_a_fingerprint_keeps_its_evaluation(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path, prompts=2)
    recipe["eval"] = {"benchmarks": [f"file:{tiny.save_prompts(tmp_path / 'bench.jsonl', 3)}"]}
    levels = {"10000000": {"acc": 1.0}, "20000000": {"brief": 1.0}}
    control = {"prefix": "Budget {level}. "}
    recipe["compositions"] = {"dial": {"levels": levels, "default": "10000000", "control": control}}
    run = run_of(recipe)
    write_evaluations(run, {"base": (0.5, 50.0), "dial@10000000": (0.5, 40.0)})
    assert clean.unneeded_folders([run]) == []
