"""Sums over the cache against slow loops, and memory that does not grow with it."""

import math
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from lightning_weave.cache.block import Block
from lightning_weave.report.kinds import KINDS, Vocabulary
from lightning_weave.report.survey import (
    BY_RULE,
    KEPT,
    NO_END_OF_TURN,
    NOT_ONE_TOKEN,
    OUT_OF_CONTEXT,
    PARTLY_KEPT,
    REASONS,
    Survey,
)
from rows import decisions_block

WORDS = ["<|end|>", "7", " 42", "the", "+", " ", "</think>", "x1", "\n", "é", "=", "done"]
STOPS = frozenset({0})
COMPOSITIONS = {"one": {"a": 1.0}, "both": {"a": 0.5, "b": 0.5}, "end": {"a": 0.0, "b": 1.0}}


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(WORDS)}, unk_token="x1"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens(["</think>"])
    return Vocabulary.of(tokenizer, STOPS)


def shard(seed: int, positions: int = 40, candidates: int = 4) -> Block:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(len(WORDS))[:candidates] for _ in range(positions)]).astype(np.int32)
    logits = np.sort(rng.normal(size=(positions, candidates + 1)), axis=1)[:, ::-1]
    logp = (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))).astype(np.float32)
    mapped = rng.random((2, positions, candidates)) < 0.93
    mapped[:, rng.random(positions) < 0.1] = False
    return decisions_block(
        rng.integers(0, len(WORDS), positions).astype(np.int32),
        ids,
        logp,
        mapped,
        r_KPC=np.where(mapped, rng.normal(size=mapped.shape), 0).astype(np.float32),
        # The second anchor counts per candidate; a rule leaves out some positions of the first.
        valid_KP=np.stack([mapped[0].all(axis=1) & (rng.random(positions) < 0.9), mapped[1].any(axis=1)]),
    )


def by_hand(shards: list[Block]) -> dict:
    """Everything that a survey says, one decision at a time."""
    kinds = [vocabulary().kind(id) for id in range(len(WORDS))]
    out: dict = {"reasons": [[0] * len(REASONS) for _ in "ab"], "kept": dict.fromkeys(COMPOSITIONS, 0)}
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
                    reason = OUT_OF_CONTEXT
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
    shards = [shard(seed) for seed in range(4)]
    survey, expected = Survey(["a", "b"], COMPOSITIONS, vocabulary()), by_hand(shards)
    for one in shards:
        survey.add(one)
    assert survey.decisions == 160
    assert survey.reasons_KR.tolist() == expected["reasons"]
    assert all(count > 0 for count in np.sum(expected["reasons"], axis=0))  # every reason was tried
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
        assert sums.agreement_on(kind) == pytest.approx(sum(agreed) / len(agreed))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = Survey(["a", "b"], COMPOSITIONS, vocabulary()), Survey(["a", "b"], COMPOSITIONS, vocabulary())
    whole.add(shard(3))
    for chunk in shard(3).chunks(7):
        parts.add(chunk)
    np.testing.assert_allclose(parts.push_KV, whole.push_KV, atol=1e-12)
    assert parts.reasons_KR.tolist() == whole.reasons_KR.tolist()
    assert parts.pairs["a", "b"].covariance == pytest.approx(whole.pairs["a", "b"].covariance)


def test_the_largest_pushes_both_ways() -> None:
    survey = Survey(["a", "b"], COMPOSITIONS, vocabulary())
    survey.push_KV[1] = np.arange(len(WORDS)) - 5.5
    up, down = survey.largest_pushes("b", most=2)
    assert up == [(11, 5.5), (10, 4.5)]
    assert down == [(0, -5.5), (1, -4.5)]
    assert survey.largest_pushes("a") == ([], [])


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

    few = peak(shard(seed, positions=500) for seed in range(2))
    many = peak(shard(seed, positions=500) for seed in range(40))
    assert many < 1.2 * few
