"""What the work of a stage is booked as: the seconds of every device that its engine takes."""

import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_weave.config import check_recipe
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import rollout, work
from lightning_weave.stages.work import Job, ShardStats, run_jobs
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
    recipe = {"name": "r", "student": {"model": "s"}, "engine": {"rollout": engine, "options": options}}
    section = check_recipe(recipe).engine_of("rollout")
    assert rollout.gpus_of(section) == devices
    meter = SimpleNamespace(add=lambda **counts: None, flush=lambda: None, devices=1)

    @contextmanager
    def measure(*arguments: Any, **extra: Any) -> Any:
        yield meter

    monkeypatch.setattr(work, "measure", measure)
    compute = nullcontext(lambda shards: iter([ShardStats(1) for _ in shards]))
    job = Job("rollout", [0], lambda run: compute, devices=rollout.gpus_of(section))
    run_jobs([job], Run(check_recipe(recipe)), Progress(quiet=True))
    assert meter.devices == devices


def test_seconds_are_those_of_every_device(tmp_path: Path) -> None:
    Meter(tmp_path / "ledger.jsonl", "rollout", "", devices=4, _since=time.monotonic() - 100).flush()
    (row,) = read_ledger(tmp_path)
    assert row["device_seconds"] >= 400
