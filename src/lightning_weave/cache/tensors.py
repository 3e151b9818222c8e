"""A block in torch, for loops of one's own."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_weave.maths import with_other

if TYPE_CHECKING:
    from lightning_weave.cache.block import Block


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
    def of(cls, block: "Block") -> "Tensors":
        """Copy a block."""
        rollouts, candidates = block.rollouts, block.candidates
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
            r_KPC=torch.tensor(block.r_KPC),
            mapped_KPC=torch.tensor(block.mapped_KPC),
            valid_KP=torch.tensor(block.valid_KP),
        )
