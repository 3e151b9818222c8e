"""Weights by tag: each prompt is composed as if all prompts had its weights, and one tag changes nothing."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_weave.checks.preflight import preflight
from lightning_weave.config import check_recipe, dump_recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.stages.caches import open_cache, routed_weights
from lightning_weave.stages.prompts import load_prompts, tag_of
from lightning_weave.stages.sweep import plan_sweep
from lightning_weave.train.data import compose
from lightning_weave.types import Prompt
from pipeline.scored import HALF, make_scored, same, trained
from tiny import run_of

pytestmark = pytest.mark.slow

MULTIPLIES = {"rules": {"product": r"\*"}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_scored(tmp_path_factory.mktemp("routes"))


def _batch(recipe: dict[str, Any], weights: dict[str, Any], rows: list[int]) -> Any:
    run = run_of({**recipe, "compositions": {"one": {"weights": weights}}})
    cache = open_cache(run, "one")
    return compose(cache.block(rows), cache.weights, 2.0)


@pytest.mark.slow
def test_one_tag_for_all_is_the_plain_composition_bit_for_bit(recipe: dict[str, Any]) -> None:
    recipe = {**recipe, "tags": {"rules": {"any": "."}}}
    weights = {"any": HALF, "default": {"acc": 1.0}}
    students = trained(recipe, plain={"weights": HALF}, routed={"weights": weights})
    assert same(students["plain"], students["routed"])


def test_each_tag_is_composed_with_its_own_weights(recipe: dict[str, Any]) -> None:
    """Targets, masks and tokens of the rows of a tag are those of the plain composition with its weights."""
    recipe = {**recipe, "tags": MULTIPLIES}
    by_tag = {"product": {"acc": 1.0}, "default": {"acc": 0.25, "brief": 0.75}}
    run = run_of(recipe)
    tags = [tag_of(run.recipe, one) for one in load_prompts(run, ())]
    assert set(tags) == {"product", "default"}
    responses = recipe["rollout"]["responses"]
    for tag, weights in by_tag.items():
        rows = [row for row in range(len(tags) * responses) if tags[row // responses] == tag]
        routed, plain = _batch(recipe, by_tag, rows), _batch(recipe, weights, rows)
        for name, value in vars(routed).items():
            other = getattr(plain, name)
            assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other, name
    whole = _batch(recipe, by_tag, list(range(len(tags) * responses)))
    assert len(set(whole.rows_N.tolist())) > len(tags), "rows of both kinds are in one batch"


def test_a_new_route_is_trained_and_nothing_else_is_made_again(recipe: dict[str, Any]) -> None:
    """The fingerprint has the tags and the weights; the cache knows of neither."""
    one = run_of({**recipe, "tags": MULTIPLIES, "compositions": {"x": {"weights": {"product": {"acc": 1.0}}}}})
    other = run_of({**recipe, "tags": {"rules": {"product": "7"}}, "compositions": one.recipe.compositions})
    assert one.stage("train", "x").fingerprint != other.stage("train", "x").fingerprint
    assert one.stage("reference").fingerprint == other.stage("reference").fingerprint
    assert all(step.complete for step in one.scores_of("acc"))


def test_a_column_gives_the_tag_and_a_prompt_without_weights_is_refused_by_id(tmp_path: Path) -> None:
    recipe = make_scored(tmp_path)
    source = Path(recipe["prompts"]["source"])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"kind": ("sum", "other")[number % 2]} if number else {}
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {**recipe, "tags": {"column": "kind"}, "compositions": {"x": {"weights": {"sum": HALF, "other": HALF}}}}
    run = run_of(recipe)
    said = {finding.verdict: finding.text for finding in preflight(run) if finding.about == "tags"}
    assert "other 6, sum 5, default 1" in said["note"]
    assert "prompt p0 has the tag 'default', for which compositions.x.weights has no table" in said["error"]
    with pytest.raises(InputError, match="prompt p0 has the tag 'default'"):
        routed_weights(run, "x", load_prompts(run, {"kind"}, [_prompt(row) for row in rows]))
    recipe["compositions"]["x"]["weights"]["default"] = {"brief": 1.0}
    run = run_of(recipe)

    weight_GK = routed_weights(run, "x", load_prompts(run, {"kind"}, [_prompt(row) for row in rows]))
    np.testing.assert_array_equal(weight_GK[:3], [[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])


def _prompt(row: dict[str, Any]) -> Any:

    return Prompt(row["id"], [{"role": "user", "content": row["problem"]}], row["problem"], [1])


def test_weights_by_tag_survive_being_written_and_can_be_set(recipe: dict[str, Any], tmp_path: Path) -> None:
    written = {**recipe, "tags": MULTIPLIES, "compositions": {"x": {"weights": {"product": HALF, "default": HALF}}}}
    made = check_recipe(written)
    (tmp_path / "r.toml").write_text(dump_recipe(made))
    assert load_recipe([tmp_path / "r.toml"]) == made
    changed = load_recipe(
        [tmp_path / "r.toml"], ["compositions.x.weights.product.acc=0.75", "compositions.x.weights.product.brief=0.25"]
    )
    assert changed.compositions["x"].by_tag == {"product": {"acc": 0.75, "brief": 0.25}, "default": HALF}


def test_a_sweep_varies_the_share_of_one_tag(recipe: dict[str, Any]) -> None:
    routed = {"x": {"weights": {"product": HALF, "default": {"acc": 1.0}}}}
    made = check_recipe({**recipe, "tags": MULTIPLIES, "compositions": routed})
    plan = plan_sweep(made, [0.25, 0.5], tag="product")
    assert [one.name for one in plan] == ["product-brief-0.250", "x"], "the second is there already"
    assert plan[0].composition.by_tag == {"product": {"acc": 0.75, "brief": 0.25}, "default": {"acc": 1.0}}
    with pytest.raises(InputError, match="--tag sum: no such tag in its weights; there are product, default"):
        plan_sweep(made, [0.5], tag="sum")
