"""Changes that do not matter make nothing stale; what a change makes stale is kept until its successor is whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.errors import InputError, StaleInput
from lightning_weave.pipeline import reference
from lightning_weave.pipeline.flow import make_students
from lightning_weave.runs import discard
from lightning_weave.runs.discard import allow_discards
from pipeline.small_runs import QUIET, make_cache, make_recipe, steps_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def states(recipe: dict[str, Any]) -> dict[str, str]:
    steps = steps_of(recipe)
    made = [step for step in steps.everything() if not step.path.startswith("eval/")]
    return {step.path: steps.store.stage(step).state() for step in made}


@pytest.mark.slow
def test_changes_that_do_not_matter_make_nothing_stale(recipe: dict[str, Any], tmp_path: Path) -> None:
    make_students(make_cache(recipe), QUIET)
    there = steps_of(recipe).store.stage(steps_of(recipe).prompts).require()["rows"]
    for take in (there, there + 1, 10_000, None):
        recipe["prompts"] = {key: value for key, value in recipe["prompts"].items() if key != "take"}
        recipe["prompts"] |= {} if take is None else {"take": take}
        assert set(states(recipe).values()) == {"done"}, take
    recipe["anchors"]["another-name"] = recipe["anchors"].pop("one")
    recipe["compositions"] = {"only": {"weights": {"another-name": 1.0}}}
    assert set(states(recipe).values()) == {"done"}
    runs = Path(recipe["runs"])
    shutil.move(runs / recipe["name"], runs / "renamed")
    recipe["name"] = "renamed"
    assert set(states(recipe).values()) == {"done"}
    recipe["compositions"]["only"]["alpha"] = 3.0
    assert states(recipe)["train/only"] == "stale"
    recipe["prompts"]["take"] = there - 1
    assert states(recipe)["prompts"] == "stale"


@pytest.mark.slow
def test_a_stage_is_set_aside_until_the_next_is_whole_and_put_back_if_it_is_wanted_again(
    recipe: dict[str, Any],
) -> None:
    steps = make_cache(recipe)
    folder = steps.store.stage(steps.reference).folder
    old = {path.name: path.read_bytes() for path in folder.iterdir()}
    recipe["reference"] = {**recipe.get("reference", {}), "candidates": 3}
    changed = steps_of(recipe).store.stage(steps_of(recipe).reference)
    changed.begin()  # and killed
    (kept,) = changed.aside()
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == old
    assert changed.state() == "missing"
    original = steps.store.stage(steps.reference)
    assert original.state() == "missing"
    original.begin()
    assert original.state() == "done"
    assert original.aside() == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == old
    reference.run(steps_of(recipe), QUIET)
    assert changed.state() == "done"
    assert changed.aside() == []


@pytest.mark.slow
def test_a_student_that_is_wanted_again_is_put_back_and_not_trained(recipe: dict[str, Any]) -> None:
    steps = make_cache(recipe)
    make_students(steps, QUIET)
    stage = steps.store.stage(steps.train("only"))
    weights = (stage.folder / "final" / "model.safetensors").stat().st_mtime_ns
    changed = {**recipe, "compositions": {"only": {**recipe["compositions"]["only"], "alpha": 3.0}}}
    steps_of(changed).store.stage(steps_of(changed).train("only")).begin()  # and killed
    shutil.rmtree(stage.folder.with_name(f".aside-only@{stage.step.fingerprint}") / "checkpoints")
    make_students(steps_of(recipe), QUIET)
    assert stage.state() == "done"
    assert (stage.folder / "final" / "model.safetensors").stat().st_mtime_ns == weights


def test_a_verb_is_refused_for_its_inputs_before_it_may_discard(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    recipe["rollout"]["seed"] = 5
    steps = steps_of(recipe)
    with pytest.raises(StaleInput, match=r"rollout is stale.*\n.*lweave rollout"):
        allow_discards(steps, steps.made_by("reference"), yes=True)
    with pytest.raises(InputError, match=r"(?s)rollout.seed: 42 -> 5:.* rollout .*tokens.*To discard them: --yes"):
        allow_discards(steps, steps.made_by("rollout"), yes=False)
    reference_stage = steps.store.stage(steps.reference)
    before = {path.name: path.read_bytes() for path in reference_stage.folder.iterdir()}
    with pytest.raises(StaleInput):  # whoever calls it: nothing is set aside or begun for what cannot be made
        reference_stage.begin()
    assert reference_stage.aside() == []
    assert {path.name: path.read_bytes() for path in reference_stage.folder.iterdir()} == before


@pytest.mark.parametrize(("answer", "agreed"), [("y\n", True), ("\n", False), ("no\n", False)])
def test_on_a_terminal_it_is_asked(
    recipe: dict[str, Any],
    answer: str,
    agreed: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(discard.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(discard.sys.stdin, "readline", lambda: answer, raising=False)
    monkeypatch.setattr(discard.sys.stderr, "isatty", lambda: True, raising=False)
    if agreed:
        discard.agree(["rollout"], False, "refused")
    else:
        with pytest.raises(InputError, match="nothing was discarded"):
            discard.agree(["rollout"], False, "refused")
    assert capsys.readouterr().err == "rollout\nContinue? [y/N] "
