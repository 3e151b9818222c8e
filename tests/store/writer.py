"""Write a stage over and over and be killed in the middle of it; run as a program by test_kill.py.

Each trial forks, and the child is killed by SIGKILL at a planned instant: when a file is opened for writing, a few
microseconds into that write, when it is about to be renamed, or right after. Audit events of the interpreter tell the
child where it is; nothing of the store is replaced. Prints one JSON line per trial.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from lightning_weave.store import Stage, Step, Store
from lightning_weave.types import Ragged, Rollouts

SHARDS = 5
STEP = Step("rollout", {"seed": 42}, (), "lweave rollout r.toml")


def make(index: int) -> Rollouts:
    rng = np.random.default_rng(index)
    rows = [rng.integers(0, 50_000, 3000).astype(np.int32) for _ in range(40)]
    flags = np.zeros(40, dtype=np.uint8)
    return Rollouts(
        np.arange(40, dtype=np.int32), np.zeros(40, dtype=np.int32), flags, Ragged.of(rows), Ragged.of(rows)
    )


def write_all(folder: Path) -> Stage:
    stage = Store(folder).stage(STEP)
    for index in stage.pending(SHARDS):
        stage.write(index, make(index))
    assert stage.finish(Rollouts, SHARDS)
    return stage


def die_at(event_number: int, delay: float, report: int) -> None:
    """Arrange the kill: at the n-th write or rename, `delay` seconds after it began."""
    seen = 0

    def kill() -> None:
        time.sleep(delay)
        os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        writing = event == "open" and str(arguments[1]).startswith("w")
        if not writing and event != "os.rename":
            return
        what = "manifest" if "manifest" in str(arguments[0]) else "shard"
        os.write(report, f"{what} {'write' if writing else 'rename'}\n".encode())
        seen += 1
        if seen == event_number:
            if delay == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Thread(target=kill).start()

    sys.addaudithook(hook)


def trial(folder: Path, event_number: int, delay: float) -> dict[str, object]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        die_at(event_number, delay, write)
        write_all(folder)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        events = pipe.read().splitlines()
    status = os.waitpid(child, 0)[1]
    return {"killed": os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, "events": events}


if __name__ == "__main__":
    root, kills = Path(sys.argv[1]), int(sys.argv[2])
    events = 2 * (SHARDS + 1)  # a write and a rename for each shard and for the manifest
    for number in range(kills):
        sweep, place = divmod(number, events - 2)
        delay = (0, 0, 3e-4, 1e-3)[sweep % 4]
        event_number = 3 + place  # after the first write
        if number >= kills - 10:
            event_number, delay = events - number % 2, 0  # the manifest is the shortest write: aim at it
        outcome = trial(root / str(number), event_number, delay)
        print(json.dumps({"folder": str(root / str(number)), **outcome}), flush=True)
