"""Where a shift comes from: an anchor pair, a teacher's own distribution, or the student itself, sharpened.

All of them are shifts of the student's candidates against `other`, so that one tilt, one loss and one loop serve all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import Anchor
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Scores

SMALLEST_MASS = 1e-8  # what a teacher leaves at least to the tokens that are not candidates


class Shift(NamedTuple):
    """A shift at every decision of some rows."""

    r_PC: NDArray[np.float32]
    mapped_PC: NDArray[np.bool_]  # candidates that have a shift
    valid_P: NDArray[np.bool_]  # decisions that can be learned from


def valid_positions(mapped_PC: NDArray[np.bool_], validity: str) -> NDArray[np.bool_]:
    """The validity rule: which decisions count, given the candidates that an anchor can express.

    By position (the paper's rule) every candidate must be expressible. By candidate one is enough, and the others keep
    shift 0.
    """
    return np.asarray(mapped_PC.all(axis=-1) if validity == "position" else mapped_PC.any(axis=-1))


def pair_shift(post: Scores, pre: Scores, validity: str) -> Shift:
    """Subtract pre from post where both can express the candidate (cross-tokenizer-shift)."""
    mapped_PC = post.mapped.flat & pre.mapped.flat
    r_PC = np.where(mapped_PC, post.logp.flat - pre.logp.flat, np.float32(0))
    return Shift(r_PC, mapped_PC, valid_positions(mapped_PC, validity))


@dataclass(frozen=True)
class PairSource:
    """One anchor's two scored models and its share of the composed shift."""

    name: str
    post: Stage
    pre: Stage
    weight: float
    validity: str = Anchor.model_fields["validity"].default

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.post, self.pre

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Post minus pre."""
        return pair_shift(scores[0], scores[1], self.validity)


@dataclass(frozen=True)
class TeacherSource:
    """One anchor's post-trained model as a teacher: the target is its own distribution (opd-objective)."""

    name: str
    post: Stage
    alpha: float  # that the shift will be divided by
    weight: float = 1.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.post,)

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Lead from the behaviour to the teacher, candidates and `other` alike."""
        (post,) = scores
        left_P = np.log(np.maximum(1 - post.mass.flat, SMALLEST_MASS))
        gap_PC = (post.logp.flat - candidates.logp.flat) - (left_P - candidates.other_logp.flat)[:, None]
        valid_P = valid_positions(post.mapped.flat, "position")
        r_PC = (self.alpha * np.where(valid_P[:, None], gap_PC, 0)).astype(np.float32)
        return Shift(r_PC, post.mapped.flat, valid_P)


@dataclass(frozen=True)
class SharpenedSource:
    """The student as its own teacher, at another temperature."""

    temperature: float
    alpha: float
    name: str = "self"
    weight: float = 1.0
    stages: tuple[Stage, ...] = ()

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Raise the behaviour to the power 1 / temperature, on the finite outcomes."""
        gap_PC = candidates.logp.flat - candidates.other_logp.flat[:, None]
        r_PC = (self.alpha * (1 / self.temperature - 1) * gap_PC).astype(np.float32)
        return Shift(r_PC, np.ones(r_PC.shape, np.bool_), np.ones(len(r_PC), np.bool_))


ShiftSource = PairSource | TeacherSource | SharpenedSource


def deal_groups(groups: int, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Assign every prompt group to one source, in exact shares, by seed (the data-mixture baseline).

    >>> np.bincount(deal_groups(10, [0.5, 0.5], seed=1)).tolist()
    [5, 5]
    """
    ends = np.round(np.cumsum(shares) / np.sum(shares) * groups).astype(np.int64)
    dealt = np.searchsorted(ends, np.arange(groups), side="right")
    return np.random.default_rng([seed, 3]).permutation(dealt)
