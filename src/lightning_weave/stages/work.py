"""Jobs: a stage says how its shards are computed; this process, one of several ranks or a cluster computes them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_weave import devices
from lightning_weave.config import Recipe
from lightning_weave.directory import MACHINE, kept_threads
from lightning_weave.errors import WeaveError
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_main_process, is_single_process, rank, world_size
from lightning_weave.run import Run
from lightning_weave.store import Stage, write_json
from lightning_weave.store.ledger import Meter, measure

PATIENCE = 2 * 3600.0  # seconds without a new shard after which the other ranks are taken for dead
LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class ShardStats:
    """What one shard took."""

    tokens: int
    written: int = 0


# Computes shards with one loaded model, in any order; each is written when its statistics are yielded. Where its job
# has several shards at once, several threads may call it.
ComputeShards = Callable[[Sequence[int]], Iterator[ShardStats]]


@dataclass(frozen=True)
class Job:
    """The pending shards of one stage, and how to load what computes them, in this process or in another."""

    path: str  # of the stage, below the run directory
    pending: Sequence[int]
    open: Callable[[Run], AbstractContextManager[ComputeShards]]
    unit: str = "shard"
    fingerprint: str = ""  # of the stage, for the ledger
    devices: int = 1  # that one worker computes on
    at_once: int = 1  # shards that a worker of a cluster computes at a time, so that its engine never runs dry
    finish: Callable[[], object] = lambda: None  # when all of its shards are there

    @property
    def label(self) -> str:
        return self.path.replace("/", " ", 1)

    def measure(self, run: Run) -> AbstractContextManager[Meter]:
        """Write what its shards cost to the ledger of the run."""
        kind, _, name = self.path.partition("/")
        return measure(run.directory, kind, name, fingerprint=self.fingerprint)


RankWork = Callable[[Run, Progress], None]  # what every rank does


@dataclass(frozen=True)
class Executor:
    """Where the shards of jobs are computed, and where students are trained."""

    run_jobs: Callable[[Sequence[Job], Run, Progress], None]
    train: Callable[[RankWork, Run, Progress], None] | None = None  # None: this process


def run_jobs(jobs: Sequence[Job], run: Run, progress: Progress) -> None:
    """Compute this rank's share of the shards in this process, job after job."""
    for job in jobs:
        # By number, so that ranks agree on their shares however late each of them looks.
        if pending := [shard for shard in job.pending if shard % world_size() == rank()]:
            with job.measure(run) as meter, progress.bar(job.label, len(pending), job.unit) as bar:
                meter.devices = job.devices
                with job.open(run) as compute_shards:
                    meter.flush()  # so that a stage whose last shard is there has a row, whenever it is killed
                    for stats in compute_shards(pending):
                        meter.add(tokens=stats.tokens, written=stats.written)
                        bar.advance()
                del compute_shards  # with its model, before the next one is loaded
        job.finish()


LOCAL = Executor(run_jobs)


def wait_for_ranks(stage: Stage, kind: type[Any], shards: int) -> None:
    """Wait for the other ranks' shards. Rank 0 writes the manifest as soon as it sees them all; ranks meet on disk."""
    missing = list(range(shards))
    since = time.monotonic()
    pause = 0.1
    while not is_single_process() and not stage.complete:
        before = missing
        missing = stage.missing(missing)
        if not missing and is_main_process():
            stage.finish(kind, shards)
            continue
        if missing != before:
            since = time.monotonic()
        if time.monotonic() - since > PATIENCE:
            ranks = ", ".join(str(number) for number in sorted({shard % world_size() for shard in missing}))
            lacks = f"{len(missing)} shards of rank {ranks} are" if missing else "the manifest that rank 0 writes is"
            raise WeaveError(
                f"{stage.folder}: nothing new for {PATIENCE / 3600:g} hours, and {lacks} missing. See what stopped "
                "there, then start all ranks again: what is finished is kept"
            )
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE)


def set_up(run: Run) -> torch.device:
    """Choose threads and device."""
    set_threads(run)
    return choose_device(run.recipe)


def set_threads(run: Run) -> None:
    """Choose the threads: one or all, whichever is faster for a small workload; on a busy machine one often is.

    A measured count is kept with the run, so that its resumes round alike.
    """
    chosen = run.recipe.machine.threads or kept_threads(run)
    if chosen is None:
        seconds = {}
        a, b = torch.ones(256, 64), torch.ones(64, 256)
        for threads in (1, torch.get_num_threads()):
            torch.set_num_threads(threads)
            seconds[threads] = float("inf")
            for _ in range(5):
                start = time.perf_counter()
                for _ in range(100):
                    torch.log_softmax(a @ b, dim=-1)
                seconds[threads] = min(seconds[threads], time.perf_counter() - start)
        chosen = min(seconds, key=lambda threads: seconds[threads])
        write_json(run.directory / MACHINE, {"threads": chosen})
    torch.set_num_threads(chosen)


def choose_device(recipe: Recipe) -> torch.device:
    """Take the device that the recipe names, or the best there is, with the matmul precision that the recipe wants."""
    devices.allow_tf32(recipe.machine.tf32)
    return devices.choose_device(recipe.machine.device)
