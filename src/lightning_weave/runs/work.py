"""Units of work: a stage says how a shard is made or a student trained; this process, a rank or a cluster does it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_weave.errors import WeaveError
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_alone, is_first, world_size
from lightning_weave.runs.machine import my_share
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import measure

PATIENCE = 2 * 3600.0  # seconds without a new shard after which the other ranks are taken for dead
LONGEST_PAUSE = 5.0


@dataclass(frozen=True)
class Made:
    """What one shard took."""

    tokens: int
    written: int = 0


class Worker(Protocol):
    """Holds one model and makes shards with it, in any order, each whole and written when it is yielded.

    Where its job has several shards at once, several threads may call `make`.
    """

    def make(self, shards: Sequence[int]) -> Iterator[Made]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """The pending shards of one step, and how to open a worker for them, in this process or in another."""

    stage: str
    name: str  # of the model or policy; empty where a stage has only one
    unit: str
    pending: Sequence[int]
    open: Callable[[Steps], Worker]
    fingerprint: str = ""  # of the step, for the ledger
    devices: int = 1  # that one worker computes on
    at_once: int = 1  # shards that a worker of a cluster makes at a time, so that its engine is never out of requests
    finish: Callable[[], object] = lambda: None  # when all of its shards are there

    @property
    def label(self) -> str:
        return f"{self.stage} {self.name}".strip()


Do = Callable[[Sequence[Job], Steps, Progress], None]
RankWork = Callable[[Steps, Progress], None]  # what every rank does


@dataclass(frozen=True)
class Workers:
    """Who makes the shards of jobs, and who trains."""

    do: Do
    train: Callable[[RankWork, Steps, Progress], None]


def do_here(jobs: Sequence[Job], steps: Steps, progress: Progress) -> None:
    """Make this rank's share of the shards in this process, job after job."""
    for job in jobs:
        _make_share(job, steps, progress)
        job.finish()


def train_here(work: RankWork, steps: Steps, progress: Progress) -> None:
    """Train in this process."""
    work(steps, progress)


HERE = Workers(do_here, train_here)


def _make_share(job: Job, steps: Steps, progress: Progress) -> None:
    pending = my_share(job.pending)
    if not pending:
        return
    with (
        measure(steps.store.run_dir, job.stage, job.name, fingerprint=job.fingerprint) as meter,
        progress.bar(job.label, len(pending), job.unit) as bar,
    ):
        meter.devices = job.devices
        worker = job.open(steps)
        try:
            for made in worker.make(pending):
                meter.add(tokens=made.tokens, written=made.written)
                bar.advance()
        finally:
            worker.close()


def make_room(stage: Stage) -> None:
    """Begin a stage: rank 0 sets aside what another recipe has made there, and the others wait until it has."""
    if is_first():
        stage.begin()
    since = time.monotonic()
    while stage.state() == "stale":
        if time.monotonic() - since > PATIENCE:
            raise _gave_up(stage, [])
        time.sleep(0.1)


def wait_for_ranks(stage: Stage, kind: type[Any], shards: int) -> None:
    """Wait for the other ranks' shards. Rank 0 writes the manifest as soon as it sees them all; ranks meet on disk."""
    missing = list(range(shards))
    since = time.monotonic()
    pause = 0.1
    while not is_alone() and stage.state() != "done":
        before = missing
        missing = stage.missing(missing)
        if not missing and is_first():
            stage.finish(kind, shards)
            continue
        if missing != before:
            since = time.monotonic()
        if time.monotonic() - since > PATIENCE:
            raise _gave_up(stage, missing)
        time.sleep(pause)
        pause = min(1.2 * pause, LONGEST_PAUSE)


def _gave_up(stage: Stage, missing: Sequence[int]) -> WeaveError:
    ranks = ", ".join(str(number) for number in sorted({shard % world_size() for shard in missing}))
    lacks = f"{len(missing)} shards of rank {ranks} are" if missing else "the manifest that rank 0 writes is"
    return WeaveError(
        f"{stage.folder}: nothing new for {PATIENCE / 3600:g} hours, and {lacks} missing. See what stopped there, then "
        "start all ranks again: what is finished is kept"
    )
