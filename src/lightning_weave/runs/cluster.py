"""`--cluster ray`: the shards of a stage on a Ray cluster. Workers hold one model each and meet on a shared disk.

Ray starts a worker again when its process or node dies, wherever there is room. The shard that it was making goes back
to the others at once, so a cluster that has shrunk keeps working.
"""

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_weave.config import Machine, Recipe
from lightning_weave.errors import InputError, WeaveError, first_line
from lightning_weave.progress import Progress
from lightning_weave.runs.machine import set_threads
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, Job, Made, Worker
from lightning_weave.store.ledger import measure

MOST_TRIES = 3  # of one shard whose worker dies
log = logging.getLogger(__name__)


def connect(address: str | None) -> Do:
    """Join a Ray cluster, or start one on this machine; returns what does the shards of a job there."""
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
    return _do_on_ray


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


def _do_on_ray(job: Job, steps: Steps, progress: Progress) -> None:
    """Make every pending shard on the cluster."""
    import ray

    if not job.pending:
        return
    set_threads(steps.recipe, steps.store)  # which all workers keep to; where this is typed there may be no GPU
    plan = plan_workers(steps.recipe.machine, ray.cluster_resources(), len(job.pending))
    remote = ray.remote(max_restarts=-1, num_cpus=plan.cpus, num_gpus=plan.gpus)(_with_patient_start(ShardWorker))
    actors = [
        remote.remote(job.open, steps.recipe, steps.arguments, steps.trust, os.getcwd()) for _ in range(plan.workers)
    ]
    with (
        measure(steps.store.run_dir, job.stage, job.name, fingerprint=job.fingerprint) as meter,
        progress.bar(job.label, len(job.pending), job.unit) as bar,
    ):
        meter.devices = plan.devices

        def count(made: Made) -> None:
            meter.add(tokens=made.tokens, written=made.written)
            bar.advance()

        try:
            _hand_out(actors, job, count)
        finally:
            for actor in actors:
                ray.kill(actor)


@dataclass(frozen=True)
class WorkerPlan:
    """How many workers, and what each of them takes from the cluster."""

    workers: int
    cpus: float
    gpus: float

    @property
    def devices(self) -> float:
        """How many devices are taken by all of them together."""
        return self.workers * (self.gpus or 1.0)


def plan_workers(machine: Machine, resources: dict[str, float], shards: int) -> WorkerPlan:
    """Choose the number of workers by the recipe, or by what the cluster has."""
    cpus = float(machine.threads or 1)
    gpus = machine.gpus_per_worker
    if machine.device == "cpu" or not resources.get("GPU") or gpus == 0:
        gpus = 0.0
    room = resources.get("GPU", 0.0) / gpus if gpus else resources.get("CPU", 1.0) / cpus
    if room < 1:
        has = ", ".join(f"{name} {resources.get(name, 0):g}" for name in ("CPU", "GPU"))
        raise InputError(
            f"no worker of {cpus:g} CPUs and {gpus:g} GPUs fits into the cluster, which has {has}. "
            "Lower machine.threads or machine.gpus_per_worker, or add nodes"
        )
    return WorkerPlan(min(machine.workers or int(room), shards), cpus, gpus)


class ShardWorker:
    """What lives in an actor: one worker, opened when it is first needed and again after every restart."""

    def __init__(
        self, opener: Callable[[Steps], Worker], recipe: Recipe, arguments: str | None, trust: bool, folder: str
    ) -> None:
        os.chdir(folder)  # the recipe's paths are relative to it
        self.opener = opener
        self.steps = Steps(recipe, arguments, trust)
        self.worker: Worker | None = None

    def ready(self) -> None:
        """Load the model."""
        if self.worker is None:
            self.worker = self.opener(self.steps)

    def make(self, shard: int) -> Made:
        """Make one shard."""
        self.ready()
        assert self.worker is not None
        (made,) = self.worker.make([shard])
        return made


def _with_patient_start(kind: type[ShardWorker]) -> type[ShardWorker]:
    """Let `ready` wait for as long as Ray needs to find room for a worker that it starts again."""
    import ray

    class RestartedWorker(kind):  # type: ignore[valid-type, misc]
        ready = ray.method(max_task_retries=-1)(kind.ready)

    return RestartedWorker


def _hand_out(actors: Sequence[Any], job: Job, count: Callable[[Made], None]) -> None:
    """Give every worker that is ready a shard until none is left; take a shard back from a worker that dies."""
    import ray

    todo = deque(job.pending)
    tries = Counter[int]()
    idle = list[Any]()
    running: dict[Any, tuple[Any, int | None]] = {actor.ready.remote(): (actor, None) for actor in actors}
    left = len(todo)
    while left:
        while todo and idle:
            actor = idle.pop()
            shard = todo.popleft()
            running[actor.make.remote(shard)] = (actor, shard)
        finished = ray.wait(list(running))[0][0]
        actor, made_shard = running.pop(finished)
        try:
            made = ray.get(finished)
        except ray.exceptions.RayTaskError as error:  # the worker's own error, as it would be raised here
            raise error.cause if isinstance(error.cause, WeaveError) else error from None
        except ray.exceptions.RayActorError as error:
            if made_shard is not None:
                tries[made_shard] += 1
                _check_tries(job, made_shard, tries[made_shard], error)
                todo.appendleft(made_shard)
                log.info("%s: a worker died; %s %d goes to another", job.label, job.unit, made_shard)
            running[actor.ready.remote()] = (actor, None)
            continue
        if made_shard is not None:
            left -= 1
            count(made)
        idle.append(actor)


def _check_tries(job: Job, shard: int, tries: int, error: Exception) -> None:
    if tries >= MOST_TRIES:
        raise WeaveError(
            f"{job.label}: {tries} workers died making {job.unit} {shard} ({first_line(error)}). "
            "Out of memory? Lower token_budget or batch_size"
        ) from None
