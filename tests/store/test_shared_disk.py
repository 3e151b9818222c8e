"""Many machines on one disk: equal process ids, files that show late, a last shard that nobody saw, no flock."""

import errno
import fcntl
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.stages import work
from lightning_weave.store import Stage, lock_run, write_atomic
from lightning_weave.store import stage as run
from lightning_weave.types import Rollouts
from store import writer


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def become(rank: int, world: int) -> None:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))

    return become


def hide(path: Path) -> Callable[[], None]:
    """Take a file out of sight; returns what shows it again."""
    aside = path.with_name(f"hidden-{path.name}")
    path.rename(aside)
    return lambda: aside.rename(path) and None


def after_a_look(show: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hidden file show when the code under test pauses for the second time."""
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            show()

    monkeypatch.setattr(time, "sleep", pause)


def test_writers_with_equal_process_ids_do_not_meet(tmp_path: Path) -> None:
    failed = []

    def write(letter: bytes) -> None:
        for _ in range(40):
            try:
                write_atomic(tmp_path / "machine.json", letter * 1000)
            except WeaveError as error:
                failed.append(str(error))

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]  # of one process id
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]
    assert len(set((tmp_path / "machine.json").read_bytes())) == 1


def test_a_temporary_name_tells_the_host_and_ends_with_the_files_own(tmp_path: Path) -> None:
    from lightning_weave.store.files import temporary_name

    names = {temporary_name(tmp_path / "00001.safetensors").name for _ in range(2)}
    host = re.escape(socket.gethostname().partition(".")[0])
    assert len(names) == 2
    assert all(re.fullmatch(rf"\.tmp-{host}-{os.getpid()}-[0-9a-f]+-00001\.safetensors", name) for name in names)


def unfinished(folder: Path) -> Stage:
    """All shards of a stage whose manifest nobody wrote: each rank's last look missed the other's last shard."""
    stage = writer.write_all(folder)
    stage.manifest_path.unlink()
    return stage


def test_a_last_shard_that_no_rank_saw_is_found_by_rank_0(tmp_path: Path, ranks: Callable[[int, int], None]) -> None:
    expected = writer.write_all(tmp_path / "undisturbed").manifest_path.read_bytes()
    stage = unfinished(tmp_path / "shared")
    ranks(0, 2)
    work.wait_for_ranks(stage, Rollouts, writer.SHARDS)
    assert stage.manifest_path.read_bytes() == expected


def test_a_shard_that_shows_late_is_waited_for(
    tmp_path: Path, ranks: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = unfinished(tmp_path)
    ranks(0, 2)
    after_a_look(hide(stage.shard_path(3)), monkeypatch)
    work.wait_for_ranks(stage, Rollouts, writer.SHARDS)
    assert stage.complete


@pytest.mark.parametrize(
    ("rank", "lost", "said"), [(0, 3, "1 shards of rank 1 are missing"), (1, None, "manifest that rank 0 writes")]
)
def test_waiting_for_a_rank_that_is_dead_ends(
    tmp_path: Path,
    ranks: Callable[[int, int], None],
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    lost: int | None,
    said: str,
) -> None:
    stage = unfinished(tmp_path)
    if lost is not None:
        stage.shard_path(lost).unlink()
    ranks(rank, 2)
    monkeypatch.setattr(work, "PATIENCE", 0.2)
    with pytest.raises(WeaveError, match=rf"{said}.*start all ranks again"):
        work.wait_for_ranks(stage, Rollouts, writer.SHARDS)


def test_a_shard_that_the_manifest_lists_is_not_made_again_because_it_shows_late(
    tmp_path: Path, ranks: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = writer.write_all(tmp_path)
    ranks(1, 2)
    after_a_look(hide(stage.shard_path(3)), monkeypatch)
    assert stage.pending(writer.SHARDS) == []


def test_a_shard_that_is_gone_is_made_again_after_the_wait(
    tmp_path: Path, ranks: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = writer.write_all(tmp_path)
    stage.shard_path(3).unlink()
    ranks(1, 2)
    monkeypatch.setattr(run, "LATE", 0.2)
    assert stage.pending(writer.SHARDS) == [3]


def test_what_another_rank_has_just_finished_may_show_late(
    tmp_path: Path, ranks: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = writer.write_all(tmp_path)
    ranks(1, 2)
    after_a_look(hide(stage.manifest_path), monkeypatch)
    assert stage.require()["rows"] == 40 * writer.SHARDS
    stage.manifest_path.unlink()
    monkeypatch.setattr(run, "LATE", 0.0)
    with pytest.raises(InputError, match="not finished"):
        stage.require()


@pytest.fixture(params=[errno.ENOSYS, errno.ENOTSUP])
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system such as Lustre mounted without `-o flock`."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)


@pytest.mark.usefixtures("without_flock")
def test_a_disk_without_flock_is_locked_by_a_file(tmp_path: Path) -> None:
    with (
        lock_run(tmp_path),
        pytest.raises(InputError, match=rf"in use by process {os.getpid()} on .*remove .*\.lock"),
        lock_run(tmp_path),
    ):
        pass
    with lock_run(tmp_path):  # released
        pass


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_the_lock_file_of_a_dead_process_is_taken_over(number: int, tmp_path: Path) -> None:
    code = f"""
import fcntl, os
from pathlib import Path
from lightning_weave.store import lock_run
def refuse(*_): raise OSError({number}, "no flock")
fcntl.flock = refuse
lock = lock_run(Path({str(tmp_path)!r}))
lock.__enter__()
os._exit(0) if {{mode!r}} == "die" else lock.__exit__(None, None, None)
"""
    for mode in ("die", "end"):
        subprocess.run([sys.executable, "-c", code.replace("{mode!r}", repr(mode))], check=True)
