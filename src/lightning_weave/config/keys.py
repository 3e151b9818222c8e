"""Every key of a recipe with its type, default, meaning and an example, read from the pydantic models."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning_weave.config.composition import ALPHA, METHODS
from lightning_weave.config.recipe import Recipe

WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
# Of keys whose name and default say nearly all, for all sections that have them.
MEANINGS = {
    "kind": "paper, math-verify, exact, numeric, choice, regex, code or python",
    "revision": "commit or branch on the hub",
    "post_revision": "commit or branch of `post` on the hub",
    "pre_revision": "commit or branch of `pre` on the hub",
    "trust_remote_code": "run the code that comes with this checkpoint; read it first",
    "seed": "of everything random here",
    "dtype": "precision of the computation; auto: float32 on a CPU, the checkpoint's own elsewhere",
    "engine": "what computes: hf (transformers, built in), vllm, or auto: vllm where it and a GPU are, else hf",
    "python": "Python executable of the engine's own environment",
    "temperature": "of sampling; 0 takes the likeliest token",
    "top_p": "sample from the likeliest tokens that together have this probability",
    "batch_size": "responses sampled at a time; changes speed and memory, not results",
    "token_budget": "tokens in memory at a time; changes speed and memory, not results",
    "chat": "render with the model's chat template",
    "thinking": "switch thinking on if the chat template supports it",
    "model": "a directory or a hub name",
    "name": "of the run; its directory is RUNS/NAME",
    "method": "how the composition is trained: " + ", ".join(METHODS),
    "alpha": "KL strength; larger stays nearer the student",
    "prompts.columns.prompt": "column with the problem",
    "prompts.columns.answer": "column with the expected answer",
    "prompts.columns.id": "column with a name of the row",
    "prompts.split": "of a hub dataset",
    "prompts.format": "how a problem is put to the student",
    "prompts.dedup": "which repeated prompts to leave out",
    "rollout.responses": "sampled for every prompt",
    "rollout.max_tokens": "longest response; longer ones are cut off",
    "rollout.prompts_per_shard": "prompts in a file of the cache: the unit of resume",
    "reference.candidates": "likeliest tokens kept at every decision",
    "train.lora.rank": "of the low-rank update",
    "train.lora.alpha": "scale of the update is alpha / rank",
    "train.epochs": "how often every prompt is used",
    "train.updates_per_round": "optimizer updates per round",
    "train.learning_rate": "of AdamW",
    "train.betas": "of AdamW",
    "train.weight_decay": "of AdamW",
    "train.gradient_checkpointing": "compute activations again to save memory",
    "train.compile": "compile the decoder layers with torch.compile; rows are then padded, not packed",
    "train.checkpoint_every": "updates between checkpoints",
    "train.keep": "how many of the newest checkpoints stay",
    "train.validate_every": "updates between validations",
    "train.allow_disagreement": "train even if trainer and cache disagree",
    "train.trackers": "also log metrics, results and figures there",
    "tracking.project": "of all its runs",
    "tracking.tags": "of every run",
    "eval.benchmarks": "names of benchmarks, or file:PATH",
    "eval.format": "how a problem is put to the policy",
    "eval.profile": "how answers are graded",
    "report.cases.NAME.count": "how many pairs of responses",
    "machine.device": "what to compute on",
}
EXAMPLES: dict[str, Any] = {
    "engine": "vllm",
    "post_url": "http://gpu-7:8000",
    "pre_url": "http://gpu-8:8000",
    "name": "mine",
    "template": "{problem}\n\nPut the final answer in \\boxed{{}}.",
    "system": "Answer briefly.",
    "profile": "math-verify",
    "kind": "regex",
    "pattern": "#### (.*)",
    "function": "my_grader.py:grade",
    "student.model": "Qwen/Qwen3-4B",
    "anchors.NAME.post": "Kwai-Klear/Klear-Reasoner-8B",
    "anchors.NAME.pre": "Qwen/Qwen3-8B-Base",
    "anchors.NAME.model": "student",
    "anchors.NAME.untrained": "mask",
    "anchors.NAME.shift_clip": 5.0,
    "anchors.NAME.only_above": 0.1,
    "anchors.NAME.mass_floor": 0.5,
    "tags.column": "kind",
    "prefix": "Question: 1+1\nAnswer: 2\n\n",
    "anchors.NAME.post_prompt.template": "{prompt}\n\nA correct solution: {solution}",
    "anchors.NAME.pre_prompt.template": "{prompt}\n\nA correct solution: {solution}",
    "policies.NAME.model": "runs/interpolated-0.8",
    "policies.NAME.system": "Answer briefly.",
    "prompts.source": "prompts.jsonl",
    "prompts.name": "default",
    "prompts.columns.answer": "answer",
    "prompts.columns.id": "id",
    "prompts.screen_against": ["benchmark.jsonl"],
    "rollout.from": "trajectories.jsonl",
    "compositions.NAME.epochs": 4,
    "compositions.NAME.objective": "direct-opd",
    "compositions.NAME.kl_budget": 0.05,
    "compositions.NAME.alpha": 2.0,
    "compositions.NAME.sequence": ["acc", "brief"],
    "compositions.NAME.sharpen": 0.6,
    "train.shard_ranks": 8,
    "train.trackers": ["tensorboard"],
    "tracking.tags": ["ablation"],
    "tracking.entity": "my-team",
    "harness.tasks": ["ifeval", "gsm8k"],
    "harness.python": ".venv-lm-eval/bin/python",
    "harness.include": "my-tasks",
    "harness.fewshot": 5,
    "harness.limit": 100,
    "eval.problems": 20,
    "eval.samples": 8,
    "eval.max_tokens": 8192,
    "eval.budgets": [1024, 4096],
    "report.students": ["even"],
    "report.cases.NAME.wrong": ["base"],
    "report.cases.NAME.right": ["even"],
    "report.cases.NAME.shortest": "even",
    "report.cases.NAME.benchmark": "aime-2024",
    "machine.threads": 8,
    "machine.workers": 4,
    "revision": "main",
    "post_revision": "main",
    "pre_revision": "main",
    "python": ".venv-vllm/bin/python",
}
TABLES = {
    "aliases": '{ "<|im_end|>" = "</s>" }',
    "weights": "{ acc = 0.5, brief = 0.5 }",
    "rules": '{ code = "def |class ", proof = "(?i)prove" }',
    "options": "{ tensor_parallel_size = 2 }",
    "sources": '{ aime-2024 = "aime.jsonl" }',
    "metrics": '{ gsm8k = "exact_match,flexible-extract" }',
    "generation": "{ do_sample = true, temperature = 0.6 }",
}


@dataclass(frozen=True)
class Key:
    """One key of a recipe, as people read it."""

    name: str  # dotted; NAME stands for a name of the user's own
    type: str
    default: str
    meaning: str
    example: str

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def recipe_keys() -> list[Key]:
    """All keys, in the order of the sections."""
    return list(_keys_of(Recipe, ""))


def _keys_of(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        inner = _sections(field.annotation)
        if dotted == "compositions":
            yield from _composition_keys(f"{dotted}.NAME.")
        elif inner:
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _keys_of(inner[0], f"{dotted}.{named}")
        else:
            yield _key(dotted, field)


def _composition_keys(prefix: str) -> Iterator[Key]:
    """The keys of all methods, each with the methods that have it unless all do."""
    keys: dict[str, Key] = {}
    having: dict[str, list[str]] = {}
    for method, section in METHODS.items():
        for key in _keys_of(section, prefix):
            keys.setdefault(key.name, key)
            having.setdefault(key.name, []).append(method)
    for name, key in keys.items():
        if name == f"{prefix}routes":  # how tables in weights are kept
            continue
        if name == f"{prefix}method":
            choices = " | ".join(map(json.dumps, METHODS))
            yield replace(key, type=choices, default='"joint"', example='method = "joint"')
        elif name == f"{prefix}alpha":  # None in the model only where kl_budget stands instead
            yield replace(key, default=json.dumps(ALPHA))
        elif len(having[name]) < len(METHODS):
            yield replace(key, meaning=f"{key.meaning} (method {', '.join(having[name])})")
        else:
            yield key


def _key(dotted: str, field: FieldInfo) -> Key:
    last = dotted.rpartition(".")[2]
    meaning = MEANINGS.get(dotted) or field.description or MEANINGS.get(last, "")
    default = None if field.is_required() else field.default
    shown = EXAMPLES.get(dotted, default if default not in (None, [], {}) else EXAMPLES.get(last))
    example = f"{last} = {TABLES.get(last) or json.dumps(shown)}"
    unset = "required" if field.is_required() else "unset"
    return Key(dotted, _type(field.annotation), unset if default is None else json.dumps(default), meaning, example)


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " | ".join(map(json.dumps, inner))
    if origin in (Union, UnionType):
        return " or ".join(_type(part) for part in inner if part is not NoneType)
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return f"table of {_type(inner[1])}"
    return WORDS[annotation]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key leads to; none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]
