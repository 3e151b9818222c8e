"""A block in torch, for loops of one's own."""

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.maths import with_other
from lightning_weave.types import Candidates, Rollouts


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

    @classmethod
    def of(cls, rollouts: Rollouts, candidates: Candidates, **arrays: NDArray) -> "Tensors":
        """Copy the parts of a block."""
        prompts = [torch.tensor(ids).long() for ids in rollouts.prompt_ids]
        responses = [torch.tensor(ids).long() for ids in rollouts.response_ids]
        rows = list(enumerate(zip(prompts, responses, strict=True)))
        return cls(
            tokens=[torch.cat([prompt, response]) for _, (prompt, response) in rows],
            row_P=torch.cat([torch.full((len(response),), row) for row, (_, response) in rows]),
            state_P=torch.cat([torch.arange(len(response)) + len(prompt) - 1 for _, (prompt, response) in rows]),
            sampled_P=torch.cat(responses),
            candidate_ids_PC=torch.tensor(candidates.ids.flat).long(),
            log_b_PO=with_other(torch.tensor(candidates.logp.flat), torch.tensor(candidates.other_logp.flat)),
            **{name: torch.tensor(array) for name, array in arrays.items()},
        )
