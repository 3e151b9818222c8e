"""A stage that is made again: stopped at any step of the file system, neither the old nor the new one is lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lightning_weave.store import Stage, Step, Store
from lightning_weave.types import Ragged, Rollouts

SHARDS = 2


class Killed(BaseException):
    """Stands for a kill: nothing in the store handles it."""


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop before the so-many-th rename, replacement or unlinking."""
    left = [number]

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            yield
        except Killed:
            return


def shard(value: int) -> Rollouts:
    ids = Ragged(np.full(3, value, np.int32), np.array([0, 3], np.int64))
    one = np.zeros(1, np.int32)
    return Rollouts(one, one, np.zeros(1, np.uint8), ids, ids)


def stage_of(run_dir: Path, seed: int) -> Stage:
    return Store(run_dir).stage(Step("rollout", {"seed": seed}, (), "lweave rollout"))


def make(stage: Stage, seed: int) -> None:
    stage.begin()
    for index in stage.pending(SHARDS):
        stage.write(index, shard(seed))
    stage.finish(Rollouts, SHARDS)


def contents(run_dir: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run_dir)): path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("number", range(14))
def test_stopped_anywhere_it_goes_on_or_back(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (1, 2):
        make(stage_of(tmp_path / str(seed), seed), seed)
    whole = {seed: contents(tmp_path / str(seed)) for seed in (1, 2)}
    for then in (1, 2):  # back to the old recipe, or on with the new one
        run_dir = tmp_path / f"run-{then}"
        make(stage_of(run_dir, 1), 1)
        with killed_at(number, monkeypatch):
            make(stage_of(run_dir, 2), 2)
        there = {seed: stage_of(run_dir, seed) for seed in (1, 2)}
        old = [there[1].folder, *there[1].aside()]
        kept = any(Stage(folder, there[1].step).state() == "done" for folder in old if folder.exists())
        assert kept or there[2].state() == "done", "one of them is whole at any time"
        if then == 1 and kept:
            written = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*.safetensors")}
            stage_of(run_dir, 1).begin()
            assert stage_of(run_dir, 1).state() == "done", "put back"
            times = {path.stat().st_mtime_ns for path in there[1].folder.glob("*.safetensors")}
            assert times <= set(written.values())
        make(stage_of(run_dir, then), then)
        left = {name: data for name, data in contents(run_dir).items() if ".tmp-" not in name}
        assert left == whole[then]
