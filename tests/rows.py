"""One trajectory at a time, as plain arrays: what slow oracles loop over."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.shifts import Shift
from lightning_weave.types import Candidates, Ragged, Rollouts


@dataclass(frozen=True)
class Row:
    """T decisions, C candidates, K sources of shifts."""

    number: int
    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    candidate_ids_TC: NDArray[np.int32]
    logp_TC: NDArray[np.float32]
    other_logp_T: NDArray[np.float32]
    sampled_logp_T: NDArray[np.float32]
    r_KTC: NDArray[np.float32]
    valid_KT: NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


def read_row(cache: Any, number: int) -> Row:
    """Read one row of a cache, or of live rows."""
    block = cache.block([number])
    candidates = block.candidates
    return Row(
        int(block.number_R[0]),
        block.rollouts.prompt_ids.flat,
        block.rollouts.response_ids.flat,
        candidates.ids.flat,
        candidates.logp.flat,
        candidates.other_logp.flat,
        candidates.sampled_logp.flat,
        block.r_KPC,
        block.valid_KP,
    )


def block_of(rows: Sequence[Row]) -> Block:
    """Put rows into one block."""
    prompts, responses = (Ragged.of([getattr(row, name) for row in rows]) for name in ("prompt_ids", "response_ids"))
    zeros = np.zeros(len(rows), np.int32)
    rollouts = Rollouts(zeros, zeros, zeros.astype(np.uint8), prompts, responses)
    fields = ("candidate_ids_TC", "logp_TC", "other_logp_T", "sampled_logp_T")
    candidates = Candidates(
        rollouts.trajectories(), *(Ragged.of([getattr(row, name) for row in rows]) for name in fields)
    )
    r_KPC = np.concatenate([row.r_KTC for row in rows], axis=1)
    valid_KP = np.concatenate([row.valid_KT for row in rows], axis=1)
    shifts = [Shift(r_PC, np.isfinite(r_PC), valid_P) for r_PC, valid_P in zip(r_KPC, valid_KP, strict=True)]
    return Block.from_shifts([row.number for row in rows], rollouts, candidates, shifts)


def decisions_block(
    sampled_P: NDArray, ids_PC: NDArray, logp_PO: NDArray, mapped_KPC: NDArray, *, r_KPC: NDArray, valid_KP: NDArray
) -> Block:
    """Put decisions into a block of one row; the last column of log-probs is that of everything else."""
    logp_PC = logp_PO[:, :-1]
    other_P = logp_PO[:, -1]
    row = Row(0, np.ones(1, np.int32), sampled_P, ids_PC, logp_PC, other_P, other_P, r_KPC, valid_KP)
    return replace(block_of([row]), mapped_KPC=mapped_KPC)
