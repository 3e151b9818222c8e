"""The sections of a recipe about training: how, with which low-rank update, and who is told of it."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lightning_weave.config.fields import (
    Count,
    Decay,
    Dtype,
    LoraBase,
    Objective,
    Seed,
    Strict,
    without_trust,
)


class Lora(Strict):
    """Train a low-rank update of a frozen student; the export has it merged, and beside that on its own."""

    rank: Count = 16
    alpha: float = Field(32.0, gt=0)
    stabilised: bool = Field(False, description="scale by alpha / sqrt(rank) instead: steady when rank grows")
    targets: list[str] | Literal["all-linear"] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        description='layers that get an update; "all-linear": all but the head',
    )
    base: LoraBase = Field(
        "own",
        description="how the frozen student is kept: in its own dtype, or in 4 bits (nf4) or 8 (int8) by bitsandbytes, "
        "on one rank",
    )


class Train(Strict):
    """Student-only training on the cache (appendix: Training Hyperparameters)."""

    objective: Objective = Field(
        "tilted",
        description="tilted (the paper's), reverse-kl, reverse-kl-full, direct-opd; your own, with --trust: my.py:loss",
    )
    epochs: Count = 2
    prompts_per_round: Count = Field(64, description="whole prompt groups replayed per round")
    updates_per_round: Count = 4
    learning_rate: float = Field(1e-6, gt=0, allow_inf_nan=False)
    warmup: int = Field(0, ge=0, description="updates over which the learning rate grows from nothing")
    decay: Decay = Field("constant", description="how it falls after that, to nothing after the last update")
    betas: list[float] = Field([0.9, 0.999], min_length=2, max_length=2)
    weight_decay: float = Field(0.01, ge=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, description="largest gradient norm")
    seed: Seed = 1234
    dtype: Dtype = Field("auto", description="compute dtype; master weights are float32 always")
    lora: Lora | None = None
    gradient_checkpointing: bool = False
    compile: bool = False
    token_budget: Count = Field(16384, description="tokens of a micro-batch")
    shard_ranks: Count | None = Field(
        None, description="ranks that hold one copy of the student together, such as those of one machine; default: all"
    )
    checkpoint_every: Count = 50
    keep: Count = 2
    validation: float = Field(0.0, ge=0, lt=1, description="share of prompts held out")
    validate_every: Count = 50
    eval_every: int = Field(
        0, ge=0, description="updates between evaluations during training, on the first of eval.benchmarks; 0: none"
    )
    eval_problems: Count = Field(32, description="problems of it that are answered then, one sample each")
    agreement: float = Field(
        1e-4, gt=0, description="largest loss at zero shift before training: trainer against cache"
    )
    allow_disagreement: bool = False
    trackers: list[Literal["tensorboard", "wandb"]] = Field([])
    keep_anchors: bool = Field(True, description="online: keep all anchors in memory, or load them one at a time")

    @model_validator(mode="before")
    @classmethod
    def _trusts_nothing(cls, data: Any) -> Any:
        return without_trust(data)

    @field_validator("betas")
    @classmethod
    def _decay_rates(cls, betas: list[float]) -> list[float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and below 1")
        return betas


class Tracking(Strict):
    """What the runs of train.trackers are called there."""

    project: str = Field("lightning-weave", min_length=1)
    entity: str | None = Field(None, description="W&B: user or team; default: yours")
    tags: list[str] = Field([])
    name: str = Field("{run}/{policy}", description="of a run: {run} is the recipe's name, {policy} the policy's")

    @field_validator("name")
    @classmethod
    def _can_be_filled(cls, name: str) -> str:
        try:
            name.format(run="", policy="")
        except (KeyError, IndexError, ValueError):
            raise ValueError("may have {run} and {policy}, and nothing else in braces") from None
        return name
