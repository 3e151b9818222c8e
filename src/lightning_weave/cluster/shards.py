"""The shards of jobs on a Ray cluster, made by workers that hold one model each.

Ray starts a worker again when its process or node dies, wherever there is room. The shard that it was making goes back
to the others at once, so a cluster that has shrunk keeps working. A worker without a shard left in its job moves to the
next: no device waits for the last shard of another. A worker whose engine fills its batch from several shards makes
several at once, each in a thread of its own.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_weave.cluster.actors import enter, own_error
from lightning_weave.cluster.plan import WorkerPlan, live_nodes, plan_workers
from lightning_weave.config import Recipe
from lightning_weave.errors import WeaveError, first_line
from lightning_weave.progress import Bar, Progress
from lightning_weave.runs.machine import set_threads
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Job, Made, Worker
from lightning_weave.store.ledger import EngineClock, Meter, engine_clock, measure

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
    threads = max(job.at_once for job in jobs)
    remote = ray.remote(max_restarts=-1, max_concurrency=threads, num_cpus=plan.cpus, num_gpus=plan.gpus)(
        _with_patient_start(ShardWorker)
    )
    openers = [job.open for job in jobs]  # sent together, so that a worker keeps what two of them share
    actors = [
        remote.remote(openers, steps.recipe, steps.arguments, steps.trust, os.getcwd()) for _ in range(plan.workers)
    ]
    try:
        with _underway(jobs, steps, plan) as underway:
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
        self.clock = EngineClock()  # of what was said of this process's engines
        self.lock = threading.Lock()

    def ready(self) -> None:
        """Begin, when there is room for this process."""
        enter(self.folder)

    def make(self, job: int, shard: int) -> tuple[Made, EngineClock]:
        """Make one shard of a job, beside others of the same job alone; also says what engines took since the last."""
        with self.lock:
            if self.worker is None or self.job != job:
                if self.worker is not None:
                    self.worker.close()
                self.worker = None  # before another model is loaded
                self.worker = self.openers[job](self.steps)
                self.job = job
            worker = self.worker
        (made,) = worker.make([shard])
        with self.lock:
            took = engine_clock.since(self.clock)
            self.clock = replace(engine_clock)
        return made, took


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
    at_once: int  # shards of one worker at a time
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

    def count(self, made: Made, took: EngineClock) -> None:
        """Book a shard; the last one ends the job."""
        self.left -= 1
        self.meter.spend_engine(took, self.devices_each)
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
def _underway(jobs: Sequence[Job], steps: Steps, plan: WorkerPlan) -> Iterator[list[_Underway]]:
    """Begin jobs, and book what they have taken however they end."""
    begun = [
        _Underway(
            number,
            job,
            steps,
            plan.devices_each,
            at_once=min(job.at_once, -(-len(job.pending) // plan.workers)),  # the first leaves some for the rest
            todo=deque(job.pending),
            left=len(job.pending),
        )
        for number, job in enumerate(jobs)
    ]
    try:
        yield begun
    finally:
        for one in begun:
            one._open.close()


@dataclass(eq=False)
class _RemoteWorker:
    """An actor, the job whose model it holds, and the shards that it is making."""

    actor: Any
    job: _Underway
    shards: list[int] = field(default_factory=list)
    is_ready: bool = False
    since: float = 0.0  # up to here its time is booked

    def next_job(self, jobs: Sequence[_Underway]) -> _Underway | None:
        """The job whose next shard it can take now, if any; rather that of the model that it holds.

        A shard whose worker has died is made alone, to know which of several kills.
        """
        job = next((job for job in (self.job, *jobs) if job.todo), None)
        if job is None or not self.is_ready:
            return None
        if not self.shards:
            return job
        is_full = job is not self.job or len(self.shards) >= job.at_once
        suspect = any(job.tries[shard] for shard in (*self.shards, job.todo[0]))
        return None if is_full or suspect else job

    def begin(self, job: _Underway) -> tuple[Any, int]:
        """Take the job's next shard; returns Ray's reference to it, and its number."""
        if not self.shards:
            self.since = time.monotonic()
        self.job = job
        shard = job.todo.popleft()
        self.shards.append(shard)
        return self.actor.make.remote(job.number, shard), shard

    def end(self, shard: int) -> None:
        """Give a shard up, made or not, and book the time since another ended."""
        now = time.monotonic()
        self.job.meter.spend((now - self.since) * self.job.devices_each)
        self.since = now
        self.shards.remove(shard)


def _hand_out(actors: Sequence[Any], jobs: Sequence[_Underway], progress: Progress) -> None:
    """Give workers that are ready shards until none is left; take back those of a worker that dies."""
    import ray

    workers = [_RemoteWorker(actor, jobs[0]) for actor in actors]
    running: dict[Any, tuple[_RemoteWorker, int | None]] = {one.actor.ready.remote(): (one, None) for one in workers}
    with ExitStack() as bars:
        _show(jobs, progress, bars)
        while any(job.left for job in jobs):
            while free := _least_busy(workers, jobs):
                worker, job = free
                reference, shard = worker.begin(job)
                running[reference] = (worker, shard)
            finished = ray.wait(list(running))[0][0]
            worker, ended = running.pop(finished)
            if ended is not None:
                worker.end(ended)
            try:
                result = ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                raise own_error(error) from None
            except ray.exceptions.RayActorError as error:
                if ended is not None:
                    worker.job.take_back(ended, error)
                if worker.is_ready or ended is None:  # the first of its errors
                    worker.is_ready = False
                    running[worker.actor.ready.remote()] = (worker, None)
                continue
            if ended is None:
                worker.is_ready = True
            else:
                worker.job.count(*result)
                _show(jobs, progress, bars)


def _least_busy(workers: Sequence[_RemoteWorker], jobs: Sequence[_Underway]) -> tuple[_RemoteWorker, _Underway] | None:
    """Find the worker that takes the next shard: of those that can, one with the fewest."""
    free = [(worker, job) for worker in workers if (job := worker.next_job(jobs))]
    return min(free, key=lambda one: len(one[0].shards), default=None)


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
