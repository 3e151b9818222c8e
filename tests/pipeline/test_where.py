"""Where an anchor speaks: against a walk through the text, in targets over a whole vocabulary, and in what is said."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import oracle
from lightning_weave.cache.block import compute_targets
from lightning_weave.cache.where import WhereRule
from lightning_weave.checks.preflight import preflight
from lightning_weave.checks.shifts import check_scored
from lightning_weave.config import Where, check_recipe
from lightning_weave.errors import InputError
from lightning_weave.report.survey import SILENT, Vocabulary, survey_cache
from lightning_weave.stages.caches import anchor_pair, open_cache, open_scored
from lightning_weave.stages.forecast import forecast, keep_points, read_points
from lightning_weave.stages.grades import grade_rows
from lightning_weave.stages.train import train
from lightning_weave.tokens.spelling import Spelling
from lightning_weave.types import Ragged, Rollouts
from lightning_weave.views.doctor import examine
from pipeline.scored import HALF, QUIET, make_scored, trained
from tiny import run_of

SPANS = {"thinking": (b"<think>", b"</think>"), "tools": (b"[", b"]")}
ADDED = b"<|turn|>"


def walk(text: bytes, opening: bytes, closing: bytes) -> list[bool]:
    """Whether each byte is inside, one byte after the other: the closing delimiter is, the opening one is not."""
    inside, flags, at = False, [False] * (len(text) + 1), 0
    while at < len(text):
        delimiter = closing if inside else opening
        if text.startswith(delimiter, at):
            for each in range(at, at + len(delimiter)):
                flags[each] = inside
            at += len(delimiter)
            inside = not inside
        else:
            flags[at] = inside
            at += 1
    flags[len(text)] = inside
    return flags


def speaks(where: Where, prompt: list[bytes], response: list[bytes], decided: list[bool], grade: float) -> list[bool]:
    """The rule again, token by token: a turn is read with what stands before it, from the last added token on."""
    turns, turn = [], -1
    for place, own in enumerate(decided):
        turn += own and (place == 0 or not decided[place - 1])
        turns.append(turn if own else None)
    found = []
    for place, own in enumerate(turns):
        members = [other for other, its in enumerate(turns) if its == own]
        if own is None:
            found.append(False)
            continue
        before = [*prompt, *response[: members[0]]]
        first = max((at + 1 for at, token in enumerate(before) if token == ADDED), default=0)
        before = before[first:]
        text = b"".join([*before, *(response[other] for other in members)])
        starts = [len(b"".join([*before, *(response[other] for other in members[:n])])) for n in range(len(members))]
        inside = {name: [walk(text, *SPANS[name])[start] for start in starts] for name in SPANS}
        busy = [n for n in range(len(members)) if inside["thinking"][n] or inside["tools"][n]]
        inside["answer"] = [own == turn and n > max(busy, default=-1) for n in range(len(members))]
        n = members.index(place)
        found.append(
            (where.inside is None or inside[where.inside][n])
            and (where.outside is None or not inside[where.outside][n])
            and (where.first is None or n < where.first)
            and (where.end is None or len(members) - n <= where.end)
            and (where.answers is None or grade == (1.0 if where.answers == "right" else 0.0))
        )
    return found


@pytest.mark.parametrize("seed", range(60))
def test_where_is_what_a_walk_through_the_text_says(seed: int) -> None:
    """Delimiters whole, in pieces, merged with their neighbours, opened by the prompt, never closed; several turns."""
    rng = random.Random(seed)
    pieces = [
        b"<think>",
        b"</think>",
        b"<th",
        b"ink>",
        b"</",
        b"think>",
        b">a",
        b"[",
        b"]",
        b"x]",
        b"word",
        b" ",
        b"",
        ADDED,
    ]
    rows = [[rng.choice(pieces) for _ in range(rng.randint(0, 25))] for _ in range(8)]
    prompts = [[rng.choice(pieces) for _ in range(rng.randint(1, 6))] for _ in rows]
    decided = [[rng.random() < 0.8 for _ in row] for row in rows]
    grades = np.array([rng.choice([0.0, 1.0, np.nan]) for _ in rows])
    spans = ["thinking", "tools", "answer", None]
    choices = {
        "inside": rng.choice(spans),
        "outside": rng.choice(spans),
        "first": rng.choice([None, 1, 4]),
        "end": rng.choice([None, 1, 5]),
        "answers": rng.choice([None, "wrong", "right"]),
    }
    where = Where.model_construct(**choices)

    def ids(tokens: list[list[bytes]]) -> Ragged:
        return Ragged.of([np.array([pieces.index(token) for token in row], np.int32) for row in tokens])

    numbers = np.zeros(len(rows), np.int32)
    flags = Ragged.of([np.array(row, np.bool_) for row in decided])
    rollouts = Rollouts(numbers, numbers, numbers.astype(np.uint8), ids(prompts), ids(rows), flags)
    spelt = {id: piece for id, piece in enumerate(pieces) if piece}
    rule = WhereRule(where, SPANS, spelt, {pieces.index(ADDED)}, grades)
    expected = [
        one for row in range(len(rows)) for one in speaks(where, prompts[row], rows[row], decided[row], grades[row])
    ]
    assert rule.speaks(range(len(rows)), rollouts).tolist() == expected


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ([b"Begin with ", b"<think>", ADDED], False),  # a user's text
        ([b"Begin with ", b"<think>", ADDED, b"<think>", b"\n"], True),  # the template's
        ([ADDED, b"<think>", b"Okay, "], True),
        ([ADDED, b"<think>", b"\n", b"</think>", b"\n"], False),
    ],
)
def test_a_span_is_opened_by_the_turn_that_it_is_in(before: list[bytes], inside: bool) -> None:
    """In the first turn, and in the second one of a log, after a first that was cut off while thinking."""
    pieces = [*dict.fromkeys([*before, b"<think>", b"a"])]
    rule = WhereRule(Where(inside="thinking"), SPANS, dict(enumerate(pieces)), {pieces.index(ADDED)})
    opened, own = ([pieces.index(one) for one in part] for part in (before, [b"a", b"a"]))
    cut = [pieces.index(b"<think>"), *own]
    rows = [(opened, own, [True] * 2), ([0], [*cut, *opened, *own], [True] * 3 + [False] * len(opened) + [True] * 2)]
    parts = [Ragged.of([np.array(row[part]) for row in rows]) for part in range(3)]
    numbers = np.zeros(2, np.int32)
    found = rule.speaks([0, 1], Rollouts(numbers, numbers, numbers.astype(np.uint8), *parts))
    assert found.tolist() == [inside] * 2 + [False, True, True] + [False] * len(opened) + [inside] * 2


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_scored(tmp_path_factory.mktemp("where"))


def _with(recipe: dict[str, Any], where: dict[str, Any], **more: Any) -> dict[str, Any]:
    anchors = {**recipe["anchors"], "brief": {**recipe["anchors"]["brief"], "where": where}}
    return {**recipe, "anchors": anchors, **more}


def test_a_silent_anchor_leaves_the_target_of_the_others(recipe: dict[str, Any]) -> None:
    """Over all outcomes, in loops: weight 0 where it is silent; no target where nobody speaks."""
    plain = open_cache(run_of(recipe), "both")
    rows = range(len(plain))
    whole = plain.block(rows)
    place_P = np.concatenate([np.arange(count) for count in whole.decisions_R])
    run = run_of(_with(recipe, {"first": 3}))
    for name, weights in (("both", [0.5, 0.5]), ("brief-only", [0.0, 1.0])):
        cache = open_cache(run, name)
        targets = compute_targets(cache.block(rows), cache.weights, 2.0)
        for at, place in enumerate(place_P.tolist()):
            own = [weights[0], weights[1] if place < 3 else 0.0]
            valid = oracle.composed_validity(whole.valid_KP[:, at].tolist(), own) and any(own)
            assert targets.valid_P[at] == valid
            b_O = np.exp(targets.log_b_PO[at].astype(float)).tolist()
            r_O = [*oracle.compose(whole.r_KPC[:, at].astype(float).tolist(), own), 0.0]
            expected = oracle.tilt(b_O, r_O, 2.0) if valid else b_O
            np.testing.assert_allclose(np.exp(targets.log_q_PO[at]), expected, atol=1e-6)


def test_wrong_and_right_responses_are_those_of_the_grader(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    grades = grade_rows(run, QUIET)
    assert grades is not None
    for answers, value in (("wrong", 0.0), ("right", 1.0)):
        cache = open_cache(run_of(_with(recipe, {"answers": answers})), "brief-only")
        block = cache.block(range(len(cache)))
        plain = open_cache(run, "brief-only").block(range(len(cache)))
        graded_P = np.repeat(grades == value, plain.decisions_R)
        np.testing.assert_array_equal(block.mapped_KPC[0], plain.mapped_KPC[0] & graded_P[:, None])
        np.testing.assert_array_equal(block.kept([1.0]), plain.kept([1.0]) & graded_P)


def test_doctor_and_report_count_what_a_rule_leaves(recipe: dict[str, Any]) -> None:
    run = run_of(_with(recipe, {"end": 2}))
    cache = open_scored(run)
    assert cache is not None
    block = open_cache(run, "brief-only").block(range(len(cache)))
    left = int(block.kept([1.0]).sum())
    said = {one.check: one for one in examine(run) if one.about == "anchors.brief"}
    assert 0 < said["where"].figures["left"] == left < said["where"].figures["decisions"]
    vocabulary = Vocabulary.from_tokenizer(run.student.tokenizer, run.student.stop_ids)
    survey = survey_cache(run, cache, vocabulary, QUIET)
    silent = survey.reasons[cache.names.index("brief")][SILENT]
    assert silent == int((~block.mapped_KPC[0].any(axis=1) & block.valid_KP[0]).sum()) > 0
    assert survey.kept["brief-only"] == left


def test_doctor_counts_what_is_left_of_a_composition(recipe: dict[str, Any]) -> None:
    """A silent anchor masks nothing, whatever its tokens can spell there."""
    run = run_of(_with(recipe, {"end": 2}))
    cache = open_cache(run, "both")
    kept_P = cache.block(range(len(cache))).kept(cache.weights)
    (said,) = (one for one in examine(run) if (one.about, one.check) == ("compositions.both", "positions"))
    assert said.figures["share"] == pytest.approx(kept_P.mean())


@pytest.mark.parametrize("where", [{"first": 1}, {"answers": "right"}])
def test_a_pair_is_judged_where_it_is_silent_too(recipe: dict[str, Any], where: dict[str, Any]) -> None:
    """Silence is no missing alias, and no sign that post and pre are swapped."""
    found = []
    for each in (run_of(recipe), run_of(_with(recipe, where))):
        found.append({one.check: one for one in check_scored(each, "brief")})
    assert {"end of turn", "separation", "length"} <= found[0].keys()
    assert found[0] == found[1]


def test_spans_of_a_recipe_are_delimited_by_its_texts(recipe: dict[str, Any]) -> None:
    run = run_of(_with(recipe, {"outside": "digits"}, spans={"digits": ["1", "2"]}))
    cache = open_cache(run, "brief-only")
    block = cache.block(range(len(cache)))
    spell = run.student.tokenizer.decode
    rows = zip(block.rollouts.prompt_ids, block.rollouts.response_ids, strict=True)
    inside = []
    for prompt, response in rows:
        tokens = [spell([one]).encode() for one in (*prompt, *response)]
        flags = walk(b"".join(tokens), b"1", b"2")
        starts = np.cumsum([0, *map(len, tokens)])[len(prompt) : -1]
        inside += [flags[start] for start in starts]
    assert 0 < sum(inside) < len(inside)
    assert not block.mapped_KPC[0][inside].any()
    plain = open_cache(run_of(recipe), "brief-only").block(range(len(cache)))
    outside = ~np.array(inside)
    np.testing.assert_array_equal(block.r_KPC[0][outside], plain.r_KPC[0][outside])


def test_training_uses_it_and_its_delimiters_are_part_of_the_fingerprint(recipe: dict[str, Any]) -> None:
    plain, other, same = (
        run_of(_with(recipe, {"inside": "plan"}, spans={"plan": list(texts), "unused": ["a", "b"]}))
        for texts in (("1", "2"), ("1", "3"), ("1", "2"))
    )
    keys = [run.stage("train", "both").fingerprint for run in (plain, other, same)]
    assert keys[0] == keys[2] != keys[1]
    assert plain.stage("train", "acc-only").fingerprint == run_of(recipe).stage("train", "acc-only").fingerprint
    weights = trained(_with(recipe, {"first": 2}), spoken={"weights": {"acc": 0.5, "brief": 0.5}})
    assert weights["spoken"]


def test_forecasts_are_kept_for_the_same_spans_and_tags(recipe: dict[str, Any]) -> None:
    where = {"inside": "plan"}
    run = run_of(_with(recipe, where, spans={"plan": ["1", "2"]}))
    keep_points(run, forecast(run))
    assert read_points(run)
    assert not read_points(run_of(_with(recipe, where, spans={"plan": ["1", "3"]})))
    assert not read_points(run_of(_with(recipe, where, spans={"plan": ["1", "2"]}, tags={"rules": {"short": "1"}})))


def test_online_training_has_no_whole_responses_to_ask_before_it_begins(recipe: dict[str, Any]) -> None:
    live = {"live": {"method": "online", "weights": {"brief": 1.0}}}
    run = run_of(_with(recipe, {"first": 2}, compositions=live))
    assert "compositions.live" in {one.about for one in preflight(run) if one.verdict == "error"}
    with pytest.raises(InputError, match=r"anchors\.brief\.where"):
        train(run, QUIET)


def test_added_tokens_end_a_turn_unless_they_are_delimiters_or_spaces(recipe: dict[str, Any], tmp_path: Path) -> None:
    """As of tokenizers that add runs of newlines."""
    folder = tmp_path / "student"
    shutil.copytree(recipe["student"]["model"], folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["\n\n", "<|user|>"])
    tokenizer.save_pretrained(folder)
    anchors = _with(recipe, {"inside": "turn"}, spans={"turn": ["<|end|>", "2"]}, student={"model": str(folder)})
    spelling = Spelling.from_tokenizer(tokenizer)
    rule = anchor_pair(run_of(anchors), "brief").rules.where
    assert rule is not None
    assert {spelling.strings[id] for id in rule.added} == {"<pad>", "<|user|>"}


def test_anchors_that_are_silent_everywhere_are_refused(recipe: dict[str, Any]) -> None:
    run = run_of(_with(recipe, {"inside": "thinking"}))
    with pytest.raises(InputError, match=r"compositions\.brief-only.*`where`"):
        train(run, QUIET, ["brief-only"])
    assert not run.stage("train", "brief-only").folder.exists()


@pytest.mark.parametrize("budget", [{}, {"kl_budget": 0.01}])
def test_a_rehearsal_does_not_need_the_spans_that_its_doubles_never_write(recipe: dict[str, Any], budget: dict) -> None:
    """Neither a budget of the composition nor one of an anchor can be solved on them."""
    low = {"brief": 1.0, "kl_budget": 0.02}
    compositions: dict[str, Any] = {"one": {"weights": {"brief": 1.0}, "kl_budget": 0.1}}
    compositions["levels"] = {
        "levels": {"high": {"brief": 1.0}, "low": low},
        "default": "high",
        "control": {"prefix": "Effort {level}. "},
    }
    anchors = {**recipe["anchors"], "acc": {**recipe["anchors"]["acc"], "where": {"inside": "thinking"}, **budget}}
    if budget:
        compositions = {"one": {"weights": HALF, "kl_budget": 0.1}}
    run = run_of(_with({**recipe, "anchors": anchors}, {"inside": "thinking"}, compositions=compositions))
    with pytest.raises(InputError, match=r"kl_budget|where"):
        train(run, QUIET)
    train(run.derive(recipe=run.recipe.model_copy(update={"rehearsal": True})), QUIET)
    assert all(run.stage("train", name).complete for name in compositions)


def test_a_log_without_answers_is_refused_before_it_is_scored(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps({"prompt_ids": [1, 2], "response_ids": [3, 4]}) + "\n")
    more = {"rollout": {"from": str(path), "responses": 1}, "prompts": {}, "name": "log"}
    for answers, refused in ((None, {"anchors.brief.where.answers"}), ("1", set())):
        row = {"prompt_ids": [1, 2], "response_ids": [3, 4], "answer": answers}
        path.write_text(json.dumps(row) + "\n")
        found = preflight(run_of(_with(recipe, {"answers": "wrong"}, **more)))
        assert {one.about for one in found if one.check == "answers" and one.verdict == "error"} == refused


WRONG = [
    ({"inside": "plans"}, {}, "anchors.brief.where.inside"),
    ({}, {}, "anchors.brief.where"),
    ({"answers": "wrong"}, {"prompts": {"source": "x.jsonl"}}, "anchors.brief.where.answers"),
    ({"first": 2}, {"spans": {"answer": ["a", "b"]}}, "spans.answer"),
    ({"first": 2}, {"spans": {"plan": ["a"]}}, "spans.plan"),
]


@pytest.mark.parametrize(("where", "more", "key"), WRONG)
def test_what_cannot_be_is_refused_by_its_key(tmp_path: Path, where: dict, more: dict, key: str) -> None:
    anchors = {name: {"post": "p", "pre": "q"} for name in ("acc", "brief")}
    recipe = {"name": "r", "student": {"model": "m"}, "anchors": anchors, "prompts": {"source": "x.jsonl"}}
    with pytest.raises(InputError, match=key.replace(".", r"\.")):
        check_recipe(_with(recipe, where, **more))
