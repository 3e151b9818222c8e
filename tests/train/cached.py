"""A student with a whole cache on disk, written directly: lengths, masks and shifts are the test's to choose."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast, Qwen3Config

from lightning_weave.config import check_recipe
from lightning_weave.models.scorer import Scorer
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.alignment import find_candidates, pack_rollouts
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import TrainContext
from lightning_weave.types import Candidates, Ragged, Request, Response, Rollouts, Scores

QUIET = Progress(quiet=True)
VOCABULARY = 40
PADDED = 48  # rows of the output matrix: the last eight belong to no token
ANCHORS = ("long", "short")

Validity = Callable[[str, int, int], np.ndarray]
"""From an anchor, a row and its number of decisions to the decisions that are valid there."""


def context(ranks: Ranks, dtype: torch.dtype = torch.float32) -> TrainContext:
    """What training is given where nothing is to be sampled or printed."""
    return TrainContext(ranks, dtype, QUIET)


def everywhere(anchor: str, row: int, decisions: int) -> np.ndarray:
    return np.ones(decisions, dtype=bool)


SHAPE: dict[str, Any] = {
    "vocab_size": PADDED,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}


def save_student(
    folder: Path,
    *,
    family: str = "qwen3",
    seed: int = 0,
    dtype: torch.dtype,
    generation: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Save a small random model whose next-token distributions are neither flat nor certain."""
    shape = {**SHAPE, **config}
    torch.manual_seed(seed)
    made = Qwen3Config(**shape) if family == "qwen3" else Gemma3TextConfig(**shape, sliding_window=8)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3)
    model.to(dtype).save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0").save_pretrained(folder)


def make_run(
    root: Path,
    *,
    groups: int = 6,
    responses: int = 2,
    candidates: int = 4,
    longest: int = 9,
    valid: Validity = everywhere,
    student: dict[str, Any] | None = None,
    save: Callable[[Path], Path] | None = None,
    compositions: dict[str, dict[str, Any]] | None = None,
    train: dict[str, Any] | None = None,
    seed: int = 0,
) -> Run:
    """Write student, rollouts, reference and scores, and give the recipe's run: only training is left to do."""
    root.mkdir(parents=True, exist_ok=True)
    if save is None:
        save = partial(save_student, **{"dtype": torch.float32, "tie_word_embeddings": True, **(student or {})})
    save(root / "student")
    (root / "prompts.jsonl").write_text('{"prompt": "w3 w4"}\n')
    for anchor in ANCHORS:
        for role in ("post", "pre"):
            (root / f"{anchor}-{role}").mkdir(exist_ok=True)
            (root / f"{anchor}-{role}" / "config.json").write_text(json.dumps({"anchor": anchor, "role": role}))
    recipe = {
        "name": "cached",
        "runs": str(root / "runs"),
        "student": {"model": str(root / "student"), "trust_remote_code": any((root / "student").glob("*.py"))},
        "anchors": {a: {"post": str(root / f"{a}-post"), "pre": str(root / f"{a}-pre")} for a in ANCHORS},
        "compositions": compositions or {"both": {"weights": {"long": 0.5, "short": 0.5}}},
        "prompts": {"source": str(root / "prompts.jsonl")},
        "rollout": {"responses": responses, "max_tokens": longest, "prompts_per_shard": 2},
        "reference": {"candidates": candidates},
        "train": {"prompts_per_round": 2, "updates_per_round": 1, "learning_rate": 1e-3, **(train or {})},
        "machine": {"threads": 1},
    }
    run = Run(check_recipe(recipe), "cached.toml", trust=True)
    write_cache(run, groups, longest, valid, seed)
    return run


def write_cache(run: Run, groups: int, longest: int, valid: Validity, seed: int) -> None:
    """Write random trajectories of unequal length, what the student says of them, and random shifts."""
    rng = np.random.default_rng(seed)
    recipe = run.recipe
    per_shard, responses = recipe.rollout.prompts_per_shard, recipe.rollout.responses
    model = run.student.load(torch.float32, torch.device("cpu"))
    scorer = Scorer.from_model(model, VOCABULARY)
    rollout, reference = run.stage("rollout"), run.stage("reference")
    shards = -(-groups // per_shard)
    for shard in range(shards):
        rows = []
        for group in range(groups)[shard * per_shard : (shard + 1) * per_shard]:
            prompt = rng.integers(2, VOCABULARY, rng.integers(1, 5)).tolist()
            for response in range(responses):
                drawn = rng.integers(2, VOCABULARY, rng.integers(1, longest + 1)).tolist()
                rows.append((Request(prompt, group, response), Response(drawn, "length")))
        rollouts = pack_rollouts(*zip(*rows, strict=True))
        found = find_candidates(scorer, rollouts, recipe.reference.candidates)
        rollout.write(shard, rollouts)
        reference.write(shard, found)
        first = shard * per_shard * responses
        for anchor in recipe.anchors:
            shift = np.random.default_rng([seed, ANCHORS.index(anchor), shard]).normal(0, 1.5, found.logp.flat.shape)
            masks = [valid(anchor, first + row, len(logp)) for row, logp in enumerate(found.logp)]
            mapped = np.repeat(np.concatenate(masks)[:, None], recipe.reference.candidates, axis=1)
            for role, part in (("post", shift), ("pre", 0 * shift)):
                logp = np.where(mapped, found.logp.flat + part, 0).astype(np.float32)
                scores = Scores(
                    found.trajectory_R,
                    Ragged(logp, found.logp.offsets),
                    Ragged(mapped, found.logp.offsets),
                    Ragged(np.ones(len(logp), np.float32), found.logp.offsets),
                )
                scored = run.side(anchor, role)  # type: ignore[arg-type]
                run.stage("score", scored).write(shard, scores)
    rollout.finish(Rollouts, shards)
    reference.finish(Candidates, shards)
    for scored in run.score_names:
        run.stage("score", scored).finish(Scores, shards)
