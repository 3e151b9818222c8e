"""Sums over the cache against slow loops, and memory that does not grow with it."""

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from lightning_weave.cache.block import Block
from lightning_weave.report.survey import (
    BY_RULE,
    KEPT,
    KINDS,
    NO_END_OF_TURN,
    NOT_ONE_TOKEN,
    PARTLY_KEPT,
    REASONS,
    UNREAD,
    UNTRAINED,
    Reading,
    Survey,
    Vocabulary,
)
from lightning_weave.stages.alignment import Alignment, OwnPrompts, Unread
from lightning_weave.tokens import TokenMap
from lightning_weave.types import Ragged
from report.decisions import STOPS, WORDS, decisions, vocabulary
from rows import decisions_block
from tiny import ENDS, make_tokenizer

COMPOSITIONS = {"one": {"a": 1.0}, "both": {"a": 0.5, "b": 0.5}, "end": {"a": 0.0, "b": 1.0}}


def by_hand(shards: list[Block]) -> dict:
    """Everything that a survey says, one decision at a time."""
    kinds = [vocabulary().kind(id) for id in range(len(WORDS))]
    out: dict = {"reasons": [Counter(), Counter()], "kept": dict.fromkeys(COMPOSITIONS, 0)}
    out |= {"push": np.zeros((2, len(WORDS))), "sizes": [{}, {}], "agree": {"sampled": [], "top": []}, "kinds": {}}
    uv = uu = vv = 0.0
    for one in shards:
        candidates = one.candidates
        for p, sampled in enumerate(one.sampled_P):
            probabilities = [
                math.exp(x) for x in (*candidates.logp.flat[p], max(candidates.other_logp.flat[p], math.log(1e-8)))
            ]
            total = sum(probabilities)
            b = [x / total for x in probabilities]
            ids = candidates.ids.flat[p].tolist()
            place = ids.index(sampled) if sampled in ids else len(ids)
            pulls = []
            for k in range(2):
                r = [*one.r_KPC[k, p].tolist(), 0.0]
                mean = sum(x * y for x, y in zip(b, r, strict=True))
                pulls.append([x - mean for x in r])
                unmapped = [id for id, ok in zip(ids, one.mapped_KPC[k, p], strict=True) if not ok]
                if one.valid_KP[k, p]:
                    reason = PARTLY_KEPT if unmapped else KEPT
                    for c, id in enumerate(ids):
                        out["push"][k, id] += b[c] * pulls[k][c]
                    out["sizes"][k].setdefault(kinds[sampled], []).append(abs(pulls[k][place]))
                elif not unmapped:
                    reason = BY_RULE
                elif len(unmapped) == len(ids):
                    reason = UNREAD[Unread.UNKNOWN]  # nobody has read the rows again
                else:
                    reason = NO_END_OF_TURN if set(unmapped) <= STOPS else NOT_ONE_TOKEN
                out["reasons"][k][reason] += 1
            for name, weights in COMPOSITIONS.items():
                used = [k for k, anchor in enumerate("ab") if weights.get(anchor, 0) != 0]
                out["kept"][name] += all(one.valid_KP[k, p] for k in used)
            if one.valid_KP[:, p].all():
                uv += sum(x * u * v for x, u, v in zip(b, *pulls, strict=True))
                uu += sum(x * u * u for x, u in zip(b, pulls[0], strict=True))
                vv += sum(x * v * v for x, v in zip(b, pulls[1], strict=True))
                top = max(range(len(ids)), key=lambda c: candidates.logp.flat[p][c])
                for where, at in (("sampled", place), ("top", top)):
                    same = (pulls[0][at] > 0) == (pulls[1][at] > 0)
                    out["agree"][where].append(same)
                    if where == "sampled":
                        out["kinds"].setdefault(kinds[sampled], []).append(same)
    return out | {"correlation": uv / math.sqrt(uu * vv)}


def test_sums_are_those_of_slow_loops() -> None:
    shards = [decisions(seed) for seed in range(4)]
    survey, expected = Survey(["a", "b"], COMPOSITIONS, vocabulary()), by_hand(shards)
    for one in shards:
        survey.add(one)
    assert survey.decisions == 160
    assert survey.reasons == expected["reasons"]
    tried = [KEPT, PARTLY_KEPT, NO_END_OF_TURN, NOT_ONE_TOKEN, BY_RULE, UNREAD[Unread.UNKNOWN]]
    assert set().union(*expected["reasons"]) == set(tried)
    assert survey.kept == expected["kept"]
    np.testing.assert_allclose(survey.push_KV, expected["push"], atol=1e-6)
    for k, anchor in enumerate("ab"):
        means = {kind: sum(sizes) / len(sizes) for kind, sizes in expected["sizes"][k].items()}
        assert survey.size_by_kind(anchor) == pytest.approx(means, abs=1e-6)
    sums = survey.pairs["a", "b"]
    assert sums.correlation == pytest.approx(expected["correlation"], abs=1e-6)
    for where, agreed in expected["agree"].items():
        assert sums.agreement(where) == pytest.approx(sum(agreed) / len(agreed))
    for kind, agreed in expected["kinds"].items():
        assert sums.agreement("sampled", kind) == pytest.approx(sum(agreed) / len(agreed))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = Survey(["a", "b"], COMPOSITIONS, vocabulary()), Survey(["a", "b"], COMPOSITIONS, vocabulary())
    whole.add(decisions(3))
    for chunk in decisions(3).chunks(7):
        parts.add(chunk)
    np.testing.assert_allclose(parts.push_KV, whole.push_KV, atol=1e-12)
    assert parts.reasons == whole.reasons
    assert parts.pairs["a", "b"].covariance == pytest.approx(whole.pairs["a", "b"].covariance)


