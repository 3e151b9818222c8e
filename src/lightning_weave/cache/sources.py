"""Where a shift comes from: an anchor pair, a teacher's own distribution, or the student itself, sharpened.

All of them are shifts of the student's candidates against `other`, so that one tilt, one loss and one loop serve all.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import Anchor
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Scores

Shift = tuple[NDArray[np.float32], NDArray[np.bool_]]  # r_TC, valid_T
SMALLEST_MASS = 1e-8  # of what a teacher leaves to the tokens that are not candidates


def pair_shift(post: Scores, pre: Scores, validity: str) -> Shift:
    """Subtract pre from post, at all their positions, where both can express the candidates (cross-tokenizer-shift)."""
    mapped_TC = post.mapped.flat & pre.mapped.flat
    r_TC = np.where(mapped_TC, post.logp.flat - pre.logp.flat, np.float32(0))
    valid_T = mapped_TC.all(axis=-1) if validity == "position" else mapped_TC.any(axis=-1)
    return r_TC, valid_T


@dataclass(frozen=True)
class Pair:
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
class Teacher:
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
        left_T = np.log(np.maximum(1 - post.mass[0], SMALLEST_MASS))
        gap_TC = (post.logp[0] - candidates.logp[0]) - (left_T - candidates.other_logp[0])[:, None]
        valid_T: NDArray[np.bool_] = np.asarray(post.mapped[0].all(axis=-1))
        return (self.alpha * np.where(valid_T[:, None], gap_TC, 0)).astype(np.float32), valid_T


@dataclass(frozen=True)
class Sharpened:
    """The student as its own teacher, at another temperature."""

    temperature: float
    alpha: float
    name: str = "self"
    weight: float = 1.0
    stages: tuple[Stage, ...] = ()

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Raise the behaviour to the power 1 / temperature, on the finite outcomes."""
        gap_TC = candidates.logp[0] - candidates.other_logp[0][:, None]
        r_TC = self.alpha * (1 / self.temperature - 1) * gap_TC
        return r_TC.astype(np.float32), np.ones(len(r_TC), np.bool_)


Source = Pair | Teacher | Sharpened


def deal_groups(groups: int, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Assign every prompt group to one source, in exact shares, by seed (the data-mixture baseline).

    >>> np.bincount(deal_groups(10, [0.5, 0.5], seed=1)).tolist()
    [5, 5]
    """
    ends = np.round(np.cumsum(shares) / np.sum(shares) * groups).astype(np.int64)
    dealt = np.searchsorted(ends, np.arange(groups), side="right")
    return np.random.default_rng([seed, 3]).permutation(dealt)
