"""The rules of an anchor's shift (clip, entropy, mass, temperature) against loops, and what is said of them."""

import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from lightning_weave.cache.shifts import Shift, ShiftRules, TeacherSource, pair_shift
from lightning_weave.checks.shifts import rule_effects, suggestions
from lightning_weave.errors import InputError
from lightning_weave.report.survey import joint_weights
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.forecast import forecast
from lightning_weave.stages.preview import preview
from lightning_weave.types import Candidates, Ragged, Scores, join_rows
from lightning_weave.views.doctor import examine
from pipeline.scored import QUIET, make_scored
from tiny import run_of

POSITIONS, CANDIDATES, VOCABULARY = 40, 5, 30


def _softmax(logits_PV: np.ndarray) -> np.ndarray:
    exp_PV = np.exp(logits_PV)
    return exp_PV / exp_PV.sum(axis=1, keepdims=True)


def make_parts(seed: int) -> dict[str, Any]:
    """Three distributions over a vocabulary, of which the first five tokens are the candidates; a few are unmapped."""
    rng = np.random.default_rng(seed)
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


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return make_parts(3)


def random_rules(rng: np.random.Generator) -> tuple[dict[str, float], str]:
    """Draw some of the rules, and the validity."""
    drawn = {
        "clip": rng.uniform(0.01, 3),
        "only_above": rng.uniform(0.2, 2),
        "mass_floor": rng.uniform(0.01, 0.6),
        "temperature": rng.uniform(0.5, 3),
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.5}, rng.choice(["position", "candidate"])


def _finite(p_V: np.ndarray, mapped_C: np.ndarray) -> list[float]:
    """A distribution over the mapped candidates and everything else."""
    kept = [float(p) for p, known in zip(p_V, mapped_C, strict=False) if known]
    return [*kept, 1 - sum(kept)]


@pytest.mark.parametrize("validity", ["position", "candidate"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"clip": 1.5},
        {"only_above": 1.2},
        {"mass_floor": 0.1},
        {"temperature": 2.0},
        {"temperature": 0.5, "clip": 2.0, "only_above": 0.8, "mass_floor": 0.05},
    ],
)
def test_every_rule_is_what_loops_over_the_vocabulary_say(
    parts: dict[str, Any], rules: dict[str, float], validity: str
) -> None:
    check_rules(parts, rules, validity)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(40))
def test_many_rules_are_what_loops_over_the_vocabulary_say(seed: int) -> None:
    check_rules(make_parts(seed), *random_rules(np.random.default_rng([seed, 1])))


def check_rules(parts: dict[str, Any], rules: dict[str, float], validity: str) -> None:
    found: Shift = pair_shift(*parts["made"], ShiftRules(validity, **rules))  # type: ignore[arg-type]
    clip, power = rules.get("clip", math.inf), 1 / rules.get("temperature", 1.0)
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
    anchors = {**recipe["anchors"], "brief": {**recipe["anchors"]["brief"], "validity": "candidate", "shift": rules}}
    return run_of({**recipe, "anchors": anchors})


def test_doctor_says_what_a_rule_changes_and_suggests_values(recipe: dict[str, Any]) -> None:
    plain = _with(recipe)
    rows = range(len(open_cache(plain, "brief-only")))
    clip = suggestions(plain, "brief", rows)["clip"] / 4
    run = _with(recipe, clip=clip, only_above=1.0)
    said = {finding.check: finding for finding in examine(run) if finding.about == "anchors.brief"}
    whole = open_cache(plain, "brief-only").block(rows)
    beyond = (np.abs(whole.r_KPC[0]) > clip).any(axis=1)[whole.valid_KP[0]].mean()
    assert said["clip"].figures["positions"] == pytest.approx(beyond)
    assert 0 < said["clip"].figures["kl_after"] < said["clip"].figures["kl_before"]
    masked = open_cache(run, "brief-only").block(rows).valid_KP[0]
    left = 1 - masked.sum() / whole.valid_KP[0].sum()
    assert said["only_above"].figures["positions"] == pytest.approx(left)
    assert any(finding.check == "rules" and "shift.clip = " in finding.text for finding in examine(plain))
    assert rule_effects(plain, "brief", rows) == []


