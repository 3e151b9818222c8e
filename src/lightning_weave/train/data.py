"""How cached trajectories become a batch with its target. Composing costs little enough to be done while loading."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.block import Block
from lightning_weave.maths import compose_shifts, tilted_target, with_other
from lightning_weave.models.packing import positions_of


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its rows' tokens after one another, T in all. N kept decisions; C candidates, O = C + 1."""

    lengths: tuple[int, ...]  # tokens of each row, up to the last that is needed
    input_ids_T: Tensor
    positions_T: Tensor  # of each token in its row
    states_N: Tensor  # index into the T hidden states: the token before each kept decision
    rows_N: Tensor  # row number of each kept decision ...
    places_N: Tensor  # ... and its place in the row's response
    candidate_ids_NC: Tensor
    log_b_NO: Tensor  # of the behaviour policy, which sampled these rows
    log_q_NO: Tensor
    r_NC: Tensor
    sampled_ids_N: Tensor
    sampled_log_b_N: Tensor

    def __len__(self) -> int:
        return len(self.states_N)

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """The same in memory that a GPU can copy from while it computes."""
        return self._each(Tensor.pin_memory)

    def first(self, decisions: int) -> "Batch":
        """Keep the first few decisions and the tokens that they need. With none, a pass that adds nothing is left."""
        parts = {name: getattr(self, name)[:decisions] for name in _OF_DECISIONS}
        tokens = int(parts["states_N"].max()) + 1 if len(parts["states_N"]) else 1
        ends = np.minimum(np.cumsum(self.lengths), tokens)
        lengths = np.diff(ends, prepend=0)
        parts |= {"input_ids_T": self.input_ids_T[:tokens], "positions_T": self.positions_T[:tokens]}
        return Batch(lengths=tuple(lengths[lengths > 0].tolist()), **parts)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(lengths=self.lengths, **tensors)


_OF_DECISIONS = [field.name for field in fields(Batch) if field.name.endswith(("_N", "_NC", "_NO"))]


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
        places = np.flatnonzero(kept_P[offsets[row] : offsets[row + 1]])
        needed.append(len(prompt_ids) + int(places[-1]) if len(places) else 1)
    return needed


def compose(block: Block, weights: Sequence[float], alpha: float) -> Batch:
    """Weigh the shifts, intersect the masks, tilt the student: all that a composition is (composed-shift)."""
    r_PC, valid_P = compose_shifts(
        torch.from_numpy(block.r_KPC),
        torch.from_numpy(block.valid_KP),
        torch.tensor(weights, dtype=torch.float32),
    )

    kept_P = valid_P.numpy()

    def kept(values: NDArray) -> Tensor:
        return torch.from_numpy(values[kept_P])

    lengths = tokens_needed(block, weights)
    starts_R = np.cumsum([0, *lengths[:-1]])
    candidates = block.candidates
    log_student_NO = with_other(kept(candidates.logp.flat), kept(candidates.other_logp.flat))
    log_b_NO = log_student_NO
    if block.proposal is not None:
        log_b_NO = with_other(kept(block.proposal.logp.flat), kept(block.proposal.other_logp.flat))
    r_NC = r_PC[valid_P]
    row_P = np.repeat(np.arange(len(block)), block.decisions_R)
    place_P = np.arange(len(row_P)) - block.rollouts.response_ids.offsets[row_P]
    prompt_R = np.diff(block.rollouts.prompt_ids.offsets)
    return Batch(
        lengths=tuple(lengths),
        input_ids_T=_tokens(block, lengths),
        positions_T=positions_of(lengths),
        # The state before a decision: the prompt's last token comes before the first.
        states_N=kept(starts_R[row_P] + prompt_R[row_P] - 1 + place_P),
        rows_N=kept(block.number_R[row_P]),
        places_N=kept(place_P),
        candidate_ids_NC=kept(candidates.ids.flat).long(),
        log_b_NO=log_b_NO,
        log_q_NO=tilted_target(log_student_NO, r_NC, alpha),
        r_NC=r_NC,
        sampled_ids_N=kept(block.sampled_P).long(),
        sampled_log_b_N=kept(candidates.sampled_logp.flat),
    )


def _tokens(block: Block, lengths: Sequence[int]) -> Tensor:
    rows = zip(block.rollouts.prompt_ids, block.rollouts.response_ids, lengths, strict=True)
    cut = [np.concatenate([prompt_ids, response_ids])[:length] for prompt_ids, response_ids, length in rows]
    return torch.from_numpy(np.concatenate(cut)).long()
