"""Shards give back what was written, row by row, and notice every flipped byte."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_weave.errors import CorruptData, InputError
from lightning_weave.store import MANIFEST, Shard, Stage, damaged_files, differences, read_checked, write_checked
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
    return Stage(folder, "rollout", settings, (), "lweave rollout r.toml")


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
        assert damaged_files(stage.folder) == {path: "is damaged (its sha256 is not the manifest's)"}
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
    assert damaged_files(stage.folder) == {}
    path.unlink()
    assert damaged_files(stage.folder) == {path: "is missing"}


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
    assert stage.complete
    whole = stage.shard_path(1).read_bytes()
    for keep in (0, 5, 8, 60, len(whole) - 1):
        stage.shard_path(1).write_bytes(whole[:keep])
        assert stage.state() == "partial"
        assert stage.pending(3) == [1]
        with pytest.raises(CorruptData):
            Shard(Rollouts, stage.shard_path(1)).read()
    stage.write(1, make_rollouts(4, 1))
    assert stage.shard_path(1).read_bytes() == whole


def test_a_shard_with_something_after_its_last_tensor_is_pending_again(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    stage.write(0, make_rollouts(4))
    path = stage.shard_path(0)
    path.write_bytes(path.read_bytes() + b"\0")
    assert stage.pending(1) == [0]
    with pytest.raises(CorruptData, match="something follows its last tensor"):
        stage.open(Rollouts, 0)


def write_all(stage: Stage, shards: int = 1) -> Stage:
    stage.begin()
    for index in stage.pending(shards):
        stage.write(index, make_rollouts(4, index))
    assert stage.finish(Rollouts, shards)
    return stage


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder, with what is in it and when it was written."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_a_folder_is_named_by_its_content_and_the_plain_name_leads_to_it(tmp_path: Path) -> None:
    stage = make_stage(tmp_path, seed=42)
    assert stage.folder == tmp_path / f"rollout@{stage.fingerprint[:8]}"
    stage.begin()
    link = tmp_path / "rollout"
    assert os.readlink(link) == stage.folder.name, "relative: the run may be moved"
    assert stage.state() == "missing", "begun, but nothing is in it"
    write_all(stage)
    assert stage.complete
    assert (link / MANIFEST).is_file()
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    assert make_stage(moved, seed=42).complete
    assert (moved / "rollout" / MANIFEST).is_file()
    moved.rename(tmp_path)


def test_changed_settings_compute_another_folder_and_leave_every_byte_of_the_old_one(tmp_path: Path) -> None:
    first = write_all(make_stage(tmp_path, temperature=1.0, seed=42), 3)
    before = contents(tmp_path)
    changed = make_stage(tmp_path, temperature=0.8, seed=42)
    assert changed.state() == "missing"
    assert changed.pending(1) == [0]
    with pytest.raises(InputError, match=r"rollout is not there yet\. Make it with: lweave rollout r\.toml"):
        changed.require()
    with pytest.raises(CorruptData, match=r"is missing\. Rerun: lweave rollout r\.toml"):
        changed.open(Rollouts, 0)
    write_all(changed)
    assert changed.complete
    assert first.complete
    assert {name: entry for name, entry in contents(tmp_path).items() if name in before} == before
    assert [path.name for path in changed.folder.glob("*.safetensors")] == ["00000.safetensors"]
    assert (tmp_path / "rollout").resolve() == changed.folder.resolve()


def test_changing_back_writes_nothing_but_the_link(tmp_path: Path) -> None:
    first = write_all(make_stage(tmp_path, seed=42))
    changed = write_all(make_stage(tmp_path, seed=43))
    before = contents(tmp_path)
    write_all(make_stage(tmp_path, seed=42))
    assert contents(tmp_path) == before
    assert (tmp_path / "rollout").resolve() == first.folder.resolve()
    assert [stage.folder for stage in first.siblings()] == [changed.folder]


def test_siblings_are_the_other_complete_folders_newest_first(tmp_path: Path) -> None:
    stages = [write_all(make_stage(tmp_path, seed=seed)) for seed in range(3)]
    for age, stage in enumerate(stages):
        os.utime(stage.manifest_path, ns=(0, (100 - age) * 10**9))
    make_stage(tmp_path, seed=9).begin()  # neither begun nor unfinished ones count
    make_stage(tmp_path, seed=10).write(0, make_rollouts(4))
    stages[1].shard_path(0).unlink()
    wanted = make_stage(tmp_path, seed=11)
    assert [one.folder for one in wanted.siblings()] == [stages[0].folder, stages[2].folder]
    assert [one.settings for one in wanted.siblings()] == [{"seed": 0}, {"seed": 2}]
    assert [one.require()["fingerprint"] for one in wanted.siblings()] == [stages[n].fingerprint for n in (0, 2)]
    other = Stage(tmp_path, "rollouts", {"seed": 1})
    assert other.siblings() == [], "a name that begins alike is another"


def test_the_same_content_under_another_name_is_found_there(tmp_path: Path) -> None:
    old = write_all(Stage(tmp_path, "train/old", {"seed": 1}))
    before = contents(tmp_path)
    new = Stage(tmp_path, "train/new", {"seed": 1})
    assert (new.folder, new.complete) == (old.folder, True)
    write_all(new)
    assert contents(tmp_path) == before
    assert (tmp_path / "train" / "new").resolve() == old.folder.resolve()


def test_names_that_mean_nothing_are_not_hashed(tmp_path: Path) -> None:
    one = Stage(tmp_path, "train/a", {"weights": {"x": 1.0}}, key={"weights": [1.0]}, definition={"x": 1})
    two = Stage(tmp_path, "train/b", {"weights": {"y": 1.0}}, key={"weights": [1.0]}, definition={"y": 1})
    assert one.fingerprint == two.fingerprint
    assert write_all(one).require()["definition"] == {"x": 1}
    assert two.require()["settings"] == {"weights": {"x": 1.0}}, "as it was computed"


def test_a_file_system_without_symlinks_lacks_only_the_plain_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError("Operation not supported")

    monkeypatch.setattr(os, "symlink", refuse)
    stage = write_all(make_stage(tmp_path, seed=42))
    assert stage.complete
    changed = write_all(make_stage(tmp_path, seed=43))
    assert [one.folder for one in stage.siblings()] == [changed.folder]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([stage.folder.name, changed.folder.name])


def test_a_folder_in_the_place_of_the_link_is_left_alone(tmp_path: Path) -> None:
    """As a copy that followed the links has it."""
    stage = write_all(make_stage(tmp_path / "run", seed=42))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    before = contents(tmp_path / "copy")
    assert make_stage(tmp_path / "copy", seed=42).complete
    changed = write_all(make_stage(tmp_path / "copy", seed=43))
    assert changed.complete
    assert {name: entry for name, entry in contents(tmp_path / "copy").items() if name in before} == before
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == sorted(
        ["rollout", stage.folder.name, changed.folder.name]
    )


def test_a_change_deep_in_the_settings_is_named_alone() -> None:
    old = {"train": {"rate": 0.1, "betas": [0.9, 0.95]}, "anchors": {"a": {"bos": False}}, "model": "0" * 64}
    new = {"train": {"rate": 0.2, "betas": [0.9, 0.95]}, "anchors": {"a": {"bos": False}, "b": {"bos": True}}}
    assert list(differences(old, {**new, "model": "1" * 64})) == [
        ("anchors.b", "is new"),
        ("model", "has changed"),
        ("train.rate", "0.1 -> 0.2"),
    ]
    assert list(differences(new, {**new, "anchors": {}, "engine": "vllm"})) == [
        ("anchors.a", "is gone"),
        ("anchors.b", "is gone"),
        ("engine", "unset -> vllm"),
    ]


def test_a_changed_input_gives_everything_after_it_another_folder(tmp_path: Path) -> None:
    def after(temperature: float) -> Stage:
        rollout = Stage(tmp_path, "rollout", {"temperature": temperature})
        return Stage(tmp_path, "reference", {"candidates": 16}, (rollout,), "lweave reference r.toml")

    first = write_all(after(1.0))
    later = after(0.5)
    assert later.folder != first.folder
    with pytest.raises(InputError, match=r"reference is not there yet\. Make it with: lweave reference r\.toml"):
        later.require()
    assert after(1.0).complete


def test_shards_of_another_stage_are_neither_taken_nor_read(tmp_path: Path) -> None:
    first = write_all(make_stage(tmp_path, seed=42))
    other = make_stage(tmp_path, seed=43)
    other.begin()
    shutil.copy(first.shard_path(0), other.shard_path(0))
    assert other.pending(1) == [0]
    with pytest.raises(CorruptData, match=r"belongs to another stage\. Remove it, then run: lweave rollout r\.toml"):
        other.open(Rollouts, 0)


def test_an_unfinished_stage_has_no_manifest(tmp_path: Path) -> None:
    stage = make_stage(tmp_path)
    assert stage.state() == "missing"
    stage.write(0, make_rollouts(4))
    assert not stage.finish(Rollouts, 2)
    assert (stage.state(), stage.pending(2)) == ("partial", [1])
    with pytest.raises(InputError, match="not finished"):
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
    whole = read_checked(stage.manifest_path)
    stage.manifest_path.write_text('{"fingerprint": ')
    with pytest.raises(CorruptData, match=r"manifest\.json"):
        stage.require()
    (shard,) = whole["shards"]
    listed: list[Any] = [None, 3, [3], [{}]]  # of a run that others have written, with a checksum that is right
    listed += [[{**shard, **wrong}] for wrong in ({"file": 3}, {"file": "../x"}, {"file": "a\0b"}, {"rows": "x"})]
    for entries in listed:
        write_checked(stage.manifest_path, {**whole, "shards": entries})
        with pytest.raises(CorruptData, match=r"manifest\.json"):
            stage.require()
    for missing in ("fingerprint", "settings", "inputs", "shards"):
        write_checked(stage.manifest_path, {key: value for key, value in whole.items() if key != missing})
        with pytest.raises(CorruptData, match=r"manifest\.json"):
            stage.require()


def test_trajectories_are_told_apart() -> None:
    rows = make_rollouts(40)
    assert len(set(rows.trajectories().tolist())) == 40
