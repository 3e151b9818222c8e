"""`--cluster ray`: shards and training on a Ray cluster, whose nodes meet on a shared disk.

Shards are made by workers that hold one model each. Ray starts a worker again when its process or node dies, wherever
there is room. The shard that it was making goes back to the others at once, so a cluster that has shrunk keeps working.
A worker without a shard left in its job moves to the next: no device waits for the last shard of another. A worker
whose engine fills its batch from several shards makes several at once, each in its own thread.

Training has its ranks in one placement group, each doing what a rank of torchrun does. When a rank or its node dies, or
one runs out of memory that less at once would spare, all of them are started again, and training resumes from its
newest checkpoint.
"""

import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from lightning_weave.config import Machine, Recipe
from lightning_weave.errors import InputError, PeerStopped, StartAgain, WeaveError, first_line
from lightning_weave.progress import Bar, Progress
from lightning_weave.ranks import set_rank_env
from lightning_weave.run import Run
from lightning_weave.stages.work import ComputeShards, Executor, Job, RankWork, ShardStats, set_threads
from lightning_weave.store import MANIFEST
from lightning_weave.store.ledger import EngineClock, Meter, engine_clock
from lightning_weave.train.schedule import POSITION

MOST_TRIES = 3  # of one shard whose worker dies
MOST_DEATHS = 3  # of ranks, one after another, without a new checkpoint or shard
NODE_PATIENCE = 60.0  # seconds for a lost node to come back, before training resumes with fewer ranks
LAST_WORDS = 30.0  # seconds for the other ranks to say why they stopped
NAMESPACE = "lightning-weave"
Opener = Callable[[Run], AbstractContextManager[ComputeShards]]  # of a job
Node = Mapping[str, float]  # what one machine has, as Ray names it: CPU, GPU, ...
log = logging.getLogger(__name__)


def enter(folder: str) -> None:
    """Work where the command was typed: the recipe's paths are relative to it."""
    if not Path(folder).is_dir():
        raise InputError(
            f"{folder} is not on node {socket.gethostname()}: start the command in a folder that all nodes share"
        )
    os.chdir(folder)


def own_error(error: Any) -> Exception:
    """What a call elsewhere raised, as it would be raised here."""
    return error.cause if isinstance(error.cause, WeaveError) else error


@dataclass(frozen=True)
class WorkerPlan:
    """How many workers, and what each of them takes from one node of the cluster."""

    workers: int
    cpus: float
    gpus: float


