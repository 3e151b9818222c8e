"""Forecasts against enumeration of all sequences, against sampling, and through the program."""

import itertools
import json
import math
import signal
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from rich.console import Console

import lightning_weave as lw
import oracle
from forked import Forked
from lightning_weave.cache.block import Block
from lightning_weave.cache.shifts import Shift
from lightning_weave.config import check_recipe, load_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.report.survey import pack_forecasts
from lightning_weave.stages import forecast as stage
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.forecast import (
    REACHED,
    Aim,
    Decoding,
    ForecastPoint,
    Weighted,
    bootstrap,
    effective_samples,
    estimate,
    forecast,
    keep_points,
    plan_forecast,
    plan_promising,
    read_points,
    sampled_logp,
    suggest_alpha,
    truncate,
    weigh,
    weigh_block,
    weights_of,
)
from lightning_weave.stages.prompts import load_prompts
from lightning_weave.stages.score import make_cache
from lightning_weave.types import Candidates, Ragged, Rollouts
from lightning_weave.views.doctor import examine
from lightning_weave.views.forecast import (
    Goal,
    add_composition,
    best,
    choose,
    choose_levels,
    composition_toml,
    parse_goals,
    show_levels,
)
from pipeline.scored import HALF, QUIET, copied, make_scored
from pipeline.test_adapters import save_adapter
from tiny import run_of
from train.cached import make_run

VOCABULARY, LONGEST, END = 4, 4, 0
ANCHORS = 2
WEIGHTS = (0.75, 0.25)


class Chain:
    """A policy whose next token depends on the last one, two shifts of it, and all of its sequences."""

    def __init__(self, candidates: int, least_stays_least: bool = False) -> None:
        rng = np.random.default_rng(3)
        self.candidates = candidates
        self.b = [oracle.softmax(rng.normal(0, 1, VOCABULARY).tolist()) for _ in range(VOCABULARY)]
        self.top = [sorted(range(VOCABULARY), key=lambda token: -row[token])[:candidates] for row in self.b]
        shifts = rng.normal(0, 1.5, (ANCHORS, VOCABULARY, VOCABULARY))
        shifts = np.abs(shifts) if least_stays_least else shifts
        for state in range(VOCABULARY):  # tokens that are not candidates have no shift
            shifts[:, state, [token for token in range(VOCABULARY) if token not in self.top[state]]] = 0
        self.shifts = shifts
        ended = [
            (*body, END) for length in range(LONGEST) for body in itertools.product(range(1, VOCABULARY), repeat=length)
        ]
        self.sequences = [*ended, *itertools.product(range(1, VOCABULARY), repeat=LONGEST)]  # the last are cut off

    def states(self, sequence: tuple[int, ...]) -> list[int]:
        return [END, *sequence[:-1]]

    def probability(self, sequence: tuple[int, ...], policy: list[list[float]]) -> float:
        steps = zip(self.states(sequence), sequence, strict=True)
        return math.prod(policy[state][token] for state, token in steps)

    def target(self, weights: tuple[float, ...], alpha: float, decoding: Decoding) -> list[list[float]]:
        """The target over the whole vocabulary, as it is sampled, in slow loops."""
        rows = []
        for state in range(VOCABULARY):
            r_V = oracle.compose(self.shifts[:, state].tolist(), weights)
            rows.append(sampled(oracle.tilt(self.b[state], r_V, alpha), decoding))
        return rows

    def block(self, sequences: list[tuple[int, ...]], valid: bool = True, decided: Ragged | None = None) -> Block:
        offsets = np.cumsum([0, *map(len, sequences)])
        states = [state for sequence in sequences for state in self.states(sequence)]
        ids = np.array([self.top[state] for state in states], np.int32)
        logp = np.log([[self.b[state][token] for token in self.top[state]] for state in states]).astype(np.float32)
        rest = [sum(p for token, p in enumerate(self.b[s]) if token not in self.top[s]) for s in states]
        other = np.log(rest).astype(np.float32)
        drawn = [
            math.log(self.b[state][token]) for state, token in zip(states, itertools.chain(*sequences), strict=True)
        ]
        rows = len(sequences)
        flat = np.array([token for sequence in sequences for token in sequence], np.int32)
        rollouts = Rollouts(
            np.arange(rows, dtype=np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.uint8),
            Ragged.of([np.array([7], np.int32)] * rows),
            Ragged(flat, offsets),
            decided,
        )
        parts = [Ragged(values, offsets) for values in (ids, logp, other, np.array(drawn, np.float32))]
        shifts = []
        for anchor in range(ANCHORS):
            r_PC = np.array([[self.shifts[anchor, s, token] for token in self.top[s]] for s in states], np.float32)
            shifts.append(Shift(r_PC, np.ones(r_PC.shape, bool), np.full(len(states), valid)))
        return Block.from_shifts(range(rows), rollouts, Candidates(rollouts.trajectories(), *parts), shifts)

    def draw(self, rows: int, seed: int, policy: list[list[float]]) -> list[tuple[int, ...]]:
        rng = np.random.default_rng(seed)
        chances = np.array([self.probability(sequence, policy) for sequence in self.sequences])
        return [self.sequences[place] for place in rng.choice(len(chances), size=rows, p=chances / chances.sum())]


