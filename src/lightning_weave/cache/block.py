"""Trajectories with everything that is known about their decisions: what training, reports and checks all read."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.shifts import Shift
from lightning_weave.maths import with_other
from lightning_weave.types import Candidates, Ragged, Rollouts, join_rows, pick_rows


@dataclass(frozen=True)
class Tensors:
    """Copies of a block's arrays. Whole numbers are int64, so that they index; the last of O outcomes is `other`."""

    tokens: list[Tensor]  # prompt and response of each row
    row_P: Tensor  # which row of the block a decision is of
    state_P: Tensor  # at which token of its row it is made: the one before it
    sampled_P: Tensor
    candidate_ids_PC: Tensor
    log_b_PO: Tensor
    r_KPC: Tensor
    mapped_KPC: Tensor
    valid_KP: Tensor


@dataclass(frozen=True)
class Block:
    """Some rows of a run. R rows, P decisions of all rows one after another, C candidates, K sources of shifts."""

    number_R: NDArray[np.int64]  # row numbers in the run
    rollouts: Rollouts
    candidates: Candidates
    r_KPC: NDArray[np.float32]
    mapped_KPC: NDArray[np.bool_]
    valid_KP: NDArray[np.bool_]
    proposal: Candidates | None = None  # the same candidates under another model that sampled the rows

    @classmethod
    def from_shifts(
        cls,
        numbers: Sequence[int],
        rollouts: Rollouts,
        candidates: Candidates,
        shifts: Sequence[Shift],
        proposal: Candidates | None = None,
    ) -> "Block":
        """Combine rows with the shift of every source."""
        shape_PC = candidates.ids.flat.shape
        valid_KP = _stack([shift.valid_P for shift in shifts], np.bool_, shape_PC[:1])
        return cls(
            number_R=np.array(numbers, np.int64),
            rollouts=rollouts,
            candidates=candidates,
            r_KPC=_stack([shift.r_PC for shift in shifts], np.float32, shape_PC),
            mapped_KPC=_stack([shift.mapped_PC for shift in shifts], np.bool_, shape_PC),
            valid_KP=valid_KP if rollouts.decided is None else valid_KP & rollouts.decided.flat,
            proposal=proposal,
        )

    @classmethod
    def concatenate(cls, blocks: Sequence["Block"]) -> "Block":
        """Concatenate the rows of several blocks."""
        if len(blocks) == 1:
            return blocks[0]
        return cls(
            number_R=np.concatenate([block.number_R for block in blocks]),
            rollouts=join_rows([block.rollouts for block in blocks]),
            candidates=join_rows([block.candidates for block in blocks]),
            r_KPC=np.concatenate([block.r_KPC for block in blocks], axis=1),
            mapped_KPC=np.concatenate([block.mapped_KPC for block in blocks], axis=1),
            valid_KP=np.concatenate([block.valid_KP for block in blocks], axis=1),
            proposal=None
            if all(block.proposal is None for block in blocks)
            else join_rows([block.behaviour for block in blocks]),
        )

    def with_row_weights(self, weight_RK: NDArray[np.float32]) -> "Block":
        """Weigh the shifts row by row: all sources then count 1, and one of weight 0 masks nothing."""
        weight_KP = np.repeat(weight_RK.T, self.decisions_R, axis=1)
        used_KP = weight_KP != 0
        r_KPC = np.where(used_KP[..., None], weight_KP[..., None] * self.r_KPC, np.float32(0))
        return replace(self, r_KPC=r_KPC, valid_KP=(self.valid_KP | ~used_KP) & self.decided_P)

    def __len__(self) -> int:
        return len(self.number_R)

    @property
    def sampled_P(self) -> NDArray[np.int32]:
        """The token that was sampled at each decision."""
        return self.rollouts.response_ids.flat

    @property
    def behaviour(self) -> Candidates:
        """The candidates under the model that sampled the rows: the student itself, unless another proposed them."""
        return self.candidates if self.proposal is None else self.proposal

    @property
    def decided_P(self) -> NDArray[np.bool_]:
        """Which tokens the student wrote; the others of a logged run are context, valid for no source."""
        decided = self.rollouts.decided
        return np.ones(len(self.sampled_P), np.bool_) if decided is None else decided.flat

    @property
    def decisions_R(self) -> NDArray[np.int64]:
        """How many decisions each row has."""
        return np.diff(self.rollouts.response_ids.offsets)

    @property
    def tokens_R(self) -> NDArray[np.int64]:
        """How many tokens each row has, prompt and response."""
        return np.diff(self.rollouts.prompt_ids.offsets) + self.decisions_R

    def tensors(self) -> "Tensors":
        """Copy all of it into torch."""
        prompts = [torch.tensor(ids).long() for ids in self.rollouts.prompt_ids]
        responses = [torch.tensor(ids).long() for ids in self.rollouts.response_ids]
        rows = list(enumerate(zip(prompts, responses, strict=True)))
        behaviour = torch.tensor(self.candidates.logp.flat), torch.tensor(self.candidates.other_logp.flat)
        return Tensors(
            tokens=[torch.cat([prompt, response]) for _, (prompt, response) in rows],
            row_P=torch.cat([torch.full((len(response),), row) for row, (_, response) in rows]),
            state_P=torch.cat([torch.arange(len(response)) + len(prompt) - 1 for _, (prompt, response) in rows]),
            sampled_P=torch.cat(responses),
            candidate_ids_PC=torch.tensor(self.candidates.ids.flat).long(),
            log_b_PO=with_other(*behaviour),
            r_KPC=torch.tensor(self.r_KPC),
            mapped_KPC=torch.tensor(self.mapped_KPC),
            valid_KP=torch.tensor(self.valid_KP),
        )

    def pick(self, rows: Sequence[int]) -> "Block":
        """Take some of its rows, by their place in the block."""
        offsets = self.rollouts.response_ids.offsets
        places_P = np.concatenate([np.arange(0), *(np.arange(offsets[row], offsets[row + 1]) for row in rows)])
        return Block(
            number_R=self.number_R[list(rows)],
            rollouts=pick_rows(self.rollouts, rows),
            candidates=pick_rows(self.candidates, rows),
            r_KPC=self.r_KPC[:, places_P],
            mapped_KPC=self.mapped_KPC[:, places_P],
            valid_KP=self.valid_KP[:, places_P],
            proposal=None if self.proposal is None else pick_rows(self.proposal, rows),
        )

    def chunks(self, decisions: int) -> Iterator["Block"]:
        """Cut into blocks of whole rows with at most so many decisions each; a longer row stands alone."""
        rows: list[int] = []
        for row, count in enumerate(self.decisions_R.tolist()):
            if rows and self.decisions_R[rows].sum() + count > decisions:
                yield self.pick(rows)
                rows = []
            rows.append(row)
        if rows:
            yield self.pick(rows)

    def first(self, decisions: int) -> "Block":
        """Cut a block of one row after its first decisions."""

        def cut(shard: Any, *names: str) -> Any:
            values = {name: value for name in names if (value := getattr(shard, name)) is not None}
            return replace(shard, **{name: Ragged.of([value[0][:decisions]]) for name, value in values.items()})

        def cut_candidates(candidates: Candidates | None) -> Any:
            return candidates and cut(candidates, "ids", "logp", "other_logp", "sampled_logp")

        return replace(
            self,
            rollouts=cut(self.rollouts, "response_ids", "decided"),
            candidates=cut_candidates(self.candidates),
            r_KPC=self.r_KPC[:, :decisions],
            mapped_KPC=self.mapped_KPC[:, :decisions],
            valid_KP=self.valid_KP[:, :decisions],
            proposal=cut_candidates(self.proposal),
        )


def _stack(parts: Sequence[NDArray], dtype: type, shape: tuple[int, ...]) -> NDArray:
    return np.stack(parts) if parts else np.zeros((0, *shape), dtype)
