"""Logs and ledgers survive torn lines; a run directory has one writer at a time."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.store import append_line, lock_run, read_lines, write_atomic
from lightning_weave.store.ledger import measure, read_ledger


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, {"step": 1})
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "lo')  # killed in the middle
    append_line(path, {"step": 3})
    assert list(read_lines(path)) == [{"step": 1}, {"step": 3}]


def test_the_ledger_keeps_what_a_failing_stage_spent(tmp_path: Path) -> None:
    def fail() -> None:
        with measure(tmp_path, "score", "klear") as meter:
            meter.add(tokens=100, written=7)
            meter.add(tokens=20)
            raise RuntimeError("died")

    with pytest.raises(RuntimeError):
        fail()
    (row,) = read_ledger(tmp_path)
    assert (row["stage"], row["name"], row["tokens"], row["bytes"]) == ("score", "klear", 120, 7)
    assert row["device_seconds"] >= 0
    assert row["peak_memory"] > 1e6
    assert set(row["versions"]) == {"lightning-weave", "torch", "transformers"}


def test_the_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from lightning_weave.store import lock_run\n"
        "with lock_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(3600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    try:
        with pytest.raises(InputError, match=f"in use by process {holder.pid}"), lock_run(tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with lock_run(tmp_path):  # the kernel let go of it
        pass


def test_a_full_disk_is_said_and_leaves_nothing_half_written(small_disk: Path) -> None:
    write_atomic(small_disk / "kept", b"k" * 1000)
    with pytest.raises(WeaveError, match=r"big: cannot be written .No space left"):
        write_atomic(small_disk / "big", b"x" * 200_000)
    assert [path.name for path in small_disk.iterdir()] == ["kept"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)
