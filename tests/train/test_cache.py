"""Rows are read back as they were written, and never joined with another trajectory's."""

from pathlib import Path

import numpy as np
import pytest

from lightning_weave.errors import CorruptData, InputError, Mismatch
from lightning_weave.stages.caches import open_cache
from lightning_weave.types import Candidates, Rollouts, Scores
from rows import read_row
from train.cached import make_run


def half(anchor: str, row: int, decisions: int) -> np.ndarray:
    return np.arange(decisions) % 2 == (anchor == "long")


def test_a_row_is_what_its_shards_say(tmp_path: Path) -> None:
    run = make_run(tmp_path, groups=5, responses=2, valid=half)
    cache = open_cache(run, "both")
    assert len(cache) == 10
    stages = {"r": run.stage("rollout"), "c": run.stage("reference")}
    scores = {anchor: [step.open(Scores, 2).read() for step in run.scores_of(anchor)] for anchor in ("long", "short")}
    rollouts, found = stages["r"].open(Rollouts, 2).read(), stages["c"].open(Candidates, 2).read()
    for place in range(2):  # shard 2 holds the last group only
        row = read_row(cache, 8 + place)
        assert np.array_equal(row.response_ids, rollouts.response_ids[place])
        assert np.array_equal(row.prompt_ids, rollouts.prompt_ids[place])
        assert cache.length(8 + place) == row.tokens
        assert np.array_equal(row.logp_TC, found.logp[place])
        for index, anchor in enumerate(("long", "short")):
            post, pre = scores[anchor]
            mask = half(anchor, 8 + place, len(row.response_ids))
            assert np.array_equal(row.valid_KT[index], mask)
            assert np.array_equal(row.r_KTC[index][mask], (post.logp[place] - pre.logp[place])[mask])


def test_scores_of_another_trajectory_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    stage = run.scores_of("short")[0]
    shard = stage.open(Scores, 1).read()
    swapped = Scores(shard.trajectory_R[::-1].copy(), shard.logp, shard.mapped, shard.mass)
    stage.write(1, swapped)
    cache = open_cache(run, "both")
    read_row(cache, 0)
    with pytest.raises(
        Mismatch, match=r"short-post@\w{8}: row 4 belongs to another trajectory.*lweave score .* --only short-"
    ):
        read_row(cache, 4)


def test_damage_is_found_when_the_row_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    path = run.stage("reference").shard_path(0)
    data = bytearray(path.read_bytes())
    data[-40] ^= 1
    path.write_bytes(data)
    cache = open_cache(run, "both")
    with pytest.raises(CorruptData, match="is damaged"):
        [read_row(cache, number) for number in range(4)]


def test_a_cache_that_is_not_finished_is_refused_before_anything_is_spent(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.scores_of("long")[1].shard_path(1).unlink()
    with pytest.raises(InputError, match=r"long-pre is not finished. Make it with: lweave score"):
        open_cache(run, "both")