def test_a_rule_costs_training_alone(recipe: dict[str, Any]) -> None:
    plain, ruled = _with(recipe), _with(recipe, temperature=2.0)
    assert plain.stage("train", "brief-only").fingerprint != ruled.stage("train", "brief-only").fingerprint
    assert plain.stage("train", "acc-only").fingerprint == ruled.stage("train", "acc-only").fingerprint
    assert [step.fingerprint for step in plain.scores_of("brief")] == [
        step.fingerprint for step in ruled.scores_of("brief")
    ]


HALF = {"acc": 0.5, "brief": 0.5}
TAGS = {"tags": {"rules": {"sums": "[+]"}}}
METHODS: dict[str, Any] = {
    "joint": {"weights": HALF},
    "refreshed": {"weights": HALF, "refresh": 2},
    "teacher": {"method": "teacher", "weights": {"brief": 1.0}},
    "mixture": {"method": "mixture", "weights": HALF},
    "routed": {"weights": {"sums": {"acc": 1.0}, "default": {"brief": 1.0}}},
}


def test_every_method_respects_the_rules_of_its_anchors(recipe: dict[str, Any]) -> None:
    def opened(compositions: dict[str, Any], **rules: float) -> dict[str, Any]:
        anchors = {name: {**one, "shift": rules} for name, one in recipe["anchors"].items()}
        run = run_of({**recipe, "anchors": anchors, "compositions": compositions, **TAGS})
        return {name: (cache := open_cache(run, name)).block(range(len(cache))) for name in compositions}

    plain = opened(METHODS)
    assert all(block.valid_KP.all(axis=0).any() for block in plain.values())
    for name, block in opened(METHODS, only_above=50.0).items():
        assert not block.valid_KP.all(axis=0).any(), f"{name}: no student is that uncertain"
    for name, block in opened(METHODS, mass_floor=0.999999).items():
        kept, before = (each.valid_KP.all(axis=0).sum() for each in (block, plain[name]))
        assert kept < before, name
    for name, block in opened(METHODS, clip=0.01).items():
        largest = 0.01 * (METHODS["teacher"].get("alpha", 2.0) if name == "teacher" else 1.0)
        assert np.abs(block.r_KPC).max() == pytest.approx(largest, rel=1e-5), name
    for name, block in opened(METHODS, temperature=2.0).items():
        assert not np.array_equal(block.r_KPC, plain[name].r_KPC), name


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.fuzz) for seed in range(1, 30))])
def test_every_method_uses_of_each_anchor_what_its_own_rules_leave(recipe: dict[str, Any], seed: int) -> None:
    rng = np.random.default_rng([seed, 2])
    anchors, rules_of = {}, {}
    for name, anchor in recipe["anchors"].items():
        rules, validity = random_rules(rng)
        anchors[name] = {**anchor, "shift": rules, "validity": str(validity)}
        rules_of[name] = ShiftRules(validity, **rules)
    run = run_of({**recipe, "anchors": anchors, "compositions": METHODS, **TAGS})
    blocks = {name: (cache := open_cache(run, name)).block(range(len(cache))) for name in METHODS}
    shards = range(len(run.stage("reference").require()["shards"]))
    candidates = join_rows([run.stage("reference").open(Candidates, shard).read() for shard in shards])
    scores = {
        name: [join_rows([stage.open(Scores, shard).read() for shard in shards]) for stage in run.scores_of(name)]
        for name in ("acc", "brief")
    }

    def same(block: Any, source: int, expected: Shift, rows: Any = slice(None)) -> bool:
        is_valid = np.array_equal(block.valid_KP[source][rows], expected.valid_P[rows])
        return is_valid and np.allclose(block.r_KPC[source][rows], expected.r_PC[rows], atol=1e-5)

    shifts = [pair_shift(*scores[name], candidates, rules_of[name]) for name in ("acc", "brief")]
    for name in ("joint", "refreshed"):
        assert all(same(blocks[name], source, shift) for source, shift in enumerate(shifts)), name
    teacher = TeacherSource("t", None, 2.0, rules_of["brief"])  # type: ignore[arg-type]
    assert same(blocks["teacher"], 0, teacher.shift(candidates, scores["brief"][:1]))
    none = Shift(np.zeros_like(shifts[0].r_PC), shifts[0].mapped_PC, np.ones_like(shifts[0].valid_P))
    for name in ("mixture", "routed"):  # each row has one of the anchors, and the other masks nothing
        used = set()
        ends = np.cumsum(blocks[name].decisions_R)
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            rows = slice(start, end)
            own = [
                source
                for source in (0, 1)
                if same(blocks[name], source, shifts[source], rows) and same(blocks[name], 1 - source, none, rows)
            ]
            assert own, f"{name}: row of the decisions {start} to {end}"
            used |= {*own}
        assert used == {0, 1}, name