def live_nodes() -> list[Node]:
    """What the machines of the cluster have that this process is connected to."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan_workers(machine: Machine, nodes: Sequence[Node], shards: int, devices: int = 1) -> WorkerPlan:
    """Choose the number of workers by the recipe, or by what the nodes have room for.

    A worker whose engine takes several devices gets them all on one node.
    """
    cpus = float(machine.threads or 1)
    gpus = max(machine.gpus_per_worker, devices if devices > 1 else 0.0) if _uses_gpus(machine, nodes) else 0.0
    room = sum(_rooms(nodes, cpus, gpus))
    return WorkerPlan(min(machine.workers or room, shards), cpus, gpus)


def plan_ranks(recipe: Recipe, nodes: Sequence[Node]) -> WorkerPlan:
    """Choose the number of ranks: one per GPU of the workers, or per node where there are no GPUs."""
    machine = recipe.machine
    cpus = float(machine.threads or 1)
    gpus = 1.0 if _uses_gpus(machine, nodes) else 0.0
    rooms = _rooms(nodes, cpus, gpus)
    ranks = sum(rooms) if gpus or machine.workers else sum(room > 0 for room in rooms)
    if machine.workers:
        ranks = min(ranks, max(1, round(machine.workers * (machine.gpus_per_worker if gpus else 1.0))))
    if recipe.train.lora is not None and recipe.train.lora.base != "own":
        ranks = 1  # quantised weights are not sharded
    among = recipe.train.shard_ranks or 1
    if ranks < among:
        raise InputError(
            f"train.shard_ranks = {among}: the cluster has room for {ranks} ranks only ({_has(nodes)}). Lower it, or "
            "add nodes"
        )
    return WorkerPlan(ranks // among * among, cpus, gpus)


def _uses_gpus(machine: Machine, nodes: Sequence[Node]) -> bool:
    return machine.device != "cpu" and machine.gpus_per_worker > 0 and any(node.get("GPU") for node in nodes)


def _rooms(nodes: Sequence[Node], cpus: float, gpus: float) -> list[int]:
    """Count the workers that fit onto each node; refuse if none does."""
    needs = {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
    # Ten workers of 0.1 fit.
    rooms = [int(min(node.get(kind, 0.0) / need for kind, need in needs.items()) + 1e-6) for node in nodes]
    if not any(rooms):
        raise InputError(
            f"no worker of {cpus:g} CPUs and {gpus:g} GPUs fits onto one node of the cluster ({_has(nodes)}). Lower "
            "machine.threads, machine.gpus_per_worker or tensor_parallel_size, or add nodes"
        )
    return rooms


def _has(nodes: Sequence[Node]) -> str:
    """List the CPUs and GPUs of the nodes for a message."""
    each = Counter(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
    return "; ".join(f"{count} x {text}" for text, count in each.items()) or "no node is alive"


class _RankDied(Exception):
    """A rank died without raising an error."""


def train_on_ray(work: RankWork, run: Run, progress: Progress) -> None:
    """Train on all ranks that the cluster has room for, as often as it takes."""
    set_threads(run)  # all ranks keep to it
    plan = plan_ranks(run.recipe, live_nodes())
    deaths = 0

    def finished() -> set[Path]:  # what a restart does not repeat: checkpoints, stages and shards
        return {path for name in (MANIFEST, POSITION, "*.safetensors") for path in run.directory.rglob(name)}

    while True:
        before = finished()
        try:
            with _placed(plan, run) as ranks:
                progress.say(f"train: {plan.workers} ranks on the cluster")
                _run(ranks, work, run, progress)
            return
        except StartAgain as error:  # every time with less, until it fits or there is nothing to halve
            progress.say(f"train: {error.what}. All start again: {error.then}")
        except _RankDied as death:
            deaths = 0 if finished() - before else deaths + 1
            if deaths == MOST_DEATHS:
                raise WeaveError(
                    f"train: {deaths} times a rank died before a new checkpoint was written ({death}). Out of memory? "
                    "Lower train.token_budget. Are nodes preempted? Lower train.checkpoint_every"
                ) from None
            progress.say(f"train: a rank died ({death}); all start again from the newest checkpoint")
        until = time.monotonic() + NODE_PATIENCE  # for as many ranks as before; then fewer, but at least one
        while not (again := _plan_now(run.recipe)) or (again.workers < plan.workers and time.monotonic() < until):
            time.sleep(1)
        plan = again


def _plan_now(recipe: Recipe) -> WorkerPlan | None:
    """Plan with the nodes that are left; None where there is no room at all."""
    try:
        return plan_ranks(recipe, live_nodes())
    except InputError:
        return None


@contextmanager
def _placed(plan: WorkerPlan, run: Run) -> Iterator[list[Any]]:
    """Start one actor per rank, in the order of their nodes, and end them all."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    name = f"train {run.directory.resolve()}"
    with suppress(ValueError):  # no such actor
        # End the first rank of a command that was killed: two would write one checkpoint.
        while orphan := ray.get_actor(name, NAMESPACE):
            ray.kill(orphan)
            time.sleep(0.2)
    bundle = {"CPU": plan.cpus, **({"GPU": plan.gpus} if plan.gpus else {})}
    group = placement_group([bundle] * plan.workers, strategy="PACK" if plan.gpus else "SPREAD")
    actors = list[Any]()
    try:
        while not group.wait(10):
            new_plan = _plan_now(run.recipe)
            if new_plan is None or new_plan.workers < plan.workers:
                raise _RankDied("a node is gone")
        for number in range(plan.workers):
            remote = ray.remote(
                num_cpus=plan.cpus,
                num_gpus=plan.gpus,
                max_concurrency=2,  # it trains, and tells of it
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
                **({"name": name, "namespace": NAMESPACE} if number == 0 else {}),
            )(Rank)
            actors.append(remote.remote())
        yield actors
    finally:
        for actor in actors:
            ray.kill(actor)
        remove_placement_group(group)


def _run(actors: Sequence[Any], work: RankWork, run: Run, progress: Progress) -> None:
    """Let all ranks train, and show what the first of them tells."""
    import ray

    beginnings = [actor.begin.remote(os.getcwd()) for actor in actors]
    try:
        answers = ray.get(beginnings)
    except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
        _raise_why(beginnings)
    nodes = [node for node, _, _ in answers]
    order = sorted(range(len(actors)), key=lambda number: nodes.index(nodes[number]))  # the first stays the first
    _, address, port = answers[0]
    running = list[Any]()
    for rank, number in enumerate(order):
        earlier = [nodes[other] for other in order[:rank]]
        local = (earlier.count(nodes[number]), nodes.count(nodes[number]))
        place = (rank, len(actors), *local, address, port)
        running.append(actors[number].train.remote(place, work, run.recipe, run.arguments, run.trust))
    with _Screen(progress) as screen:
        pending = list(running)
        news = actors[0].read_messages.remote()
        while pending:
            (reference,), _ = ray.wait([news, *pending])
            try:
                if reference == news:
                    screen.show(ray.get(news))
                    news = actors[0].read_messages.remote()
                else:
                    pending.remove(reference)
                    ray.get(reference)
            except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError):
                _raise_why(running)
        with suppress(ray.exceptions.RayActorError):  # all is done; only its last words are lost
            screen.show(ray.get(news))
            screen.show(ray.get(actors[0].read_messages.remote()))


