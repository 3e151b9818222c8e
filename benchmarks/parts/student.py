"""A student of random weights, and a cache of random trajectories for it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from lightning_weave.cache.block import Cache
from lightning_weave.cache.shifts import PairSource
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores

VOCABULARY, WIDTH = 49_152, 576
CANDIDATES = 16


def write_cache(folder: Path, rows: int, length: int, per_shard: int = 64) -> None:
    """Write random trajectories of one length."""
    write_rows(folder, [length] * rows, per_shard)


def write_rows(folder: Path, lengths: Sequence[int], per_shard: int = 64) -> None:
    """Write random trajectories, an eighth of each prompt, with two anchors' scores."""
    rng = np.random.default_rng(0)
    for shard, start in enumerate(range(0, len(lengths), per_shard)):
        own = np.array(lengths[start : start + per_shard])
        count = len(own)
        prompts = np.concatenate([[0], np.cumsum(own // 8)])
        offsets = np.concatenate([[0], np.cumsum(own - own // 8)])
        positions = int(offsets[-1])
        logp = np.log(rng.dirichlet(np.ones(CANDIDATES + 1), positions)).astype(np.float32)
        ids = rng.integers(0, VOCABULARY - CANDIDATES, (positions, 1)) + np.arange(CANDIDATES)
        rollouts = Rollouts(
            np.arange(start, start + count, dtype=np.int32),
            np.zeros(count, np.int32),
            np.zeros(count, np.uint8),
            Ragged(rng.integers(0, VOCABULARY, int(prompts[-1]), dtype=np.int32), prompts),
            Ragged(rng.integers(0, VOCABULARY, positions, dtype=np.int32), offsets),
        )
        named = rollouts.trajectories()
        stages(folder)["rollout"].write(shard, rollouts)
        candidates = Candidates(
            named,
            Ragged(ids.astype(np.int32), offsets),
            Ragged(logp[:, :-1], offsets),
            Ragged(logp[:, -1], offsets),
            Ragged(logp[:, 0], offsets),
        )
        stages(folder)["reference"].write(shard, candidates)
        for name in ("post-0", "pre-0", "post-1", "pre-1"):
            moved = logp[:, :-1] + rng.normal(0, 0.5, (positions, CANDIDATES)).astype(np.float32)
            mapped = Ragged(np.ones(moved.shape, np.bool_), offsets)
            scores = Scores(named, Ragged(moved, offsets), mapped, Ragged(np.ones(positions, np.float32), offsets))
            stages(folder)[name].write(shard, scores)
    shards = -(-len(lengths) // per_shard)
    for name, stage in stages(folder).items():
        stage.finish({"rollout": Rollouts, "reference": Candidates}.get(name, Scores), shards)


def stages(folder: Path) -> dict[str, Stage]:
    names = ("rollout", "reference", "post-0", "pre-0", "post-1", "pre-1")
    return {name: Stage(folder, name, {}) for name in names}


def open_cache(folder: Path) -> Cache:
    found = stages(folder)
    pairs = [PairSource(str(k), found[f"post-{k}"], found[f"pre-{k}"], 0.5) for k in range(2)]
    return Cache(found["rollout"], found["reference"], pairs)


def make_student(layers: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
