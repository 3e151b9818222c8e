"""Recipes: pydantic models of the TOML that users write. Importing this never imports torch."""

from lightning_weave.config.anchor import Anchor, PromptContext, Side
from lightning_weave.config.composition import (
    ALPHA,
    DEFAULT_TAG,
    Composition,
    Distilled,
    Joint,
    Mixture,
    Online,
    SelfDistilled,
    Sequential,
    anchors_of,
)
from lightning_weave.config.fields import (
    HARNESS,
    Decay,
    Dtype,
    Engine,
    LoraBase,
    Objective,
    Threshold,
    benchmark_folder,
    is_own_function,
    slug,
)
from lightning_weave.config.load import check_recipe, dump_recipe, load_recipe, merge_overrides, merge_tables
from lightning_weave.config.recipe import Recipe
from lightning_weave.config.sections import (
    Case,
    Checks,
    Columns,
    Eval,
    Grading,
    Harness,
    Machine,
    Policy,
    Prompts,
    Reference,
    Rollout,
    Score,
    Student,
    Tags,
)
from lightning_weave.config.training import Lora, Train
