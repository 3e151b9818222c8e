"""Anchors, and compositions: which shifts, how strongly, and by which of the methods that the paper compares."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from lightning_weave.config.fields import (
    EngineOrUrl,
    Finite,
    Inline,
    Name,
    Objective,
    Option,
    Positive,
    Repeats,
    Role,
    Source,
    Strict,
    Text,
    named_columns,
)

STUDENT = "student"  # as anchors.NAME.model: the student of the recipe


class PromptContext(Inline):
    """What one side of an anchor reads in place of the student's prompt; empty: the same prompt."""

    system: Text | None = Field(None, description="system turn; needs a chat template", examples=["Answer briefly."])
    prefix: Text | None = Field(
        None, description="text before the user's turn", examples=["Question: 1+1\nAnswer: 2\n\n"]
    )
    template: str | None = Field(
        None,
        description="the user's turn; {prompt} is the student's, other names are columns",
        examples=["{prompt}\n\nA correct solution: {solution}"],
    )

    @field_validator("template")
    @classmethod
    def _has_columns(cls, template: str | None) -> str | None:
        if template is not None and not named_columns(template):
            raise ValueError("needs {prompt}, the user's turn that the student reads, or a column of its row")
        return template

    @property
    def columns(self) -> set[str]:
        """The columns of a row that it needs."""
        return set() if self.template is None else named_columns(self.template) - {"prompt"}

    def __bool__(self) -> bool:
        return self != PromptContext()

    def __str__(self) -> str:
        """Describe it for messages and cards."""
        return ", ".join(f"{key} {text!r}" for key, text in self.model_dump(exclude_none=True).items())


class ShiftSettings(Inline):
    """Rules for the shift between post and pre."""

    temperature: Positive = Field(1.0, description="temperature of post and pre before they are subtracted")
    clip: Positive | None = Field(None, description="largest shift of a candidate, in nats", examples=[5.0])
    only_above: Positive | None = Field(None, description="mask where the student's entropy is lower", examples=[0.1])
    mass_floor: Positive | None = Field(
        None, lt=1, description="mask where the candidates have less probability under post or pre", examples=[0.5]
    )


