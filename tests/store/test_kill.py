"""A store whose writer is killed at any instant opens, verifies and can be finished to the same bytes."""

import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forked import Fault, Forked, Job
from lightning_weave.store import Shard, damaged_files
from lightning_weave.types import Rollouts
from store import writer

KILLS = 50


def faults() -> Iterator[Fault]:
    """Kills when a file is opened for writing or about to be renamed, or a few hundred microseconds later."""
    for number in range(KILLS):
        sweep, place = divmod(number, writer.EVENTS - 2)
        if number < KILLS - 10:
            yield Fault(event=3 + place, delay=(0, 0, 3e-4, 1e-3)[sweep % 4])  # after the first write
        else:
            yield Fault(event=writer.EVENTS - number % 2)  # the manifest is the shortest write: aim at it


def kind(event: str) -> str:
    """Say what an event does to what, such as `shard rename`."""
    action, path = event.split(" ", 1)
    return f"{'manifest' if 'manifest' in Path(path).name else 'shard'} {action}"


@pytest.mark.slow
def test_fifty_kills_lose_nothing_that_was_finished(tmp_path: Path, forked: Forked) -> None:
    undisturbed = writer.write_all(tmp_path / "undisturbed").folder
    expected = {path.name: path.read_bytes() for path in undisturbed.iterdir()}
    fell: Counter[str] = Counter()
    for number, fault in enumerate(faults()):
        folder = tmp_path / "killed" / str(number)
        job = Job(
            [str(folder)],
            "store.writer:write_all",
            counted=rf" {re.escape(str(folder))}/.*(safetensors|manifest)",
            fault=fault,
        )
        ended = forked.run(job)
        assert ended.code == -signal.SIGKILL, ended.said
        assert len(ended.events) > 2, "every kill comes after the first write"
        fell[kind(ended.events[-1])] += 1

        stage = writer.stage_in(folder)
        assert stage.state() in {"partial", "complete"}
        for path in stage.folder.glob("[0-9]*.safetensors"):
            Shard(Rollouts, path).read()  # whole, every row's CRC right
        if stage.manifest() is not None:
            assert damaged_files(stage.folder) == {}
        writer.write_all(folder)
        assert {path.name: path.read_bytes() for path in stage.folder.iterdir()} == expected
    print(f"kills fell in: {dict(fell)}")
    assert min(fell["shard write"], fell["shard rename"]) >= 3
    assert min(fell["manifest write"], fell["manifest rename"]) >= 3
