"""What status says of a run as it grows, and of one whose recipe has changed."""

import json
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.filesize import decimal as file_size

from lightning_weave.bench.samples import write_block
from lightning_weave.directory import size_of
from lightning_weave.stages import reference, rollout, score
from lightning_weave.stages.run import make_students
from lightning_weave.views import status
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    return make_recipe(tmp_path, "qwen3", "llama", "bytes", eval={"benchmarks": ["aime-2024"]})


def states(recipe: dict[str, Any]) -> tuple[dict[str, str], dict[str, str], str]:
    out = StringIO()
    found = status.run(run_of(recipe), Console(file=out, width=200))
    return {one.path: one.state for one in found}, {one.path: one.why for one in found}, out.getvalue()


@pytest.mark.slow
def test_a_run_grows_stage_by_stage(recipe: dict[str, Any]) -> None:
    seen, why, text = states(recipe)
    cache = ["prompts", "rollout", "reference", "score/post", "score/pre"]
    assert list(seen)[:6] == [*cache, "train/only"]
    assert set(seen.values()) == {"missing"}
    assert why["reference"] == "waits for rollout"
    assert "first prompts. Next: lweave run small.toml" in text
    rollout.rollout(run_of(recipe), QUIET)
    seen, why, text = states(recipe)
    assert (seen["prompts"], seen["rollout"], seen["reference"]) == ("complete", "complete", "missing")
    assert why["rollout"].startswith("12 rows, ")
    assert "first reference. Next: lweave run small.toml" in text
    reference.reference(run_of(recipe), QUIET)
    assert "first score/post. Next: lweave run small.toml" in states(recipe)[2]
    score.score(run_of(recipe), QUIET, ["post"])
    seen, _, text = states(recipe)
    assert (seen["score/post"], seen["score/pre"]) == ("complete", "missing")
    assert "first score/pre. Next: lweave run small.toml" in text


