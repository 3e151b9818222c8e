"""What is said about what a stage has made, and what stops `lweave run`."""

import json
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_weave.checks.findings import Finding
from lightning_weave.checks.shifts import (
    GradedShifts,
    LengthPreference,
    auc_at_equal_length,
    judge_preference,
    judge_separation,
    prefers_longer,
    pulls,
)
from lightning_weave.checks.watch import check_evaluation, check_rollouts, check_scores, check_training, stop, warn
from lightning_weave.errors import WeaveError
from lightning_weave.progress import Progress
from lightning_weave.stages import rollout
from lightning_weave.stages import run as run_stage
from tiny import make_world, run_of, save_prompts

QUIET = Progress(quiet=True)


def by_check(findings: list[Finding]) -> dict[tuple[str, str], Finding]:
    return {(finding.about, finding.check): finding for finding in findings}


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path, prompts=20)
    bench = save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    recipe["compositions"] = {"acc-only": {"weights": {"acc": 1.0, "brief": 0.0}}}
    recipe["rollout"] |= {"max_tokens": 2, "prompts_per_shard": 20}
    return recipe


@pytest.mark.slow
def test_a_run_whose_responses_are_all_cut_off_stops_before_the_next_stage(recipe: dict[str, Any]) -> None:
    recipe["checks"] = {"truncated": 0.6}
    run = run_of(recipe)
    with pytest.raises(WeaveError, match="of 40 sampled responses are cut off at 2 tokens") as stopped:
        run_stage.run_all(run, QUIET)
    assert stopped.value.code == 1
    assert "--force" in str(stopped.value)
    assert run.stage("rollout").complete
    assert run.stage("reference").state() == "missing"
    with pytest.raises(WeaveError, match="cut off"):  # again: what is made is not made anew, and is no better
        run_stage.run_all(run_of(recipe), QUIET)
    rollout.rollout(run_of(recipe), QUIET)  # the stage by itself only warns
    recipe["checks"] = {"truncated": False}
    assert by_check(check_rollouts(run_of(recipe)))["rollout", "truncated"].verdict == "ok"


@pytest.mark.slow
def test_figures_are_those_of_what_was_made(recipe: dict[str, Any]) -> None:
    recipe["eval"]["profile"] = "paper"
    run = run_of(recipe)
    run_stage.run_all(run, QUIET, force=True)
    found = by_check(check_rollouts(run) + check_scores(run) + check_training(run, "acc-only"))
    assert found["rollout", "unanswered"].figures["share"] == 1
    assert found["rollout", "unanswered"].verdict == "warning"
    assert found["rollout", "right"].verdict == "warning"
    numeric = run_of({**recipe, "eval": {**recipe["eval"], "profile": "numeric"}})
    assert "numeric" in by_check(check_rollouts(numeric))["rollout", "unanswered"].text
    own = run_of({**recipe, "eval": {**recipe["eval"], "graders": {"bench": "regex:(?s).+"}}})
    assert by_check(check_rollouts(own))["rollout", "unanswered"].figures["share"] < 1, "as the benchmark is graded"
    assert 0 < found["anchors.acc", "positions"].figures["share"] <= 1
    assert ("compositions.acc-only", "KL to the target") in found
    samples = [json.loads(line) for line in (run.directory / "eval/base/bench/samples.jsonl").read_text().splitlines()]
    found = by_check(check_evaluation(run, "base"))
    cut = found["eval base/bench", "truncated"].figures["share"]
    assert cut == np.mean([sample["finish"] == "length" for sample in samples])
    unanswered = np.mean([sample["answer"] is None for sample in samples])
    assert found["eval base/bench", "unanswered"].figures["share"] == pytest.approx(unanswered)


def graded(seed: int, right: float, length: float) -> GradedShifts:
    """A pair that prefers right responses or long ones by so much; right responses are longer."""
    rng = np.random.default_rng(seed)
    right_R = rng.random(400) < 0.5
    length_R = np.round(30 + 8 * right_R + 10 * rng.standard_normal(400))
    return GradedShifts(right * right_R + length * length_R / 10 + rng.standard_normal(400), length_R, right_R)


@pytest.mark.parametrize(
    ("right", "length", "verdict"),
    [(1.5, 0.0, "ok"), (-1.5, 0.0, "error"), (-0.5, 0.0, "warning"), (0.0, -2.0, "note"), (-2.5, -1.0, "error")],
)
def test_a_swapped_pair_is_found_and_a_brevity_pair_is_none(right: float, length: float, verdict: str) -> None:
    for seed in range(3):
        shifts = graded(seed, right, length)
        equal = auc_at_equal_length(shifts)
        found = judge_separation("anchors.x", shifts, equal, 0.35)
        assert found.verdict == verdict, found.text
        assert ("swapped?" in found.text) == (verdict in ("warning", "error"))
        if verdict == "error":
            assert judge_separation("anchors.x", shifts, equal, False).verdict == "warning"
            with pytest.raises(WeaveError, match="swapped"):
                stop(lambda: [found], False, QUIET)  # noqa: B023
            warn(lambda: [found], True, QUIET)  # noqa: B023


