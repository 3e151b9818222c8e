"""The shards of jobs on a Ray cluster, made by workers that hold one model each.

Ray starts a worker again when its process or node dies, wherever there is room. The shard that it was making goes back
to the others at once, so a cluster that has shrunk keeps working. A worker without a shard left in its job moves to the
next: no device waits for the last shard of another. A worker whose engine fills its batch from several shards makes
several at once, each in its own thread.
"""

import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_weave.cluster.ranks import train_on_ray
from lightning_weave.cluster.workers import enter, live_nodes, own_error, plan_workers
from lightning_weave.config import Recipe
from lightning_weave.errors import InputError, WeaveError, first_line
from lightning_weave.progress import Bar, Progress
from lightning_weave.run import Run
from lightning_weave.stages.work import ComputeShards, Executor, Job, ShardStats, set_threads
from lightning_weave.store.ledger import EngineClock, Meter, engine_clock, measure

MOST_TRIES = 3  # of one shard whose worker dies
log = logging.getLogger(__name__)


def run_jobs_on_ray(jobs: Sequence[Job], run: Run, progress: Progress) -> None:
    """Make every pending shard of these jobs on the cluster, with the same workers for all of them."""
    import ray

    for job in jobs:
        if not job.pending:
            job.finish()
    jobs = [job for job in jobs if job.pending]
    if not jobs:
        return
    set_threads(run)  # all workers keep to it
    shards = sum(len(job.pending) for job in jobs)
    plan = plan_workers(run.recipe.machine, live_nodes(), shards, max(job.devices for job in jobs))
    threads = max(job.at_once for job in jobs)

    class RestartedWorker(ShardWorker):  # `ready` waits for as long as Ray needs to find room for it
        ready = ray.method(max_task_retries=-1)(ShardWorker.ready)

    remote = ray.remote(max_restarts=-1, max_concurrency=threads, num_cpus=plan.cpus, num_gpus=plan.gpus)(
        RestartedWorker
    )
    openers = [job.open for job in jobs]  # sent together, so that a worker keeps what two of them share
    actors = [remote.remote(openers, run.recipe, run.arguments, run.trust, os.getcwd()) for _ in range(plan.workers)]
    running = []
    for number, job in enumerate(jobs):
        at_once = min(job.at_once, -(-len(job.pending) // plan.workers))  # the first worker leaves some for the others
        running.append(_RunningJob(number, job, at_once, deque(job.pending), len(job.pending)))
    try:
        _hand_out(actors, running, run, plan.devices_each, progress)
    finally:
        for one in running:  # what was spent is recorded however it ends
            one.account.close()
        for actor in actors:
            ray.kill(actor)


class ShardWorker:
    """What lives in an actor: the model of one job at a time, loaded when a shard of that job comes."""

    def __init__(
        self,
        openers: Sequence[Callable[[Run], AbstractContextManager[ComputeShards]]],
        recipe: Recipe,
        arguments: str | None,
        trust: bool,
        folder: str,
    ) -> None:
        self.openers = openers
        self.folder = folder
        self.run = Run(recipe, arguments, trust)
        self.job: int | None = None
        self.loaded = ExitStack()
        self.clock = EngineClock()  # of what was reported of this process's engines
        self.lock = threading.Lock()

    def ready(self) -> None:
        """Begin, when there is room for this process."""
        enter(self.folder)

    def compute(self, job: int, shard: int) -> tuple[ShardStats, EngineClock]:
        """Compute one shard of a job, at the same time as others of that job; also what engines took since the last."""
        with self.lock:
            if self.job != job:
                self.job = None
                self.loaded.close()  # before another model is loaded
                self.compute_shards: ComputeShards = self.loaded.enter_context(self.openers[job](self.run))
                self.job = job
        (stats,) = self.compute_shards([shard])
        with self.lock:
            took = engine_clock.since(self.clock)
            self.clock = replace(engine_clock)
        return stats, took


@dataclass
class _RunningJob:
    """A job on the cluster: the shards to hand out, how many are not finished, and the record of its cost."""

    number: int
    job: Job
    at_once: int  # shards of one worker at a time
    todo: deque[int]
    left: int
    deaths: Counter[int] = field(default_factory=Counter)  # of workers, by the shard that they were computing
    shown: int = 0
    bar: Bar | None = None
    account: ExitStack = field(default_factory=ExitStack)
    meter: Meter | None = None  # opened with the first shard: only what workers spend on its shards is counted


@dataclass(eq=False)
class _RemoteWorker:
    """An actor, the job whose model it holds, and the shards that it is computing."""

    actor: Any
    job: _RunningJob
    shards: list[int] = field(default_factory=list)
    is_ready: bool = False
    since: float = 0.0  # up to here its time is recorded

    def next_job(self, jobs: Sequence[_RunningJob]) -> _RunningJob | None:
        """Find the job whose next shard it can take now: first the one whose model it holds.

        A shard whose worker has died is computed alone, to know which of several kills.
        """
        job = next((job for job in (self.job, *jobs) if job.todo), None)
        if job is None or not self.is_ready or not self.shards:
            return job if self.is_ready else None
        is_full = job is not self.job or len(self.shards) >= job.at_once
        suspect = any(job.deaths[shard] for shard in (*self.shards, job.todo[0]))
        return None if is_full or suspect else job


def _hand_out(
    actors: Sequence[Any], jobs: Sequence[_RunningJob], run: Run, devices_each: float, progress: Progress
) -> None:
    """Give shards to workers that are ready until none is left; take back those of a worker that dies."""
    import ray

    workers = [_RemoteWorker(actor, jobs[0]) for actor in actors]
    running: dict[Any, tuple[_RemoteWorker, int | None]] = {one.actor.ready.remote(): (one, None) for one in workers}
    with ExitStack() as bars:
        _show(jobs, progress, bars)
        while any(job.left for job in jobs):
            while free := [(worker, job) for worker in workers if (job := worker.next_job(jobs))]:
                worker, job = min(free, key=lambda one: len(one[0].shards))
                if not worker.shards:
                    worker.since = time.monotonic()
                if job.meter is None:
                    account = measure(run.directory, job.job.stage, job.job.name, fingerprint=job.job.fingerprint)
                    job.meter = job.account.enter_context(account)
                    job.meter.devices = 0.0
                worker.job = job
                worker.shards.append(job.todo.popleft())
                running[worker.actor.compute.remote(job.number, worker.shards[-1])] = (worker, worker.shards[-1])
            finished = ray.wait(list(running))[0][0]
            worker, shard = running.pop(finished)
            job = worker.job
            if shard is not None:
                assert job.meter is not None, "it was opened with the first shard"
                now = time.monotonic()
                job.meter.spend((now - worker.since) * devices_each)
                worker.since = now
                worker.shards.remove(shard)
            try:
                result = ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                raise own_error(error) from None
            except ray.exceptions.RayActorError as error:
                if shard is not None:
                    job.deaths[shard] += 1
                    if job.deaths[shard] >= MOST_TRIES:
                        raise WeaveError(
                            f"{job.job.label}: {MOST_TRIES} workers died making {job.job.unit} {shard} "
                            f"({first_line(error)}). Out of memory? Lower token_budget or batch_size"
                        ) from None
                    job.todo.appendleft(shard)
                    log.info("%s: a worker died; %s %d goes to another", job.job.label, job.job.unit, shard)
                if worker.is_ready or shard is None:  # the first of its errors
                    worker.is_ready = False
                    running[worker.actor.ready.remote()] = (worker, None)
                continue
            if shard is None:
                worker.is_ready = True
                continue
            stats, took = result
            assert job.meter is not None
            job.meter.spend_engine(took, devices_each)
            job.meter.add(tokens=stats.tokens, written=stats.written)
            job.left -= 1
            if not job.left:
                job.account.close()
                job.job.finish()
            _show(jobs, progress, bars)


def _show(jobs: Sequence[_RunningJob], progress: Progress, bars: ExitStack) -> None:
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


def connect(address: str | None) -> Executor:
    """Join a Ray cluster, or start one that only this machine can reach; returns what does all work there."""
    running = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()), "ray", "ray_current_cluster")
    if address is None and "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules and not running.exists():
        address = "local"  # no cluster of the user's runs here
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listen at 127.0.0.1, on Linux as well
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray before 2.52 ignores it
    try:
        import ray
    except ModuleNotFoundError:
        raise InputError("--cluster ray needs Ray: pip install ray, on every node") from None
    if not ray.is_initialized():
        check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise InputError(f"--address {address}: no Ray cluster answers there ({error})") from None
    return Executor(run_jobs_on_ray, train_on_ray)


def check_address(address: str | None) -> None:
    """Find out in seconds whether anything listens at HOST:PORT; Ray would retry for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():  # none, or a keyword of Ray's such as auto
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise InputError(
            f"--address {address}: no answer there ({error.strerror or error}). Start a cluster there "
            "(ray start --head), or leave --address out for one on this machine"
        ) from None
