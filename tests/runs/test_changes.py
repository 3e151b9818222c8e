"""Changes that do not matter compute nothing; a change that does computes another folder and leaves the old one."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.errors import InputError
from lightning_weave.stages import reference
from lightning_weave.stages.run import make_students
from lightning_weave.store.ledger import read_ledger
from lightning_weave.views import clean
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def states(recipe: dict[str, Any]) -> dict[str, str]:
    run = run_of(recipe)
    made = [stage for stage in run.everything() if not stage.path.startswith("eval/")]
    return {stage.path: stage.state() for stage in made}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with what is in it and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.slow
def test_changes_that_do_not_matter_compute_nothing(recipe: dict[str, Any], tmp_path: Path) -> None:
    make_students(make_cache(recipe), QUIET)
    recipe["rollout"]["batch_size"] = 1
    recipe["score"]["token_budget"] = 200
    assert set(states(recipe).values()) == {"complete"}, "how it is executed"
    recipe["anchors"]["another-name"] = recipe["anchors"].pop("one")
    recipe["compositions"] = {"another": {"weights": {"another-name": 1.0}}}
    assert set(states(recipe).values()) == {"complete"}
    runs = Path(recipe["runs"])
    shutil.move(runs / recipe["name"], runs / "renamed")
    recipe["name"] = "renamed"
    assert set(states(recipe).values()) == {"complete"}
    before = contents(runs / "renamed")
    make_students(make_cache(recipe), QUIET)
    assert contents(runs / "renamed") == before
    recipe["compositions"]["another"]["alpha"] = 3.0
    assert states(recipe)["train/another"] == "missing"
    recipe["prompts"]["take"] = 5
    assert states(recipe)["prompts"] == "missing"


@pytest.mark.slow
def test_a_stage_of_a_changed_recipe_leaves_the_old_one_and_changing_back_costs_nothing(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    original = run.stage("reference")
    old = contents(original.folder)
    changed = {**recipe, "reference": {**recipe["reference"], "candidates": 3}}
    run_of(changed).stage("reference").begin()  # and killed
    assert run_of(changed).stage("reference").state() == "missing"
    assert original.complete
    reference.reference(run_of(recipe), QUIET)
    assert contents(original.folder) == old
    assert (run.directory / "reference").resolve() == original.folder.resolve()
    reference.reference(run_of(changed), QUIET)
    assert run_of(changed).stage("reference").complete
    assert contents(original.folder) == old
    before = contents(run.directory)
    reference.reference(run_of(recipe), QUIET)
    assert contents(run.directory) == before
    assert (run.directory / "reference").resolve() == original.folder.resolve()


@pytest.mark.slow
def test_a_student_that_is_wanted_again_is_not_trained(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    make_students(run, QUIET)
    stage = run.stage("train", "only")
    shutil.rmtree(stage.folder / "checkpoints")
    before = contents(stage.folder)
    changed = {**recipe, "compositions": {"only": {**recipe["compositions"]["only"], "alpha": 3.0}}}
    make_students(run_of(changed), QUIET)
    other = run_of(changed).stage("train", "only").folder
    after = contents(run.directory)
    ledger = read_ledger(run.directory)
    make_students(run_of(recipe), QUIET)
    assert contents(stage.folder) == before
    assert contents(other) == {
        name.removeprefix(f"train/{other.name}/"): x for name, x in after.items() if other.name in name
    }
    assert read_ledger(run.directory) == ledger
    assert (run.directory / "train" / "only").resolve() == stage.folder.resolve()


def test_a_verb_is_refused_for_its_inputs_before_it_begins(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    before = contents(run.directory)
    recipe["rollout"]["seed"] = 5
    with pytest.raises(InputError, match=r"rollout is not there yet\. Make it with: lweave rollout"):
        reference.reference(run_of(recipe), QUIET)
    assert contents(run.directory) == before
    assert not run_of(recipe).stage("reference").folder.exists()
    assert (run.directory / "reference").resolve() == run.stage("reference").folder.resolve()


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_only_clean_asks(
    tmp_path: Path,
    answer: str,
    agreed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(clean.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(clean.sys.stdin, "readline", lambda: answer, raising=False)
    monkeypatch.setattr(clean.sys.stderr, "isatty", lambda: True, raising=False)
    (tmp_path / "rollout@01234567").mkdir()
    (tmp_path / "rollout@01234567" / "a").write_bytes(b"x" * 5000)
    if agreed:
        clean.confirm([tmp_path / "rollout@01234567"], tmp_path, yes=False)
    else:
        with pytest.raises(InputError, match="nothing was removed"):
            clean.confirm([tmp_path / "rollout@01234567"], tmp_path, yes=False)
    said = f"This removes from {tmp_path}:\n  rollout@01234567  5.0 kB\nTotal: 5.0 kB.\nContinue? [y/N] "
    assert capsys.readouterr().err == said
    assert (tmp_path / "rollout@01234567").is_dir(), "asking removes nothing"
