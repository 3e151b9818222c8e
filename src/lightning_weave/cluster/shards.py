"""The shards of jobs on a Ray cluster, made by workers that hold one model each.

Ray starts a worker again when its process or node dies, wherever there is room. The shard that it was making goes back
to the others at once, so a cluster that has shrunk keeps working. A worker without a shard left in its job moves to the
next: no device waits for the last shard of another.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from lightning_weave.cluster.actors import enter, own_error
from lightning_weave.cluster.plan import live_nodes, plan_workers
from lightning_weave.config import Recipe
from lightning_weave.errors import WeaveError, first_line
from lightning_weave.progress import Bar, Progress
from lightning_weave.runs.machine import set_threads
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Job, Made, Worker
from lightning_weave.store.ledger import Meter, measure

MOST_TRIES = 3  # of one shard whose worker dies
log = logging.getLogger(__name__)


def do_on_ray(jobs: Sequence[Job], steps: Steps, progress: Progress) -> None:
    """Make every pending shard of these jobs on the cluster, with the same workers for all of them."""
    import ray

    for job in jobs:
        if not job.pending:
            job.finish()
    jobs = [job for job in jobs if job.pending]
    if not jobs:
        return
    set_threads(steps.recipe, steps.store)  # all workers keep to it
    shards = sum(len(job.pending) for job in jobs)
    plan = plan_workers(steps.recipe.machine, live_nodes(), shards, max(job.devices for job in jobs))
    remote = ray.remote(max_restarts=-1, num_cpus=plan.cpus, num_gpus=plan.gpus)(_with_patient_start(ShardWorker))
    openers = [job.open for job in jobs]  # sent together, so that a worker keeps what two of them share
    actors = [
        remote.remote(openers, steps.recipe, steps.arguments, steps.trust, os.getcwd()) for _ in range(plan.workers)
    ]
    try:
        with _underway(jobs, steps, plan.devices_each) as underway:
            _hand_out(actors, underway, progress)
    finally:
        for actor in actors:
            ray.kill(actor)


class ShardWorker:
    """What lives in an actor: a worker of one job at a time, opened when a shard of that job comes."""

    def __init__(
        self,
        openers: Sequence[Callable[[Steps], Worker]],
        recipe: Recipe,
        arguments: str | None,
        trust: bool,
        folder: str,
    ) -> None:
        self.openers = openers
        self.folder = folder
        self.steps = Steps(recipe, arguments, trust)
        self.job: int | None = None
        self.worker: Worker | None = None

    def ready(self) -> None:
        """Begin, when there is room for this process."""
        enter(self.folder)

    def make(self, job: int, shard: int) -> Made:
        """Make one shard of a job."""
        if self.worker is None or self.job != job:
            if self.worker is not None:
                self.worker.close()
            self.worker = None  # before another model is loaded
            self.worker = self.openers[job](self.steps)
            self.job = job
        (made,) = self.worker.make([shard])
        return made


def _with_patient_start(kind: type[ShardWorker]) -> type[ShardWorker]:
    """Let `ready` wait for as long as Ray needs to find room for a worker that it starts again."""
    import ray

    class RestartedWorker(kind):  # type: ignore[valid-type, misc]
        ready = ray.method(max_task_retries=-1)(kind.ready)

    return RestartedWorker


@dataclass
class _Underway:
    """A job on the cluster: what is left to hand out and to come back, and what it has taken."""

    number: int
    job: Job
    steps: Steps
    devices_each: float
    todo: deque[int]
    left: int
    tries: Counter[int] = field(default_factory=Counter)
    shown: int = 0
    bar: Bar | None = None
    _meter: Meter | None = None
    _open: ExitStack = field(default_factory=ExitStack)

    @property
    def meter(self) -> Meter:
        """Its account, opened with the first shard. Only what workers spend on its shards is counted."""
        if self._meter is None:
            job = self.job
            account = measure(self.steps.store.run_dir, job.stage, job.name, fingerprint=job.fingerprint)
            self._meter = self._open.enter_context(account)
            self._meter.devices = 0.0
        return self._meter

    def count(self, made: Made) -> None:
        """Book a shard; the last one ends the job."""
        self.left -= 1
        self.meter.add(tokens=made.tokens, written=made.written)
        if not self.left:
            self._open.close()
            self.job.finish()

    def take_back(self, shard: int, error: Exception) -> None:
        """Put a shard back whose worker died, unless it has killed too many."""
        self.tries[shard] += 1
        if self.tries[shard] >= MOST_TRIES:
            raise WeaveError(
                f"{self.job.label}: {MOST_TRIES} workers died making {self.job.unit} {shard} ({first_line(error)}). "
                "Out of memory? Lower token_budget or batch_size"
            ) from None
        self.todo.appendleft(shard)
        log.info("%s: a worker died; %s %d goes to another", self.job.label, self.job.unit, shard)


@contextmanager
def _underway(jobs: Sequence[Job], steps: Steps, devices_each: float) -> Iterator[list[_Underway]]:
    """Begin jobs, and book what they have taken however they end."""
    begun = [
        _Underway(number, job, steps, devices_each, todo=deque(job.pending), left=len(job.pending))
        for number, job in enumerate(jobs)
    ]
    try:
        yield begun
    finally:
        for one in begun:
            one._open.close()


@dataclass(frozen=True)
class _Task:
    """A shard in the hands of a worker."""

    of: _Underway
    shard: int
    since: float = field(default_factory=time.monotonic)


def _hand_out(actors: Sequence[Any], jobs: Sequence[_Underway], progress: Progress) -> None:
    """Give every worker that is ready a shard until none is left; take a shard back from a worker that dies."""
    import ray

    holds = dict.fromkeys(actors, jobs[0])
    idle = list[Any]()
    running: dict[Any, tuple[Any, _Task | None]] = {actor.ready.remote(): (actor, None) for actor in actors}
    with ExitStack() as bars:
        _show(jobs, progress, bars)
        while any(job.left for job in jobs):
            while idle and any(job.todo for job in jobs):
                actor = idle.pop()
                job = next(job for job in (holds[actor], *jobs) if job.todo)  # rather of the model that it holds
                holds[actor] = job
                task = _Task(job, job.todo.popleft())
                running[actor.make.remote(job.number, task.shard)] = (actor, task)
            finished = ray.wait(list(running))[0][0]
            actor, done = running.pop(finished)
            try:
                made = ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                raise own_error(error) from None
            except ray.exceptions.RayActorError as error:
                if done:
                    done.of.take_back(done.shard, error)
                running[actor.ready.remote()] = (actor, None)
                continue
            finally:
                if done:
                    done.of.meter.spend((time.monotonic() - done.since) * done.of.devices_each)
            if done:
                done.of.count(made)
                _show(jobs, progress, bars)
            idle.append(actor)


def _show(jobs: Sequence[_Underway], progress: Progress, bars: ExitStack) -> None:
    """Show one bar at a time, in the order of the jobs, though their ends overlap."""
    for one in jobs:
        total = len(one.job.pending)
        if one.shown == total:
            continue
        if one.bar is None:
            one.bar = bars.enter_context(progress.bar(one.job.label, total, one.job.unit))
        while one.shown < total - one.left:
            one.shown += 1
            one.bar.advance()
        if one.left:
            return
        bars.close()
