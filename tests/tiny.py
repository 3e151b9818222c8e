"""Tiny checkpoints with real architectures and real tokenizers, random weights, and a recipe over them."""

import json
from pathlib import Path

import numpy as np
import torch

from lightning_weave.config import Recipe, check_recipe
from lightning_weave.stages.steps import Steps
from lightning_weave.world.pretrain import Size, make_model
from lightning_weave.world.spellings import SPELLINGS, make_tokenizer
from lightning_weave.world.task import draw_problems

SIZE = Size(layers=2, width=16, heads=2, feed_forward=32, steps=0, batch=0)


def save_model(folder: Path, spelling: str, family: str, seed: int, noise_from: Path | None = None) -> Path:
    """Save a random model; with `noise_from`, that model with its weights moved a little (a 'post-trained' one)."""
    tokenizer = make_tokenizer(SPELLINGS[spelling], seed=0)
    model = make_model(family, SIZE, tokenizer, seed)
    if noise_from is not None:
        model = type(model).from_pretrained(noise_from, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.05 if noise_from is not None else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int, seed: int = 5) -> Path:
    problems = draw_problems(count, (3, 4, 5), np.random.default_rng(seed))
    rows = [{"problem": problem.text, "answer": problem.answer, "id": f"p{n}"} for n, problem in enumerate(problems)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_world(root: Path, prompts: int = 12) -> dict:
    """Student and two anchor pairs with three tokenizers, and the recipe that weaves them."""
    root.mkdir(parents=True, exist_ok=True)
    student = save_model(root / "student", "student", "qwen3", 1)
    pre_a = save_model(root / "acc-pre", "accuracy", "llama", 2)
    pre_b = save_model(root / "brief-pre", "brevity", "qwen3", 3)
    end = SPELLINGS["student"].end
    return {
        "name": "tiny",
        "runs": str(root / "runs"),
        "student": {"model": str(student)},
        "anchors": {
            "acc": {
                "post": str(save_model(root / "acc-post", "accuracy", "llama", 4, pre_a)),
                "pre": str(pre_a),
                "aliases": {end: SPELLINGS["accuracy"].end},
            },
            "brief": {
                "post": str(save_model(root / "brief-post", "brevity", "qwen3", 5, pre_b)),
                "pre": str(pre_b),
                "aliases": {end: SPELLINGS["brevity"].end},
            },
        },
        "compositions": {
            "acc-only": {"weights": {"acc": 1.0}},
            "brief-only": {"weights": {"brief": 1.0}},
            "both": {"weights": {"acc": 0.5, "brief": 0.5}},
        },
        "prompts": {
            "source": str(save_prompts(root / "prompts.jsonl", prompts)),
            "columns": {"prompt": "problem", "answer": "answer", "id": "id"},
            "format": "question-answer",
            "chat": False,
            "take": prompts,
        },
        "rollout": {"responses": 2, "max_tokens": 12, "prompts_per_shard": 4},
        "reference": {"candidates": 4},
        "train": {"epochs": 2, "prompts_per_round": 4, "updates_per_round": 2, "learning_rate": 1e-3},
        "machine": {"threads": 1},
    }


def steps_of(recipe: dict | Recipe) -> Steps:
    return Steps(recipe if isinstance(recipe, Recipe) else check_recipe(recipe), "tiny.toml")
