"""Shards as units of work: a stage defines how one is made, and this process, a rank or a cluster makes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_weave.progress import Progress
from lightning_weave.runs.machine import my_share
from lightning_weave.runs.steps import Steps
from lightning_weave.store.ledger import measure


@dataclass(frozen=True)
class Made:
    """What one shard took."""

    tokens: int
    written: int = 0


class Worker(Protocol):
    """Holds one model and makes shards with it, in any order, each whole and written to the run directory."""

    def make(self, shard: int) -> Made: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """The pending shards of one step, and how to open a worker for them, in this process or in another."""

    stage: str
    name: str  # of the model or policy; empty where a stage has only one
    unit: str
    pending: Sequence[int]
    open: Callable[[Steps], Worker]

    @property
    def label(self) -> str:
        return f"{self.stage} {self.name}".strip()


Do = Callable[[Job, Steps, Progress], None]


def do_here(job: Job, steps: Steps, progress: Progress) -> None:
    """Make this rank's share of the shards in this process."""
    pending = my_share(job.pending)
    if not pending:
        return
    with (
        measure(steps.store.run_dir, job.stage, job.name) as meter,
        progress.bar(job.label, len(pending), job.unit) as bar,
    ):
        worker = job.open(steps)
        try:
            for shard in pending:
                made = worker.make(shard)
                meter.add(tokens=made.tokens, written=made.written)
                bar.advance()
        finally:
            worker.close()
