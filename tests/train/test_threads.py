"""Threads of a trainer make its device current: otherwise each rank would also take memory on the first GPU."""

import sys
import threading
from pathlib import Path

import pytest
import torch

from lightning_weave.progress import Progress
from lightning_weave.stages.train import train
from train.cached import make_run


def test_every_thread_of_a_training_sets_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, train={"checkpoint_every": 1, "validation": 0.2, "epochs": 1})
    started: set[str] = set()
    ready: dict[str, torch.device] = {}
    start = threading.Thread.start

    def noting(thread: threading.Thread) -> None:
        started.add(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noting)
    for name in [name for name in sys.modules if name.startswith("lightning_weave.")]:
        if hasattr(sys.modules[name], "set_device"):
            monkeypatch.setattr(
                sys.modules[name],
                "set_device",
                lambda device: ready.setdefault(threading.current_thread().name, device),
            )
    train(run, Progress(quiet=True))
    assert {name.partition("_")[0] for name in started} == {"read-ahead", "checkpoint"}
    assert ready == dict.fromkeys(started, torch.device("cpu"))
