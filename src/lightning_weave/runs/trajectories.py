"""Trajectories as the arrays of a shard, and what a student says of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_weave.models.hf import RowCandidates, Scorer
from lightning_weave.types import FINISH_REASONS, Candidates, Ragged, Request, Response, Rollouts


def pack_rollouts(requests: Sequence[Request], responses: Sequence[Response]) -> Rollouts:
    """Put sampled responses into the arrays of a shard."""
    logged = any(response.decided is not None for response in responses)
    return Rollouts(
        prompt_R=np.array([request.prompt for request in requests], dtype=np.int32),
        response_R=np.array([request.response for request in requests], dtype=np.int32),
        finish_R=np.array([FINISH_REASONS.index(response.finish) for response in responses], dtype=np.uint8),
        prompt_ids=Ragged.of([np.array(request.prompt_ids, dtype=np.int32) for request in requests]),
        response_ids=Ragged.of([np.array(response.ids, dtype=np.int32) for response in responses]),
        decided=Ragged.of([_decided(response) for response in responses]) if logged else None,
    )


def _decided(response: Response) -> NDArray[np.bool_]:
    return np.array([True] * len(response.ids) if response.decided is None else response.decided, dtype=np.bool_)


def find_candidates(scorer: Scorer, rows: Rollouts, count: int) -> Candidates:
    """Run the student over its trajectories and keep its likeliest tokens at every decision."""
    return _packed(rows, scorer.candidates(_pairs(rows), count, row_names(rows)))


def rescore_candidates(scorer: Scorer, rows: Rollouts, candidates: Candidates) -> Candidates:
    """Ask another model with the student's tokenizer about the same candidates."""
    return _packed(rows, scorer.rescore(_pairs(rows), list(candidates.ids), row_names(rows)))


def row_names(rows: Rollouts) -> list[str]:
    """Name the rows of a shard in messages as rollout does."""
    places = zip(rows.prompt_R.tolist(), rows.response_R.tolist(), strict=True)
    return [f"prompt {prompt}, response {response}" for prompt, response in places]


def _pairs(rows: Rollouts) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    return list(zip(rows.prompt_ids, rows.response_ids, strict=True))


def _packed(rows: Rollouts, scored: Sequence[RowCandidates]) -> Candidates:
    ids, logp, other, sampled = (Ragged.of([np.asarray(row[part]) for row in scored]) for part in range(4))
    return Candidates(rows.trajectories(), ids, logp, other, sampled)
