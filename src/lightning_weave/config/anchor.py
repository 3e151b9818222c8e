"""An anchor: two sides whose difference is a shift, each a checkpoint in a context."""

from typing import Literal, NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from lightning_weave.config.fields import Strict, named_columns

STUDENT = "student"  # as anchors.NAME.model: the student of the recipe


class PromptContext(Strict):
    """What one side of an anchor reads where the student reads its prompt; empty: the prompt as it is."""

    system: str | None = Field(None, min_length=1, description="system turn of this side; needs a chat template")
    prefix: str | None = Field(None, min_length=1, description="text before the user's turn, such as an example")
    template: str | None = Field(
        None, description="the user's turn: {prompt} is what the student reads there, {name} a column of its row"
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
        """What stands in it, for messages and cards."""
        return ", ".join(f"{key} {text!r}" for key, text in self.model_dump(exclude_none=True).items())


class Side(NamedTuple):
    """One of the two models of an anchor as the recipe names it."""

    model: str | None  # None: the base of the adapter on the other side
    revision: str | None
    trust_remote_code: bool
    context: PromptContext


class Anchor(Strict):
    """A specialist and the checkpoint it was post-trained from, or one checkpoint in two contexts."""

    post: str | None = Field(
        None, min_length=1, description="the specialist, a directory or a hub name; a LoRA adapter needs no pre"
    )
    pre: str | None = Field(None, min_length=1, description="the checkpoint it was trained from")
    model: str | None = Field(
        None, min_length=1, description='instead of both: one checkpoint in two contexts; "student" is the student'
    )
    missing: Literal["refuse", "mask"] = Field(
        "refuse", description="a row without a column that a template names: refuse it, or mask it for this anchor"
    )
    post_revision: str | None = None
    pre_revision: str | None = None
    engine: Literal["hf", "vllm"] | None = Field(None, description="what scores its models, instead of score.engine")
    options: dict[str, bool | int | float | str] = Field({}, description="of its own engine, instead of score.options")
    post_url: str | None = Field(
        None, description="a vLLM server that runs post for pooling, instead of an engine here"
    )
    pre_url: str | None = Field(None, description="the same for pre")
    trust_remote_code: bool = False
    aliases: dict[str, str] = Field({}, description="student token -> anchor token, for candidates only")
    untrained: Literal["keep", "mask"] | None = Field(
        None, description="what to do where an alias leads to an output row that the pre-anchor never trained"
    )
    bos: bool = Field(False, description="put the anchor's beginning-of-sequence token before the prompt")
    prompt: Literal["student", "native"] = Field(
        "student", description="the student's rendered prompt, or the messages in the anchor's own chat template"
    )
    validity: Literal["position", "candidate"] = Field(
        "position", description="an unmappable candidate masks its position, or only gets shift 0 itself"
    )
    shift_clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="largest size of a candidate's shift, in nats; larger ones are cut"
    )
    only_above: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="entropy of the student, in nats, below which a position is masked"
    )
    mass_floor: float | None = Field(
        None, gt=0, lt=1, description="mass of post and of pre on the candidates, below which a position is masked"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        allow_inf_nan=False,
        description="of post and pre before they are subtracted; above 1 is softer",
    )
    post_prompt: PromptContext = PromptContext()
    pre_prompt: PromptContext = PromptContext()

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        if self.model is None and self.post is None:
            raise ValueError(
                "post is missing, the specialist. A pair has post and pre (a LoRA adapter: post alone); one checkpoint "
                "in two contexts has model and post_prompt"
            )
        if self.model is not None and (self.post or self.pre):
            raise ValueError("model stands instead of post and pre: leave them out, or leave it out")
        if self.model == STUDENT and (self.post_revision or self.pre_revision or self.trust_remote_code):
            raise ValueError('model = "student" takes revision and trust_remote_code from [student]: leave them out')
        same = self.post_prompt == self.pre_prompt and self.post_revision == self.pre_revision
        if self.model is not None and same:
            raise ValueError(
                "one model in the same context on both sides has no shift. Give post_prompt, such as "
                '{ system = "Answer briefly." }'
            )
        if self.options and self.engine is None:
            raise ValueError('options are of an engine of its own: set engine = "vllm", or use score.options')
        if self.missing == "mask" and not (self.post_prompt.columns | self.pre_prompt.columns):
            raise ValueError('missing = "mask" concerns the columns of a template, and there are none: leave it out')
        return self