@pytest.mark.parametrize(("last", "verdict"), [(0.5, "ok"), (1.1, "warning"), (1.6, "error")])
def test_a_distance_that_rises_is_said_with_the_update(recipe: dict[str, Any], last: float, verdict: str) -> None:
    run = run_of(recipe | {"checks": {"kl_rise": 1.25}})
    folder = run.stage("train", "acc-only").folder
    folder.mkdir(parents=True)
    curve = [*np.linspace(1, 0.5, 20), *np.linspace(0.5, last, 20)]
    rows = [{"step": step, "reverse_kl": kl} for step, kl in enumerate(curve, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [found] = check_training(run, "acc-only")
    assert found.verdict == verdict
    if verdict != "ok":
        assert abs(found.figures["step"] - 22) <= 1
        assert f"about update {found.figures['step']}" in found.text
        [unlimited] = check_training(run_of(recipe), "acc-only")
        assert unlimited.verdict == "warning", "by default it only warns"


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_a_pair_that_sharpens_the_student_does_not_prefer_long_responses_for_it(temperature: float) -> None:
    """Its shift makes likely tokens likelier, and cold samples are likely tokens: no reason to like more of them."""
    rng = np.random.default_rng(3)
    b_O = np.array([0.5, 0.25, 0.15, 0.08, 0.02])  # the last is the rest
    cold_O = b_O ** (1 / temperature) if temperature else np.eye(5)[0]
    lengths = rng.integers(5, 60, 200)
    sampled = rng.choice(5, size=lengths.sum(), p=cold_O / cold_O.sum())
    log_b_PO = np.tile(np.log(b_O), (len(sampled), 1))
    pull_P = pulls(log_b_PO, log_b_PO[:, :4], sampled[:, None] == np.arange(4), temperature)
    summed = np.add.reduceat(pull_P, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    found = prefers_longer([(summed, lengths.astype(float))])
    assert abs(found.share - 0.5) <= 2 * found.error
    naive = np.add.reduceat(pulls(log_b_PO, log_b_PO[:, :4], sampled[:, None] == np.arange(4), 1.0), [0])
    assert (naive[0] / len(sampled) > 0.1) == (temperature < 1), "as at temperature 1 it would"


def test_the_error_of_a_length_preference_is_that_of_all_orders() -> None:
    lengths = [np.array([3.0, 5.0, 5.0, 9.0]), np.array([2.0, 1.0, 4.0])]
    orders = [list(permutations(range(len(length)))) for length in lengths]
    groups = [
        [(np.array(order, float), length) for order in some] for some, length in zip(orders, lengths, strict=True)
    ]
    shares = [prefers_longer(both) for both in product(*groups)]
    assert {found.pairs for found in shares} == {5 + 3}
    assert np.mean([found.share for found in shares]) == pytest.approx(0.5)
    assert np.std([found.share for found in shares]) == pytest.approx(shares[0].error)


@pytest.mark.parametrize(
    ("share", "equal", "verdict"),
    [
        (0.65, 0.77, "warning"),  # with so few answers it may well prefer right ones
        (0.35, None, "ok"),  # a brevity pair
        (0.35, 0.5, "ok"),
        (0.65, 0.5, "error"),  # the same, swapped
        (0.55, 0.5, "warning"),  # perhaps
        (0.52, 0.5, "ok"),  # chance
        (0.65, 0.8, "ok"),  # right responses are longer
        (0.65, None, "warning"),  # nobody knows which are right
    ],
)
def test_a_swapped_brevity_pair_is_found_by_length(share: float, equal: float | None, verdict: str) -> None:
    separation = (0.5, 0.5) if equal is None else (equal, 0.2 if equal == 0.77 else 0.03)
    found = judge_preference("anchors.x", LengthPreference(share, 0.02, 500), separation, 0.6)
    assert found.verdict == verdict, found.text
    assert ("swapped" in found.text) == (verdict in ("warning", "error"))
    assert judge_preference("anchors.x", LengthPreference(share, 0.02, 500), separation, False).verdict != "error"
    assert (
        judge_preference("anchors.x", LengthPreference(share, 0.02, 500), (0.5, 0.5), 0.6).verdict == "warning"
    ) == (share == 0.65)
