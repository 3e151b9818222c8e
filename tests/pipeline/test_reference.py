"""The student's candidates: every cached number against whole logits, at every position."""

from typing import Any

import pytest

from lightning_weave.errors import InputError, StaleInput
from lightning_weave.pipeline import reference
from lightning_weave.pipeline.flow import make_rollouts
from lightning_weave.runs.steps import Steps
from pipeline.expected import check_reference, read_cache
from pipeline.small_runs import QUIET, make_recipe, steps_of


def test_every_number_is_that_of_whole_logits(sampled_run: Steps) -> None:
    rows = read_cache(sampled_run)
    assert check_reference(sampled_run, rows) > 80
    assert {row["finish"] for row in rows} == {0, 1}


def test_every_number_is_right_at_the_edges(edge_run: Steps) -> None:
    rows = read_cache(edge_run)
    assert [len(row["response_ids"]) for row in rows] == [1, 1, 5, 0, 17, 8, 44, 1]
    assert check_reference(edge_run, rows) == 77


def test_the_token_budget_changes_no_number(edge_run: Steps, tmp_path: Any) -> None:
    recipe = edge_run.recipe.model_dump(by_alias=True, exclude_none=True)
    recipe |= {"runs": str(tmp_path), "anchors": {}, "compositions": {}}
    found = []
    for name, budget in (("small", 1), ("large", 100_000)):
        steps = steps_of(recipe | {"name": name, "reference": {"candidates": 4, "token_budget": budget}})
        make_rollouts(steps, QUIET)
        reference.run(steps, QUIET)
        found.append(steps)
    for steps in found:
        assert check_reference(steps, read_cache(steps, None)) == 77


def test_missing_and_stale_rollouts_are_refused_with_the_command(tmp_path: Any) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes")
    with pytest.raises(StaleInput, match=r"rollout is not there yet\. Make it with: lweave rollout small\.toml"):
        reference.run(steps_of(recipe), QUIET)
    make_rollouts(steps_of(recipe), QUIET)
    recipe["rollout"]["seed"] = 7
    with pytest.raises(StaleInput, match=r"rollout is stale \(seed 42 -> 7\).*\n.*lweave rollout small\.toml"):
        reference.run(steps_of(recipe), QUIET)


def test_more_candidates_than_tokens_are_refused(tmp_path: Any) -> None:
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes", reference={"candidates": 1000})
    make_rollouts(steps_of(recipe), QUIET)
    with pytest.raises(InputError, match=r"reference\.candidates = 1000: the student has only 269 tokens"):
        reference.run(steps_of(recipe), QUIET)
