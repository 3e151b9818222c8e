"""A stage that is written whole, by test_kill.py and by the processes that it kills."""

from pathlib import Path

import numpy as np

from lightning_weave.store import Stage
from lightning_weave.types import Ragged, Rollouts

SHARDS = 5
EVENTS = 2 * (SHARDS + 1)  # a write and a rename for each shard and for the manifest


def stage_in(folder: str | Path) -> Stage:
    return Stage(Path(folder), "rollout", {"seed": 42}, (), "lweave rollout r.toml")


def make(index: int) -> Rollouts:
    rng = np.random.default_rng(index)
    rows = [rng.integers(0, 50_000, 3000).astype(np.int32) for _ in range(40)]
    flags = np.zeros(40, dtype=np.uint8)
    return Rollouts(
        np.arange(40, dtype=np.int32), np.zeros(40, dtype=np.int32), flags, Ragged.of(rows), Ragged.of(rows)
    )


def write_all(folder: str | Path) -> Stage:
    stage = stage_in(folder)
    for index in stage.pending(SHARDS):
        stage.write(index, make(index))
    assert stage.finish(Rollouts, SHARDS)
    return stage
