"""The student's candidates: every cached number against whole logits, at every position."""

from typing import Any

import pytest

from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages import reference, rollout
from pipeline.expected import check_reference, read_cache
from pipeline.small_runs import QUIET, make_recipe, run_of


def test_every_number_is_that_of_whole_logits(sampled_run: Run) -> None:
    rows = read_cache(sampled_run)
    assert check_reference(sampled_run, rows) > 80
    assert {row["finish"] for row in rows} == {0, 1}


def test_every_number_is_right_at_the_edges(edge_run: Run) -> None:
    rows = read_cache(edge_run)
    assert [len(row["response_ids"]) for row in rows] == [1, 1, 5, 0, 17, 8, 44, 1]
    assert check_reference(edge_run, rows) == 77


def test_the_token_budget_changes_no_number(edge_run: Run, tmp_path: Any) -> None:
    recipe = edge_run.recipe.model_dump(by_alias=True, exclude_none=True)
    recipe |= {"runs": str(tmp_path), "anchors": {}, "compositions": {}}
    found = []
    for name, budget in (("small", 1), ("large", 100_000)):
        run = run_of(recipe | {"name": name, "reference": {"candidates": 4}, "score": {"token_budget": budget}})
        rollout.rollout(run, QUIET)
        reference.reference(run, QUIET)
        found.append(run)
    for run in found:
        assert check_reference(run, read_cache(run, None)) == 77


def test_rollouts_that_are_missing_or_of_another_recipe_are_refused_with_the_command(tmp_path: Any) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes")
    with pytest.raises(InputError, match=r"rollout is not there yet\. Make it with: lweave rollout small\.toml"):
        reference.reference(run_of(recipe), QUIET)
    rollout.rollout(run_of(recipe), QUIET)
    recipe["rollout"]["seed"] = 7
    with pytest.raises(InputError, match=r"rollout is not there yet\. Make it with: lweave rollout small\.toml"):
        reference.reference(run_of(recipe), QUIET)


def test_more_candidates_than_tokens_are_refused(tmp_path: Any) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", reference={"candidates": 1000})
    rollout.rollout(run_of(recipe), QUIET)
    with pytest.raises(InputError, match=r"reference\.candidates = 1000: the student has only 269 tokens"):
        reference.reference(run_of(recipe), QUIET)
