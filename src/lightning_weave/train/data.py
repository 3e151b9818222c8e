"""How cached trajectories become a batch with its target. Composing costs little enough to be done while loading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.block import Block
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
        """Keep the first few decisions and the tokens that they need. With none, a pass that adds nothing is left."""
        kept = {name: tensor[:decisions] for name, tensor in vars(self).items() if name != "input_ids_RT"}
        if not len(kept["states_N"]):
            return replace(self, **{**kept, "input_ids_RT": self.input_ids_RT[:1, :1]})
        row_N = kept["states_N"] // self.input_ids_RT.shape[1]
        place_N = kept["states_N"] % self.input_ids_RT.shape[1]
        ids_RT = self.input_ids_RT[: int(row_N.max()) + 1, : int(place_N.max()) + 1]
        return replace(self, **{**kept, "input_ids_RT": ids_RT, "states_N": row_N * ids_RT.shape[1] + place_N})


def kept_decisions(block: Block, weights: Sequence[float]) -> NDArray[np.bool_]:
    """Find the decisions at which every anchor that takes part is valid."""
    takes_part_K = np.array(weights) != 0
    return block.valid_KP[takes_part_K].all(axis=0)


def tokens_needed(block: Block, weights: Sequence[float]) -> list[int]:
    """Count the tokens of each row up to the last state that is learned from: nothing after it needs to be run."""
    kept_P = kept_decisions(block, weights)
    offsets = block.rollouts.response_ids.offsets
    needed = []
    for row, prompt_ids in enumerate(block.rollouts.prompt_ids):
        kept = np.flatnonzero(kept_P[offsets[row] : offsets[row + 1]])
        needed.append(len(prompt_ids) + int(kept[-1]) if len(kept) else 1)
    return needed


def compose(block: Block, weights: Sequence[float], alpha: float) -> Batch:
    """Weigh the shifts, intersect the masks, tilt the behaviour: all that a composition is (composed-shift)."""
    r_PC, valid_P = compose_shifts(
        torch.from_numpy(block.r_KPC),
        torch.from_numpy(block.valid_KP),
        torch.tensor(weights, dtype=torch.float32),
    )

    kept_P = valid_P.numpy()

    def kept(values: NDArray) -> Tensor:
        return torch.from_numpy(values[kept_P])

    longest = max(tokens_needed(block, weights))
    candidates = block.candidates
    log_b_NO = with_other(kept(candidates.logp.flat), kept(candidates.other_logp.flat))
    r_NC = r_PC[valid_P]
    row_P = np.repeat(np.arange(len(block)), block.decisions_R)
    place_P = np.arange(len(row_P)) - block.rollouts.response_ids.offsets[row_P]
    prompt_R = np.diff(block.rollouts.prompt_ids.offsets)
    return Batch(
        input_ids_RT=_padded(block, longest),
        # The state before a decision: the prompt's last token comes before the first.
        states_N=kept(row_P * longest + prompt_R[row_P] - 1 + place_P),
        rows_N=kept(block.number_R[row_P]),
        places_N=kept(place_P),
        candidate_ids_NC=kept(candidates.ids.flat).long(),
        log_b_NO=log_b_NO,
        log_q_NO=tilted_target(log_b_NO, r_NC, alpha),
        r_NC=r_NC,
        sampled_ids_N=kept(block.sampled_P).long(),
        sampled_log_b_N=kept(candidates.sampled_logp.flat),
    )


def _padded(block: Block, longest: int) -> Tensor:
    ids_RT = torch.zeros(len(block), longest, dtype=torch.long)
    for row, (prompt_ids, response_ids) in enumerate(
        zip(block.rollouts.prompt_ids, block.rollouts.response_ids, strict=True)
    ):
        ids = np.concatenate([prompt_ids, response_ids])[:longest]
        ids_RT[row, : len(ids)] = torch.from_numpy(ids)
    return ids_RT
