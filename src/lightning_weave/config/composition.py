"""A composition: which shifts, how strongly, and by which of the methods that the paper compares."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from lightning_weave.config.fields import Count, Finite, Objective, Strict
from lightning_weave.config.flags import has_flags, read_flags

ALPHA = 2.0  # the paper's
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False, description="KL strength; larger stays nearer the student")]


class _Shared(Strict):
    """What all methods have."""

    method: str
    objective: Objective | None = Field(
        None, description="instead of train.objective (online: instead of direct-opd), for this composition only"
    )
    epochs: Count | None = Field(None, description="instead of train.epochs, for this composition only")


class _Weighted(_Shared):
    """What the methods with anchors have."""

    subtracts: ClassVar[bool] = False  # a negative weight has a meaning

    normalize: bool = Field(True, description="insist that weights sum to 1; false allows raw weights")
    allow_negative: bool = Field(False, description="let a weight subtract an anchor's shift")
    weights: dict[str, Finite] = Field(
        description="each anchor's share of the shift, such as weights = { a = 0.5, b = 0.5 }"
    )

    @property
    def used(self) -> dict[str, float]:
        """The weights of the anchors that take part."""
        return {anchor: weight for anchor, weight in self.weights.items() if weight != 0}

    @field_validator("weights")
    @classmethod
    def _are_shares(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if not weights:
            raise ValueError("give each anchor its share, such as weights = { a = 0.5, b = 0.5 }")
        if min(weights.values()) < 0 and not cls.subtracts:
            method = cls.model_fields["method"].default
            raise ValueError(f"a negative weight subtracts a shift from others, which {method} training has not")
        if min(weights.values()) < 0 and not info.data.get("allow_negative"):
            raise ValueError("weights must be non-negative; allow_negative = true lets one subtract")
        total = sum(weights.values())
        if info.data.get("normalize") and abs(total - 1) > 1e-6:
            raise ValueError(f"weights must sum to 1 but sum to {total:g}; normalize = false allows raw weights")
        if not any(weights.values()):
            raise ValueError("weights are all 0: give at least one anchor a share")
        return weights


class _Budgeted(_Weighted):
    """What the methods have whose whole target is in the cache: alpha, or a KL budget that it is solved for."""

    kl_budget: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="instead of alpha: mean KL(target || behaviour), nats per token"
    )
    alpha: Alpha | None = Field(None, validate_default=True)  # None only where a budget stands instead

    @field_validator("alpha")
    @classmethod
    def _given_or_solved(cls, alpha: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("kl_budget") is None:
            return ALPHA if alpha is None else alpha
        if alpha is not None:
            raise ValueError("set either kl_budget or alpha, not both")
        return None


class Joint(_Budgeted):
    """All shifts act together on the cache: the paper's method."""

    subtracts = True
    method: Literal["joint"] = "joint"


class Mixture(_Budgeted):
    """Each prompt is supervised by one anchor only; weights are their shares of the prompts."""

    method: Literal["mixture"] = "mixture"


class Online(_Weighted):
    """Resample and rescore every round, with live anchors."""

    subtracts = True
    method: Literal["online"] = "online"
    alpha: Alpha = ALPHA


class Sequential(_Weighted):
    """One anchor after the other, each on its own part of the prompts."""

    method: Literal["sequential"] = "sequential"
    alpha: Alpha = ALPHA
    sequence: list[str] = Field(description="the anchors in their order, each with an equal part of the prompts")
    dose: Literal["full", "matched"] = Field("full", description="weight 1 in every leg, or the composition's weights")
    resample: bool = Field(True, description="later legs resample, or reuse the first cache")

    @field_validator("sequence")
    @classmethod
    def _names_every_anchor_once(cls, sequence: list[str], info: ValidationInfo) -> list[str]:
        used = sorted(anchor for anchor, weight in info.data.get("weights", {}).items() if weight != 0)
        if used and sorted(sequence) != used:
            raise ValueError(f"sequence must name every anchor with a weight once: {', '.join(used)}")
        return sequence


class Distilled(_Weighted):
    """Aim at one anchor's own distribution instead of its shift (plain OPD)."""

    method: Literal["teacher"] = "teacher"
    alpha: Alpha = ALPHA

    @field_validator("weights")
    @classmethod
    def _names_one_teacher(cls, weights: dict[str, float]) -> dict[str, float]:
        if sum(weight != 0 for weight in weights.values()) != 1:
            raise ValueError("teacher aims at one anchor: give exactly one of them a weight")
        return weights


class SelfDistilled(_Shared):
    """Aim at the student itself at another temperature; no anchors."""

    weights: ClassVar[Mapping[str, float]] = {}
    used: ClassVar[Mapping[str, float]] = {}

    method: Literal["self"] = "self"
    alpha: Alpha = ALPHA
    sharpen: float = Field(gt=0, allow_inf_nan=False, description="the temperature, such as sharpen = 0.6")


def _default_method(table: Any) -> Any:
    """Fill in a missing method: joint, or what the flags of an earlier version's recipe.toml mean."""
    if not isinstance(table, Mapping):
        return table
    return read_flags(table) if has_flags(table) else {"method": "joint", **table}


_AnyMethod = Joint | Mixture | Online | Sequential | Distilled | SelfDistilled
Composition = Annotated[_AnyMethod, Field(discriminator="method"), BeforeValidator(_default_method)]
METHODS: dict[str, type[_Shared]] = {
    section.model_fields["method"].default: section for section in get_args(_AnyMethod)
}
