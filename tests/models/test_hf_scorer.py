"""The scorer against whole logits, one row at a time, in plain loops."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from small_models import ARCHITECTURES, PADDED, VOCABULARY, small_model

import rounding
from lightning_weave.devices import is_out_of_memory
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.models.scorer import GrowingBody, HFBody, Scorer, ScoreRow

COUNT = 8
SHAPES = ((1, 1), (1, 20), (12, 1), (5, 9), (30, 34), (3, 0), (7, 13), (2, 2))  # (30, 34) fills the context limit
BUDGETS = (1, 70, 16384)


def some_rows(seed: int = 5) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(seed)
    draw = lambda size: rng.integers(0, VOCABULARY, size=size).tolist()  # noqa: E731
    return [(draw(prompt), draw(response)) for prompt, response in SHAPES]


def whole_logprobs(model: Any, ids: list[int]) -> np.ndarray:
    """Log-probabilities after each token of one row, alone, over the tokens that exist."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :, :VOCABULARY].double().numpy()
    peak = logits.max(axis=1, keepdims=True)
    return logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))


def score_rows(seed: int = 9) -> list[ScoreRow]:
    """Rows as another tokenizer would give them: decisions at boundaries only, some candidates not mapped."""
    rng = np.random.default_rng(seed)
    rows = []
    for prompt, response in some_rows():
        ids = np.array(prompt + response, dtype=np.int32)
        positions = np.arange(len(prompt) - 1, len(ids) - 1)
        kept = positions[rng.random(len(positions)) < 0.8]
        candidates = np.array([rng.permutation(VOCABULARY)[:COUNT] for _ in kept], dtype=np.int32)
        mapped = rng.random((len(kept), COUNT)) < 0.7
        mapped[::5] = False
        rows.append(ScoreRow(ids, kept, np.where(mapped, candidates.reshape(-1, COUNT), -1).astype(np.int32), mapped))
    return rows


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_candidates_are_those_of_the_whole_logits(architecture: str, budget: int) -> None:
    model, rows = small_model(architecture), some_rows()
    found = Scorer.from_model(model, VOCABULARY, budget).candidates(rows, COUNT)
    assert len(found) == len(rows)
    for (prompt, response), (ids_TC, logp_TC, other_T, sampled_T) in zip(rows, found, strict=True):
        assert (ids_TC.dtype, logp_TC.dtype, ids_TC.shape) == (np.int32, np.float32, (len(response), COUNT))
        expected_PV = whole_logprobs(model, prompt + response)
        for t, token in enumerate(response):
            expected_V = expected_PV[len(prompt) - 1 + t]
            order = sorted(range(VOCABULARY), key=lambda token: (-expected_V[token], token))
            assert ids_TC[t].tolist() == order[:COUNT]
            np.testing.assert_allclose(logp_TC[t], expected_V[order[:COUNT]], atol=rounding.LOGPROB, rtol=0)
            np.testing.assert_allclose(
                other_T[t], np.log(np.exp(expected_V[order[COUNT:]]).sum()), atol=rounding.LOGPROB, rtol=0
            )
            np.testing.assert_allclose(sampled_T[t], expected_V[token], atol=rounding.LOGPROB, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_given_candidates_are_reread_from_the_whole_logits(architecture: str) -> None:
    model, rows, rng = small_model(architecture), some_rows(), np.random.default_rng(3)
    asked = [
        np.array([rng.permutation(VOCABULARY)[:COUNT] for _ in response], np.int32).reshape(-1, COUNT)
        for _, response in rows
    ]
    for ids_TC, (_, response) in zip(asked, rows, strict=True):
        absent_T = ~(ids_TC == np.array(response, np.int32).reshape(-1, 1)).any(axis=1)
        ids_TC[::2, 3] = np.where(absent_T, response, ids_TC[:, 3])[::2]  # the sampled token is a candidate or not
    found = Scorer.from_model(model, VOCABULARY, 70).candidates(rows, asked[0].shape[1], given=asked)
    for (prompt, response), given_TC, (ids_TC, logp_TC, other_T, sampled_T) in zip(rows, asked, found, strict=True):
        assert np.array_equal(ids_TC, given_TC)
        expected_PV = whole_logprobs(model, prompt + response)
        for t, token in enumerate(response):
            expected_V = expected_PV[len(prompt) - 1 + t]
            rest_V = np.delete(expected_V, given_TC[t])
            np.testing.assert_allclose(logp_TC[t], expected_V[given_TC[t]], atol=rounding.LOGPROB, rtol=0)
            np.testing.assert_allclose(other_T[t], np.log(np.exp(rest_V).sum()), atol=rounding.LOGPROB, rtol=0)
            np.testing.assert_allclose(sampled_T[t], expected_V[token], atol=rounding.LOGPROB, rtol=0)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_the_whole_logits(architecture: str, budget: int) -> None:
    model, rows = small_model(architecture), score_rows()
    for row, (logp_TC, mass_T) in zip(rows, Scorer.from_model(model, VOCABULARY, budget).score(rows), strict=True):
        assert logp_TC.shape == row.mapped_TC.shape
        assert (logp_TC.dtype, mass_T.dtype, mass_T.shape) == (np.float32, np.float32, row.positions_T.shape)
        expected_PV = whole_logprobs(model, row.ids.tolist())
        for t, position in enumerate(row.positions_T):
            mapped_C, ids_C = row.mapped_TC[t], row.candidate_ids_TC[t]
            np.testing.assert_allclose(
                logp_TC[t][mapped_C], expected_PV[position, ids_C[mapped_C]], atol=rounding.LOGPROB, rtol=0
            )
            assert (logp_TC[t][~mapped_C] == 0).all()
            expected_mass = sum(np.exp(expected_PV[position, token]) for token in ids_C[mapped_C])
            np.testing.assert_allclose(mass_T[t], expected_mass, atol=rounding.LOGPROB, rtol=0)


def groups(prompt: int, response: int, count: int = 3, responses: int = 4) -> list[tuple[list[int], list[int]]]:
    """Several responses to each of a few prompts; the last two are the same."""
    rng = np.random.default_rng(prompt)
    rows = []
    for _ in range(count):
        shared = rng.integers(0, VOCABULARY, size=prompt).tolist()
        rows += [(shared, rng.integers(0, VOCABULARY, size=response).tolist()) for _ in range(responses - 1)]
        rows.append(rows[-1])
    return [rows[place] for place in rng.permutation(len(rows))]


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_prompt_that_is_read_once_gives_each_row_its_own_numbers(architecture: str, budget: int) -> None:
    """Also where the prompt is longer than the windows of some layers."""
    model, rows = small_model(architecture), groups(prompt=21, response=9)
    alone = [Scorer.from_model(model, VOCABULARY).candidates([row], COUNT)[0] for row in rows]
    for found, single in zip(Scorer.from_model(model, VOCABULARY, budget).candidates(rows, COUNT), alone, strict=True):
        assert np.array_equal(found[0], single[0])
        for one, other in zip(found[1:], single[1:], strict=True):
            np.testing.assert_allclose(one, other, atol=rounding.LOGPROB, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "prompt", "response", "read"),
    [
        ("llama", 21, 9, 3 * (21 + 3 * 8)),  # of two equal responses one is read, and of each all but the last token
        ("gemma3", 21, 9, 3 * (21 + 3 * 8)),
        ("phi3", 21, 9, 3 * 4 * (21 + 8)),  # longrope
        ("qwen3.5", 21, 9, 3 * 4 * (21 + 8)),  # recurrent
    ],
)
def test_tokens_that_rows_have_in_common_are_read_once(
    architecture: str, prompt: int, response: int, read: int
) -> None:
    model = small_model(architecture)
    scorer = Scorer.from_model(model, VOCABULARY)
    sizes: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    scorer.candidates(groups(prompt, response), COUNT)
    assert sizes == [read]


