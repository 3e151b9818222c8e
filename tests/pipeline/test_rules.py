"""The rules of an anchor's shift (clip, entropy, mass, temperature) against loops, and what is said of them."""

import math
from typing import Any

import numpy as np
import pytest

from lightning_weave.cache.sources import Shift, ShiftRules, pair_shift
from lightning_weave.runs.caches import open_cache
from lightning_weave.runs.hygiene import rule_effects, suggestions
from lightning_weave.types import Candidates, Ragged, Scores
from lightning_weave.views.doctor import examine
from pipeline.scored import make_scored
from tiny import steps_of

POSITIONS, CANDIDATES, VOCABULARY = 40, 5, 30


def _softmax(logits_PV: np.ndarray) -> np.ndarray:
    exp_PV = np.exp(logits_PV)
    return exp_PV / exp_PV.sum(axis=1, keepdims=True)


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    """Three distributions over a vocabulary, of which the first five tokens are the candidates; a few are unmapped."""
    rng = np.random.default_rng(3)
    b, post, pre = (_softmax(rng.normal(0, 3, (POSITIONS, VOCABULARY))) for _ in range(3))
    mapped = rng.random((POSITIONS, CANDIDATES)) > 0.1
    offsets = np.array([0, POSITIONS])

    def scores(p: np.ndarray) -> Scores:
        own = np.where(mapped, p[:, :CANDIDATES], 0)
        logp = np.where(mapped, np.log(p[:, :CANDIDATES]), 0).astype(np.float32)
        mass = own.sum(axis=1).astype(np.float32)
        return Scores(np.zeros(1, np.uint32), *(Ragged(values, offsets) for values in (logp, mapped, mass)))

    ids = np.tile(np.arange(CANDIDATES, dtype=np.int32), (POSITIONS, 1))
    other = np.log(b[:, CANDIDATES:].sum(axis=1)).astype(np.float32)
    logp = np.log(b[:, :CANDIDATES]).astype(np.float32)
    candidates = Candidates(np.zeros(1, np.uint32), *(Ragged(values, offsets) for values in (ids, logp, other, other)))
    return {"b": b, "post": post, "pre": pre, "mapped": mapped, "made": (scores(post), scores(pre), candidates)}


def _finite(p_V: np.ndarray, mapped_C: np.ndarray) -> list[float]:
    """A distribution over the mapped candidates and everything else."""
    kept = [float(p) for p, known in zip(p_V, mapped_C, strict=False) if known]
    return [*kept, 1 - sum(kept)]


@pytest.mark.parametrize("validity", ["position", "candidate"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"shift_clip": 1.5},
        {"only_above": 1.2},
        {"mass_floor": 0.1},
        {"temperature": 2.0},
        {"temperature": 0.5, "shift_clip": 2.0, "only_above": 0.8, "mass_floor": 0.05},
    ],
)
def test_every_rule_is_what_loops_over_the_vocabulary_say(
    parts: dict[str, Any], rules: dict[str, float], validity: str
) -> None:
    found: Shift = pair_shift(*parts["made"], ShiftRules(validity, **rules))  # type: ignore[arg-type]
    clip, power = rules.get("shift_clip", math.inf), 1 / rules.get("temperature", 1.0)
    for at in range(POSITIONS):
        mapped_C = parts["mapped"][at]
        sides = [_finite(parts[side][at], mapped_C) for side in ("post", "pre")]
        masses = [sum(side[:-1]) for side in sides]
        sides = [[p**power / sum(one**power for one in side) for p in side] for side in sides]
        shifts = iter(math.log(post / pre) for post, pre in zip(sides[0][:-1], sides[1][:-1], strict=True))
        expected = [min(max(next(shifts), -clip), clip) if known else 0.0 for known in mapped_C]
        np.testing.assert_allclose(found.r_PC[at], expected, atol=2e-5)
        b = _finite(parts["b"][at], np.ones(CANDIDATES, bool))
        expressible = mapped_C.all() if validity == "position" else mapped_C.any()
        certain = -sum(p * math.log(p) for p in b) < rules.get("only_above", 0.0)
        assert found.valid_P[at] == (expressible and not certain and min(masses) >= rules.get("mass_floor", 0.0))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_scored(tmp_path_factory.mktemp("rules"))


def _with(recipe: dict[str, Any], **rules: float) -> Any:
    anchors = {**recipe["anchors"], "brief": {**recipe["anchors"]["brief"], "validity": "candidate", **rules}}
    return steps_of({**recipe, "anchors": anchors})


def test_doctor_says_what_a_rule_changes_and_suggests_values(recipe: dict[str, Any]) -> None:
    plain = _with(recipe)
    rows = range(len(open_cache(plain, "brief-only")))
    clip = suggestions(plain, "brief", rows)["shift_clip"] / 4
    steps = _with(recipe, shift_clip=clip, only_above=1.0)
    said = {finding.check: finding for finding in examine(steps) if finding.about == "anchors.brief"}
    whole = open_cache(plain, "brief-only").block(rows)
    beyond = (np.abs(whole.r_KPC[0]) > clip).any(axis=1)[whole.valid_KP[0]].mean()
    assert said["shift_clip"].figures["positions"] == pytest.approx(beyond)
    assert 0 < said["shift_clip"].figures["kl_after"] < said["shift_clip"].figures["kl_before"]
    masked = open_cache(steps, "brief-only").block(rows).valid_KP[0]
    left = 1 - masked.sum() / whole.valid_KP[0].sum()
    assert said["only_above"].figures["positions"] == pytest.approx(left)
    assert any(finding.check == "rules" and "shift_clip = " in finding.text for finding in examine(plain))
    assert rule_effects(plain, "brief", rows) == []


def test_a_rule_costs_training_alone(recipe: dict[str, Any]) -> None:
    plain, ruled = _with(recipe), _with(recipe, temperature=2.0)
    assert plain.train("brief-only").fingerprint != ruled.train("brief-only").fingerprint
    assert plain.train("acc-only").fingerprint == ruled.train("acc-only").fingerprint
    assert [step.fingerprint for step in plain.scores_of("brief")] == [
        step.fingerprint for step in ruled.scores_of("brief")
    ]
