"""Recipes: pydantic models of the TOML that users write. Importing this never imports torch."""

from lightning_weave.config.composition import (
    ALPHA,
    DEFAULT_TAG,
    STUDENT,
    Anchor,
    Composition,
    Distilled,
    Joint,
    Mixture,
    Online,
    PromptContext,
    SelfDistilled,
    Sequential,
    anchors_of,
)
from lightning_weave.config.evaluation import Case, Checks, Eval, Grading, Harness
from lightning_weave.config.fields import (
    HARNESS,
    HELD_OUT,
    KEPT_CHECKPOINTS,
    Decay,
    Dtype,
    EngineStage,
    LoraBase,
    Objective,
    Role,
    Threshold,
    benchmark_folder,
    is_own_function,
    slug,
    split_revision,
)
from lightning_weave.config.recipe import Recipe, check_recipe, dump_recipe, load_recipe, merge_overrides, merge_tables
from lightning_weave.config.sections import (
    Columns,
    Engine,
    Lora,
    Machine,
    Policy,
    Prompts,
    Reference,
    Rollout,
    Score,
    StageEngine,
    Student,
    Tags,
    Train,
)