def sampled(p_V: list[float], decoding: Decoding) -> list[float]:
    """Temper and cut to the nucleus, in plain loops."""
    if decoding.temperature == 0:
        return [float(p == max(p_V)) for p in p_V]
    powers = [p ** (1 / decoding.temperature) for p in p_V]
    p_V = [power / sum(powers) for power in powers]
    kept, mass = [0.0] * len(p_V), 0.0
    for token in sorted(range(len(p_V)), key=lambda token: -p_V[token]):
        if mass < decoding.top_p:
            kept[token] = p_V[token]
            mass += p_V[token]
    return [p / mass for p in kept]


def is_right(sequence: tuple[int, ...]) -> float:
    return float(sum(sequence) % 3 == 0)


CASES = {
    "temperature 1": (3, Decoding(), Decoding()),
    "several others": (2, Decoding(), Decoding()),
    "colder": (3, Decoding(0.6), Decoding()),
    "a warm rollout": (3, Decoding(0.6), Decoding(1.3)),
    "top-p": (3, Decoding(0.6, 0.9), Decoding()),
    "top-p that needs all candidates": (2, Decoding(1.0, 0.999), Decoding()),
    "greedy": (3, Decoding(0.0), Decoding()),
}


@pytest.mark.parametrize("case", list(CASES))
def test_weights_of_all_sequences_give_the_target_exactly(case: str) -> None:
    """With the behaviour's exact probabilities instead of samples, nothing is left to chance."""
    candidates, decoding, behaviour = CASES[case]
    chain = Chain(candidates, least_stays_least=decoding.top_p < 1 or decoding.temperature == 0)
    block = chain.block(chain.sequences)
    log_weight_AR, _, _ = weigh_block(block, [Aim(WEIGHTS, 0.7)], decoding, behaviour)
    drawn_from = [sampled(row, behaviour) for row in chain.b]
    log_b_R = np.log([chain.probability(sequence, drawn_from) for sequence in chain.sequences])
    weight_AR = np.exp(log_weight_AR + log_b_R)
    truths = [[sampled(row, decoding) for row in chain.b], chain.target(WEIGHTS, 0.7, decoding)]
    for place, policy in enumerate(truths):
        chances = np.array([chain.probability(sequence, policy) for sequence in chain.sequences])
        for value in (is_right, len):
            expected = sum(p * value(sequence) for p, sequence in zip(chances, chain.sequences, strict=True))
            value_R = np.array([float(value(sequence)) for sequence in chain.sequences])
            found = weight_AR[place] @ value_R / weight_AR[place].sum()
            assert found == pytest.approx(expected, abs=1e-6, rel=1e-6)
        assert weight_AR[place].sum() == pytest.approx(1, abs=1e-5)  # it is a distribution already


@pytest.mark.parametrize(("temperature", "most"), [(0.6, 0.02), (0.8, 0.04), (1.0, 1e-5), (1.3, 0.3)])
def test_tokens_of_a_long_tail_are_tempered_one_by_one(temperature: float, most: float) -> None:
    """As a single token, `other` would be drawn far too often: here by 0.5 nats per decision at temperature 0.6."""
    rng = np.random.default_rng(0)
    logits = -rng.uniform(0.9, 2.5, (400, 1)) * np.log(np.arange(1, 20_001)) + rng.normal(0, 0.5, (400, 20_000))
    p_PV = np.exp(-np.sort(-logits, axis=1))
    p_PV /= p_PV.sum(axis=1, keepdims=True)
    drawn_P = (p_PV.cumsum(axis=1) < rng.random((400, 1))).sum(axis=1)
    logp_P = np.log(np.take_along_axis(p_PV, drawn_P[:, None], 1)[:, 0])
    true_P = logp_P / temperature - np.log((p_PV ** (1 / temperature)).sum(axis=1))
    log_p_PO = torch.tensor(np.log(np.hstack([p_PV[:, :16], p_PV[:, 16:].sum(axis=1, keepdims=True)])))
    other_P = log_p_PO[:, -1]
    share_P = torch.where(torch.tensor(drawn_P < 16), 0.0, torch.tensor(logp_P) - other_P)
    outcome_P = torch.tensor(np.minimum(drawn_P, 16))
    found_P = sampled_logp(log_p_PO, outcome_P, share_P, log_p_PO[:, 15] - other_P, Decoding(temperature))
    assert (drawn_P >= 16).mean() > 0.1
    assert np.abs(found_P.numpy() - true_P).mean() < most


def test_samples_estimate_the_target_within_their_interval() -> None:
    chain, decoding = Chain(3), Decoding(0.8)
    policy = chain.target(WEIGHTS, 1.0, decoding)
    chances = np.array([chain.probability(sequence, policy) for sequence in chain.sequences])
    truth = 100 * float(chances @ np.array([is_right(one) for one in chain.sequences]))
    covered = 0
    for seed in range(40):
        drawn = chain.draw(600, seed, chain.b)
        log_weight_AR, _, _ = weigh_block(chain.block(drawn), [Aim(WEIGHTS, 1.0)], decoding, Decoding())
        right_R = np.array([100 * is_right(one) for one in drawn])
        values = bootstrap(weights_of(log_weight_AR), right_R, np.arange(600), resamples=200)[1]
        low, high = np.percentile(values[1:], [2.5, 97.5])
        covered += int(low <= truth <= high)
    assert covered >= 34  # of 40: fewer have a chance below 0.02 % at 95 %


