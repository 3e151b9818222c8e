"""Which trajectories make an update, and how they become a batch with its target."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from lightning_weave.maths import compose_shifts, tilted_target, with_other
from lightning_weave.train.cache import Row


@dataclass(frozen=True)
class Schedule:
    """The rows of every update: rounds of whole prompt groups, reshuffled each epoch, for any composition the same."""

    groups: int
    responses: int
    epochs: int
    prompts_per_round: int
    updates_per_round: int
    seed: int
    validation: float = 0.0

    def held_out(self) -> list[int]:
        """Rows of the prompts that are kept for validation."""
        count = round(self.groups * self.validation)
        chosen = np.random.default_rng([self.seed, 1]).permutation(self.groups)[:count]
        return self._rows(sorted(chosen.tolist()))

    def updates(self) -> list[list[int]]:
        """Row numbers of each update, in order. A last round that is not full makes fewer updates."""
        held_out = {row // self.responses for row in self.held_out()}
        kept = np.array([group for group in range(self.groups) if group not in held_out])
        size = self.prompts_per_round * self.responses // self.updates_per_round
        updates = []
        for epoch in range(self.epochs):
            order = np.random.default_rng([self.seed, 2, epoch]).permutation(kept)
            for start in range(0, len(order), self.prompts_per_round):
                rows = self._rows(order[start : start + self.prompts_per_round].tolist())
                updates += [rows[first : first + size] for first in range(0, len(rows), size)]
        return updates

    def _rows(self, groups: Sequence[int]) -> list[int]:
        return [group * self.responses + response for group in groups for response in range(self.responses)]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. N kept decisions of R right-padded rows; C candidates, O = C + 1 outcomes."""

    input_ids_RT: Tensor
    states_N: Tensor  # index into the R x T hidden states: the token before each kept decision
    rows_N: Tensor  # row number of each kept decision
    candidate_ids_NC: Tensor
    log_b_NO: Tensor
    log_q_NO: Tensor
    r_NC: Tensor
    sampled_ids_N: Tensor
    sampled_log_b_N: Tensor
    decisions: int  # all decisions of these rows, kept or not

    def to(self, device: torch.device) -> "Batch":
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        moved = {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
        return Batch(**moved, decisions=self.decisions)

    def emptied(self) -> "Batch":
        """The same row with no decision kept: a forward and backward pass that adds nothing."""
        per_decision = {
            name: getattr(self, name)[:0] for name in vars(self) if name.rpartition("_")[2] in {"N", "NC", "NO"}
        }
        return replace(self, input_ids_RT=self.input_ids_RT[:, :1], decisions=0, **per_decision)


def compose(rows: Sequence[Row], weights: Sequence[float], alpha: float) -> Batch:
    """Weigh the shifts, intersect the masks, tilt the behaviour: all that a composition is (composed-shift)."""
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in rows]
    input_ids_RT = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for index, row in enumerate(rows):
        input_ids_RT[index, : lengths[index]] = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]))
    starts = [index * max(lengths) + len(row.prompt_ids) - 1 for index, row in enumerate(rows)]
    states_P = np.concatenate(
        [start + np.arange(len(row.response_ids)) for start, row in zip(starts, rows, strict=True)]
    )
    rows_P = np.concatenate([np.full(len(row.response_ids), row.number) for row in rows])
    r_PC, valid_P = compose_shifts(
        torch.from_numpy(np.concatenate([row.r_KTC for row in rows], axis=1)),
        torch.from_numpy(np.concatenate([row.valid_KT for row in rows], axis=1)),
        torch.tensor(weights, dtype=torch.float32),
    )
    r_NC = r_PC[valid_P]

    def kept(name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([getattr(row, name) for row in rows]))[valid_P]

    log_b_NO = with_other(kept("logp_TC"), kept("other_logp_T"))
    return Batch(
        input_ids_RT=input_ids_RT,
        states_N=torch.from_numpy(states_P)[valid_P],
        rows_N=torch.from_numpy(rows_P)[valid_P],
        candidate_ids_NC=kept("candidate_ids_TC").long(),
        log_b_NO=log_b_NO,
        log_q_NO=tilted_target(log_b_NO, r_NC, alpha),
        r_NC=r_NC,
        sampled_ids_N=kept("response_ids").long(),
        sampled_log_b_N=kept("sampled_logp_T"),
        decisions=len(states_P),
    )


def valid_decisions(row: Row, weights: Sequence[float]) -> int:
    """Count the decisions of a row that a composition keeps."""
    takes_part = np.array(weights) != 0
    return int(row.valid_KT[takes_part].all(axis=0).sum()) if takes_part.any() else len(row.response_ids)


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Pack rows into micro-batches of at most `token_budget` tokens, padding included; a longer row goes alone.

    >>> list(micro_batches([5, 2, 9, 2], token_budget=10))
    [[1, 3], [0], [2]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if batch and lengths[index] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def share_rows(lengths: Sequence[int], rank: int, world: int) -> list[int]:
    """Deal rows to ranks from long to short, back and forth, so that all get about the same work.

    >>> [share_rows([5, 2, 9, 2], rank, 2) for rank in range(2)]
    [[2, 3], [0, 1]]
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    turns = [turn % (2 * world) for turn in range(len(order))]
    return [index for index, turn in zip(order, turns, strict=True) if min(turn, 2 * world - 1 - turn) == rank]
