"""How far both sides of an anchor can read the student's trajectories, and where not, why."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.checks.pairs import open_alignment
from lightning_weave.errors import InputError
from lightning_weave.runs.alignment import Alignment, Unread
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps


@dataclass(frozen=True)
class Reading:
    """Both sides of one anchor as they read a run; without them only the cache speaks."""

    sides: tuple[Alignment, ...] = ()  # none: its models are gone
    untrained: NDArray[np.int64] | None = None  # tokens of the student that stand for an untrained one of pre

    @classmethod
    def of(cls, steps: Steps, anchor: str) -> "Reading":
        """Open the tokenizers of an anchor, if they are still there."""
        try:
            sides = tuple(open_alignment(steps, anchor, role, cached=True) for role in ROLES)
        except InputError:
            return cls()
        masked = [id for side in sides for id in side.masked_ids]
        ids_V = torch.arange(steps.student.vocabulary)
        untrained = [
            ids_V[mapped_V & torch.isin(anchor_ids, torch.tensor([*side.masked_ids]))]
            for side in sides
            for anchor_ids, mapped_V in [side.tokens.candidate_map(ids_V)]
        ]
        return cls(sides, torch.cat(untrained).numpy() if masked else None)

    def unread(self, block: Block, asked_P: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Say of every position in rows with an asked one why neither side, or only one, can read that far."""
        found_P = np.full(len(asked_P), Unread.UNKNOWN if not self.sides else Unread.READ, np.int64)
        for row, places in _rows(block):
            if self.sides and asked_P[places].any():
                rollouts = block.rollouts
                of_row = (int(rollouts.prompt_R[row]), rollouts.prompt_ids[row], rollouts.response_ids[row])
                found_P[places] = np.max([side.unread(*of_row) for side in self.sides], axis=0)
        return found_P


def _rows(block: Block) -> Iterator[tuple[int, slice]]:
    offsets = block.rollouts.response_ids.offsets.tolist()
    return ((row, slice(offsets[row], offsets[row + 1])) for row in range(len(block)))