def test_kl_is_the_mean_over_the_states() -> None:
    chain = Chain(3)
    _, kl_A, decisions_A = weigh_block(chain.block(chain.sequences), [Aim(WEIGHTS, 0.7)], Decoding(), Decoding())
    q = chain.target(WEIGHTS, 0.7, Decoding())
    each = [sum(p * math.log(p / b) for p, b in zip(q[s], chain.b[s], strict=True)) for s in range(VOCABULARY)]
    states = [state for sequence in chain.sequences for state in chain.states(sequence)]
    assert decisions_A.tolist() == [0, len(states)]
    assert kl_A[1] == pytest.approx(sum(each[state] for state in states), rel=1e-5)


def test_without_a_shift_every_response_counts_once() -> None:
    chain = Chain(3)
    chain.shifts[:] = 0
    drawn = chain.draw(50, 0, chain.b)
    for decoding in (Decoding(), Decoding(0.7)):
        log_weight_AR, _, _ = weigh_block(chain.block(drawn), [Aim(WEIGHTS, 2.0)], decoding, decoding)
        assert (log_weight_AR[0] == 0).all()
        assert effective_samples(weights_of(log_weight_AR))[0] == 50
        assert np.abs(log_weight_AR[1]).max() < 1e-5  # float32: the target is normalised again


def test_masked_decisions_keep_the_student_but_are_sampled_as_the_evaluation_samples() -> None:
    chain = Chain(3)
    block = chain.block(chain.sequences, valid=False)
    log_weight_AR, kl_A, _ = weigh_block(block, [Aim(WEIGHTS, 0.5)], Decoding(0.6), Decoding())
    assert np.array_equal(log_weight_AR[0], log_weight_AR[1])
    assert kl_A[1] == 0
    assert np.abs(log_weight_AR[0]).max() > 0.1


def test_only_what_the_student_wrote_counts() -> None:
    """Rows of a log whose later tokens are context weigh as much as the rows cut before them."""
    chain = Chain(3)
    long = [one for one in chain.sequences if len(one) > 2]
    offsets = np.cumsum([0, *map(len, long)])
    decided = Ragged(np.concatenate([[True, True, *[False] * (len(one) - 2)] for one in long]), offsets)
    aims = [Aim(WEIGHTS, 0.5)]
    logged, _, decisions_A = weigh_block(chain.block(long, decided=decided), aims, Decoding(0.6), Decoding())
    plain, _, _ = weigh_block(chain.block([one[:2] for one in long]), aims, Decoding(0.6), Decoding())
    assert np.allclose(logged, plain, atol=1e-5)
    assert decisions_A[1] == 2 * len(long)


def test_rows_have_the_weights_of_their_tag() -> None:
    chain = Chain(3)
    block = chain.block(chain.sequences)
    rows = len(chain.sequences)
    tables = np.array([[1.0, 0.0], [0.25, 0.75]], np.float32)
    weight_RK = tables[np.arange(rows) % 2]
    aims = [Aim([1.0, 1.0], 1.0, weight_RK), Aim(tables[0].tolist(), 1.0), Aim(tables[1].tolist(), 1.0)]
    _, routed, first, second = weigh_block(block, aims, Decoding(), Decoding())[0]
    assert np.allclose(routed, np.where(np.arange(rows) % 2, second, first), atol=1e-6)


