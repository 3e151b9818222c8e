"""Shards give back what was written, row by row, and notice every flipped byte."""

from pathlib import Path

import numpy as np
import pytest

from lightning_weave.errors import CorruptData, StaleInput
from lightning_weave.store import Shard, Stage, Step, Store
from lightning_weave.types import Ragged, Rollouts


def make_rollouts(rows: int, seed: int = 0) -> Rollouts:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 9, size=(2, rows))
    lengths[1, 0] = 0  # an empty response keeps its place
    return Rollouts(
        prompt_R=np.arange(rows, dtype=np.int32),
        response_R=rng.integers(0, 4, rows).astype(np.int32),
        finish_R=rng.integers(0, 2, rows).astype(np.uint8),
        prompt_ids=Ragged.of([rng.integers(0, 9999, n).astype(np.int32) for n in lengths[0]]),
        response_ids=Ragged.of([rng.integers(0, 9999, n).astype(np.int32) for n in lengths[1]]),
    )


def make_stage(folder: Path, **settings: object) -> Stage:
    return Store(folder).stage(Step("rollout", settings, (), "lweave rollout r.toml"))


def test_rows_and_ranges_come_back_as_written(tmp_path: Path) -> None:
    stage, written = make_stage(tmp_path), make_rollouts(7)
    stage.write(0, written)
    shard = stage.open(Rollouts, 0)
    assert len(shard) == 7
    for start, stop in ((0, 7), (0, 1), (3, 5), (6, 7), (4, 4)):
        read = shard.read(start, stop)
        np.testing.assert_array_equal(read.prompt_R, written.prompt_R[start:stop])
        for row in range(start, stop):
            np.testing.assert_array_equal(read.prompt_ids[row - start], written.prompt_ids[row])
            np.testing.assert_array_equal(read.response_ids[row - start], written.response_ids[row])
    with pytest.raises(IndexError):
        shard.read(3, 8)


def test_reading_a_row_does_not_read_the_shard(tmp_path: Path) -> None:
    """Rows are views of the map: nothing was copied, so nothing else was touched."""
    stage = make_stage(tmp_path)
    stage.write(0, make_rollouts(50))
    read = stage.open(Rollouts, 0).read(20, 21)
    assert not read.response_ids.flat.flags.owndata
    assert not read.response_ids.flat.flags.writeable


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    """By `verify` in any place of the file; on reading, in the row that it hits and in no other."""
    stage, rows = make_stage(tmp_path), 4
    stage.write(0, make_rollouts(rows))
    assert stage.finish(Rollouts, 1)
    path = stage.shard_path(0)
    whole = path.read_bytes()
    undisturbed = [stage.open(Rollouts, 0).read(row, row + 1) for row in range(rows)]
    rows_hit = 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :])
        (problem,) = stage.verify()
        assert str(path) in problem
        assert "lweave rollout r.toml" in problem
        try:
            shard = Shard(Rollouts, path)
        except CorruptData:
            continue
        for row in range(rows):
            try:
                read = shard.read(row, row + 1)
            except CorruptData:
                rows_hit += 1
                continue
            for name in ("prompt_ids", "response_ids"):
                np.testing.assert_array_equal(getattr(read, name)[0], getattr(undisturbed[row], name)[0])
            assert read.finish_R == undisturbed[row].finish_R
    assert rows_hit > 100
    path.write_bytes(whole)
    assert stage.verify() == []


def test_a_damaged_row_is_named_with_file_and_remedy(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.write(0, make_rollouts(4))
    path = stage.shard_path(0)
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptData, match=rf"{path}: row \d is damaged .* Remove it \(rm {path}\)"):
        stage.open(Rollouts, 0).read()