def test_tokens_are_not_shared_where_that_saves_little() -> None:
    model = small_model("llama")
    scorer = Scorer.from_model(model, VOCABULARY)
    sizes: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    ids = np.random.default_rng(0).permutation(VOCABULARY)[:60].tolist()
    for common in (2, 8):
        scorer.candidates([(ids[:common], ids[20:60]), (ids[:common], ids[19:59])], COUNT)
    assert sizes == [2 * (2 + 39), 8 + 2 * 39]


def test_padding_of_the_vocabulary_takes_no_mass() -> None:
    model, rows = small_model("llama"), some_rows()
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] *= 50
    found = Scorer.from_model(model, VOCABULARY).candidates(rows, COUNT)
    assert max(int(ids_TC.max(initial=0)) for ids_TC, *_ in found) < VOCABULARY
    for _, logp_TC, other_T, _ in found:
        np.testing.assert_allclose(np.exp(logp_TC).sum(axis=1) + np.exp(other_T), 1, atol=rounding.LOGPROB)
    whole = Scorer.from_model(model, PADDED).candidates(rows, COUNT)
    assert max(int(ids_TC.max(initial=0)) for ids_TC, *_ in whole) >= VOCABULARY


def test_running_out_of_memory_halves_the_budget_and_changes_no_number(caplog: pytest.LogCaptureFixture) -> None:
    model, rows = small_model("llama"), some_rows()
    expected = Scorer.from_model(model, VOCABULARY).candidates(rows, COUNT)
    scorer = Scorer.from_model(model, VOCABULARY)

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].numel() > 130:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    with caplog.at_level(logging.WARNING):
        found = scorer.candidates(rows, COUNT)
    assert scorer.token_budget <= 130
    assert "token budget is now" in caplog.text
    for ours, theirs in zip(found, expected, strict=True):
        for array, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(array, other, atol=rounding.LOGPROB, rtol=0)