def test_the_largest_pushes_both_ways() -> None:
    survey = Survey(["a", "b"], COMPOSITIONS, vocabulary())
    survey.push_KV[1] = np.arange(len(WORDS)) - 5.5
    survey.count_KJ[1] = 100  # decisions of each kind
    pushes = survey.pushes(most=2)
    scale = 1000 / survey.count_KJ[1].sum()
    assert pushes[["anchor", "side", "text"]].to_numpy().tolist() == [
        ["b", "up", WORDS[11]], ["b", "up", WORDS[10]], ["b", "down", WORDS[0]], ["b", "down", WORDS[1]]
    ]  # fmt: skip
    assert pushes["amount"].tolist() == pytest.approx([5.5 * scale, 4.5 * scale, -5.5 * scale, -4.5 * scale])
    assert pushes["share"].tolist() == pytest.approx([1, 4.5 / 5.5, 1, 4.5 / 5.5])


def test_kinds_of_tokens() -> None:
    known = vocabulary()
    kinds = {word: known.kind(id) for id, word in enumerate(WORDS)}
    assert kinds == {
        "<|end|>": "end of sequence", "7": "digits", " 42": "digits", "the": "words", "+": "punctuation",
        " ": "whitespace", "</think>": "end of thinking", "x1": "words", "\n": "whitespace", "é": "words",
        "=": "punctuation", "done": "words",
    }  # fmt: skip
    assert set(kinds.values()) == set(KINDS) - {"special"}


def test_memory_does_not_grow_with_the_cache() -> None:
    def peak(shards: Iterator[Block]) -> int:
        survey = Survey(["a", "b"], COMPOSITIONS, vocabulary())
        tracemalloc.start()
        for one in shards:
            survey.add(one)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    few = peak(decisions(seed, positions=500) for seed in range(2))
    many = peak(decisions(seed, positions=500) for seed in range(40))
    assert many < 1.2 * few


def reasons_of(post: Alignment, pre: Alignment, prompt: str, response: str, candidates: list[str]) -> list[str]:
    """Score one trajectory as both sides would, the same candidates everywhere, and ask why each decision is masked."""
    student = make_tokenizer("student")
    prompt_ids, response_ids = (np.array(student(text)["input_ids"], np.int32) for text in (prompt, response))
    ids = np.array([student(text)["input_ids"] for text in candidates], np.int32).T
    ids_TC = np.repeat(ids, len(response_ids), axis=0)
    mapped = [side.align(0, prompt_ids, response_ids, ids_TC).mapped_TC for side in (post, pre)]
    mapped_KPC = (mapped[0] & mapped[1])[None]
    logp = np.full((len(ids_TC), ids_TC.shape[1] + 1), -2.0, np.float32)
    r_KPC = np.zeros(mapped_KPC.shape, np.float32)
    block = decisions_block(response_ids, ids_TC, logp, mapped_KPC, r_KPC=r_KPC, valid_KP=mapped_KPC.all(axis=2))
    block = replace(block, rollouts=replace(block.rollouts, prompt_ids=Ragged.of([prompt_ids])))
    end = student.convert_tokens_to_ids(ENDS["student"])
    untrained = [end] if post.masked_ids | pre.masked_ids else []
    known = Vocabulary.from_tokenizer(student, frozenset({end}))
    survey = Survey(["a"], {}, known, {"a": Reading((post, pre), untrained)})
    survey.add(block)
    return [reason for reason in REASONS for _ in range(survey.reasons[0][reason])]


def test_a_decision_is_masked_for_the_reason_that_is_true() -> None:
    """By hand, on real tokenizers: one token of the student and of the anchor per character."""
    student, anchor = make_tokenizer("student"), make_tokenizer("accuracy")
    end = ENDS["student"]
    plain = Alignment(TokenMap.between(student, anchor, {}), None)
    aliased = Alignment(TokenMap.between(student, anchor, {end: ENDS["accuracy"]}), None)
    untrained = replace(aliased, masked_ids=frozenset({anchor.eos_token_id}))
    too_long, not_spelt, no_column, _ = UNREAD.values()
    assert reasons_of(plain, plain, "1+2", "345", ["6", "7"]) == [KEPT] * 3
    assert reasons_of(plain, plain, "1+2", "345", ["6", end]) == [NO_END_OF_TURN] * 3
    assert reasons_of(plain, plain, "1+2", "345", [end]) == [NO_END_OF_TURN] * 3  # the only candidate, and it is read
    assert reasons_of(aliased, aliased, "1+2", "345", ["6", end]) == [KEPT] * 3
    assert reasons_of(aliased, untrained, "1+2", "345", ["6", end]) == [UNTRAINED] * 3
    assert reasons_of(aliased, untrained, "1+2", "345", [end]) == [UNTRAINED] * 3
    short = replace(plain, limit=4)  # it has room for 1+2 and one more
    assert reasons_of(short, plain, "1+2", "345", ["6", "7"]) == [KEPT] * 2 + [too_long]
    assert reasons_of(plain, plain, "1+2", f"3{end}5", ["6", "7"]) == [KEPT] * 2 + [not_spelt]
    assert reasons_of(plain, plain, "1+2", "345", ["}."]) == [NOT_ONE_TOKEN] * 3  # only the student has it
    lacking = replace(plain, prompts=OwnPrompts([[]], [None], native=False))
    assert reasons_of(plain, lacking, "1+2", "345", ["6"]) == [no_column] * 3
