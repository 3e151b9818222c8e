"""Effort levels of a composition: where the student reads its level, and what it is trained towards at each."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from lightning_weave.config.fields import Inline, Text, named_columns

LEVEL_KEYS = ("alpha", "kl_budget")  # of a level; its other keys are anchors


class Control(Inline):
    """Where the student reads its effort level: one of the three."""

    system: Text | None = Field(None, description="text of the system turn", examples=["Reasoning effort: {level}"])
    prefix: Text | None = Field(None, description="text before the user's turn", examples=["Effort {level}. "])
    variable: Text | None = Field(None, description="the chat template's own variable", examples=["reasoning_effort"])

    @model_validator(mode="after")
    def _has_one_place(self) -> Self:
        if sum(text is not None for text in (self.system, self.prefix, self.variable)) != 1:
            raise ValueError('give one of system, prefix and variable: { system = "Reasoning effort: {level}" }')
        if self.variable is not None and not self.variable.isidentifier():
            raise ValueError("variable must be a name that the chat template uses, such as reasoning_effort")
        if self.variable is None and named_columns(self.system or self.prefix or "") != {"level"}:
            raise ValueError("the text must contain {level}, the name of the level, and no other name in braces")
        return self

    def __str__(self) -> str:
        ((key, text),) = self.model_dump(exclude_none=True).items()
        return f"{key} = {text!r}"

    def text(self, level: str) -> str:
        """What the student reads for a level."""
        return (self.system or self.prefix or "{level}").format(level=level)


class LevelSlot(NamedTuple):
    """What a row is trained as: a level with its weights, or as slot 0 the plain prompt with those of the default."""

    level: str | None
    weights: dict[str, float]
    alpha: float | None
    kl_budget: float | None

    def towards(self, other: "LevelSlot", level: str, share: float) -> "LevelSlot":
        """Interpolate linearly between two levels."""

        def mix(own: float | None, others: float | None) -> float | None:
            return None if own is None or others is None else (1 - share) * own + share * others

        weights = {
            anchor: (1 - share) * self.weights.get(anchor, 0.0) + share * other.weights.get(anchor, 0.0)
            for anchor in {**self.weights, **other.weights}
        }
        return LevelSlot(level, weights, mix(self.alpha, other.alpha), mix(self.kl_budget, other.kl_budget))


def level_weights(level: Mapping[str, float]) -> dict[str, float]:
    """The weights of a level as it is written."""
    return {anchor: weight for anchor, weight in level.items() if anchor not in LEVEL_KEYS}


def as_number(level: str | None) -> float | None:
    """Read the name of a level as a number, if it is one."""
    try:
        number = math.nan if level is None else float(level)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def levels_between(named: Sequence[LevelSlot]) -> dict[str, LevelSlot]:
    """Interpolate between numbers: at whole ones if the ends are whole and 2 to 100 apart, else at tenths."""
    ends = [(float(slot.level or 0), slot) for slot in named]  # sorted, as the recipe reads levels
    low, high = ends[0][0], ends[-1][0]
    whole = low.is_integer() and high.is_integer() and 2 <= high - low <= 100
    steps = int(high - low) if whole else 10
    slots = {}
    for number in (float(f"{low + (high - low) * step / steps:g}") for step in range(steps + 1)):
        if number not in dict(ends):
            (first, below), (last, above) = next(pair for pair in pairwise(ends) if number < pair[1][0])
            slots[f"{number:g}"] = below.towards(above, f"{number:g}", (number - first) / (last - first))
    return slots
