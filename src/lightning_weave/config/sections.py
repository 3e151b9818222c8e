"""The sections of a recipe. Omitted keys have the paper's values; unknown keys are errors."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from lightning_weave.config.composition import DEFAULT_TAG
from lightning_weave.config.fields import (
    MOST_CANDIDATES,
    Count,
    Decay,
    Dtype,
    EngineName,
    EngineStage,
    Finite,
    Inline,
    LoraBase,
    Name,
    Objective,
    Option,
    Pattern,
    Positive,
    PromptFormat,
    Repeats,
    Seed,
    Source,
    Strict,
    Text,
    Threshold,
    execution,
    split_revision,
    unlisted,
)


class Student(Strict):
    """The model that samples, is tilted and is trained."""

    model: Source = Field(description="a directory, or a hub name (owner/name@revision)", examples=["Qwen/Qwen3-4B"])
    trust_remote_code: bool = execution(False, "run the code that comes with this checkpoint; needs --trust")

    @property
    def name(self) -> str:
        """The model without its revision."""
        return split_revision(self.model)[0]

    @property
    def revision(self) -> str | None:
        return split_revision(self.model)[1]


class Policy(Student):
    """Something else that is evaluated and shown with the students."""

    model: Source | None = Field(  # type: ignore[assignment]
        None, description="another checkpoint; default: the student", examples=["owner/name"]
    )
    merge: Literal["linear", "task-arithmetic", "ties", "dare"] | None = unlisted(
        None, description="instead of model: merge weights into the student's; shapes must agree", examples=["ties"]
    )
    weights: dict[str, Finite] = unlisted(
        {},
        description="with merge: weights of differences, by name: post - pre of an anchor (linear: post - student), or "
        "a composition or policy minus the student",
        examples=[{"acc": 0.5, "brief": 0.5}],
    )
    density: float | None = unlisted(
        None, "with ties and dare: share of each difference that is kept; default: 0.5", gt=0, le=1, examples=[0.2]
    )
    decode: str | None = unlisted(
        None,
        description="instead of model: sample from the target of this composition, with all its models loaded",
        examples=["even"],
    )
    system: Text | None = Field(None, description="instead of eval.system", examples=["Answer briefly."])
    thinking: bool | None = unlisted(None, description="instead of eval.thinking", examples=[False])
    template: dict[Name, Option] = unlisted(
        {}, description="variables of the chat template", examples=[{"reasoning_effort": "low"}]
    )
    budget: Count | None = unlisted(
        None, description="tokens after which eval.final is appended and the answer sampled", examples=[512]
    )

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        chosen = [key for key in ("model", "merge", "decode") if getattr(self, key) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{' and '.join(chosen)} cannot be combined: give one of them")
        asked = [key for key in ("system", "thinking", "template", "budget") if getattr(self, key) not in (None, {})]
        if not chosen and not asked:
            raise ValueError("is the same as base: give it a model, merge or decode, or another prompt, such as system")
        if (self.merge is None) != (not self.weights):
            raise ValueError("merge and weights belong together: give both or neither")
        if self.density is not None and self.merge not in ("ties", "dare"):
            raise ValueError('density is for merge = "ties" or "dare"; remove it')
        if self.decode is not None and asked:
            raise ValueError(f"decode uses the prompts of [eval]; remove {', '.join(asked)}")
        return self


class Tags(Strict):
    """Kinds of prompts, for weights that differ by kind."""

    column: str | None = Field(None, min_length=1, description="column that holds the tag of a row", examples=["kind"])
    rules: dict[Name, Pattern] = Field(
        {},
        description="tag -> regular expression; the first one found in the user's turn gives the tag",
        examples=[{"code": "def |class ", "proof": "(?i)prove"}],
    )

    @model_validator(mode="after")
    def _have_one_source(self) -> Self:
        if self.column is not None and self.rules:
            raise ValueError("column and rules both give a prompt its tag: remove one of them")
        return self

    def of(self, text: str, columns: Mapping[str, Any]) -> str:
        """The tag of one prompt."""
        if self.column is not None:
            return str(columns.get(self.column, DEFAULT_TAG))
        return next((tag for tag, rule in self.rules.items() if re.search(rule, text)), DEFAULT_TAG)


class Columns(Inline):
    """Which columns of the data hold what."""

    prompt: str = Field("prompt", description="column with the problem")
    answer: str | None = Field(None, description="column with the expected answer", examples=["answer"])
    id: str | None = Field(None, description="column with the name of the row", examples=["id"])


class Asked(Strict):
    """How a problem is presented to a model, in [prompts] and [eval]."""

    system: Text | None = Field(None, description="system prompt; needs chat = true", examples=["Answer briefly."])
    chat: bool = Field(True, description="render with the model's chat template")
    thinking: bool = Field(True, description="switch thinking on if the chat template supports it")

    @model_validator(mode="after")
    def _can_have_a_system_prompt(self) -> Self:
        if self.system is not None and (not self.chat or getattr(self, "format", None) == "livecodebench"):
            raise ValueError("system needs chat = true and a format other than livecodebench")
        return self


class Prompts(Asked):
    """Where prompts come from and which of them are used."""

    source: Source | None = Field(
        None,
        description="file (JSONL, Parquet), directory, or hub name (owner/name@revision)",
        examples=["prompts.jsonl"],
    )
    name: str | None = Field(None, description="configuration of a hub dataset", examples=["main"])
    split: str = Field("train", description="split of a hub dataset")
    columns: Columns = Field(Columns(), description="which columns hold what", examples=[{"prompt": "problem"}])
    format: PromptFormat = Field(
        "plain",
        description="plain, boxed (default with columns.answer), question-answer, dapo, livecodebench, or a template",
        examples=["{problem}\n\nPut the final answer in \\boxed{{}}."],
    )
    max_tokens: Count = Field(1024, description="longest prompt in student tokens; longer ones are left out")
    dedup: Literal["none", "exact", "normalised"] = Field("exact", description="which repeated prompts are left out")
    take: Count | None = Field(3200, description="number of prompts, drawn at random with a fixed seed")
    screen_against: list[Source] = Field(
        [], description="files of problems to leave out", examples=[["benchmark.jsonl"]]
    )


@dataclass(frozen=True)
class StageEngine:
    """The engine of one stage as [engine] and the stage's own section describe it."""

    stage: EngineStage
    engine: EngineName
    dtype: Dtype
    python: str | None
    parity: float | None
    options: Mapping[str, Option]
    batch_size: int = 0  # responses, where the stage samples
    token_budget: int = 0  # where it scores