@pytest.mark.slow
def test_a_row_too_large_for_memory_is_named() -> None:
    model = small_model("llama")
    scorer = Scorer.from_model(model, VOCABULARY)

    def refuse(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(refuse, with_kwargs=True)
    with pytest.raises(WeaveError, match="row 4: its 63 tokens alone do not fit"):
        scorer.candidates(some_rows(), COUNT)


def test_the_cpu_allocator_is_understood_and_other_errors_are_not_swallowed() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_name_the_row(broken: float) -> None:
    model = small_model("llama")
    scorer = Scorer.from_model(model, VOCABULARY)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = broken
    rows = [([3, 4], [5, 6]), ([3, 4, 77], [5, 6])]
    with pytest.raises(WeaveError, match="row 1: the model's logits are not finite"):
        scorer.candidates(rows, COUNT)
    score_row = ScoreRow(
        np.array([3, 77, 5], np.int32), np.array([1]), np.array([[5, 6]], np.int32), np.array([[True] * 2])
    )
    with pytest.raises(WeaveError, match="row 0: the model's logits are not finite"):
        scorer.score([score_row])


def test_wrong_rows_are_refused_by_number() -> None:
    scorer = Scorer.from_model(small_model("llama"), VOCABULARY)
    with pytest.raises(InputError, match="row 1: 65 tokens are more than the 64"):
        scorer.candidates([([1], [2]), ([3] * 60, [4] * 6)], COUNT)
    with pytest.raises(InputError, match="row 0: token id 93 is not in the model's vocabulary of 90"):
        scorer.candidates([([1], [93])], COUNT)
    with pytest.raises(InputError, match="row 0: token id 200 is not in"):
        scorer.candidates([([200], [3])], COUNT)
    with pytest.raises(InputError, match="row 0: the prompt is empty"):
        scorer.candidates([([], [3, 4])], COUNT)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_that_grow_by_a_token_are_scored_as_a_whole(architecture: str) -> None:
    """Rows of two lengths, one that appears later and some that end; two of them are the same."""
    model, rng = small_model(architecture), np.random.default_rng(2)
    rows = [rng.integers(0, VOCABULARY, size=34).astype(np.int32) for _ in range(4)]
    rows = [*rows, rows[0]]
    first, last = (5, 9, 5, 7, 5), (34, 20, 12, 30, 34)
    scorer = Scorer(GrowingBody(HFBody(model, VOCABULARY)), 10**6)
    candidates = np.array([[*range(COUNT)]], np.int32)
    for step in range(1, 34):
        running = [row[: start + step - 4] for row, start, end in zip(rows, first, last, strict=True)]
        running = [row for row, start, end in zip(running, first, last, strict=True) if start <= len(row) <= end]
        everything = np.ones((1, COUNT), np.bool_)
        found = scorer.score([ScoreRow(row, np.array([len(row) - 1]), candidates, everything) for row in running])
        for row, (logp_TC, _) in zip(running, found, strict=True):
            expected_V = whole_logprobs(model, row.tolist())[-1]
            np.testing.assert_allclose(logp_TC[0], expected_V[:COUNT], atol=rounding.LOGPROB, rtol=0)
