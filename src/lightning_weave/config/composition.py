"""A composition: which shifts, how strongly, and in which of the ways that the paper compares."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lightning_weave.config.fields import Count, Finite, Objective, Strict


class Composition(Strict):
    """How cached shifts become one target, and how the student gets there.

    Unsaid, all shifts act together on the cache (the paper's method). `online`, `mixture`, `sequence`, `teacher` and
    `sharpen` are the alternatives that it is compared with; at most one of them can be chosen.
    """

    normalize: bool = Field(True, description="insist that weights sum to 1; false allows raw weights")
    allow_negative: bool = Field(False, description="let a weight subtract an anchor's shift")
    weights: dict[str, Finite] = Field({}, description="anchor name -> share of the shift")
    alpha: float = Field(2.0, gt=0, allow_inf_nan=False, description="KL strength; larger stays nearer the student")
    kl_budget: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="instead of alpha: mean KL(target || behaviour), nats per token"
    )
    objective: Objective | None = Field(
        None, description="instead of train.objective (online: instead of direct-opd), for this composition only"
    )
    epochs: Count | None = Field(None, description="instead of train.epochs, for this composition only")
    online: bool = Field(False, description="sample and score anew every round, with live anchors")
    mixture: bool = Field(False, description="each prompt is supervised by one anchor only; weights are their shares")
    sequence: list[str] = Field([], description="anchors one after the other, half the budget each")
    dose: Literal["full", "matched"] = Field(
        "full", description="of a sequence: weight 1 in every leg, or the weights of the joint run"
    )
    resample: bool = Field(True, description="of a sequence: later legs sample anew, or reuse the first cache")
    teacher: bool = Field(False, description="aim at one anchor's own distribution instead of its shift (plain OPD)")
    sharpen: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="aim at the student itself at this temperature; no anchors"
    )

    @property
    def method(self) -> Literal["joint", "online", "mixture", "sequential", "teacher", "self"]:
        """Name the way that this composition is trained."""
        if self.online:
            return "online"
        if self.mixture:
            return "mixture"
        if self.sequence:
            return "sequential"
        if self.teacher:
            return "teacher"
        return "self" if self.sharpen is not None else "joint"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        chosen = {
            "online": self.online,
            "mixture": self.mixture,
            "sequence": bool(self.sequence),
            "teacher": self.teacher,
            "sharpen": self.sharpen is not None,
        }
        if sum(chosen.values()) > 1:
            raise ValueError(f"only one of {', '.join(name for name, on in chosen.items() if on)} can be chosen")
        if self.sharpen is not None and self.weights:
            raise ValueError("sharpen needs no anchors: leave out weights")
        if self.kl_budget is not None and "alpha" in self.model_fields_set:
            raise ValueError("kl_budget stands instead of alpha: leave one of them out")
        if self.kl_budget is not None and self.method not in ("joint", "mixture"):
            raise ValueError(
                f"kl_budget is solved on the cache, which {self.method} training does not keep to: set alpha"
            )
        if self.teacher and sum(weight != 0 for weight in self.weights.values()) != 1:
            raise ValueError("teacher aims at one anchor: give exactly one of them a weight")
        if self.sharpen is None and not any(self.weights.values()):
            raise ValueError("weights are all 0: give at least one anchor a share")
        if self.method in ("mixture", "sequential", "teacher") and min(self.weights.values()) < 0:
            raise ValueError(f"a negative weight subtracts a shift from others, which {self.method} training has not")
        if not self.sequence and (self.dose == "matched" or not self.resample):
            raise ValueError("dose and resample are of a sequence: name its anchors in their order, or leave them out")
        taking_part = {name for name, weight in self.weights.items() if weight != 0}
        if self.sequence and (set(self.sequence) != taking_part or len(self.sequence) != len(taking_part)):
            raise ValueError(f"sequence must name every anchor with a weight once: {', '.join(sorted(taking_part))}")
        return self

    @field_validator("weights")
    @classmethod
    def _are_shares(cls, weights: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if weights and min(weights.values()) < 0 and not info.data.get("allow_negative"):
            raise ValueError("weights must be non-negative; allow_negative = true lets one subtract")
        total = sum(weights.values())
        if weights and info.data.get("normalize") and abs(total - 1) > 1e-6:
            raise ValueError(f"weights must sum to 1 but sum to {total:g}; normalize = false allows raw weights")
        return weights

    @model_validator(mode="before")
    @classmethod
    def _has_weights(cls, data: Any) -> Any:
        if (
            isinstance(data, dict)
            and "sharpen" not in data
            and not data.get("weights", {})
            and data.get("weights") != []
        ):
            raise ValueError("weights is missing: give each anchor its share, such as weights = { a = 0.5, b = 0.5 }")
        return data