class Engine(Strict):
    """What computes each stage: transformers ("hf"), or vLLM in a separate process."""

    rollout: EngineName = Field("auto", description="hf, vllm, or auto: vllm if it is installed and there is a GPU")
    reference: EngineName = Field("hf", description="the same for the student's candidates")
    score: EngineName = Field("hf", description="the same for the anchors; anchors.NAME.engine overrides it")
    eval: EngineName = Field("auto", description="the same for evaluation")
    python: Source | None = execution(
        None, "Python with vLLM, if not this one; needs --trust", examples=[".venv-vllm/bin/python"]
    )
    dtype: Dtype | dict[EngineStage, Dtype] = Field(
        "auto", description="precision, also as a table by stage; auto: float32 on a CPU, else that of the checkpoint"
    )
    parity: Positive | None = unlisted(
        None,
        "largest mean difference of vLLM from transformers, nats per token; default: by dtype",
        examples=[0.05],
        execution=True,
    )
    options: dict[str, Option | dict[str, Option]] = Field(
        {},
        description="passed to vLLM unchanged; a table named like a stage is for that stage only",
        examples=[{"tensor_parallel_size": 2}],
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _is_one_or_by_stage(cls, dtype: Any) -> Any:
        by_stage = dtype if isinstance(dtype, Mapping) else {"rollout": dtype}
        for stage, one in by_stage.items():
            if stage not in get_args(EngineStage) or one not in get_args(Dtype):
                raise ValueError(
                    f"must be one of {', '.join(map(repr, get_args(Dtype)))}, or a table with these by stage "
                    f"({', '.join(get_args(EngineStage))})"
                )
        return dtype

    @field_validator("options", mode="before")
    @classmethod
    def _tables_are_of_stages(cls, options: Any) -> Any:
        for name, value in options.items() if isinstance(options, Mapping) else ():
            if "trust_remote_code" in (name, *(value if isinstance(value, Mapping) else ())):
                raise ValueError("trust_remote_code is a key of [student], of an anchor or of a policy; remove it here")
            if isinstance(value, Mapping) and name not in get_args(EngineStage):
                raise ValueError(
                    f"{name} is a table; only the name of a stage may be one ({', '.join(get_args(EngineStage))})"
                )
        return options


class Rollout(Strict):
    """The student's own trajectories (appendix: Behavior trajectories)."""

    responses: Repeats = Field(4, description="number of responses to each prompt")
    temperature: Finite = Field(1.0, ge=0, description="sampling temperature; 0 takes the likeliest token")
    max_tokens: Count = Field(2048, description="longest response; longer ones are cut off")
    seed: Seed = Field(42, description="random seed of sampling")
    from_: Source | None = Field(
        None, alias="from", description="your own trajectories, token ids or messages", examples=["trajectories.jsonl"]
    )
    prompts_per_shard: Count = unlisted(16, "prompts per file, the unit of resume")
    batch_size: Count = execution(64, "responses sampled at a time; affects speed and memory, not results")


class Reference(Strict):
    """The student's candidates on its own trajectories."""

    candidates: int = Field(
        16, ge=1, le=MOST_CANDIDATES, description="number of likeliest tokens kept at every position"
    )


class Score(Strict):
    """The log-probabilities of these candidates under every anchor model."""

    token_budget: Count = execution(16384, "tokens scored at a time, also in reference; does not change results")


class Lora(Strict):
    """Train a low-rank update of a frozen student; exported merged and as an adapter."""

    rank: Count = Field(16, description="rank of the update")
    alpha: float = Field(32.0, gt=0, description="the update is scaled by alpha / rank")
    stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead (rsLoRA)")
    targets: list[str] | Literal["all-linear"] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description='names of the layers with an update; "all-linear": all but the head',
    )
    base: LoraBase = Field(
        "own", description="precision of the frozen student: own, nf4 or int8 (bitsandbytes, one rank)"
    )


