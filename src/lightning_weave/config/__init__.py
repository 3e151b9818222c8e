"""Recipes: pydantic models of the TOML that users write. Importing this never imports torch."""

from lightning_weave.config.composition import Composition
from lightning_weave.config.fields import Dtype, Engine, Objective, benchmark_folder, slug
from lightning_weave.config.load import check_recipe, dump_recipe, load_recipe, merge_overrides, merge_tables
from lightning_weave.config.sections import (
    Anchor,
    Case,
    Columns,
    Eval,
    Lora,
    Machine,
    Policy,
    Prompts,
    Recipe,
    Reference,
    Rollout,
    Score,
    Student,
    Train,
)

__all__ = [
    "Anchor",
    "Case",
    "Columns",
    "Composition",
    "Dtype",
    "Engine",
    "Eval",
    "Lora",
    "Machine",
    "Objective",
    "Policy",
    "Prompts",
    "Recipe",
    "Reference",
    "Rollout",
    "Score",
    "Student",
    "Train",
    "benchmark_folder",
    "check_recipe",
    "dump_recipe",
    "load_recipe",
    "merge_overrides",
    "merge_tables",
    "slug",
]
