"""A composition: which shifts, how strongly, and by which of the methods that the paper compares."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic.json_schema import SkipJsonSchema

from lightning_weave.config.fields import Count, Finite, Name, Objective, Strict
from lightning_weave.config.flags import has_flags, read_flags

ALPHA = 2.0  # the paper's
DEFAULT_TAG = "default"  # of prompts that no column and no rule gives another
Alpha = Annotated[float, Field(gt=0, allow_inf_nan=False, description="KL strength; larger stays nearer the student")]


class _Shared(Strict):
    """What all methods have."""

    method: str
    objective: Objective | None = Field(
        None, description="instead of train.objective (online: instead of direct-opd), for this composition only"
    )
    epochs: Count | None = Field(None, description="instead of train.epochs, for this composition only")

    @property
    def samples(self) -> bool:
        """Whether it samples and scores while it trains, so that its anchors must be there."""
        return False


class _Weighted(_Shared):
    """What the methods with anchors have."""

    subtracts: ClassVar[bool] = False  # a negative weight has a meaning

    routed: ClassVar[bool] = False  # weights may differ by tag

    normalize: bool = Field(True, description="insist that weights sum to 1; false allows raw weights")
    allow_negative: bool = Field(False, description="let a weight subtract an anchor's shift")
    routes: SkipJsonSchema[dict[Name, dict[str, Finite]]] = Field({}, description="written as tables in weights")
    weights: dict[str, Finite] = Field(
        description="each anchor's share of the shift, such as weights = { a = 0.5, b = 0.5 }, or such a table per tag",
        json_schema_extra={"additionalProperties": {"type": ["number", "object"]}},
    )

    @property
    def used(self) -> dict[str, float]:
        """The weights of the anchors that take part; where they differ by tag, the largest of each."""
        weights: dict[str, float] = {}
        for shares in (self.weights, *self.routes.values()):
            for anchor, weight in shares.items():
                if abs(weight) > abs(weights.get(anchor, 0.0)):
                    weights[anchor] = weight
        return weights

    def shares(self, tag: str) -> dict[str, float] | None:
        """The weights for the prompts of one tag; None where the composition says nothing of it."""
        return self.routes.get(tag, self.weights or None)

    @property
    def by_tag(self) -> dict[str, dict[str, float]]:
        """The weights of every tag; empty where all prompts have the same."""
        return {**self.routes, **({DEFAULT_TAG: self.weights} if self.weights else {})} if self.routes else {}

    @model_serializer(mode="wrap")
    def _as_written(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = plain(self)
        data.pop("routes", None)
        return {**data, "weights": self.by_tag} if self.routes and "weights" in data else data

    @field_validator("routes")
    @classmethod
    def _may_differ(cls, routes: dict[str, dict[str, float]], info: ValidationInfo) -> dict[str, dict[str, float]]:
        if routes and not cls.routed:
            method = cls.model_fields["method"].default
            raise ValueError(f"weights by tag are for joint training; {method} training has one table for all prompts")
        for tag, weights in routes.items():
            try:
                cls._are_shares(weights, info)
            except ValueError as error:
                raise ValueError(f"{tag}: {error}") from None
        return routes

    @field_validator("weights")
    @classmethod
    def _are_shares(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if not weights and info.data.get("routes"):  # every tag has a table of its own
            return weights
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
    routed = True
    method: Literal["joint"] = "joint"
    refresh: Count = Field(
        1, description="split the updates into so many parts; before each later part the current student samples again"
    )

    @property
    def samples(self) -> bool:
        return self.refresh > 1


class Mixture(_Budgeted):
    """Each prompt is supervised by one anchor only; weights are their shares of the prompts."""

    method: Literal["mixture"] = "mixture"


class Online(_Weighted):
    """Resample and rescore every round, with live anchors."""

    subtracts = True
    method: Literal["online"] = "online"
    alpha: Alpha = ALPHA

    @property
    def samples(self) -> bool:
        return True


class Sequential(_Weighted):
    """One anchor after the other, each on its own part of the prompts."""

    method: Literal["sequential"] = "sequential"
    alpha: Alpha = ALPHA
    sequence: list[str] = Field(description="the anchors in their order, each with an equal part of the prompts")
    dose: Literal["full", "matched"] = Field("full", description="weight 1 in every leg, or the composition's weights")
    resample: bool = Field(True, description="later legs resample, or reuse the first cache")

    @property
    def samples(self) -> bool:
        return self.resample

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
    routes: ClassVar[Mapping[str, Mapping[str, float]]] = {}
    used: ClassVar[Mapping[str, float]] = {}
    by_tag: ClassVar[Mapping[str, Mapping[str, float]]] = {}

    method: Literal["self"] = "self"
    alpha: Alpha = ALPHA
    sharpen: float = Field(gt=0, allow_inf_nan=False, description="the temperature, such as sharpen = 0.6")


def _default_method(table: Any) -> Any:
    """Fill in a missing method: joint, or what the flags of an earlier version's recipe.toml mean."""
    if not isinstance(table, Mapping):
        return table
    if has_flags(table):
        return read_flags(table)
    return {"method": "joint", **_apart(table)}


def _apart(table: Mapping[str, Any]) -> dict[str, Any]:
    """Take weights by tag apart: those of `default`, and the others."""
    if "routes" in table:
        raise ValueError("has no key routes; write weights = { TAG = { a = 1.0 }, default = { b = 1.0 } }")
    weights = table.get("weights")
    if not isinstance(weights, Mapping) or not any(isinstance(value, Mapping) for value in weights.values()):
        return dict(table)
    if plain := [tag for tag, value in weights.items() if not isinstance(value, Mapping)]:
        raise ValueError(f"weights mix tables by tag with the number of {plain[0]!r}: put that into `default`")
    routes = {tag: value for tag, value in weights.items() if tag != DEFAULT_TAG}
    return {**table, "weights": weights.get(DEFAULT_TAG, {}), "routes": routes}


def anchors_of(composition: Mapping[str, Any]) -> set[str]:
    """Name the anchors of a composition as it is written, with weights by tag or not."""
    weights = composition.get("weights", {})
    return {anchor for key, value in weights.items() for anchor in (value if isinstance(value, Mapping) else (key,))}


_AnyMethod = Joint | Mixture | Online | Sequential | Distilled | SelfDistilled
Composition = Annotated[_AnyMethod, Field(discriminator="method"), BeforeValidator(_default_method)]
METHODS: dict[str, type[_Shared]] = {
    section.model_fields["method"].default: section for section in get_args(_AnyMethod)
}
