"""How cached trajectories become a batch with its target. Composing costs little enough to be done while loading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.reader import Row
from lightning_weave.maths import compose_shifts, tilted_target, with_other


@dataclass(frozen=True)
class Batch:
    """One micro-batch. N kept decisions of R right-padded rows; C candidates, O = C + 1 outcomes."""

    input_ids_RT: Tensor
    states_N: Tensor  # index into the R x T hidden states: the token before each kept decision
    rows_N: Tensor  # row number of each kept decision ...
    places_N: Tensor  # ... and its place in the row's response
    candidate_ids_NC: Tensor
    log_b_NO: Tensor
    log_q_NO: Tensor
    r_NC: Tensor
    sampled_ids_N: Tensor
    sampled_log_b_N: Tensor

    def __len__(self) -> int:
        return len(self.states_N)

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: tensor.to(device, non_blocking=True) for name, tensor in vars(self).items()})

    def first(self, decisions: int) -> "Batch":
        """Keep only the first few decisions. With none, a forward and backward pass that adds nothing is left."""
        kept = {name: tensor[:decisions] for name, tensor in vars(self).items() if name != "input_ids_RT"}
        return replace(self, **kept) if decisions else replace(self, input_ids_RT=self.input_ids_RT[:1, :1], **kept)


def kept_decisions(row: Row, weights: Sequence[float]) -> NDArray[np.bool_]:
    """Find the decisions of a row at which every anchor that takes part is valid."""
    takes_part_K = np.array(weights) != 0
    return row.valid_KT[takes_part_K].all(axis=0)


def tokens_needed(row: Row, weights: Sequence[float]) -> int:
    """Count the tokens of a row up to the last state that is learned from: nothing after it needs to be run."""
    kept = np.flatnonzero(kept_decisions(row, weights))
    return len(row.prompt_ids) + int(kept[-1]) if len(kept) else 1


def compose(rows: Sequence[Row], weights: Sequence[float], alpha: float) -> Batch:
    """Weigh the shifts, intersect the masks, tilt the behaviour: all that a composition is (composed-shift)."""
    r_PC, valid_P = compose_shifts(
        torch.from_numpy(np.concatenate([row.r_KTC for row in rows], axis=1)),
        torch.from_numpy(np.concatenate([row.valid_KT for row in rows], axis=1)),
        torch.tensor(weights, dtype=torch.float32),
    )

    def kept(parts: list[NDArray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts))[valid_P]

    longest = max(tokens_needed(row, weights) for row in rows)
    log_b_NO = with_other(kept([row.logp_TC for row in rows]), kept([row.other_logp_T for row in rows]))
    r_NC = r_PC[valid_P]
    return Batch(
        input_ids_RT=_padded(rows, longest),
        states_N=kept([index * longest + _states(row) for index, row in enumerate(rows)]),
        rows_N=kept([np.full(len(row.response_ids), row.number) for row in rows]),
        places_N=kept([np.arange(len(row.response_ids)) for row in rows]),
        candidate_ids_NC=kept([row.candidate_ids_TC for row in rows]).long(),
        log_b_NO=log_b_NO,
        log_q_NO=tilted_target(log_b_NO, r_NC, alpha),
        r_NC=r_NC,
        sampled_ids_N=kept([row.response_ids for row in rows]).long(),
        sampled_log_b_N=kept([row.sampled_logp_T for row in rows]),
    )


def _states(row: Row) -> NDArray[np.int64]:
    """Place of the token before each decision: the prompt's last one comes before the first."""
    return len(row.prompt_ids) - 1 + np.arange(len(row.response_ids))


def _padded(rows: Sequence[Row], longest: int) -> Tensor:
    ids_RT = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids = np.concatenate([row.prompt_ids, row.response_ids])[:longest]
        ids_RT[index, : len(ids)] = torch.from_numpy(ids)
    return ids_RT
