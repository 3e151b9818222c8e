"""The alternatives to the paper's method: each does what its name says, on the same cache and the same budget."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from lightning_weave.cache.shifts import assign_groups
from lightning_weave.config import Composition
from lightning_weave.errors import InputError
from lightning_weave.maths import expected_kl
from lightning_weave.stages import reference, rollout
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.train.data import anchor_doses, compose
from lightning_weave.types import Scores
from pipeline.scored import HALF, QUIET, make_scored, same, trained
from rows import block_of, read_row
from tiny import run_of


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return make_scored(tmp_path_factory.mktemp("baselines"))


@pytest.mark.slow
def test_degenerate_baselines_are_the_single_anchor_run_bit_for_bit(recipe: dict) -> None:
    models = trained(
        recipe,
        single={"weights": {"acc": 1.0}},
        mixture={"weights": {"acc": 1.0, "brief": 0.0}, "method": "mixture"},
        sequence={"weights": {"acc": 1.0}, "method": "sequential", "sequence": ["acc"]},
        other={"weights": {"brief": 1.0}},
    )
    assert same(models["single"], models["mixture"])
    assert same(models["single"], models["sequence"])
    assert not same(models["single"], models["other"])


def test_a_mixture_gives_each_prompt_one_anchor_in_exact_shares(recipe: dict) -> None:
    run = run_of({**recipe, "compositions": {"mix": {"weights": {"acc": 0.25, "brief": 0.75}, "method": "mixture"}}})
    cache = open_cache(run, "mix")
    singles = {
        anchor: open_cache(run_of({**recipe, "compositions": {"x": {"weights": {anchor: 1.0}}}}), "x")
        for anchor in ("acc", "brief")
    }
    found = []
    for number in range(len(cache)):
        row = read_row(cache, number)
        matches = [
            anchor
            for anchor, single in singles.items()
            if np.array_equal(row.r_KTC.sum(axis=0), read_row(single, number).r_KTC[0])
            and np.array_equal(row.valid_KT.all(axis=0), read_row(single, number).valid_KT[0])
        ]
        assert len(matches) == 1
        found.append(matches[0])
    assert all(found[2 * group] == found[2 * group + 1] for group in range(12)), "prompt groups stay together"
    assert found.count("acc") == 6, "a quarter of 12 prompts x 2 responses"
    assert cache.weights == [1.0, 1.0], "what each row is given is in its shifts"


def test_dealing_is_exact_and_by_seed() -> None:
    dealt = assign_groups(100, [0.2, 0.3, 0.5], seed=1)
    assert np.bincount(dealt).tolist() == [20, 30, 50]
    assert not np.array_equal(dealt, assign_groups(100, [0.2, 0.3, 0.5], seed=2))
    assert np.array_equal(dealt, assign_groups(100, [0.2, 0.3, 0.5], seed=1))


def test_a_teacher_target_is_the_teachers_own_distribution(recipe: dict) -> None:
    run = run_of({**recipe, "compositions": {"opd": {"weights": {"acc": 1.0}, "method": "teacher", "alpha": 3.0}}})
    cache = open_cache(run, "opd")
    post = run.scores_of("acc")[0]
    for number in range(8):
        batch = compose(cache.block([number]), cache.weights, 3.0)
        scores = post.open(Scores, number // 8).read(number % 8, number % 8 + 1)
        kept = scores.mapped[0].all(axis=-1)
        logp_NC, mass_N = torch.from_numpy(scores.logp[0][kept]), torch.from_numpy(scores.mass[0][kept])
        torch.testing.assert_close(batch.log_q_NO[:, :-1], logp_NC, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batch.log_q_NO[:, -1].exp(), 1 - mass_N, atol=1e-5, rtol=1e-4)


def test_self_distillation_aims_at_the_student_at_another_temperature(recipe: dict) -> None:
    run = run_of({**recipe, "compositions": {"self": {"method": "self", "sharpen": 0.5, "alpha": 3.0}}})
    cache = open_cache(run, "self")
    batch = compose(cache.block([0]), cache.weights, 3.0)
    torch.testing.assert_close(batch.log_q_NO, torch.log_softmax(2 * batch.log_b_NO, dim=-1), atol=1e-5, rtol=1e-5)


def test_a_contrast_subtracts_a_shift(recipe: dict) -> None:
    weights = {"acc": 1.5, "brief": -0.5}
    run = run_of({**recipe, "compositions": {"minus": {"weights": weights, "allow_negative": True}}})
    row = read_row(cache := open_cache(run, "minus"), 0)
    batch = compose(block_of([row]), cache.weights, 2.0)
    kept = row.valid_KT.all(axis=0)
    expected = 1.5 * row.r_KTC[0][kept] - 0.5 * row.r_KTC[1][kept]
    torch.testing.assert_close(batch.r_NC, torch.from_numpy(expected))


def test_a_kl_budget_is_hit_within_one_percent_on_the_cache(recipe: dict) -> None:
    budget = 0.02
    trained(recipe, budget={"weights": HALF, "kl_budget": budget})
    run = run_of({**recipe, "compositions": {"budget": {"weights": HALF, "kl_budget": budget}}})
    manifest = run.stage("train", "budget").require()
    cache = open_cache(run, "budget")
    rows = [read_row(cache, number) for number in range(len(cache))]
    batch = compose(block_of(rows), cache.weights, manifest["alpha"])
    assert expected_kl(batch.log_q_NO, batch.log_b_NO).mean().item() == pytest.approx(budget, rel=0.01)
    assert manifest["target_kl"] == pytest.approx(budget, rel=0.01)


def test_an_unreachable_kl_budget_names_the_range(recipe: dict) -> None:
    with pytest.raises(InputError, match=r"compositions\.far\.kl_budget = 1e\+06: .* gives"):
        trained(recipe, far={"weights": HALF, "kl_budget": 1e6})


@pytest.mark.parametrize(
    ("way", "doses"),
    [
        ({"weights": HALF}, {"acc": 0.25, "brief": 0.25}),
        ({"weights": HALF, "method": "mixture"}, {"acc": 0.5, "brief": 0.5}),
        ({"weights": HALF, "method": "sequential", "sequence": ["acc", "brief"]}, {"acc": 0.5, "brief": 0.5}),
        (
            {"weights": HALF, "method": "sequential", "sequence": ["acc", "brief"], "dose": "matched"},
            {"acc": 0.25, "brief": 0.25},
        ),
        ({"weights": {"acc": 1.0}, "method": "teacher"}, {}),
        ({"method": "self", "sharpen": 0.5}, {}),
    ],
)
def test_the_dose_is_what_each_anchor_acts_with(way: dict, doses: dict) -> None:
    assert anchor_doses(TypeAdapter(Composition).validate_python(way), 2.0) == doses


@pytest.mark.slow
def test_self_distillation_without_anchors_is_a_whole_run(recipe: dict, tmp_path: Path) -> None:
    alone = {key: value for key, value in recipe.items() if key != "anchors"}
    run = run_of({**alone, "runs": str(tmp_path), "compositions": {"self": {"method": "self", "sharpen": 0.5}}})
    assert [step.path for step in run.everything()][:4] == ["prompts", "rollout", "reference", "train/self"]
    rollout.rollout(run, QUIET)
    reference.reference(run, QUIET)
    make_students(run, QUIET)
    assert run.stage("train", "self").complete
