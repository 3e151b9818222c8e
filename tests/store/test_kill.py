"""A store whose writer is killed at any instant opens, verifies and can be finished to the same bytes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lightning_weave.store import Shard, Store
from lightning_weave.types import Rollouts

WRITER = Path(__file__).with_name("writer.py")
KILLS = 50


@pytest.mark.slow
def test_fifty_kills_lose_nothing_that_was_finished(tmp_path: Path) -> None:
    sys.path.insert(0, str(WRITER.parent))
    try:
        import writer
    finally:
        sys.path.pop(0)
    undisturbed = writer.write_all(tmp_path / "undisturbed").folder
    expected = {path.name: path.read_bytes() for path in undisturbed.iterdir()}

    command = [sys.executable, str(WRITER), str(tmp_path / "killed"), str(KILLS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    trials = [json.loads(line) for line in output.splitlines()]
    fell = Counter(trial["events"][-1] for trial in trials if trial["killed"])
    print(f"kills fell in: {dict(fell)}")
    assert fell.total() >= KILLS - 5, "a delayed kill may come after the last event, not more"
    assert all(len(trial["events"]) > 2 for trial in trials), "every kill comes after the first write"
    assert min(fell["shard write"], fell["shard rename"]) >= 3
    assert min(fell["manifest write"], fell["manifest rename"]) >= 3

    for trial in trials:
        stage = Store(Path(trial["folder"])).stage(writer.STEP)
        assert stage.state() in {"partial", "done"}
        for path in stage.folder.glob("[0-9]*.safetensors"):
            Shard(Rollouts, path).read()  # whole, every row's CRC right
        if stage.manifest() is not None:
            assert stage.verify() == []
        writer.write_all(Path(trial["folder"]))
        assert {path.name: path.read_bytes() for path in stage.folder.iterdir()} == expected
