"""What status says of a run as it grows, and of one whose recipe has changed."""

import json
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_weave.bench.samples import write_block
from lightning_weave.pipeline import reference, score
from lightning_weave.pipeline.flow import make_rollouts, make_students
from lightning_weave.views import status
from pipeline.small_runs import QUIET, make_cache, make_recipe, steps_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def states(recipe: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], str]:
    out = StringIO()
    found = status.run(steps_of(recipe), Console(file=out, width=200))
    return {one.step.path: one.state for one in found}, {one.step.path: one.why for one in found}, out.getvalue()


@pytest.mark.slow
def test_a_run_grows_stage_by_stage(recipe: dict[str, Any]) -> None:
    seen, why, text = states(recipe)
    cache = ["prompts", "rollout", "reference", "score/post", "score/pre"]
    assert list(seen)[:6] == [*cache, "train/only"]
    assert set(seen.values()) == {"missing"}
    assert why["reference"] == "waits for rollout"
    assert "Next: lweave rollout small.toml" in text
    make_rollouts(steps_of(recipe), QUIET)
    seen, why, text = states(recipe)
    assert (seen["prompts"], seen["rollout"], seen["reference"]) == ("done", "done", "missing")
    assert why["rollout"].startswith("12 rows, ")
    assert "Next: lweave reference small.toml" in text
    reference.run(steps_of(recipe), QUIET)
    assert "Next: lweave score small.toml --only post" in states(recipe)[2]
    score.run(steps_of(recipe), QUIET, ["post"])
    seen, _, text = states(recipe)
    assert (seen["score/post"], seen["score/pre"]) == ("done", "missing")
    assert "Next: lweave score small.toml --only pre" in text
    assert "Everything: lweave run small.toml" in text


def test_an_unfinished_stage_says_how_far_it_got(recipe: dict[str, Any]) -> None:
    steps = make_cache(recipe)
    stage = steps.store.stage(steps.reference)
    stage.manifest_path.unlink()
    stage.shard_path(1).unlink()
    seen, why, text = states(recipe)
    assert seen["reference"] == "partial"
    assert why["reference"] == "1 shard so far"
    assert "Next: lweave reference small.toml" in text


@pytest.mark.slow
def test_training_and_evaluation_under_way_are_unfinished_not_missing(recipe: dict[str, Any]) -> None:
    steps = make_cache(recipe)
    make_students(steps, QUIET)
    stage = steps.store.stage(steps.train("only"))
    updates = stage.require()["updates"]
    stage.manifest_path.unlink()
    seen, why, text = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", f"{updates} of {updates} updates")
    assert "Next: lweave train small.toml --only only" in text
    recipe["train"] = {**recipe.get("train", {}), "seed": 99}
    assert states(recipe)[0]["train/only"] == "missing", "checkpoints of another recipe are none of this one's"
    exam = next(step for step in steps.everything() if step.path.startswith("eval/base/"))
    write_block(steps.store.stage(exam).folder / f"blocks-{exam.fingerprint}", 0, [])
    seen, why, _ = states(recipe)
    assert (seen[exam.path], why[exam.path]) == ("partial", "1 block so far")


@pytest.mark.slow
def test_a_changed_recipe_is_told_by_its_key(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    recipe["rollout"]["max_tokens"] = 10
    seen, why, _ = states(recipe)
    assert [seen[path] for path in ("prompts", "rollout", "reference", "score/post")] == ["done", *["stale"] * 3]
    assert why["rollout"] == "rollout.max_tokens: 12 -> 10"
    assert why["reference"] == "made from an earlier rollout"


def test_a_changed_model_is_noticed_under_the_same_name(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    config = Path(recipe["anchors"]["one"]["post"]) / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    seen, why, _ = states(recipe)
    assert (seen["score/post"], seen["score/pre"], seen["reference"]) == ("stale", "done", "done")
    assert why["score/post"] == "model has changed", "no hash"


@pytest.mark.slow
def test_training_interrupted_after_a_change_is_partial_and_a_deleted_student_is_named(recipe: dict[str, Any]) -> None:
    recipe["train"] = {"prompts_per_round": 2, "updates_per_round": 2, "checkpoint_every": 4, "keep": 9}
    steps = make_cache(recipe)
    make_students(steps, QUIET)
    folder = steps.store.stage(steps.train("only")).folder
    shutil.rmtree(folder / "final")
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", "was finished, but final/ has been deleted")
    recipe["train"]["learning_rate"] = 1e-3
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("stale", "train.learning_rate: 1e-06 -> 0.001")
    position = folder / "checkpoints" / "000004" / "position.json"
    position.write_text(json.dumps({"update": 4, "fingerprint": steps_of(recipe).train("only").fingerprint}))
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", "4 of 12 updates")


@pytest.mark.slow
def test_changes_are_said_by_key_without_hashes_or_tables_of_python(recipe: dict[str, Any]) -> None:
    make_students(make_cache(recipe), QUIET)
    anchor = recipe["anchors"].pop("one")
    recipe["anchors"]["other"] = {**anchor, "validity": "candidate"}
    recipe["compositions"] = {"only": {"weights": {"other": 1.0}}}
    _, why, _ = states(recipe)
    assert why["train/only"] == (
        "anchors.one is gone; anchors.other is new; "
        "compositions.only.weights.one: 1.0 -> unset; compositions.only.weights.other: unset -> 1.0"
    )
    source = Path(recipe["prompts"]["source"])
    source.write_text(source.read_text() * 2)
    assert states(recipe)[1]["prompts"] == "prompts.source has changed"


def test_json_says_the_same(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status.run(steps_of(recipe), Console(quiet=True), json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["stages"][0] == {"stage": "prompts", "state": "missing", "why": ""}
    assert said["next"] == "lweave rollout small.toml"