def test_cut_off_shards_are_pending_again(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    for index in range(3):
        stage.write(index, make_rollouts(4, index))
    assert stage.finish(Rollouts, 3)
    assert stage.state() == "done"
    whole = stage.shard_path(1).read_bytes()
    for keep in (0, 5, 8, 60, len(whole) - 1):
        stage.shard_path(1).write_bytes(whole[:keep])
        assert stage.state() == "partial"
        assert stage.pending(3) == [1]
        with pytest.raises(CorruptData):
            Shard(Rollouts, stage.shard_path(1)).read()
    stage.write(1, make_rollouts(4, 1))
    assert stage.shard_path(1).read_bytes() == whole


def test_changed_settings_make_a_stage_stale_and_say_which(tmp_path: Path) -> None:
    first = make_stage(tmp_path, temperature=1.0, seed=42)
    first.write(0, make_rollouts(4))
    assert first.finish(Rollouts, 1)
    changed = make_stage(tmp_path, temperature=0.8, seed=42)
    assert changed.state() == "stale"
    with pytest.raises(StaleInput, match=r"temperature 1.0 -> 0.8") as raised:
        changed.require()
    assert "lweave rollout r.toml" in str(raised.value)
    with pytest.raises(StaleInput):
        changed.open(Rollouts, 0)
    assert changed.pending(1) == [0]
    changed.write(0, make_rollouts(4))
    assert changed.finish(Rollouts, 1)
    assert changed.state() == "done"


def test_a_finished_stage_stays_so_until_something_else_is_written(tmp_path: Path) -> None:
    first = make_stage(tmp_path, seed=42)
    first.write(0, make_rollouts(4))
    assert first.finish(Rollouts, 1)
    changed = make_stage(tmp_path, seed=43)
    assert changed.pending(1) == [0]
    assert first.state() == "done", "looking is not touching"
    changed.write(0, make_rollouts(4))
    assert first.state() != "done"


def test_a_change_deep_in_the_settings_is_named_alone(tmp_path: Path) -> None:
    old = {"train": {"rate": 0.1, "betas": [0.9, 0.95]}, "anchors": {"a": {"bos": False}}}
    stage = make_stage(tmp_path, **old)
    stage.write(0, make_rollouts(4))
    assert stage.finish(Rollouts, 1)
    new = {"train": {"rate": 0.2, "betas": [0.9, 0.95]}, "anchors": {"a": {"bos": False}, "b": {"bos": True}}}
    assert make_stage(tmp_path, **new).changed_settings() == [
        "anchors.b is new",
        "train.rate 0.1 -> 0.2",
    ]


def test_a_changed_input_makes_everything_after_it_stale(tmp_path: Path) -> None:
    def chain(temperature: float) -> tuple[Step, Step]:
        rollout = Step("rollout", {"temperature": temperature})
        return rollout, Step("reference", {"candidates": 16}, (rollout,), "lweave reference r.toml")

    stage = Store(tmp_path).stage(chain(1.0)[1])
    stage.write(0, make_rollouts(4))
    assert stage.finish(Rollouts, 1)
    later = Store(tmp_path).stage(chain(0.5)[1])
    with pytest.raises(StaleInput, match="rollout has changed"):
        later.require()


def test_shards_of_a_larger_recipe_are_cleared_away(tmp_path: Path) -> None:
    old = make_stage(tmp_path, take=3)
    for index in range(3):
        old.write(index, make_rollouts(4, index))
    assert old.finish(Rollouts, 3)
    new = make_stage(tmp_path, take=1)
    assert new.pending(1) == [0]
    new.write(0, make_rollouts(4))
    assert new.finish(Rollouts, 1)
    assert [path.name for path in new.folder.glob("*.safetensors")] == ["00000.safetensors"]


def test_an_unfinished_stage_has_no_manifest(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    assert stage.state() == "missing"
    stage.write(0, make_rollouts(4))
    assert not stage.finish(Rollouts, 2)
    assert (stage.state(), stage.pending(2)) == ("partial", [1])
    with pytest.raises(StaleInput, match="not finished"):
        stage.require()


def test_the_manifest_counts_rows_and_decisions(tmp_path: Path) -> None:
    stage, written = make_stage(tmp_path), make_rollouts(7)
    stage.write(0, written)
    assert stage.finish(Rollouts, 1)
    manifest = stage.require()
    assert (manifest["rows"], manifest["positions"]) == (7, len(written.response_ids.flat))


def test_a_broken_manifest_is_named(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.write(0, make_rollouts(4))
    assert stage.finish(Rollouts, 1)
    stage.manifest_path.write_text('{"fingerprint": ')
    with pytest.raises(CorruptData, match=r"manifest\.json"):
        stage.require()


def test_trajectories_are_told_apart() -> None:
    rows = make_rollouts(40)
    assert len(set(rows.trajectories().tolist())) == 40
