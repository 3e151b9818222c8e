"""What training made of a target: against the trainer's own measurement, and the verdict."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

import lightning_weave as lw
import oracle
from lightning_weave.cache.block import compute_targets
from lightning_weave.errors import InputError
from lightning_weave.stages import realised
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.forecast import ForecastPoint, forecast, read_points
from lightning_weave.stages.prompts import load_prompts, tag_of
from lightning_weave.stages.realised import judge, measure_all, realise, realised_table
from lightning_weave.stages.run import make_students
from lightning_weave.train.schedule import make_schedule
from lightning_weave.views.forecast import show_realised
from pipeline.scored import HALF, QUIET, copied, make_scored
from tiny import run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe = make_scored(tmp_path_factory.mktemp("realised"))
    recipe = {
        **recipe,
        "tags": {"rules": {"product": r"\*"}},
        "train": {**recipe["train"], "validation": 0.5},
        "compositions": {"even": {"weights": HALF, "alpha": 0.3}, "dealt": {"method": "mixture", "weights": HALF}},
    }
    with pytest.raises(InputError, match="no composition with a target is trained"):
        measure_all(run_of(recipe), QUIET)
    make_students(run_of(recipe), QUIET)
    assert realise(run_of(recipe), []) == []
    return recipe


def test_what_is_left_is_what_the_trainer_measured_on_held_out_rows(trained: dict[str, Any]) -> None:
    run = run_of(trained)
    measure_all(run, QUIET)
    (one,) = realise(run, forecast(run))  # a mixture has no single target
    assert one.policy == "even"
    assert one.held_out
    metrics = (run.stage("train", "even").folder / "metrics.jsonl").read_text().splitlines()
    (whole,) = one.closed["all"]
    assert whole.left == pytest.approx(json.loads(metrics[-1])["validation_forward_kl"], rel=1e-4)
    assert whole.asked > 0
    for by in ("position", "kind", "tag"):  # every decision is in one group of each
        groups = one.closed[by]
        assert sum(group.decisions for group in groups) == whole.decisions
        for figure in ("asked", "left"):
            total = sum(group.decisions * getattr(group, figure) for group in groups)
            assert total / whole.decisions == pytest.approx(getattr(whole, figure))
    assert one.closed["position"][0].group == "1/10"
    assert {group.group for group in one.closed["tag"]} <= {"product", "default"}
    assert one.verdict == "unknown"  # not evaluated
    table = realised_table([one])
    assert table[0] == ["KL to the target closed", "even"]
    assert table[1] == ["all", f"{whole.share:.0%}"]


def test_a_level_is_measured_as_its_own_target_with_its_own_prompt(trained: dict[str, Any], tmp_path: Path) -> None:
    """The plain prompt is one of the levels here, so all that is said of it must be said of that level."""
    levels = {"a": {**HALF, "alpha": 0.3}, "b": {"acc": 1.0, "alpha": 0.1}}
    dial = {"levels": levels, "default": "a", "control": {"prefix": "{level}+"}, "epochs": 2}
    recipe = {**copied(trained, tmp_path), "compositions": {"dial": dial, "even": {"weights": HALF, "alpha": 0.3}}}
    run = run_of(recipe)
    make_students(run, QUIET)
    measure_all(run, QUIET)
    results = {one.policy: one for one in realise(run, forecast(run))}
    assert list(results) == ["dial", "dial@a", "dial@b", "even"]
    whole = {policy: one.closed["all"][0] for policy, one in results.items()}
    assert whole["dial"].asked == pytest.approx(whole["dial@a"].asked) == pytest.approx(whole["even"].asked)
    assert whole["dial@b"].asked > 2 * whole["dial@a"].asked
    assert {policy: one.forecast.weights for policy, one in results.items() if one.forecast} == {
        "dial": HALF,
        "dial@a": HALF,
        "dial@b": {"acc": 1.0},
        "even": HALF,
    }
    assert results["dial"].apart is None
    apart = {level: results[f"dial@{level}"].apart or {} for level in "ab"}
    assert apart["a"]["asked"] == pytest.approx(0, abs=1e-6)
    cache = open_cache(run, "dial")
    final = AutoModelForCausalLM.from_pretrained(run.stage("train", "dial").folder / "final", dtype=torch.float32)
    rows = sorted(make_schedule(run.recipe, len(cache) // 2, "dial").held_out())
    kls: dict[str, list[float]] = {"asked": [], "learned": [], "left": []}
    for row in rows:
        log_p, log_q = [], []
        for slot in (0, 2):
            block = cache.block([slot * len(cache) + row])
            targets = compute_targets(block, cache.weights, run.stage("train", "dial").require()["alpha"])
            ids = torch.tensor([[*block.rollouts.prompt_ids[0], *block.sampled_P]])
            with torch.no_grad():
                log_PV = final(ids).logits[0, -len(block.sampled_P) - 1 : -1, : run.student.vocabulary].log_softmax(-1)
            log_PC = log_PV.gather(1, torch.tensor(block.candidates.ids.flat).long())
            rest_P = (1 - log_PC.exp().sum(dim=1)).clamp(min=1e-8).log()
            log_p.append(torch.cat([log_PC, rest_P[:, None]], dim=1).double())
            log_q.append(torch.from_numpy(targets.log_q_PO).double())
        for key, (one, two) in {"asked": log_q[::-1], "learned": log_p[::-1], "left": (log_q[1], log_p[1])}.items():
            kls[key] += (one.exp() * (one - two)).sum(dim=1)[targets.valid_P].tolist()  # of the level
    assert apart["b"] == pytest.approx({key: np.mean(kls[key]) for key in ("asked", "learned")}, rel=1e-3)
    assert whole["dial@b"].left == pytest.approx(np.mean(kls["left"]), rel=1e-3)


@pytest.mark.parametrize("balance", ["decisions", "rows", "tags"])
def test_shares_of_tags_are_what_loops_over_decisions_say(trained: dict[str, Any], balance: str) -> None:
    recipe = {**trained, "train": {**trained["train"], "balance": balance, "validation": 0.0}}
    run = run_of({**recipe, "compositions": {"even": trained["compositions"]["even"]}})
    make_students(run, QUIET)
    measure_all(run, QUIET)
    (one,) = realise(run, [])
    cache = open_cache(run, "even")
    prompts = load_prompts(run, ())
    losses: dict[str, list[list[float]]] = {}  # tag -> row -> decisions
    for row in range(len(cache)):
        targets = compute_targets(cache.block([row]), cache.weights, 0.3)
        b_PO, q_PO = np.exp(targets.log_b_PO.astype(float)), np.exp(targets.log_q_PO.astype(float))
        kept = np.flatnonzero(targets.valid_P)
        own = [oracle.log_residual_loss(b_PO[at], b_PO[at], q_PO[at], 0.3) for at in kept]
        losses.setdefault(tag_of(run.recipe, prompts[row // 2]), []).append(own)
    decisions = {tag: sum(map(len, rows)) for tag, rows in losses.items()}
    says = {
        "decisions": {tag: sum(map(sum, rows)) for tag, rows in losses.items()},
        "rows": {tag: sum(sum(row) / len(row) for row in rows if row) for tag, rows in losses.items()},
        "tags": {tag: sum(map(sum, rows)) / decisions[tag] for tag, rows in losses.items()},
    }[balance]
    shares = one.tag_shares()
    assert shares.keys() == {"product", "default"}
    for tag, share in shares.items():
        assert share["decisions"] == pytest.approx(decisions[tag] / sum(decisions.values()))
        assert share["loss"] == pytest.approx(says[tag] / sum(says.values()), rel=1e-4)
    assert sum(share["closed"] for share in shares.values()) == pytest.approx(1)


def test_it_is_measured_once_and_kept(trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = lw.Run(run_of(trained).recipe)
    first = run.realised()
    points = read_points(run)
    assert points == forecast(run)  # for the report
    clipped = {"acc": {**trained["anchors"]["acc"], "shift": {"clip": 0.1}}}
    for changed in ({"eval": {"temperature": 0.3}}, {"anchors": {**trained["anchors"], **clipped}}):
        assert read_points(run_of({**trained, **changed})) == []
    assert realise(run, points)[0].forecast == points[1]
    for other in (replace(points[1], alpha=9.0), replace(points[1], weights={"acc": 1.0})):  # the name meant another
        assert realise(run, [other])[0].forecast is None
    monkeypatch.setattr(realised, "find_candidates", None)
    assert run.realised() == first
    console = Console(record=True, width=200)
    show_realised(run, first, console, as_json=False)
    assert f"{first[0]['closed']['all'][0]['share']:.0%}" in (text := console.export_text())
    assert "cached rows held out" in text


def point(aes: float, low: float, trusted: bool = True) -> ForecastPoint:
    return ForecastPoint("x", {}, 2.0, 80, 75, 85, 50, 45, 55, aes, low, aes + 0.2, 0.1, 100, trusted, True)


@pytest.mark.parametrize(
    ("expected", "measured", "closed", "verdict"),
    [
        (point(0.5, 0.3), 0.45, 0.8, "as forecast"),
        (point(0.5, 0.3), 0.25, 0.3, "as forecast"),  # within the error of the evaluation
        (point(-0.1, -0.3), 0.0, 0.8, "target"),
        (point(0.5, 0.3), 0.0, 0.3, "training"),
        (point(0.5, 0.3), 0.0, 0.9, "states"),
        (point(0.5, 0.3), None, 0.9, "unknown"),
        (point(0.5, 0.3, trusted=False), 0.0, 0.9, "unknown"),
        (None, 0.0, 0.9, "unknown"),
    ],
)
def test_verdicts(expected: ForecastPoint | None, measured: float | None, closed: float, verdict: str) -> None:
    assert judge(expected, None if measured is None else {"aes": measured, "aes_error": 0.1}, closed) == verdict
