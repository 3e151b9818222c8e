"""Twenty first runs of strangers: each ends in a good student, or stops before something is wasted and names the fix.

HELD_BY names the test of each; those that are nowhere else are here.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.checks import preflight as disk
from lightning_weave.checks.preflight import preflight
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.stages import run as run_stage
from lightning_weave.world.layout import shipped_world
from tiny import make_world, run_of, save_prompts

TESTS = Path(__file__).parents[1]
QUIET = Progress(quiet=True)
WRONG = "checks/test_preflight.py::test_what_is_wrong_is_found_before_anything_is_sampled"
DIRECTORIES = "checks/test_preflight.py::test_a_directory_that_is_no_checkpoint_is_named_for_what_it_is"
WATCH = "checks/test_watch.py::"
HELD_BY = {
    "base student": f"{WRONG}[prompt template]",
    "chat student": "pipeline/test_own_models.py::test_the_page_leads_to_a_better_student_that_is_ready_for_the_hub",
    "thinking student": "views/test_init.py::test_a_situation_leads_to_a_recipe_that_doctor_accepts",
    "wrong format": "checks/test_first_runs.py::test_a_format_that_the_student_does_not_follow_stops_after_sampling",
    "swapped pair": "checks/test_first_runs.py::test_pairs_that_are_swapped_stop_after_scoring",
    "one adapter": f"{DIRECTORIES}[anchor-adapter]",
    "GGUF": "checks/test_preflight.py::test_run_refuses_and_doctor_exits_one_with_the_same_words",
    "odd columns": f"{WRONG}[prompt column]",
    "answers missing": "checks/test_first_runs.py::test_prompts_without_answers_are_a_warning_or_an_error",
    "answers in the prompts": "checks/test_first_runs.py::test_answers_in_the_prompts_are_a_warning",
    "tiny context": f"{WRONG}[long problem]",
    "no end of turn": "views/test_doctor.py::test_the_alias_line_does_what_it_promises",
    "benchmark typo": f"{WRONG}[benchmark typo]",
    "no disk": "checks/test_first_runs.py::test_a_disk_without_room_for_students_is_refused",
    "no peft": f"{WRONG}[peft]",
    "no vLLM": f"{WRONG}[engine]",
    "hub unreachable": "models/test_hub.py::test_a_hub_out_of_reach_is_asked_once_and_everywhere",
    "same model twice": f"{WRONG}[same model]",
    "everything cut off": f"{WATCH}test_a_run_whose_responses_are_all_cut_off_stops_before_the_next_stage",
    "two recipes in one run": "pipeline/test_run.py::test_everything_is_made_once_and_then_only_what_a_change_reaches",
}


@pytest.mark.parametrize("situation", list(HELD_BY))
def test_every_situation_has_its_test(situation: str) -> None:
    file, _, name = HELD_BY[situation].partition("::")
    text = (TESTS / file).read_text(encoding="utf-8")
    test, _, case = name.partition("[")
    assert f"def {test}(" in text
    assert all(f'"{part}"' in text for part in case.rstrip("]").split("-") if part)


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path, prompts=16)
    bench = save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    return recipe


def rewrite(recipe: dict[str, Any], change: Any) -> None:
    """Change every row of the prompts."""
    source = Path(recipe["prompts"]["source"])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    source.write_text("".join(json.dumps(change(number, row)) + "\n" for number, row in enumerate(rows)))


def warnings(recipe: dict[str, Any]) -> dict[str, str]:
    return {one.check: one.line for one in preflight(run_of(recipe)) if one.verdict == "warning"}


def test_answers_in_the_prompts_are_a_warning(recipe: dict[str, Any]) -> None:
    recipe["prompts"]["format"] = "plain"
    assert "answers" not in warnings(recipe)
    rewrite(recipe, lambda number, row: {**row, "problem": f"{row['problem']}=\nAnswer: {row['answer']}"})
    assert "16 of 16 prompts contain their own answer: p" in warnings(recipe)["answers"]
    assert "prompts.columns" in warnings(recipe)["answers"]


def test_prompts_without_answers_are_a_warning_or_an_error(recipe: dict[str, Any]) -> None:
    rewrite(recipe, lambda number, row: row if number % 4 == 0 else {**row, "answer": None})
    assert "12 of 16 prompts have no answer (prompts.columns.answer = 'answer'" in warnings(recipe)["no answers"]
    rewrite(recipe, lambda number, row: {"problem": row["problem"], "id": row["id"]})
    with pytest.raises(InputError, match=r"no column 'answer' \(it has 'problem', 'id'\)\. Check prompts\.columns"):
        run_stage.run_all(run_of(recipe), QUIET)
    assert not Path(recipe["runs"]).exists()


def test_a_context_shorter_than_the_responses_is_a_warning_and_bounds_the_disk(recipe: dict[str, Any]) -> None:
    recipe["rollout"] |= {"max_tokens": 100_000}
    assert "rollout.max_tokens is 100,000, but the context of" in warnings(recipe)["context"]
    [room] = [one for one in preflight(run_of(recipe)) if one.check == "disk"]
    assert room.figures["positions"] == 16 * 2 * 256  # prompts x responses x context


def test_prompts_that_make_hardly_an_update_are_a_warning(recipe: dict[str, Any]) -> None:
    recipe["train"] = {"prompts_per_round": 8, "updates_per_round": 1, "epochs": 4}
    assert "16 prompts make 8 updates" in warnings(recipe)["updates"]
    recipe["train"] |= {"prompts_per_round": 32, "updates_per_round": 4, "epochs": 1}
    assert "16 prompts make 2 updates" in warnings(recipe)["updates"]
    recipe["train"]["prompts_per_round"] = 28  # of 7 prompts, 7 prompts and the 2 that are left
    assert "16 prompts make 3 updates" in warnings(recipe)["updates"]
    recipe["train"] = {"prompts_per_round": 8, "updates_per_round": 1, "epochs": 4}
    recipe["train"]["epochs"] = 5
    assert "updates" not in warnings(recipe)


def test_a_disk_without_room_for_students_is_refused(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage._replace(free=100_000))
    with pytest.raises(
        InputError, match=r"checkpoints and students of 3 compositions; .* 100.0 kB are free"
    ) as refused:
        run_stage.run_all(run_of(recipe), QUIET)
    assert "set runs to a directory on another disk" in str(refused.value)
    assert "To continue anyway: --force" in str(refused.value)
    assert not Path(recipe["runs"]).exists()


@pytest.mark.slow
def test_a_format_that_the_student_does_not_follow_stops_after_sampling(recipe: dict[str, Any]) -> None:
    recipe["prompts"] |= {"format": "boxed"}
    recipe["eval"] = {**recipe.get("eval", {}), "profile": "paper"}  # whose rule reads a box and nothing else
    recipe["checks"] = {"truncated": "warn"}
    run = run_of(recipe)
    with pytest.raises(WeaveError, match=r"of 32 sampled responses have no \\boxed\{\} answer") as stopped:
        run_stage.run_all(run, QUIET)
    assert "prompts.format, prompts.chat" in str(stopped.value)
    assert run.stage("reference").state() == "missing"


@pytest.mark.slow
def test_pairs_that_are_swapped_stop_after_scoring(tmp_path: Path) -> None:
    """On the demo's models. One learned to be right, the other to be brief: each is known by what it prefers."""
    torch.set_num_threads(1)
    world = shipped_world()

    def swapped(name: str, end: str) -> dict[str, Any]:
        sides = {"post": str(world / f"{name}-pre"), "pre": str(world / f"{name}-post")}
        return {**sides, "aliases": {"<|end|>": end}, "validity": "candidate"}

    recipe = {
        "name": "swapped",
        "runs": str(tmp_path / "runs"),
        "student": {"model": str(world / "student")},
        "anchors": {"accuracy": swapped("accuracy", "</s>"), "brevity": swapped("brevity", "<|eot|>")},
        "compositions": {"even": {"weights": {"accuracy": 0.5, "brevity": 0.5}}},
        "prompts": {
            "source": str(world / "prompts.jsonl"),
            "columns": {"prompt": "problem", "answer": "answer", "id": "id"},
            "format": "question-answer",
            "chat": False,
            "take": 40,
        },
        "rollout": {"max_tokens": 160, "responses": 8, "batch_size": 320, "prompts_per_shard": 40},
        "reference": {"candidates": 8},
        "eval": {"benchmarks": [f"file:{world / 'benchmarks' / 'easy.jsonl'}"], "chat": False},
        "machine": {"threads": 1},
    }
    run = run_of(recipe)
    with pytest.raises(WeaveError) as stopped:
        run_stage.run_all(run, QUIET)
    accuracy, brevity, *_ = str(stopped.value).splitlines()
    assert accuracy.startswith("anchors.accuracy: the summed shift prefers wrong ones, at equal length too")
    assert accuracy.endswith("Are post and pre swapped?")
    assert brevity.startswith("anchors.brevity: of two responses it prefers the longer in ")
    assert brevity.endswith("If it was trained to be brief, post and pre are swapped")
    assert not (run.directory / "train").exists()
