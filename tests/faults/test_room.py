"""No room on the disk, a run directory that may not be written, no memory: said in a line, nothing finished is lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from faults.conftest import VERBS, Lab, Tally
from forked import Fault

LWEAVE = Path(sys.executable).with_name("lweave")
# In a mount namespace of its own: a small disk at runs/, the command, then a larger or a writable one, and once more.
SCRIPT = """
set -u
mount -t tmpfs -o size=64m tmpfs runs
cp -a "$BEFORE/runs/." runs/
mount -o remount,$FIRST runs
"$LWEAVE" $VERB r.toml > first.txt 2>&1
echo $? > first.code
mount -o remount,rw,size=64m runs
"$LWEAVE" $VERB r.toml > second.txt 2>&1
echo $? > second.code
cp -a runs/. out/
"""
can_mount = subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
needs_mount = pytest.mark.skipif(not can_mount, reason="this user may not make a mount namespace (unshare -rm)")


def on_a_small_disk(lab: Lab, name: str, verb: str, first: str) -> str:
    """Run a verb twice, at first under hardship; returns what the first said."""
    folder = lab.root / name
    for part in ("runs", "out"):
        (folder / part).mkdir(parents=True)
    lab.write(name)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "BEFORE": str(lab.root / f"before-{verb}"),
        "LWEAVE": str(LWEAVE),
        "VERB": verb,
        "FIRST": first,
    }
    if not (lab.root / f"before-{verb}" / "runs").exists():
        (lab.root / f"before-{verb}" / "runs").mkdir()
    subprocess.run(["unshare", "-rm", "sh", "-c", SCRIPT], cwd=folder, env=environment, check=True)
    assert (folder / "second.code").read_text().strip() == "0", (folder / "second.txt").read_text()
    (folder / "runs").rmdir()
    shutil.move(folder / "out", folder / "runs")
    assert lab.contents(name) == lab.contents(f"after-{verb}")
    said = (folder / "first.txt").read_text()
    assert (folder / "first.code").read_text().strip() == "1", said
    assert "Traceback" not in said
    return said


def used(folder: Path) -> int:
    """What a folder takes on a disk of 4 KiB pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())


@needs_mount
@pytest.mark.parametrize("verb", ["rollout", "score", "train", "eval"])
def test_a_full_disk_is_said_and_what_was_finished_stays(lab: Lab, tally: Tally, verb: str) -> None:
    before, after = used(lab.root / f"before-{verb}" / "runs"), used(lab.root / f"after-{verb}" / "runs")
    said = on_a_small_disk(lab, f"full-{verb}", verb, f"size={(before + (after - before) // 2) // 1024}k")
    assert "No space left on device" in said
    tally.survived["disk full"] += 1


SIZES = """
set -u
for size in $SIZES; do
    mount -t tmpfs -o size=64m tmpfs runs
    cp -a "$BEFORE/runs/." runs/
    mount -o remount,size=$size runs
    "$LWEAVE" $VERB r.toml > $size.txt 2>&1
    echo $? > $size.code
    umount runs
done
"""


@needs_mount
@pytest.mark.parametrize("verb", ["train", "report"])
def test_a_full_disk_is_named_as_the_reason_wherever_it_fills_up(lab: Lab, tally: Tally, verb: str) -> None:
    before, after = (lab.root / name / "runs" for name in ("before-train", "after-eval"))
    before = after if verb == "report" else before
    folder = lab.root / f"sizes-{verb}"
    (folder / "runs").mkdir(parents=True)
    lab.write(folder.name)
    room = 1 << 20 if verb == "report" else used(after) - used(before)
    parts = [0.02, 0.1, 0.25, 0.4, 0.6] if verb == "train" else [0.005, 0.1]
    sizes = [f"{(used(before) + int(part * room)) // 1024}k" for part in parts]
    own = {"BEFORE": str(before.parent), "LWEAVE": str(LWEAVE), "VERB": verb, "SIZES": " ".join(sizes)}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **own}
    subprocess.run(["unshare", "-rm", "sh", "-c", SIZES], cwd=folder, env=environment, check=True)
    for size in sizes:
        said = (folder / f"{size}.txt").read_text()
        assert (folder / f"{size}.code").read_text().strip() == "1", (size, said)
        assert "No space left on device" in said, (size, said)
        assert "Traceback" not in said, (size, said)
        tally.refused["disk full"] += 1


@needs_mount
@pytest.mark.parametrize("verb", ["reference", "train"])
def test_a_read_only_run_is_said(lab: Lab, tally: Tally, verb: str) -> None:
    said = on_a_small_disk(lab, f"readonly-{verb}", verb, "ro")
    assert "runs/tiny" in said
    assert "Read-only file system" in said
    tally.refused["run directory read-only"] += 1


@pytest.mark.parametrize("verb", VERBS)
def test_a_process_that_dies_of_memory_loses_nothing(lab: Lab, tally: Tally, verb: str) -> None:
    """After its third write it gets no more: the interpreter itself may abort, wherever it stands."""
    name = lab.copy(f"memory-{verb}", f"before-{verb}")
    ended = lab.lweave(name, verb, fault=Fault("memory", event=3, bytes=1 << 16))
    print(f"lweave {verb} without memory ended with {ended.code}: {ended.said[-200:]}")
    again = lab.lweave(name, verb)
    assert again.code == 0, again.said
    found, expected = lab.contents(name), lab.contents(f"after-{verb}")
    assert found.keys() == expected.keys()
    for file in found:
        if file.endswith(".safetensors"):
            _check_close(lab.folder(name) / file, lab.folder(f"after-{verb}") / file)
    tally.survived["death by memory"] += 1


def _check_close(one: Path, other: Path) -> None:
    """Equal up to rounding: batches may have been halved."""
    found, expected = load_file(one), load_file(other)
    for key in expected.keys() - {"row_crc"}:
        np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)
