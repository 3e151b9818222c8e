"""Where a shift comes from: an anchor pair, a teacher's own distribution, or the student itself, sharpened.

All of them are shifts of the student's candidates against `other`, so that one tilt, one loss and one loop serve all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.where import WhereRule
from lightning_weave.config import Anchor
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Rollouts, Scores

SMALLEST_MASS = 1e-8  # what a teacher leaves at least to the tokens that are not candidates


class Shift(NamedTuple):
    """A shift at every decision of some rows."""

    r_PC: NDArray[np.float32]
    mapped_PC: NDArray[np.bool_]  # candidates that have a shift; none at a valid decision: the anchor is silent there
    valid_P: NDArray[np.bool_]  # decisions that can be learned from


def valid_positions(mapped_PC: NDArray[np.bool_], validity: str) -> NDArray[np.bool_]:
    """Tell which decisions count, given the candidates that an anchor can express.

    By position (the paper's rule) every candidate must be expressible. By candidate one is enough, and the others keep
    shift 0.
    """
    return np.asarray(mapped_PC.all(axis=-1) if validity == "position" else mapped_PC.any(axis=-1))


@dataclass(frozen=True)
class ShiftRules:
    """What of a pair's shift is used: all of it, unless the anchor says otherwise."""

    validity: str = Anchor.model_fields["validity"].default
    clip: float | None = None
    only_above: float | None = None
    mass_floor: float | None = None
    temperature: float = 1.0
    where: WhereRule | None = None

    @classmethod
    def from_anchor(cls, anchor: Anchor) -> "ShiftRules":
        """Read the rules of an anchor of the recipe, without where it speaks."""
        return cls(anchor.validity, **anchor.shift.model_dump())

    @property
    def active(self) -> dict[str, Any]:
        """The rules that change something, the validity rule aside."""
        rules = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "validity"}
        return {name: value for name, value in rules.items() if value != getattr(ShiftRules, name)}

    def silence(self, shift: Shift, numbers: Sequence[int], rollouts: Rollouts) -> Shift:
        """Take the shift away where the anchor does not speak; it masks nothing there."""
        if self.where is None:
            return shift
        speaks_P = self.where.speaks(numbers, rollouts)
        r_PC = np.where(speaks_P[:, None], shift.r_PC, np.float32(0))
        return Shift(r_PC, shift.mapped_PC & speaks_P[:, None], shift.valid_P | ~speaks_P)


def pair_shift(post: Scores, pre: Scores, candidates: Candidates, rules: ShiftRules) -> Shift:
    """Subtract pre from post where both can express the candidate (cross-tokenizer-shift), by the anchor's rules."""
    post_PC, pre_PC = (apply_temperature(scores, rules.temperature)[0] for scores in (post, pre))
    mass_P = np.minimum(post.mass.flat, pre.mass.flat)
    return apply_rules(post_PC - pre_PC, post.mapped.flat & pre.mapped.flat, mass_P, candidates, rules)


def apply_rules(
    r_PC: NDArray[np.float32],
    mapped_PC: NDArray[np.bool_],
    mass_P: NDArray[np.float32],
    candidates: Candidates,
    rules: ShiftRules,
) -> Shift:
    """Clip a shift and mask decisions that cannot be expressed, are certain, or have little mass."""
    r_PC = np.where(mapped_PC, r_PC, np.float32(0))
    valid_P = valid_positions(mapped_PC, rules.validity)
    if rules.clip is not None:
        r_PC = np.clip(r_PC, np.float32(-rules.clip), np.float32(rules.clip))
    if rules.only_above is not None:
        valid_P = valid_P & (entropy(candidates) >= rules.only_above)
    if rules.mass_floor is not None:
        valid_P = valid_P & (mass_P >= rules.mass_floor)
    return Shift(r_PC, mapped_PC, valid_P)


def apply_temperature(scores: Scores, temperature: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Raise a model's distribution over candidates and `other` to the power 1 / temperature; returns both parts."""
    logp_PC: NDArray[np.float32] = scores.logp.flat
    other_P = np.log(np.maximum(1 - scores.mass.flat, SMALLEST_MASS))
    if temperature == 1.0:
        return logp_PC, other_P
    unmapped_PC = np.where(scores.mapped.flat, logp_PC, -np.inf)
    outcomes_PO = np.concatenate([unmapped_PC, other_P[:, None]], axis=1).astype(np.float64) / temperature
    outcomes_PO -= np.logaddexp.reduce(outcomes_PO, axis=1, keepdims=True)
    logp_PC = np.asarray(np.where(scores.mapped.flat, outcomes_PO[:, :-1], 0), np.float32)
    return logp_PC, outcomes_PO[:, -1].astype(np.float32)


def entropy(candidates: Candidates) -> NDArray[np.float64]:
    """Compute the entropy of the behaviour over its finite outcomes, in nats."""
    log_b_PO = np.concatenate([candidates.logp.flat, candidates.other_logp.flat[:, None]], axis=1).astype(np.float64)
    return np.asarray(-(np.exp(log_b_PO) * log_b_PO).sum(axis=1))


@dataclass(frozen=True)
class PairSource:
    """One anchor's two scored models and its share of the composed shift."""

    name: str
    post: Stage
    pre: Stage
    weight: float
    rules: ShiftRules = ShiftRules()

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.post, self.pre

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Post minus pre."""
        return pair_shift(scores[0], scores[1], candidates, self.rules)


@dataclass(frozen=True)
class TeacherSource:
    """One anchor's post-trained model as a teacher: the target is its own distribution (opd-objective)."""

    name: str
    post: Stage
    alpha: float  # that the shift will be divided by
    rules: ShiftRules = ShiftRules()
    weight: float = 1.0

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.post,)

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Lead from the behaviour to the teacher, candidates and `other` alike; a clip bounds it before alpha."""
        (post,) = scores
        logp_PC, other_P = apply_temperature(post, self.rules.temperature)
        gap_PC = (logp_PC - candidates.logp.flat) - (other_P - candidates.other_logp.flat)[:, None]
        shift = apply_rules(gap_PC, post.mapped.flat, post.mass.flat, candidates, self.rules)
        return shift._replace(r_PC=(self.alpha * shift.r_PC).astype(np.float32))


@dataclass(frozen=True)
class SharpenedSource:
    """The student as its own teacher, at another temperature."""

    temperature: float
    alpha: float
    name: str = "self"
    weight: float = 1.0
    stages: tuple[Stage, ...] = ()
    rules: ShiftRules = ShiftRules()

    def shift(self, candidates: Candidates, scores: Sequence[Scores]) -> Shift:
        """Raise the behaviour to the power 1 / temperature, on the finite outcomes."""
        gap_PC = candidates.logp.flat - candidates.other_logp.flat[:, None]
        r_PC = (self.alpha * (1 / self.temperature - 1) * gap_PC).astype(np.float32)
        return Shift(r_PC, np.ones(r_PC.shape, np.bool_), np.ones(len(r_PC), np.bool_))


ShiftSource = PairSource | TeacherSource | SharpenedSource


def assign_groups(groups: int, shares: Sequence[float], seed: int) -> NDArray[np.int64]:
    """Assign every prompt group to one source, in exact shares, by seed (the data-mixture baseline).

    >>> np.bincount(assign_groups(10, [0.5, 0.5], seed=1)).tolist()
    [5, 5]
    """
    ends = np.round(np.cumsum(shares) / np.sum(shares) * groups).astype(np.int64)
    dealt = np.searchsorted(ends, np.arange(groups), side="right")
    return np.random.default_rng([seed, 3]).permutation(dealt)