class Optimizer(Inline):
    """Settings of AdamW."""

    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.999], min_length=2, max_length=2, description="decay rates of AdamW's moments"
    )
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False, description="weight decay of AdamW")
    clip: float = Field(1.0, gt=0, description="largest gradient norm")


class Train(Strict):
    """Training of the student on the cache (appendix: Training Hyperparameters)."""

    objective: Objective = Field(
        "tilted",
        description="tilted (the paper's), reverse-kl, reverse-kl-full, direct-opd, or your own my.py:loss (--trust)",
    )
    balance: Literal["decisions", "rows", "tags"] = Field(
        "decisions", description="what counts equally in the loss of an update: decisions, responses or tags"
    )
    epochs: Repeats = Field(2, description="number of passes over the prompts")
    prompts_per_round: Count = Field(64, description="prompts in a round, each with all its responses")
    updates_per_round: Count = Field(4, description="optimizer updates in a round")
    learning_rate: Positive = Field(1e-6, description="learning rate of AdamW")
    warmup: int = Field(0, ge=0, lt=2**31, description="updates over which the learning rate rises from zero")
    decay: Decay = Field("constant", description="how the learning rate falls after that, to zero at the end")
    optimizer: Optimizer = Field(Optimizer(), description="settings of AdamW", examples=[{"weight_decay": 0.0}])
    seed: Seed = Field(1234, description="random seed of the order of prompts")
    seeds: Repeats = execution(1, "number of training seeds of every composition: seed, seed + 1, ...", examples=[3])
    dtype: Dtype = Field("auto", description="compute precision; master weights are always float32")
    lora: Lora | None = None
    gradient_checkpointing: bool | Literal["auto"] = execution(
        "auto",
        "recompute activations to save memory; auto: on a GPU that could not hold them",
        examples=[True],
    )
    compile: bool | Literal["auto"] = execution(
        "auto",
        "use torch.compile on the decoder layers; auto: on a GPU with Triton, in 16 bits, if not recurrent",
        examples=[False],
    )
    token_budget: Count | Literal["auto"] = execution(
        "auto",
        "tokens in a micro-batch, for speed and memory only; auto: 16384, on a GPU less if only that fits",
        examples=[16384],
    )
    shard_ranks: Count | None = unlisted(
        None, "ranks that share a copy; default: those of a machine", examples=[8], execution=True
    )
    checkpoint_every: Count = execution(50, "updates between checkpoints and between validations")
    validation: float = Field(0.0, ge=0, lt=1, description="share of the prompts held out for validation")
    eval_every: int = execution(
        0, ge=0, lt=2**31, description="updates between evaluations on the first of eval.benchmarks; 0: none"
    )
    eval_problems: Count = unlisted(32, "problems in such an evaluation", execution=True)
    agreement: Threshold = unlisted(
        1e-4, "largest loss at zero shift before training; false: only warn", execution=True
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = execution([], "log there, too", examples=[["wandb"]])
    keep_anchors: bool = unlisted(True, "online: keep all anchors in memory, not one at a time", execution=True)


class Machine(Strict):
    """Where it runs. Recorded, but not part of a fingerprint, except for tf32 = true, which rounds."""

    device: Literal["auto", "cpu", "cuda", "mps"] = execution("auto", "auto: CUDA if available, else the CPU")
    threads: Count | None = execution(None, "CPU threads; default: measured once per run", examples=[8])
    tf32: bool = Field(False, description="on a GPU, use TF32 for float32 matrix products: faster, less precise")
    workers: Count | None = unlisted(
        None, "Ray workers; default: one per GPU, or per CPU", examples=[4], execution=True
    )
    gpus_per_worker: float = unlisted(1.0, "GPUs of each Ray worker", ge=0, le=1024, execution=True)
