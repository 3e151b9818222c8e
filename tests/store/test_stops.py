"""A stage of a changed recipe: stopped at any step of the file system, neither the old nor the new one is lost."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from lightning_weave.store import Stage
from lightning_weave.types import Ragged, Rollouts

SHARDS = 2


class Killed(BaseException):
    """Stands for a kill: nothing in the store handles it."""


@contextmanager
def killed_at(number: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop before the so-many-th rename, replacement, link or unlinking."""
    left = [number]

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **options):  # type: ignore[no-untyped-def]
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("rename", "replace", "symlink", "unlink", "rmdir"):
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
    return Stage(run_dir, "rollout", {"seed": seed}, (), "lweave rollout")


def make(stage: Stage, seed: int) -> None:
    stage.begin()
    for index in stage.pending(SHARDS):
        stage.write(index, shard(seed))
    stage.finish(Rollouts, SHARDS)


def contents(run_dir: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in run_dir.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(run_dir)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("number", range(14))
def test_stopped_anywhere_it_goes_on_or_back(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = stage_of(tmp_path / "undisturbed", 2)
    make(new, 2)
    whole = {path.name: path.read_bytes() for path in new.folder.iterdir()}
    for then in (1, 2):  # back to the old recipe, or on with the new one
        run_dir = tmp_path / f"run-{then}"
        make(stage_of(run_dir, 1), 1)
        old = contents(run_dir)
        with killed_at(number, monkeypatch):
            make(stage_of(run_dir, 2), 2)
        assert stage_of(run_dir, 1).complete, "nothing ever touches it"
        target = (run_dir / "rollout").resolve()
        assert target in {stage_of(run_dir, seed).folder.resolve() for seed in (1, 2)}, "the link leads somewhere"
        make(stage_of(run_dir, then), then)
        assert (run_dir / "rollout").resolve() == stage_of(run_dir, then).folder.resolve()
        there = contents(run_dir)
        assert {name: there.get(name) for name in old} == old, "no byte written, changing back costs nothing"
        make(stage_of(run_dir, 2), 2)
        made = {path.name: path.read_bytes() for path in stage_of(run_dir, 2).folder.iterdir()}
        assert {name: data for name, data in made.items() if ".tmp-" not in name} == whole
        assert {name: contents(run_dir)[name] for name in old} == old