def test_a_cache_in_parts_weighs_as_one_block(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cache = open_cache(run, "both")
    aims = [Aim([0.5, 0.5], 2.0), Aim([1.0, 0.0], 0.5)]
    settings = Decoding(0.6, 0.95), Decoding()
    whole, kl_A, decisions_A = weigh_block(cache.block(range(len(cache))), aims, *settings)
    for longest in (1, 1 << 20):  # many rows at a time, and one
        found = weigh(cache, aims, *settings, longest)
        assert np.allclose(found.log_weight_AR, whole, atol=1e-5)
        assert np.allclose(found.kl_A[1:], kl_A[1:] / decisions_A[1:], rtol=1e-5)
    assert found.tokens_R.tolist() == cache.block(range(len(cache))).decisions_R.tolist()


def test_the_bootstrap_resamples_prompts_not_responses() -> None:
    """Responses to one prompt that are all alike tell no more than one."""
    rng = np.random.default_rng(0)
    value_G = rng.normal(size=50)
    one = bootstrap(np.ones((1, 50)), value_G, np.arange(50))[0]
    four = bootstrap(np.ones((1, 200)), np.repeat(value_G, 4), np.repeat(np.arange(50), 4))[0]
    assert np.allclose(one, four)
    assert one[1:].std() == pytest.approx(value_G.std() / math.sqrt(50), rel=0.2)


def test_a_measured_base_anchors_points_and_factors() -> None:
    rows = 40
    log_weight_AR = np.zeros((2, rows))
    log_weight_AR[1, : rows // 2] = math.log(3)
    tokens_R = np.repeat([10.0, 30.0], rows // 2)
    grade_R = np.repeat([1.0, 0.0], rows // 2)
    weighted = Weighted(log_weight_AR, np.array([0, 0.1]), tokens_R, np.arange(rows))
    plain, anchored = estimate(weighted, grade_R, None), estimate(weighted, grade_R, (60.0, 200.0))
    assert plain.accuracy_AB is not None
    assert anchored.accuracy_AB is not None
    assert plain.accuracy_AB[:, 0].tolist() == pytest.approx([50, 75])
    assert plain.tokens_AB[:, 0].tolist() == pytest.approx([20, 15])
    assert anchored.accuracy_AB[:, 0].tolist() == pytest.approx([60, 85])
    assert anchored.tokens_AB[:, 0].tolist() == pytest.approx([200, 150])
    assert anchored.figures(1)["aes"] == pytest.approx(0.25 + 3 * 25 / 60)
    unknown = estimate(weighted, None, None)
    assert unknown.accuracy_AB is unknown.figures(1)["accuracy"] is unknown.figures(1)["aes"] is None


def test_few_effective_samples_truncate_the_weights() -> None:
    """One response of 100 has nearly all of the weight: it counts as much as 10 means, not as everything."""
    rows = 100
    log_weight_AR = np.zeros((3, rows))
    log_weight_AR[1, 0] = math.log(1e6)
    log_weight_AR[2, : rows // 2] = math.log(3)  # enough effective samples: as they are
    tokens_R = np.where(np.arange(rows) == 0, 10.0, 20.0)
    found = estimate(Weighted(log_weight_AR, np.zeros(3), tokens_R, np.arange(rows)), None, None)
    assert [found.trusted(place) for place in range(3)] == [True, False, True]
    assert found.samples_A[1] == pytest.approx(1, abs=1e-3)
    share = 10 * (1e6 + 99) / 100 / (10 * (1e6 + 99) / 100 + 99)
    assert found.tokens_AB[1, 0] == pytest.approx(20 - 10 * share)
    assert found.tokens_AB[2, 0] == pytest.approx(20 - 10 * 3 / 200)


# Through the stages


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    recipe = make_scored(tmp_path_factory.mktemp("forecast"))
    return {
        **recipe,
        "eval": {"benchmarks": [], "temperature": 1.0, "top_p": 1.0, "format": "question-answer", "chat": False},
    }


GRADER = """
import os, signal
from pathlib import Path

here = Path(__file__).parent

def grade(response, answer):
    with open(here / "calls", "a") as file:
        file.write(".")
    if (here / "fatal").exists() and len((here / "calls").read_text()) > 12:
        os.kill(os.getpid(), signal.SIGKILL)
    return len(response) % 2 == 0
"""


def own_grader(scored: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Random models are never right: grade by a rule of our own, which counts its calls."""
    (folder / "my.py").write_text(f"# {folder}\n{GRADER}")  # grades are cached by its content
    (folder / "bench.jsonl").write_text('{"id": "1", "problem": "1+1", "answer": "2"}\n')
    named = {"benchmarks": [f"file:{folder / 'bench.jsonl'}"], "graders": {"bench": f"{folder / 'my.py'}:grade"}}
    return {**scored, "eval": {**scored["eval"], **named}}


def by_name(points: list[ForecastPoint]) -> dict[str, ForecastPoint]:
    return {point.policy: point for point in points}


def test_every_kind_of_target_is_forecast_and_the_others_are_named(scored: dict[str, Any]) -> None:
    half = {"acc": 0.5, "brief": 0.5}
    tables = {"product": {"acc": 1.0}, "default": half}
    run = run_of(
        {
            **scored,
            "tags": {"rules": {"product": r"\*"}},
            "compositions": {
                "even": {"weights": half},
                "gentle": {"weights": half, "alpha": 1e6},
                "budget": {"weights": half, "kl_budget": 0.02},
                "routed": {"weights": tables},
                "one-table": {"weights": {"product": half, "default": half}},
                "plain": {"method": "self", "sharpen": 1.0},
                "teacher": {"method": "teacher", "weights": {"acc": 1.0}},
                "dealt": {"method": "mixture", "weights": half},
                "live": {"method": "online", "weights": half},
            },
        }
    )
    points = by_name(forecast(run))
    rows = run.stage("rollout").require()["rows"]
    assert list(points) == ["base", "even", "gentle", "budget", "routed", "one-table", "plain", "teacher"]
    assert points["base"].effective_samples == rows
    for name in ("gentle", "plain"):
        assert points[name].effective_samples == pytest.approx(rows, rel=1e-3)
        assert points[name].tokens == pytest.approx(points["base"].tokens, rel=1e-3)
    assert points["budget"].kl == pytest.approx(0.02, rel=0.1)  # alpha is solved on the first updates, as in training
    assert points["one-table"].tokens == pytest.approx(points["even"].tokens)
    assert points["routed"].weights == tables
    assert {name: one.method for name, one in points.items() if one.method != "joint"} == {
        "plain": "self",
        "teacher": "teacher",
    }
    packed = pack_forecasts(list(points.values()), ["acc", "brief"])
    assert {one["policy"] for one in packed} == {"even", "gentle", "budget"}
    assert pack_forecasts(list(points.values()), ["acc", "brief"], ["brief"]) == [], "its dose is solved"
    assert points["routed"].kl != pytest.approx(points["even"].kl)
    assert {point.accuracy is not None for point in points.values()} == {True}


@pytest.fixture(scope="module")
def everything(scored: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three anchors (a pair, an adapter and a context), whose responses are logged runs with turns of others."""
    folder = tmp_path_factory.mktemp("everything")
    run = run_of(scored)
    rows, prompts = run.stage("rollout").open(Rollouts, 0).read(), load_prompts(run, ())
    log = folder / "log.jsonl"
    with log.open("w") as file:
        for row, (prompt_ids, ids) in enumerate(zip(rows.prompt_ids, rows.response_ids, strict=True)):
            mask = [place != 1 for place in range(len(ids))]
            made = {"prompt_ids": prompt_ids, "response_ids": ids, "mask": mask, "answer": "1", "id": f"row-{row}"}
            made["messages"] = prompts[rows.prompt_R[row]].messages
            file.write(json.dumps(made, default=np.ndarray.tolist) + "\n")
    student = Path(scored["student"]["model"])
    anchors = {
        "third": {"post": str(save_adapter(folder / "adapter", student, 1))},
        "pair": scored["anchors"]["acc"],
        "hint": {"model": "student", "post_prompt": {"prefix": "the "}},
    }
    weights = {"third": 0.25, "pair": 0.25, "hint": 0.5}
    recipe = {
        **scored,
        "runs": str(folder / "runs"),
        "anchors": anchors,
        "compositions": {"three": {"weights": weights, "alpha": 0.5}},
        "rollout": {"from": str(log), "responses": 1, "prompts_per_shard": 4},
    }
    make_cache(run_of(recipe), QUIET)
    return recipe


def test_three_anchors_of_all_kinds_on_logged_runs_are_forecast_as_loops_say(everything: dict[str, Any]) -> None:
    run = run_of(everything)
    base, three = forecast(run)
    cache = open_cache(run, "three")
    weights = tuple({"third": 0.25, "pair": 0.25, "hint": 0.5}[name] for name in cache.names)
    log_weights, kls, tokens = [], [], []
    for row in range(len(cache)):
        block = cache.block([row])
        decided = block.decided_P.tolist()
        assert not all(decided)
        log_weight = 0.0
        for place in np.flatnonzero(decided):
            candidates = block.candidates
            b = [*np.exp(candidates.logp.flat[place].astype(float))]
            q, b = [*b], [*b, 1 - sum(b)]
            if block.valid_KP[:, place].all():
                r = oracle.compose(block.r_KPC[:, place].tolist(), weights)
                q = oracle.tilt(b, [*r, 0.0], 0.5)
                kls.append(sum(p * math.log(p / before) for p, before in zip(q, b, strict=True)))
            else:
                q = b
            ids = candidates.ids.flat[place].tolist()
            outcome = ids.index(token) if (token := block.sampled_P[place]) in ids else len(ids)
            log_weight += math.log(q[outcome] / b[outcome])
        log_weights.append(log_weight)
        tokens.append(sum(decided))
    weight_R = np.exp(log_weights)
    assert np.std(log_weights) > 0.01
    assert three.kl == pytest.approx(np.mean(kls), rel=1e-3)
    assert three.effective_samples == pytest.approx(weight_R.sum() ** 2 / (weight_R**2).sum(), rel=1e-3)
    weight_R = truncate(weight_R[None])[0]  # there are few responses
    assert three.tokens == pytest.approx(weight_R @ tokens / weight_R.sum(), rel=1e-3)
    assert base.tokens == pytest.approx(np.mean(tokens))


def test_without_answers_length_and_kl_are_forecast(scored: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.stage("prompts").begin()
    prompts = [{"id": str(n), "messages": [], "text": "", "token_ids": [3]} for n in range(6)]
    run.prompts_file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    run.stage("prompts").record([run.prompts_file], {"rows": 6})
    base, both = forecast(run, decoding=Decoding())
    assert base.accuracy is both.accuracy is both.aes is both.accuracy_low is None
    assert both.kl > 0
    assert both.tokens_low <= both.tokens <= both.tokens_high


def test_a_point_that_is_not_trusted_comes_with_the_largest_dose_that_is(
    scored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_weave.stages.forecast.TRUSTED", 20)  # of 24 responses
    run = run_of({**scored, "compositions": {"even": {"weights": {"acc": 0.5, "brief": 0.5}}}})
    strong, weak = (by_name(forecast(run, plan_forecast(run.recipe, alphas=[a]))) for a in (0.001, 1e6))
    assert weak["even-alpha-1e+06"].trusted
    point = strong["even-alpha-0.001"]
    assert not point.trusted
    dose = point.largest_trusted
    if dose is not None:  # the ladder is finite
        assert dose.effective_samples >= 20
        again = by_name(forecast(run, plan_forecast(run.recipe, alphas=[dose.alpha])))
        assert again[f"even-alpha-{dose.alpha:g}"].kl == pytest.approx(dose.kl, rel=1e-4)


def test_a_grid_has_every_weight_once(scored: dict[str, Any]) -> None:
    recipe = run_of(scored).recipe
    tables = [dict(one.composition.weights) for one in plan_forecast(recipe, grid=4)]
    assert len(tables) == len({tuple(sorted((k, v) for k, v in table.items() if v)) for table in tables})
    assert {"acc": 0.25, "brief": 0.75} in tables
    third = {**scored, "anchors": {**scored["anchors"], "more": scored["anchors"]["acc"]}, "compositions": {}}
    planned = plan_forecast(run_of(third).recipe, grid=4)
    assert len(planned) == 15
    assert all(sum(one.composition.weights.values()) == 1 for one in planned)


def test_a_sweep_takes_the_best_trusted_points(
    scored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_weave.stages.forecast.TRUSTED", 1)
    run = run_of(own_grader(scored, tmp_path), trust=True)
    points = by_name(forecast(run, plan_forecast(run.recipe, [0.0, 0.5, 1.0], alphas=[1.0, 2.0])))
    chosen = plan_promising(run, 2, [0.0, 0.5, 1.0], alphas=[1.0, 2.0])
    assert len(chosen) == 2
    assert all(points[one.name].kl <= REACHED for one in chosen)
    ours = points[chosen[0].name]
    assert not any(
        other.accuracy >= ours.accuracy and other.tokens < ours.tokens  # type: ignore[operator]
        for name, other in points.items()
        if name != "base" and other.kl <= REACHED
    )


def test_doctor_suggests_the_alpha_with_the_best_forecast(
    scored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_weave.stages.forecast.TRUSTED", 1)
    recipe = {**own_grader(scored, tmp_path), "compositions": {"both": {"weights": {"acc": 0.5, "brief": 0.5}}}}
    run = run_of(recipe, trust=True)
    points = forecast(run, plan_forecast(run.recipe, alphas=[0.5, 1.0, 2.0, 4.0]))[1:]
    _, alpha = max((one.aes, one.alpha) for one in points if one.kl <= REACHED)  # type: ignore[type-var]
    (found,) = (one for one in examine(run) if (one.about, one.check) == ("compositions", "alpha"))
    assert f"alpha {alpha:g} with" in found.text
    assert suggest_alpha(run_of({**recipe, "runs": str(tmp_path / "none")}, trust=True)) is None


# Choosing


def point(
    policy: str, accuracy: float, tokens: float, aes: float, trusted: bool = True, kl: float = 0.1
) -> dict[str, Any]:
    weights = {"acc": 0.5, "brief": 0.5}
    figures = (accuracy, 0, 100, tokens, 0, 200, aes, -9, 9, kl, 99)
    return ForecastPoint(policy, weights, 1.0, *figures, trusted, True).to_dict()


POINTS = [
    point("base", 70, 100, 0.0),
    point("long", 95, 120, 0.8),
    point("short", 72, 50, 0.6),
    point("shortest", 60, 40, -0.1),
    point("dream", 99, 10, 5.0, trusted=False),
    point("far", 98, 20, 3.0, kl=0.5),  # farther than offline training follows
]


@pytest.mark.parametrize(
    ("goal", "chosen"),
    [
        (["aes"], "long"),
        (["tokens <= 0.6"], "short"),
        (["accuracy >= base"], "short"),
        (["accuracy >= base - 15"], "shortest"),
        (["tokens"], "shortest"),
        (["aes and tokens < 1"], "short"),
        (["tokens <= 0.6", "accuracy >= 65"], "short"),
        (["aes and kl <= 1"], "far"),
    ],
)
def test_goals_choose_among_trusted_points(goal: list[str], chosen: str) -> None:
    assert best(POINTS, parse_goals(goal))["policy"] == chosen


def test_a_goal_without_a_trusted_base_asks_for_more_samples() -> None:
    base = {**POINTS[0], "trusted": False, "effective_samples": 4.2}
    others = [{**one, "trusted": False} for one in POINTS[1:]]
    with pytest.raises(WeaveError, match=r"4 effective samples.* --temperature .* rollout\.responses"):
        best([base, *others], parse_goals(["aes"]))


@pytest.mark.parametrize(("unknown", "goal"), [("aes", "aes"), ("accuracy", "accuracy >= 50"), ("aes", "aes >= 0.1")])
def test_a_goal_by_a_figure_that_is_not_known_is_refused(unknown: str, goal: str) -> None:
    """AES is relative to the base's accuracy, which may be 0."""
    points = [{**one, "aes": None, unknown: None} for one in POINTS]
    with pytest.raises(InputError, match=f"--goal: {unknown}"):
        best(points, parse_goals([goal]))
    assert best(points, parse_goals(["kl <= 0.4"]))["policy"] == "shortest"


@pytest.mark.parametrize(
    "goal",
    ["speed", "tokens <=", "accuracy >= base 3", "tokens <= base", "aes >> 1", "", "accuracy >= 0.9"],
)
def test_a_goal_that_cannot_be_read_is_refused(goal: str) -> None:
    with pytest.raises(InputError, match="--goal"):
        parse_goals([goal])


def test_goal_is_relative_to_the_base() -> None:
    assert parse_goals(["accuracy >= base + 2"]) == [Goal("accuracy", ">=", 2.0, True)]
    assert parse_goals(["accuracy >= 80 %"]) == [Goal("accuracy", ">=", 80.0, False)]
    assert parse_goals(["tokens <= 60 %"]) == parse_goals(["tokens <= 0.6"]) == [Goal("tokens", "<=", 0.6, True)]
    assert parse_goals(["tokens <= 800"]) == [Goal("tokens", "<=", 800.0, False)]


def test_the_written_composition_is_the_forecast_one(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    text = '# mine\nname = "r"\n\n[student]\nmodel = "s"  # small\n'
    for anchor in ("acc", "brief"):
        text += f'[anchors.{anchor}]\npost = "{anchor}+"\npre = "{anchor}-"\n'
    file.write_text(text)
    chosen = point("even-alpha-0.5", 80, 50, 1.0)
    assert add_composition(file, chosen["policy"], composition_toml(chosen))
    assert file.read_text().startswith(text)  # nothing else has changed
    loaded = load_recipe(file).compositions[chosen["policy"]]
    assert (loaded.weights, loaded.alpha) == (chosen["weights"], chosen["alpha"])
    assert not add_composition(file, chosen["policy"], composition_toml(chosen))
    with pytest.raises(InputError, match="other content"):
        add_composition(file, chosen["policy"], composition_toml({**chosen, "alpha": 3.0}))
    file.write_text("compositions = { a = { weights = { acc = 1.0 } } }\n")
    with pytest.raises(InputError, match=r"r\.toml"):
        add_composition(file, chosen["policy"], composition_toml(chosen))


THREE = {"name": "three", "student": {"model": "s"}, "prompts": {"chat": False}}
THREE |= {"anchors": {name: {"post": f"{name}+", "pre": f"{name}-"} for name in ("acc", "brief", "kind")}}


def test_levels_are_evenly_spaced_on_the_trusted_frontier(scored: dict[str, Any], tmp_path: Path) -> None:
    line = [point(f"p{tokens}", 50 + tokens / 10, tokens, 0.5) for tokens in (38, 40, 50, 68, 72, 90, 100)]
    line[4] = {**line[4], "policy": "one@low", "weights": {"acc": 0.75, "brief": 0.25}, "alpha": 0.5}
    off = [point("dominated", 52, 70, 0.1), {**point("raw", 99, 70, 1.0), "weights": {"acc": 1.5}}]
    teacher = {**point("teacher", 99, 70, 1.0), "method": "teacher", "weights": {"acc": 1.0}}  # of no shift
    levels = choose_levels([*POINTS[:1], *line, *off, teacher, *POINTS[-2:]], 3)
    assert {name: one["tokens"] for name, one in levels.items()} == {"high": 100, "medium": 72, "low": 40}
    assert [one["tokens"] for one in choose_levels([*POINTS[:1], *line[2:]], 2).values()] == [100, 50]
    thirds = [{**one, "weights": dict.fromkeys(("acc", "brief", "kind"), 1 / 3)} for one in line]
    show_levels(run_of(scored), choose_levels([*POINTS[:1], *thirds], 2), None, out := Console(record=True))
    lines = out.export_text().partition("[compositions")
    written = check_recipe({**THREE, **tomllib.loads("".join(lines[1:]))}).compositions["effort"]
    assert written.weights == thirds[0]["weights"]
    with pytest.raises(WeaveError, match="only 3 of 4"):
        choose_levels([*POINTS[:1], *line[:3], *off[:1]], 5)
    file = tmp_path / "r.toml"
    file.write_text(tomli_w.dumps(scored))
    out = Console(quiet=True)
    show_levels(run_of(scored), levels, str(file), out)
    show_levels(run_of(scored), levels, str(file), out)  # again: it is already there
    written = load_recipe(file).compositions["effort"]
    slots = {slot.level: (slot.weights, slot.alpha) for slot in written.slots}
    assert slots["low"] == slots["high"] == ({"acc": 0.5, "brief": 0.5}, 1.0)
    assert slots["medium"] == slots[None] == ({"acc": 0.75, "brief": 0.25}, 0.5)


@pytest.mark.parametrize(
    "keys",
    [
        {"weights": {"acc": 1.0, "brief": 0.5}, "normalize": False, "alpha": 1.5},
        {"weights": {"acc": 1.25, "brief": -0.25}, "allow_negative": True, "alpha": 1.0},
        {"weights": {"product": {"acc": 0.5}, "default": {"brief": 1.0}}, "normalize": False, "kl_budget": 0.02},
    ],
    ids=["raw weights", "negative weights", "by tag, with a budget"],
)
def test_the_chosen_composition_is_a_valid_one_and_is_written_once(
    scored: dict[str, Any], tmp_path: Path, keys: dict[str, Any]
) -> None:
    rules = {"tags": {"rules": {"product": r"\*"}}} if "kl_budget" in keys else {}
    recipe = {**scored, **rules, "compositions": {"own": {**keys, "refresh": "auto"}}}
    file = tmp_path / "r.toml"
    file.write_text(tomli_w.dumps(recipe))
    dose = {"kl_budgets": [0.03]} if "kl_budget" in keys else {"alphas": [3.0]}
    points = lw.Run(run_of(recipe).recipe).forecast(**dose)
    out = Console(quiet=True)
    for _ in range(2):
        run = lw.Run(load_recipe(file))
        assert [one["policy"] for one in run.forecast(**dose)] == [one["policy"] for one in points]
        for one in points[1:]:
            both = [{**points[0], "trusted": True}, {**one, "trusted": True}]
            choose(run, both, [Goal("kl", "<=", 9.0)], str(file), out)
    written = load_recipe(file).compositions[points[2]["policy"]]
    assert written == plan_forecast(run_of(recipe).recipe, **dose)[1].composition
    assert load_recipe(file).compositions.keys() == {one["policy"] for one in points[1:]}


def test_by_tag_is_written_by_tag(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text("")
    tables = {"code": {"acc": 1.0}, "default": {"brief": 1.0}}
    add_composition(file, "x", composition_toml({**POINTS[1], "policy": "x", "weights": tables}))
    assert "code = { acc = 1.0 }" in file.read_text()


def test_figures_of_the_base_belong_to_the_sampling_of_its_evaluation(
    scored: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of({**copied(scored, tmp_path), "compositions": {"even": {"weights": HALF}}})
    keep_points(run, forecast(run, plan_forecast(run.recipe, alphas=[4.0])))
    monkeypatch.setattr(stage, "measured_base", lambda run: (60.0, 200.0))
    for decoding, anchored in ((None, True), (Decoding(0.7, 1.0), False), (Decoding(1.0, 0.9), False)):
        points = forecast(run, decoding=decoding)
        assert {one.anchored for one in points} == {anchored}
        assert (points[0].tokens == pytest.approx(200)) == anchored
    keep_points(run, forecast(run))
    assert [one.policy for one in read_points(run)] == ["base", "even"]  # none next to another base
    keep_points(run, forecast(run, plan_forecast(run.recipe, alphas=[8.0])))
    assert [one.policy for one in read_points(run)] == ["base", "even", "even-alpha-8"]
    monkeypatch.setattr(stage, "measured_base", lambda run: (50.0, 200.0))
    assert read_points(run) == [], "the base is evaluated otherwise now"


# The program

KEYS = {"policy", "method", "weights", "alpha", "kl_budget", "accuracy", "tokens", "aes", "kl"}
KEYS |= {"effective_samples", "trusted", "reachable", "anchored", "largest_trusted"}
KEYS |= {f"{key}_{end}" for key in ("accuracy", "tokens", "aes") for end in ("low", "high")}


@pytest.mark.slow
def test_the_program_prints_points_and_resumes_grading_after_a_kill(
    scored: dict[str, Any], tmp_path: Path, forked: Forked
) -> None:
    """Shards that were graded before the kill are not graded again, and a third command grades nothing."""
    file = tmp_path / "r.toml"
    file.write_text(tomli_w.dumps(own_grader(scored, tmp_path)))
    refused = forked.lweave("forecast", file)
    assert refused.code == 2
    assert "--trust" in refused.said
    (tmp_path / "fatal").touch()
    assert forked.lweave("forecast", file, "--trust").code == -signal.SIGKILL
    (tmp_path / "fatal").unlink()
    before = len((tmp_path / "calls").read_text())
    ended = forked.lweave("forecast", file, "--trust", "--json")
    points = json.loads(ended.said[ended.said.index("\n[") :])
    again = len((tmp_path / "calls").read_text()) - before
    rows = 24
    assert rows - before <= again < rows
    assert forked.lweave("forecast", file, "--trust").code == 0
    assert len((tmp_path / "calls").read_text()) == before + again
    assert {frozenset(one) for one in points} == {frozenset(KEYS)}
    assert points[0]["policy"] == "base"
    assert all(0 <= one["accuracy"] <= 100 for one in points)


@pytest.mark.slow
def test_the_program_refuses_what_it_cannot_do(scored: dict[str, Any], tmp_path: Path, forked: Forked) -> None:
    file = tmp_path / "r.toml"
    file.write_text(tomli_w.dumps({**scored, "runs": str(tmp_path / "none")}))
    refused = forked.lweave("forecast", file)
    assert refused.code == 2
    assert "lweave rollout" in refused.said
    file.write_text(tomli_w.dumps(scored))
    for words in (
        ["--write"],
        ["--goal", "speed"],
        ["--alphas", "0"],
        ["--alphas", ","],
        ["--levels", "9"],
        ["--realised", "--goal", "aes"],
    ):
        assert forked.lweave("forecast", file, *words).code == 2
    refused = forked.lweave("forecast", file, "--goal", "tokens <= 0.001")
    assert refused.code == 1
    assert "30 are needed" in refused.said, "there are 24 responses"
    file.write_text(tomli_w.dumps({**scored, "rollout": {**scored["rollout"], "temperature": 0.0}}))
    assert forked.lweave("forecast", file).code == 2
