"""What the work of a stage is booked as: the seconds of every device that its engine takes."""

import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_weave.config import check_recipe
from lightning_weave.pipeline import rollout
from lightning_weave.progress import Progress
from lightning_weave.runs import work
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Job, do_here
from lightning_weave.store.ledger import Meter, read_ledger


@pytest.mark.parametrize(
    ("engine", "options", "devices"),
    [
        ("vllm", {"tensor_parallel_size": 2}, 2),
        ("vllm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ("vllm", {}, 1),
        ("hf", {}, 1),
    ],
)
def test_all_gpus_of_an_engine_are_counted(
    monkeypatch: pytest.MonkeyPatch, engine: str, options: dict[str, int], devices: int
) -> None:
    recipe = {"name": "r", "student": {"model": "s"}, "rollout": {"engine": engine, "options": options}}
    section = check_recipe(recipe).rollout
    assert rollout.gpus_of(section) == devices
    meter = SimpleNamespace(add=lambda **counts: None, devices=1)

    @contextmanager
    def measure(*arguments: Any, **extra: Any) -> Any:
        yield meter

    monkeypatch.setattr(work, "measure", measure)
    worker = SimpleNamespace(make=lambda shards: [work.Made(1) for _ in shards], close=lambda: None)
    job = Job("rollout", "", "shard", [0], lambda steps: worker, devices=rollout.gpus_of(section))
    do_here([job], Steps(check_recipe(recipe)), Progress(quiet=True))
    assert meter.devices == devices


def test_seconds_are_those_of_every_device(tmp_path: Path) -> None:
    Meter(tmp_path / "ledger.jsonl", "rollout", "", devices=4, _since=time.monotonic() - 100).flush()
    (row,) = read_ledger(tmp_path)
    assert row["device_seconds"] >= 400
