"""A batch against the paper's equations in plain loops, row by row and decision by decision."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import oracle
from lightning_weave.train.data import compose
from rows import Row, block_of

VOCABULARY, CANDIDATES = 11, 4


def make_rows(seed: int, shapes: Sequence[tuple[int, int]], anchors: int = 2) -> tuple[list[Row], list[np.ndarray]]:
    """Draw rows of (prompt, response) lengths; also the whole behaviour distributions b_TV behind their candidates."""
    rng = np.random.default_rng(seed)
    rows, behaviours = [], []
    for number, (prompt, response) in enumerate(shapes):
        b_TV = rng.dirichlet(np.full(VOCABULARY, 0.5), size=response)
        ids_TC = np.argsort(-b_TV, axis=1)[:, :CANDIDATES]
        logp_TC = np.log(np.take_along_axis(b_TV, ids_TC, axis=1))
        tokens = rng.integers(0, VOCABULARY, prompt + response).astype(np.int32)
        rows.append(
            Row(
                number=100 + number,
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                candidate_ids_TC=ids_TC.astype(np.int32),
                logp_TC=logp_TC.astype(np.float32),
                other_logp_T=np.log1p(-np.exp(logp_TC).sum(axis=1)).astype(np.float32),
                sampled_logp_T=np.log(b_TV[np.arange(response), tokens[prompt:]]).astype(np.float32),
                r_KTC=rng.normal(0, 2, (anchors, response, CANDIDATES)).astype(np.float32),
                valid_KT=rng.random((anchors, response)) < 0.7,
            )
        )
        behaviours.append(b_TV)
    return rows, behaviours


SHAPES = [(3, 5), (1, 1), (4, 9), (2, 0), (6, 2)]


@pytest.mark.parametrize("weights", [(0.5, 0.5), (0.9, 0.1), (1.0, 0.0), (0.0, 1.0)])
def test_every_decision_is_what_the_equations_say(weights: tuple[float, float]) -> None:
    rows, behaviours = make_rows(0, SHAPES)
    batch = compose(block_of(rows), weights, alpha=1.7)
    found = iter(range(len(batch)))
    starts = np.cumsum([0, *batch.lengths])
    for place, (row, b_TV) in enumerate(zip(rows, behaviours, strict=True)):
        for t in range(len(row.response_ids)):
            if not oracle.composed_validity(row.valid_KT[:, t].tolist(), weights):
                continue
            n = next(found)
            r_C = oracle.compose(row.r_KTC[:, t].tolist(), weights)
            q_O = oracle.finite_target(b_TV[t].tolist(), row.candidate_ids_TC[t].tolist(), r_C, alpha=1.7)
            b_O = oracle.bucket(b_TV[t].tolist(), row.candidate_ids_TC[t].tolist())
            np.testing.assert_allclose(batch.r_NC[n], r_C, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(batch.log_q_NO[n].exp(), q_O, rtol=1e-4, atol=1e-7)
            np.testing.assert_allclose(batch.log_b_NO[n].exp(), b_O, rtol=1e-4, atol=1e-7)
            assert batch.candidate_ids_NC[n].tolist() == row.candidate_ids_TC[t].tolist()
            assert (batch.rows_N[n], batch.places_N[n], batch.sampled_ids_N[n]) == (row.number, t, row.response_ids[t])
            assert batch.sampled_log_b_N[n].item() == pytest.approx(math.log(b_TV[t, row.response_ids[t]]), rel=1e-5)
            # The state of decision t has seen the prompt and the response before t, and nothing else.
            seen = [*row.prompt_ids, *row.response_ids[:t]]
            state = int(batch.states_N[n])
            assert batch.input_ids_T[starts[place] : state + 1].tolist() == seen
            assert batch.positions_T[starts[place] : state + 1].tolist() == list(range(len(seen)))
    assert next(found, None) is None


def test_nothing_is_run_after_the_last_kept_decision() -> None:
    rows, _ = make_rows(1, [(3, 8), (2, 8)])
    early = [replace(row, valid_KT=np.arange(8) < np.array([[2], [8]])) for row in rows]
    assert compose(block_of(early), (0.5, 0.5), 2.0).lengths == (4, 3)
    assert compose(block_of(early), (0.0, 1.0), 2.0).lengths == (10, 9)


def test_rows_without_a_valid_decision_make_a_batch_that_asks_for_nothing() -> None:
    rows, _ = make_rows(2, [(3, 4), (2, 0)])
    masked = [replace(row, valid_KT=np.zeros_like(row.valid_KT)) for row in rows]
    batch = compose(block_of(masked), (0.5, 0.5), 2.0)
    assert len(batch) == 0
    assert batch.lengths == (1, 1)
    assert batch.log_q_NO.shape == (0, CANDIDATES + 1)


def test_an_endpoint_ignores_the_other_anchor_even_where_it_is_broken() -> None:
    rows, _ = make_rows(3, SHAPES)
    alone = [replace(row, r_KTC=row.r_KTC[:1], valid_KT=row.valid_KT[:1]) for row in rows]
    spoilt = [replace(row, r_KTC=np.stack([row.r_KTC[0], np.full_like(row.r_KTC[1], np.nan)])) for row in rows]
    one, other = compose(block_of(alone), (1.0,), 2.0), compose(block_of(spoilt), (1.0, 0.0), 2.0)
    assert (one.lengths, one.whole) == (other.lengths, other.whole)
    for name, tensor in vars(one).items():
        assert name in ("lengths", "whole") or torch.equal(tensor, getattr(other, name)), name


def test_the_first_decisions_are_the_first() -> None:
    rows, _ = make_rows(4, SHAPES)
    batch = compose(block_of(rows), (0.5, 0.5), 2.0)
    few = batch.first(3)
    assert len(few) == 3
    assert torch.equal(few.log_q_NO, batch.log_q_NO[:3])
    tokens = int(batch.states_N[2]) + 1  # every kept decision still has its tokens before it; nothing else is run
    assert sum(few.lengths) == tokens
    assert torch.equal(few.states_N, batch.states_N[:3])
    assert torch.equal(few.input_ids_T, batch.input_ids_T[:tokens])
    assert torch.equal(few.positions_T, batch.positions_T[:tokens])
    assert len(batch.first(0)) == 0
