"""KL budgets of anchors: met in every tag, against loops over a whole vocabulary; reported, or refused by their key."""

from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import oracle
from lightning_weave.cache.block import Cache, compute_targets
from lightning_weave.checks.preflight import preflight
from lightning_weave.errors import InputError
from lightning_weave.report.survey import joint_weights
from lightning_weave.stages.caches import open_cache, open_scored
from lightning_weave.stages.forecast import forecast, plan_forecast
from lightning_weave.stages.preview import preview
from lightning_weave.stages.prompts import load_prompts, tag_of
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.sweep import plan_sweep
from lightning_weave.stages.train import train
from pipeline.scored import HALF, QUIET
from tiny import make_world, run_of

BY_TAG = {"product": HALF, "default": {"acc": 0.25, "brief": 0.75}}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every token of the student is a candidate; those that an anchor cannot express keep shift 0."""
    recipe = make_world(tmp_path_factory.mktemp("budgets"))
    vocabulary = run_of(recipe).student.vocabulary
    anchors = {name: {**section, "validity": "candidate"} for name, section in recipe["anchors"].items()}
    tags = {"rules": {"product": r"\*"}}
    recipe |= {"reference": {"candidates": vocabulary}, "anchors": anchors, "tags": tags}
    make_cache(run_of(recipe), QUIET)
    return recipe


def budgeted(recipe: dict[str, Any], compositions: dict[str, Any], **budgets: Any) -> Any:
    anchors = {
        name: {**section, **({"kl_budget": budgets[name]} if name in budgets else {})}
        for name, section in recipe["anchors"].items()
    }
    return run_of({**recipe, "anchors": anchors, "compositions": compositions})


def spent(cache: Cache, alpha: float, anchors: tuple[str, ...], rows: list[int]) -> float:
    """Mean KL(target || behaviour) with the shifts of some anchors alone, in loops over all tokens."""
    assert cache.weight_RK is not None
    plain = Cache(cache.rollouts, cache.reference, cache.sources)
    found = []
    for row in rows:
        block = plain.block([row])
        for at in np.flatnonzero(block.valid_KP.all(axis=0)).tolist():
            b_V = np.exp([*block.candidates.logp.flat[at].astype(float), -18.42]).tolist()
            shifts = [*block.r_KPC[:, at].astype(float)]
            own = [cache.weight_RK[row, k] if name in anchors else 0.0 for k, name in enumerate(cache.names)]
            r_V = [*oracle.compose([shift.tolist() for shift in shifts], own), 0.0]
            total = sum(b_V)
            b_V = [b / total for b in b_V]
            found.append(oracle.kl(oracle.tilt(b_V, r_V, alpha), b_V))
    return float(np.mean(found))


def rows_by_tag(run: Any) -> dict[str, list[int]]:
    tags = [tag_of(run.recipe, one) for one in load_prompts(run, ())]
    rows: dict[str, list[int]] = {}
    for row in range(len(tags) * 2):
        rows.setdefault(tags[row // 2], []).append(row)
    return rows


@pytest.mark.parametrize("weights", [HALF, BY_TAG])
def test_each_anchor_meets_its_budget_in_every_tag(recipe: dict[str, Any], weights: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": weights, "alpha": 1.5}}, acc=0.03, brief=0.008)
    cache = open_cache(run, "one")
    assert cache.alpha == 1.5
    rows = rows_by_tag(run)
    assert len(rows) == 2
    for members in rows.values() if weights is BY_TAG else [list(range(len(cache)))]:
        for anchor, budget in (("acc", 0.03), ("brief", 0.008)):
            assert spent(cache, 1.5, (anchor,), members) == pytest.approx(budget, rel=0.01)
    assert {share.tag for share in cache.shares} == (set(rows) if weights is BY_TAG else {""})
    for share in cache.shares:
        assert share.kl == pytest.approx(share.budget, rel=0.01)


def test_a_budget_by_tag_and_a_fixed_weight(recipe: dict[str, Any]) -> None:
    """The other anchor keeps its weight over alpha, and its share is reported, too."""
    run = budgeted(recipe, {"one": {"weights": BY_TAG, "alpha": 3.0}}, brief={"product": 0.02, "default": 0.005})
    cache = open_cache(run, "one")
    rows = rows_by_tag(run)
    assert cache.weight_RK is not None
    for tag, budget in (("product", 0.02), ("default", 0.005)):
        assert spent(cache, 3.0, ("brief",), rows[tag]) == pytest.approx(budget, rel=0.01)
        np.testing.assert_allclose(cache.weight_RK[rows[tag], cache.names.index("acc")], BY_TAG[tag]["acc"])
        (share,) = (one for one in cache.shares if (one.tag, one.anchor) == (tag, "acc"))
        assert share.budget is None
        assert share.dose == pytest.approx(BY_TAG[tag]["acc"] / 3)
        assert share.kl == pytest.approx(spent(cache, 3.0, ("acc",), rows[tag]), rel=0.01)


def test_a_silent_anchor_has_no_weight_and_the_others_keep_their_budgets(recipe: dict[str, Any]) -> None:
    """Only in the tag where it never speaks: there its dose could be anything."""
    anchors = {**recipe["anchors"], "brief": {**recipe["anchors"]["brief"], "where": {"inside": "product"}}}
    spans = {"product": ["*", "never"]}  # the prompt opens it, where it is a product
    run = budgeted({**recipe, "anchors": anchors, "spans": spans}, {"one": {"weights": BY_TAG}}, brief=0.01, acc=0.02)
    cache = open_cache(run, "one")
    rows = rows_by_tag(run)
    assert cache.weight_RK is not None
    assert (cache.weight_RK[rows["default"]] > 0).all(axis=0).tolist() == [True, False]
    assert {(one.tag, one.anchor) for one in cache.shares} == {
        ("product", "acc"),
        ("product", "brief"),
        ("default", "acc"),
    }
    for tag, anchor, budget in (("product", "brief", 0.01), ("product", "acc", 0.02), ("default", "acc", 0.02)):
        assert spent(cache, 2.0, (anchor,), rows[tag]) == pytest.approx(budget, rel=0.01)


def test_an_anchor_and_the_composition_meet_their_budgets_together(recipe: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": HALF, "kl_budget": 0.05}}, brief=0.01)
    cache = open_cache(run, "one")
    rows = list(range(len(cache)))
    assert cache.alpha is not None
    assert spent(cache, cache.alpha, ("brief",), rows) == pytest.approx(0.01, rel=0.01)
    assert spent(cache, cache.alpha, ("acc", "brief"), rows) == pytest.approx(0.05, rel=0.01)


def test_training_records_what_each_anchor_got(recipe: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": BY_TAG, "refresh": 2}}, brief=0.01)
    train(run, QUIET)
    manifest = run.stage("train", "one").require()
    cache = open_cache(run, "one")
    assert manifest["budgets"] == [asdict(share) for share in cache.shares]
    assert manifest["alpha"] == cache.alpha == 2.0
    card = (run.stage("train", "one").folder / "final" / "README.md").read_text()
    (row,) = [line for line in card.splitlines() if line.startswith("| brief |")]
    assert row.split("|")[3].strip() == "solved"
    assert all(str(share) in card for share in cache.shares)
    targets = compute_targets(cache.block([0]), cache.weights, 2.0)
    assert targets.valid_P.any()
    (point,) = forecast(run)[1:]
    assert point.policy == "one"
    scored = open_scored(run)
    assert scored is not None
    assert joint_weights(run, scored) == {}
    with pytest.raises(InputError, match=r"anchors\.brief\.kl_budget"):
        preview(run, QUIET, Console(), problems=1)


OTHERS = {
    "online": {"method": "online", "weights": {"brief": 1.0}},
    "teacher": {"method": "teacher", "weights": {"brief": 1.0}},
    "mixture": {"method": "mixture", "weights": HALF},
    "both": {"weights": {"brief": 1.0}, "kl_budget": 0.1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_cannot_be_solved_is_refused_before_it_begins(recipe: dict[str, Any], name: str) -> None:
    run = budgeted(recipe, {name: OTHERS[name]}, brief=0.01)
    assert f"compositions.{name}" in {one.about for one in preflight(run) if one.verdict == "error"}
    with pytest.raises(InputError, match="kl_budget"):
        train(run, QUIET)


def test_a_budget_out_of_reach_names_its_key(recipe: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": BY_TAG}}, brief=50.0)
    with pytest.raises(InputError, match=r"anchors\.brief\.kl_budget"):
        open_cache(run, "one")


@pytest.mark.parametrize("weights", [BY_TAG, HALF])
def test_a_table_of_budgets_has_a_value_for_every_tag(recipe: dict[str, Any], weights: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": weights}}, brief={"product": 0.01})
    errors = [one.text for one in preflight(run) if one.verdict == "error"]
    assert [text.startswith("anchors.brief.kl_budget") for text in errors] == [True]
    with pytest.raises(InputError, match=r"anchors\.brief\.kl_budget"):
        train(run, QUIET)


def test_shares_of_an_anchor_with_a_budget_are_not_varied(recipe: dict[str, Any]) -> None:
    run = budgeted(recipe, {"one": {"weights": HALF}}, brief=0.01)
    for vary in (partial(plan_sweep, shares=[0.25, 0.75]), partial(plan_forecast, grid=2)):
        with pytest.raises(InputError, match=r"anchors\.brief\.kl_budget"):
            vary(run.recipe)
