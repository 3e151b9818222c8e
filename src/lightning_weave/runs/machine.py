"""Where a stage runs: device, dtype, threads, and which share of the shards is this process's."""

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from lightning_weave import devices
from lightning_weave.config import Recipe
from lightning_weave.ranks import rank, world_size
from lightning_weave.store import Store, read_json, write_json


def set_up(recipe: Recipe, store: Store) -> torch.device:
    """Choose device and threads. A measured thread count is kept with the run, so that its resumes round alike."""
    set_threads(recipe, store)
    return choose_device(recipe)


def set_threads(recipe: Recipe, store: Store) -> None:
    """Set the threads alone, where other machines compute and keep to the same number."""
    torch.set_num_threads(recipe.machine.threads or _kept_threads(store.run_dir / "machine.json"))


def choose_device(recipe: Recipe) -> torch.device:
    """Take the device that the recipe names, or the best there is, with the products that the recipe wants."""
    devices.allow_tf32(recipe.machine.tf32)
    return devices.choose_device(recipe.machine.device)


def my_share(shards: Iterable[int]) -> list[int]:
    """Pick the shards of this rank by their number, so that ranks agree however late each of them looks."""
    return [shard for shard in shards if shard % world_size() == rank()]


def _kept_threads(path: Path) -> int:
    if path.exists():
        return int(read_json(path)["threads"])
    threads = measure_threads()
    write_json(path, {"threads": threads})
    return threads


def measure_threads() -> int:
    """Time a small workload with one thread and with all: on a busy machine one is often several times faster."""
    most = torch.get_num_threads()
    if most == 1:
        return 1
    return min((1, most), key=_seconds_with)


def _seconds_with(threads: int) -> float:
    torch.set_num_threads(threads)
    a = torch.ones(256, 64)
    b = torch.ones(64, 256)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(100):
            torch.log_softmax(a @ b, dim=-1)
        best = min(best, time.perf_counter() - start)
    return best
