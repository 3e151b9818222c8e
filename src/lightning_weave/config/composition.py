"""Anchors, and compositions: which shifts, how strongly, and by which of the methods that the paper compares."""

import json
from collections.abc import Mapping, Sequence
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
    Count,
    EngineOrUrl,
    Finite,
    Inline,
    Name,
    Objective,
    Option,
    Positive,
    Repeats,
    Role,
    Seed,
    Source,
    Strict,
    Text,
    execution,
    named_columns,
    unlisted,
)
from lightning_weave.config.levels import LEVEL_KEYS, Control, LevelSlot, as_number, level_weights, levels_between

STUDENT = "student"  # as anchors.NAME.model: the student of the recipe
# Columns that the run fills for each response: another response to its prompt that is graded so, or is shorter.
RUN_COLUMNS = frozenset({"wrong", "right", "shorter"})


class PromptContext(Inline):
    """What one side of an anchor reads in place of the student's prompt; empty: the same prompt."""

    system: Text | None = Field(None, description="system turn; needs a chat template", examples=["Answer briefly."])
    prefix: Text | None = Field(
        None, description="text before the user's turn", examples=["Question: 1+1\nAnswer: 2\n\n"]
    )
    template: str | None = Field(
        None,
        description="the user's turn; {prompt} is the student's, other names are columns; {wrong}, {right} and "
        "{shorter} are other responses to the prompt, from the run itself",
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
        return set() if self.template is None else named_columns(self.template) - {"prompt"} - RUN_COLUMNS

    @property
    def run_columns(self) -> set[str]:
        """The columns that it needs of the run itself, for each response."""
        return set() if self.template is None else named_columns(self.template) & RUN_COLUMNS

    @property
    def is_graded(self) -> bool:
        """Whether it depends on which responses are right."""
        return bool(self.run_columns & {"wrong", "right"})

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


ANSWER = "answer"  # the span after the last thinking and tool call of the last turn
SPANS = {"thinking": ("<think>", "</think>"), "tools": ("<tool_call>", "</tool_call>")}


class Where(Inline):
    """The decisions at which an anchor speaks: those that meet every condition that is given."""

    inside: Text | None = Field(
        None, description="only in this span: thinking, tools, answer, or one of [spans]", examples=["thinking"]
    )
    outside: Text | None = Field(None, description="only outside of this span", examples=["tools"])
    first: Count | None = Field(None, description="only the first tokens of each turn", examples=[64])
    end: Count | None = Field(None, description="only the last tokens of each turn, its end included", examples=[8])
    answers: Literal["wrong", "right"] | None = Field(
        None, description="only responses whose answer is wrong, or right", examples=["wrong"]
    )

    @model_validator(mode="after")
    def _limits_something(self) -> Self:
        if self == Where.model_construct():
            raise ValueError("is empty: give inside, outside, first, end or answers, or remove it")
        return self

    def __str__(self) -> str:
        given = self.model_dump(exclude_none=True)
        return f"{{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in given.items())} }}"


class Anchor(Strict):
    """A specialist and the checkpoint it was post-trained from, or one checkpoint in two contexts."""

    RULES: ClassVar = ("validity", "shift", "where", "kl_budget")  # how its scores are used, whatever they are

    post: Source | None = Field(
        None,
        description="the specialist: directory or hub name (owner/name@revision); a LoRA adapter needs no pre",
        examples=["Kwai-Klear/Klear-Reasoner-8B"],
    )
    pre: Source | None = Field(None, description="what it was trained from", examples=["Qwen/Qwen3-8B-Base"])
    model: Source | None = Field(
        None, description='instead of both: one checkpoint in two contexts; "student" is possible', examples=["student"]
    )
    cache: Source | None = execution(
        None,
        "URL of published scores (`lweave push`), which also bring post and pre",
        examples=["hf://datasets/org/name"],
    )
    post_prompt: PromptContext = Field(
        PromptContext(), description="what post reads", examples=[{"system": "Be brief."}]
    )
    pre_prompt: PromptContext = Field(PromptContext(), description="what pre reads", examples=[{"system": "Be brief."}])
    missing: Literal["refuse", "mask"] = unlisted("refuse", "what to do with rows that lack a template's column")
    trust_remote_code: bool = execution(False, "run the code that comes with these checkpoints; needs --trust")
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
    where: Where | None = Field(
        None, description="the decisions at which it speaks; default: all", examples=[{"inside": "thinking"}]
    )
    kl_budget: Positive | dict[Name, Positive] | None = Field(
        None,
        description="instead of the size of its weight: KL(target of this anchor alone || behaviour), nats per token, "
        "met in every tag of a composition with weights by tag; or a table by tag",
        examples=[0.02],
    )

    @field_validator("engine", mode="before")
    @classmethod
    def _is_one_or_by_side(cls, engine: Any) -> Any:
        return dict.fromkeys(get_args(Role), engine) if isinstance(engine, str) else engine

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        if self.cache is not None and self.post is None and self.model is None:
            if extra := sorted(self.model_fields_set - {"cache", *self.RULES}):
                raise ValueError(f"cache brings what was published: remove {', '.join(extra)}")
            return self
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

    @property
    def run_columns(self) -> set[str]:
        """The columns of the run itself that its sides read."""
        return self.post_prompt.run_columns | self.pre_prompt.run_columns

    @property
    def graded(self) -> str:
        """The key for which responses are graded; empty if there is none."""
        if self.where and self.where.answers:
            return "where.answers"
        return next((f"{role}_prompt" for role in get_args(Role) if self.context(role).is_graded), "")

    def server(self, role: Role) -> str | None:
        """The URL of the server that runs one side, if there is one."""
        engine = self.engine.get(role)
        return engine if engine not in ("hf", "vllm") else None

    def own_engine(self, role: Role) -> Literal["hf", "vllm"] | None:
        """The engine of one side if it differs from engine.score."""
        names: dict[str, Literal["hf", "vllm"]] = {"hf": "hf", "vllm": "vllm"}
        return names.get(self.engine.get(role, ""))


PLACEBOS: Mapping[str, Any] = {"flip": True, "shuffle": "states"}  # rules that make a control of a composition
ALPHA = 2.0  # the paper's
REFRESH_BUDGET = 4  # parts
DEFAULT_TAG = "default"  # the tag of prompts without another one
Alpha = Annotated[Positive, Field(description="KL strength; larger stays nearer the student")]


class _Shared(Strict):
    """Keys of all methods."""

    slots: ClassVar[Sequence[LevelSlot]] = ()

    method: str = Field(description="how the composition is trained", examples=["joint"])
    objective: Objective | None = Field(None, description="instead of train.objective", examples=["direct-opd"])
    epochs: Repeats | None = Field(None, description="instead of train.epochs", examples=[4])
    seed: Seed | None = unlisted(None, "instead of train.seed", examples=[7])

    @property
    def rules(self) -> dict[str, Any]:
        """What it does to shifts other than weigh them: fields of `cache.block.Rules`."""
        return {name: getattr(self, name) for name in PLACEBOS if getattr(self, name, None)}

    @property
    def is_placebo(self) -> bool:
        """Whether it is a control, whose target nobody wants to see."""
        return bool(self.rules)

    @property
    def samples(self) -> bool:
        """Whether training samples and scores, so that the anchors must still exist."""
        return self.method == "online" or getattr(self, "parts", 1) > 1 or getattr(self, "resample", False)


class _Weighted(_Shared):
    """Keys of the methods with anchors."""

    subtracts: ClassVar[bool] = False  # negative weights make sense
    routed: ClassVar[bool] = False  # weights may differ by tag

    normalize: bool = execution(True, "require weights to sum to 1; false allows raw weights")
    allow_negative: bool = execution(False, "allow negative weights, which subtract a shift")
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
        for shares in (self.weights, *self.routes.values(), *(slot.weights for slot in self.slots)):
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
        if self.slots:
            data.pop("weights", None)
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
    flip: bool = unlisted(False, "placebo: negate the shift, as a control")
    shuffle: Literal["states"] | None = unlisted(
        None, "placebo: use shifts of other decisions of the same response", examples=["states"]
    )
    refresh: Repeats | Literal["auto"] = Field(
        1,
        description='parts of training; the current student samples again before each later one; "auto": at most '
        "refresh_budget (4) parts, and only if the student has moved since it last sampled",
        examples=["auto"],
    )
    refresh_budget: Repeats | None = unlisted(
        None, 'with refresh = "auto": the largest number of parts; default: 4', ge=2, examples=[4]
    )
    levels: dict[Name, dict[str, Finite]] = Field(
        {},
        description="instead of weights: effort levels of one student, each with weights and optionally alpha or "
        "kl_budget; numbers as names are also interpolated",
        examples=[{"high": {"acc": 1.0}, "low": {"acc": 0.25, "brief": 0.75, "alpha": 1.0}}],
    )
    default: str | None = unlisted(None, "with levels: the level of a prompt that names none", examples=["high"])
    control: Control | None = unlisted(
        None, "with levels: where the student reads them", examples=[{"system": "Reasoning effort: {level}"}]
    )

    @field_validator("refresh_budget")
    @classmethod
    def _limits_auto(cls, budget: int | None, info: ValidationInfo) -> int | None:
        if budget is not None and info.data.get("refresh", "auto") != "auto":
            raise ValueError(f'is for refresh = "auto"; refresh = {info.data["refresh"]} is that many parts already')
        return budget

    @property
    def parts(self) -> int:
        """The largest number of parts of training."""
        return (self.refresh_budget or REFRESH_BUDGET) if self.refresh == "auto" else self.refresh

    @field_validator("levels")
    @classmethod
    def _have_shares(cls, levels: dict[str, dict[str, float]], info: ValidationInfo) -> dict[str, dict[str, float]]:
        for name, level in levels.items():
            try:
                cls._are_shares(level_weights(level), info)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        if all(as_number(name) is not None for name in levels):
            return dict(sorted(levels.items(), key=lambda item: float(item[0])))
        return levels

    @model_validator(mode="after")
    def _has_whole_levels(self) -> Self:
        if not self.levels:
            if self.default is not None or self.control is not None:
                raise ValueError("default and control are for levels, and there are none: add levels.NAME = { ... }")
            return self
        if self.routes:
            raise ValueError("levels and weights by tag cannot be combined")
        if len(self.levels) < 2:
            raise ValueError("levels needs two or more: add another, or write weights instead")
        if self.control is None:
            raise ValueError('control is missing, where the student reads the level: { system = "Effort: {level}" }')
        for name, level in self.levels.items():
            given = [key for key in LEVEL_KEYS if key in level]
            if len(given) == 2 or any(level[key] <= 0 for key in given):
                raise ValueError(f"levels.{name}: give a positive alpha or a positive kl_budget, not both")
        if self.is_numeric and len({slot.kl_budget is None for slot in self.named}) > 1:
            raise ValueError("levels between which numbers are drawn have either all alpha or all kl_budget")
        if self.default not in self.levels:
            wrong = "is missing" if self.default is None else f"= {self.default!r} is none of the levels"
            raise ValueError(f"default {wrong}: give the level of a prompt that names none, {' or '.join(self.levels)}")
        return self

    @property
    def is_numeric(self) -> bool:
        """Whether levels are numbers, so that the student learns all that lie between them."""
        return all(as_number(level) is not None for level in self.levels)

    @property
    def named(self) -> list[LevelSlot]:
        """The levels that the recipe names."""
        slots = []
        for name, level in self.levels.items():
            alpha = level.get("alpha", None if "kl_budget" in level else self.alpha)
            budget = level.get("kl_budget", None if alpha is not None else self.kl_budget)
            slots.append(LevelSlot(name, level_weights(level), alpha, budget))
        return slots

    @property
    def slots(self) -> list[LevelSlot]:  # type: ignore[override]
        """What rows are trained as: the plain prompt, as the default level, and all levels."""
        if not self.levels:
            return []
        named = {str(slot.level): slot for slot in self.named}
        between = levels_between(self.named) if self.is_numeric else {}
        return [named[str(self.default)]._replace(level=None), *named.values(), *between.values()]


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
    dose: Literal["full", "matched"] = unlisted("full", "weight 1 in every leg, or the composition's weights")
    resample: bool = unlisted(True, "sample again before later legs; false: reuse the first cache")

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
    if isinstance(levels := table.get("levels"), Mapping) and levels:
        if "weights" in table:
            raise ValueError("weights and levels cannot be combined: each level has its own weights")
        if table["method"] != "joint":
            raise ValueError(f'levels are for method = "joint"; method = {table["method"]!r} has one target')
        if isinstance(default := table.get("default"), int | float) and not isinstance(default, bool):
            table["default"] = default = f"{default:g}"
        level = levels.get(str(default), next(iter(levels.values())))
        return {**table, "weights": level_weights(level) if isinstance(level, Mapping) else {}}
    weights = table.get("weights")
    if not isinstance(weights, Mapping) or not any(isinstance(value, Mapping) for value in weights.values()):
        return table
    if plain := [tag for tag, value in weights.items() if not isinstance(value, Mapping)]:
        raise ValueError(f"weights mix tables by tag with the number of {plain[0]!r}: put that into `default`")
    routes = {tag: value for tag, value in weights.items() if tag != DEFAULT_TAG}
    return {**table, "weights": weights.get(DEFAULT_TAG, {}), "routes": routes}


def anchors_of(composition: Mapping[str, Any]) -> set[str]:
    """Name the anchors of a composition as it is written, with weights by tag or not."""
    weights = composition.get("levels") or composition.get("weights", {})
    named = (value if isinstance(value, Mapping) else (key,) for key, value in weights.items())
    return {anchor for anchors in named for anchor in anchors} - ({*LEVEL_KEYS} if "levels" in composition else set())


_AnyMethod = Joint | Mixture | Online | Sequential | Distilled | SelfDistilled
Composition = Annotated[_AnyMethod, Field(discriminator="method"), BeforeValidator(_split_weights)]
METHODS: dict[str, type[_Shared]] = {
    section.model_fields["method"].default: section for section in get_args(_AnyMethod)
}