def _raise_why(running: Sequence[Any]) -> NoReturn:
    """Raise what a rank has to complain about; if none has, one of them is gone."""
    import ray

    until = time.monotonic() + LAST_WORDS
    pending = list(running)
    death = "no answer"
    while pending:
        ended, pending = ray.wait(pending, timeout=max(0.0, until - time.monotonic()))
        if not ended:
            break
        try:
            ray.get(ended)
        except ray.exceptions.RayActorError as error:
            death = first_line(error)
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, PeerStopped):
                raise own_error(error) from None
    raise _RankDied(death)


class Rank:
    """What lives in an actor: one rank."""

    def __init__(self) -> None:
        self.messages = queue.SimpleQueue[tuple[Any, ...]]()
        self.meeting = socket.socket()

    def begin(self, folder: str) -> tuple[str, str, int]:
        """Go to a folder; name this node, its address and a free port there."""
        import ray

        enter(folder)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), self.hold_port()

    def hold_port(self) -> int:
        """Keep a port for the store of this rank: torch may listen there, and nobody else is given it before."""
        self.meeting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.meeting.bind(("", 0))
        return int(self.meeting.getsockname()[1])

    def train(self, place: tuple[Any, ...], work: RankWork, recipe: Recipe, arguments: str | None, trust: bool) -> None:
        """Train as this rank of all."""
        set_rank_env(*place)
        work(Run(recipe, arguments, trust), ForwardedProgress(self.messages.put))

    def read_messages(self) -> list[tuple[Any, ...]]:
        """Return the messages since the last call; wait a moment for one."""
        messages = []
        with suppress(queue.Empty):
            messages.append(self.messages.get(timeout=1.0))
            while True:
                messages.append(self.messages.get_nowait())
        return messages


class ForwardedProgress(Progress):
    """Sends what it would show to the process that shows it: lines, and the states of bars."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.send: Callable[[tuple[Any, ...]], None] = (lambda message: None) if self.quiet else send

    def say(self, message: str) -> None:
        self.send((message,))

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        bar = Bar(what, total, unit)
        bar.show = lambda: self.send((what, total, unit, bar.done, bar.note))  # type: ignore[method-assign]
        yield bar


class _Screen(ExitStack):
    """Shows here what a rank tells elsewhere."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.bar: Bar | None = None

    def show(self, messages: Sequence[tuple[Any, ...]]) -> None:
        """Print a line, or move the bar; another bar ends the one before."""
        for message in messages:
            if len(message) == 1:
                self.progress.say(*message)
                continue
            what, total, unit, done, note = message
            if self.bar is None or (self.bar.what, self.bar.total) != (what, total):
                self.close()
                self.bar = self.enter_context(self.progress.bar(what, total, unit))
            self.bar.advance(done - self.bar.done, note)


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

    options = {"max_restarts": -1, "max_concurrency": threads, "num_cpus": plan.cpus, "num_gpus": plan.gpus}
    remote = ray.remote(**options)(RestartedWorker)
    openers = [job.open for job in jobs]  # sent together, so that a worker keeps what two of them share
    actors = [remote.remote(openers, run.recipe, run.arguments, run.trust, os.getcwd()) for _ in range(plan.workers)]
    running = []
    for number, job in enumerate(jobs):
        at_once = min(job.at_once, -(-len(job.pending) // plan.workers))  # the first worker leaves some for the others
        running.append(_RunningJob(number, job, at_once, deque(job.pending), len(job.pending)))
    try:
        _hand_out(actors, running, run, plan.gpus or 1.0, progress)
    finally:
        for one in running:  # what was spent is recorded however it ends
            one.account.close()
        for actor in actors:
            ray.kill(actor)


class ShardWorker:
    """What lives in an actor: the model of one job at a time, loaded when a shard of that job comes."""

    def __init__(
        self, openers: Sequence[Opener], recipe: Recipe, arguments: str | None, trust: bool, folder: str
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
                    job.meter = job.account.enter_context(job.job.measure(run))
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
        if one.bar is None:
            one.bar = bars.enter_context(progress.bar(one.job.label, total, one.job.unit))
        elif one.bar.done == total:
            continue
        for _ in range(total - one.left - one.bar.done):
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