def test_an_unfinished_stage_says_how_far_it_got(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    stage = run.stage("reference")
    stage.manifest_path.unlink()
    stage.shard_path(1).unlink()
    seen, why, text = states(recipe)
    assert seen["reference"] == "partial"
    assert why["reference"] == "1 shard so far"
    assert "first reference. Next: lweave run small.toml" in text


@pytest.mark.slow
def test_training_and_evaluation_under_way_are_unfinished_not_missing(recipe: dict[str, Any]) -> None:
    run = make_cache(recipe)
    make_students(run, QUIET)
    stage = run.stage("train", "only")
    updates = stage.require()["updates"]
    stage.manifest_path.unlink()
    seen, why, text = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", f"{updates} of {updates} updates")
    assert "first train/only. Next: lweave run small.toml" in text
    recipe["train"] = {**recipe.get("train", {}), "seed": 99}
    assert states(recipe)[0]["train/only"] == "missing", "checkpoints of another recipe are none of this one's"
    exam = next(step for step in run.everything() if step.path.startswith("eval/base/"))
    write_block(exam.folder / f"blocks-{exam.fingerprint}", 0, [])
    seen, why, _ = states(recipe)
    assert (seen[exam.path], why[exam.path]) == ("partial", "1 block so far")


@pytest.mark.slow
def test_a_changed_recipe_is_told_by_its_key(recipe: dict[str, Any]) -> None:
    old = make_cache(recipe)
    recipe["rollout"]["max_tokens"] = 10
    seen, why, text = states(recipe)
    paths = ("prompts", "rollout", "reference", "score/post")
    assert [seen[path] for path in paths] == ["complete", *["missing"] * 3]
    assert why["rollout"] == f"rollout.max_tokens: 12 -> 10 ({old.stage('rollout').folder.name} is kept)"
    assert why["reference"] == f"{why['rollout']}; waits for rollout"
    for stage in (old.stage("rollout"), old.stage("reference"), *old.scores_of("one")):
        size = file_size(size_of(stage.folder))
        assert f"  {stage.folder.relative_to(old.directory)}  {size}\n" in text
    assert "Not needed by this recipe (" in text
    assert "Remove them: lweave clean small.toml" in text
    recipe["rollout"]["max_tokens"] = 12
    seen, _, text = states(recipe)
    assert {seen[path] for path in (*paths, "score/pre")} == {"complete"}
    assert "Not needed" not in text


@pytest.mark.slow
def test_a_change_is_told_from_the_nearest_folder(recipe: dict[str, Any]) -> None:
    """Of two students under one name, that with the fewest differences, not the newest."""
    run = make_cache(recipe)
    make_students(run, QUIET)
    nearest = run.stage("train", "only").folder.name
    recipe["compositions"]["only"] |= {"alpha": 5.0, "epochs": 3}
    make_students(run_of(recipe), QUIET)
    recipe["compositions"]["only"] |= {"alpha": 1.0, "epochs": None}
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == (
        "missing",
        f"compositions.only.alpha: 2.0 -> 1.0 ({nearest} is kept)",
    )


def test_a_changed_model_is_noticed_under_the_same_name(recipe: dict[str, Any]) -> None:
    make_cache(recipe)
    config = Path(recipe["anchors"]["one"]["post"]) / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    seen, why, _ = states(recipe)
    assert (seen["score/post"], seen["score/pre"], seen["reference"]) == ("missing", "complete", "complete")
    assert re.fullmatch(r"model has changed \(post@\w{8} is kept\)", why["score/post"]), "no other hash"


@pytest.mark.slow
def test_training_interrupted_after_a_change_is_partial_and_a_deleted_student_is_named(recipe: dict[str, Any]) -> None:
    recipe["train"] = {"prompts_per_round": 2, "updates_per_round": 2, "checkpoint_every": 4}
    run = make_cache(recipe)
    make_students(run, QUIET)
    folder = run.stage("train", "only").folder
    shutil.rmtree(folder / "final")
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", "was finished, but final/ has been deleted")
    recipe["train"]["learning_rate"] = 1e-3
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("missing", ""), "what is not complete is no older one"
    changed = run_of(recipe).stage("train", "only")
    shutil.copytree(folder / "checkpoints" / "000008", changed.folder / "checkpoints" / "000008")
    position = changed.folder / "checkpoints" / "000008" / "position.json"
    position.write_text(json.dumps({"update": 8, "fingerprint": changed.fingerprint}))
    seen, why, _ = states(recipe)
    assert (seen["train/only"], why["train/only"]) == ("partial", "8 of 12 updates")


@pytest.mark.slow
def test_changes_are_said_by_key_without_hashes_or_tables_of_python(recipe: dict[str, Any]) -> None:
    make_students(make_cache(recipe), QUIET)
    anchor = recipe["anchors"].pop("one")
    recipe["anchors"]["other"] = {**anchor, "validity": "candidate"}
    recipe["compositions"] = {"only": {"weights": {"other": 1.0}}}
    _, why, _ = states(recipe)
    reasons, _, kept = why["train/only"].rpartition(" (")
    assert reasons == (
        "anchors.one is gone; anchors.other is new; "
        "compositions.only.weights.one: 1.0 -> unset; compositions.only.weights.other: unset -> 1.0"
    )
    assert re.fullmatch(r"only@\w{8} is kept\)", kept)
    source = Path(recipe["prompts"]["source"])
    source.write_text(source.read_text() * 2)
    assert re.fullmatch(r"prompts\.source has changed \(prompts@\w{8} is kept\)", states(recipe)[1]["prompts"])


def test_json_says_the_same(recipe: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    status.run(run_of(recipe), Console(quiet=True), json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["stages"][0] == {"stage": "prompts", "state": "missing", "why": ""}
    assert said["next"] == "lweave run small.toml"
    assert said["unneeded"] == {}
    folder = run_of(recipe).directory / "score" / "gone@01234567"
    folder.mkdir(parents=True)
    (folder / "00000.safetensors").write_bytes(b"x" * 5000)
    status.run(run_of(recipe), Console(quiet=True), json=True)
    assert json.loads(capsys.readouterr().out)["unneeded"] == {"score/gone@01234567": 5000}