def test_placebos_negate_the_shift_or_take_it_from_another_decision_of_the_row(recipe: dict[str, Any]) -> None:
    """At the same decisions as their composition; the only one of a row has no other, and is left out."""
    placebos = {"flipped": {"weights": HALF, "flip": True}, "shuffled": {"weights": HALF, "shuffle": "states"}}
    alone = {"one": {"weights": {"acc": 1.0}}, "one-shuffled": {"weights": {"acc": 1.0}, "shuffle": "states"}}
    anchors = {**recipe["anchors"], "acc": {**recipe["anchors"]["acc"], "where": {"first": 1}}}
    compositions = {"joint": {"weights": HALF}, **placebos, **alone}
    run = run_of({**recipe, "anchors": anchors, "compositions": compositions})
    caches = {name: open_cache(run, name) for name in run.recipe.compositions}
    rows = range(len(caches["joint"]))
    plain, flipped, shuffled, one, none = (cache.block(rows) for cache in caches.values())
    np.testing.assert_array_equal(flipped.r_KPC, -plain.r_KPC)
    np.testing.assert_array_equal(flipped.valid_KP, plain.valid_KP)
    assert one.kept([1.0]).any()
    assert not none.kept([1.0]).any()
    weights = caches["joint"].weights
    assert 0 < plain.kept(weights).mean() < 1
    moved = 0
    ends = np.cumsum(plain.decisions_R)
    for row, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        places = start + np.flatnonzero(plain.kept(weights)[start:end])
        kept = places if len(places) > 1 else []
        np.testing.assert_array_equal(start + np.flatnonzero(shuffled.kept(weights)[start:end]), kept)
        before, after = (
            [(block.r_KPC[:, at].tobytes(), block.mapped_KPC[:, at].tobytes()) for at in places]
            for block in (plain, shuffled)
        )
        assert sorted(before) == sorted(after), "each shift is used once, in its own row"
        if len(set(before)) == len(before) > 1:
            assert all(one != two for one, two in zip(before, after, strict=True))
            moved += 1
        by_itself = caches["shuffled"].block([row])
        np.testing.assert_array_equal(by_itself.r_KPC, shuffled.r_KPC[:, start:end])  # whatever is read with it
    assert moved
    joint = run.stage("train", "joint")
    for name in placebos:
        assert run.stage("train", name).fingerprint != joint.fingerprint
        assert {one.fingerprint for one in run.stage("train", name).inputs} == {one.fingerprint for one in joint.inputs}


@pytest.mark.parametrize("placebo", [{"flip": True}, {"shuffle": "states"}])
def test_no_target_of_a_placebo_is_shown_as_that_of_its_weights(recipe: dict[str, Any], placebo: dict) -> None:
    compositions = {"joint": {"weights": HALF}, "control": {"weights": HALF, **placebo}}
    run = run_of({**recipe, "compositions": compositions})
    assert [point.policy for point in forecast(run)] == ["base", "joint"]
    assert list(joint_weights(run, open_cache(run, "joint"))) == ["joint"]
    with pytest.raises(InputError):
        preview(run, QUIET, Console(), problems=1, only=["control"])


def test_a_tempered_teacher_is_its_distribution_to_a_power(parts: dict[str, Any]) -> None:
    post, _, candidates = parts["made"]
    found = TeacherSource("t", None, 3.0, ShiftRules(temperature=2.0)).shift(candidates, [post])  # type: ignore[arg-type]
    for at in np.flatnonzero(found.valid_P):
        teacher = np.sqrt(_finite(parts["post"][at], np.ones(CANDIDATES, bool)))
        b = np.array(_finite(parts["b"][at], np.ones(CANDIDATES, bool)))
        target = b * np.exp(np.append(found.r_PC[at], 0.0) / 3.0)
        np.testing.assert_allclose(target / target.sum(), teacher / teacher.sum(), rtol=1e-4)