class Anchor(Strict):
    """A specialist and the checkpoint it was post-trained from, or one checkpoint in two contexts."""

    post: Source | None = Field(
        None,
        description="the specialist: directory or hub name (owner/name@revision); a LoRA adapter needs no pre",
        examples=["Kwai-Klear/Klear-Reasoner-8B"],
    )
    pre: Source | None = Field(None, description="what it was trained from", examples=["Qwen/Qwen3-8B-Base"])
    model: Source | None = Field(
        None, description='instead of both: one checkpoint in two contexts; "student" is possible', examples=["student"]
    )
    post_prompt: PromptContext = Field(
        PromptContext(), description="what post reads", examples=[{"system": "Be brief."}]
    )
    pre_prompt: PromptContext = Field(PromptContext(), description="what pre reads", examples=[{"system": "Be brief."}])
    missing: Literal["refuse", "mask"] = Field(
        "refuse", description="what to do with rows that lack a template's column"
    )
    trust_remote_code: bool = Field(False, description="run the code that comes with these checkpoints; needs --trust")
    engine: dict[Role, EngineOrUrl] = Field(
        {},
        description="hf, vllm or a vLLM server's URL instead of engine.score; or a table with these for post and pre",
        examples=["vllm", {"post": "http://gpu-7:8000", "pre": "http://gpu-8:8000"}],
        json_schema_extra={"type": ["string", "object"]},
    )
    options: dict[str, Option] = Field(
        {}, description="vLLM options instead of engine.options", examples=[{"quantization": "fp8"}]
    )
    aliases: dict[str, str] = Field(
        {}, description="student token -> anchor token, for candidates only", examples=[{"<|im_end|>": "</s>"}]
    )
    untrained: Literal["keep", "mask"] | None = Field(
        None, description="what to do with an alias to an output row that pre never trained", examples=["mask"]
    )
    bos: bool = Field(False, description="put the anchor's beginning-of-sequence token before the prompt")
    prompt: Literal["student", "native"] = Field(
        "student", description="the student's rendered prompt, or its messages in the anchor's own chat template"
    )
    validity: Literal["position", "candidate"] = Field(
        "position", description="what a candidate that the anchor cannot express masks"
    )
    shift: ShiftSettings = Field(
        ShiftSettings(), description="rules for the shift between post and pre", examples=[{"clip": 5.0}]
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _is_one_or_by_side(cls, engine: Any) -> Any:
        return dict.fromkeys(get_args(Role), engine) if isinstance(engine, str) else engine

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        if self.model is None and self.post is None:
            raise ValueError(
                "post is missing, the specialist. A pair has post and pre (a LoRA adapter: post alone); one checkpoint "
                "in two contexts has model and post_prompt"
            )
        if self.model is not None and (self.post or self.pre):
            raise ValueError("model replaces post and pre: remove one or the other")
        if self.model == STUDENT and self.trust_remote_code:
            raise ValueError('model = "student" takes trust_remote_code from [student]: remove it here')
        if self.model is not None and self.post_prompt == self.pre_prompt:
            raise ValueError(
                "one model in the same context on both sides has no shift. Set post_prompt, such as "
                '{ system = "Answer briefly." }'
            )
        if self.options and "vllm" not in self.engine.values():
            raise ValueError('options need engine = "vllm" in this anchor; those of all anchors are engine.options')
        if self.missing == "mask" and not (self.post_prompt.columns | self.pre_prompt.columns):
            raise ValueError('missing = "mask" is for columns that a template names, and there are none: remove it')
        return self

    def reads_as_student(self, role: Role) -> bool:
        """Whether one side reads the student's prompts and tokens as they are."""
        changed = self.context(role) or self.aliases or self.bos or self.prompt == "native" or self.server(role)
        return not changed

    def context(self, role: Role) -> PromptContext:
        """What one side reads."""
        return self.post_prompt if role == "post" else self.pre_prompt

    def server(self, role: Role) -> str | None:
        """The URL of the server that runs one side, if there is one."""
        engine = self.engine.get(role)
        return engine if engine not in ("hf", "vllm") else None

    def own_engine(self, role: Role) -> Literal["hf", "vllm"] | None:
        """The engine of one side if it differs from engine.score."""
        names: dict[str, Literal["hf", "vllm"]] = {"hf": "hf", "vllm": "vllm"}
        return names.get(self.engine.get(role, ""))


ALPHA = 2.0  # the paper's
DEFAULT_TAG = "default"  # the tag of prompts without another one
Alpha = Annotated[Positive, Field(description="KL strength; larger stays nearer the student")]


class _Shared(Strict):
    """Keys of all methods."""

    method: str = Field(description="how the composition is trained", examples=["joint"])
    objective: Objective | None = Field(None, description="instead of train.objective", examples=["direct-opd"])
    epochs: Repeats | None = Field(None, description="instead of train.epochs", examples=[4])

    @property
    def samples(self) -> bool:
        """Whether training samples and scores, so that the anchors must still exist."""
        return self.method == "online" or getattr(self, "refresh", 1) > 1 or getattr(self, "resample", False)


class _Weighted(_Shared):
    """Keys of the methods with anchors."""

    subtracts: ClassVar[bool] = False  # negative weights make sense
    routed: ClassVar[bool] = False  # weights may differ by tag

    normalize: bool = Field(True, description="require weights to sum to 1; false allows raw weights")
    allow_negative: bool = Field(False, description="allow negative weights, which subtract a shift")
    routes: SkipJsonSchema[dict[Name, dict[str, Finite]]] = Field({}, description="written as tables in weights")
    weights: dict[str, Finite] = Field(
        description="each anchor's share of the shift, such as weights = { a = 0.5, b = 0.5 }, or such a table per tag",
        examples=[{"acc": 0.5, "brief": 0.5}],
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
        """The weights for the prompts of one tag; None if the composition has none."""
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
        if not weights and info.data.get("routes"):  # every tag has its own table
            return weights
        if not weights:
            raise ValueError("give each anchor its share, such as weights = { a = 0.5, b = 0.5 }")
        if min(weights.values()) < 0 and not cls.subtracts:
            method = cls.model_fields["method"].default
            raise ValueError(f"negative weights are not supported by {method} training")
        if min(weights.values()) < 0 and not info.data.get("allow_negative"):
            raise ValueError("weights must be non-negative; allow_negative = true allows a weight to subtract")
        total = sum(weights.values())
        if info.data.get("normalize") and abs(total - 1) > 1e-6:
            raise ValueError(f"weights must sum to 1 but sum to {total:g}; normalize = false allows raw weights")
        if not any(weights.values()):
            raise ValueError("weights are all 0: give at least one anchor a share")
        return weights


class _Budgeted(_Weighted):
    """Keys of the methods whose target is in the cache: alpha, or a KL budget that determines it."""

    kl_budget: Positive | None = Field(
        None, description="instead of alpha: mean KL(target || behaviour) in nats per token", examples=[0.05]
    )
    alpha: Alpha | None = Field(  # None only with kl_budget
        None, validate_default=True, description="KL strength; larger stays nearer the student", examples=[ALPHA]
    )

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
    refresh: Repeats = Field(
        1, description="parts of training; the current student samples again before each later one"
    )


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
    sequence: list[str] = Field(description="the anchors in their order", examples=[["acc", "brief"]])
    dose: Literal["full", "matched"] = Field("full", description="weight 1 in every leg, or the composition's weights")
    resample: bool = Field(True, description="sample again before later legs; false: reuse the first cache")

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
    sharpen: Positive = Field(description="the temperature, such as sharpen = 0.6", examples=[0.6])


def _split_weights(table: Any) -> Any:
    """Fill in the default method, and split weights by tag into those of `default` and the others."""
    if not isinstance(table, Mapping):
        return table
    if "routes" in table:
        raise ValueError("has no key routes; write weights = { TAG = { a = 1.0 }, default = { b = 1.0 } }")
    table = {"method": "joint", **table}
    weights = table.get("weights")
    if not isinstance(weights, Mapping) or not any(isinstance(value, Mapping) for value in weights.values()):
        return table
    if plain := [tag for tag, value in weights.items() if not isinstance(value, Mapping)]:
        raise ValueError(f"weights mix tables by tag with the number of {plain[0]!r}: put that into `default`")
    routes = {tag: value for tag, value in weights.items() if tag != DEFAULT_TAG}
    return {**table, "weights": weights.get(DEFAULT_TAG, {}), "routes": routes}


def anchors_of(composition: Mapping[str, Any]) -> set[str]:
    """Name the anchors of a composition as it is written, with weights by tag or not."""
    weights = composition.get("weights", {})
    return {anchor for key, value in weights.items() for anchor in (value if isinstance(value, Mapping) else (key,))}


_AnyMethod = Joint | Mixture | Online | Sequential | Distilled | SelfDistilled
Composition = Annotated[_AnyMethod, Field(discriminator="method"), BeforeValidator(_split_weights)]
METHODS: dict[str, type[_Shared]] = {
    section.model_fields["method"].default: section for section in get_args(_AnyMethod)
}
