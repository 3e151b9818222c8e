"""Training on a Ray cluster: ranks in one placement group, each doing what a rank of torchrun does.

When a rank or its node dies, or one runs out of memory that less at once would spare, all of them are started again,
and training resumes from its newest checkpoint.
"""

import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from lightning_weave.cluster.workers import WorkerPlan, enter, live_nodes, own_error, plan_ranks
from lightning_weave.config import Recipe
from lightning_weave.errors import InputError, PeerStopped, StartAgain, WeaveError, first_line
from lightning_weave.progress import Bar, Progress
from lightning_weave.ranks import set_rank_env
from lightning_weave.run import Run
from lightning_weave.stages.work import RankWork, set_threads
from lightning_weave.store import MANIFEST
from lightning_weave.train.schedule import POSITION

MOST_DEATHS = 3  # one after another, without a new checkpoint or shard
NODE_PATIENCE = 60.0  # seconds for a lost node to come back, before training resumes with fewer ranks
LAST_WORDS = 30.0  # seconds for the other ranks to say why they stopped
NAMESPACE = "lightning-weave"


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
                    "Lower train.token_budget. Do nodes go often? Lower train.checkpoint_every"
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

    try:
        answers = ray.get([actor.begin.remote(os.getcwd()) for actor in actors])
    except ray.exceptions.RayActorError as error:
        raise _RankDied(first_line(error)) from None
    except ray.exceptions.RayTaskError as error:
        raise own_error(error) from None
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
        try:
            messages.append(self.messages.get(timeout=1.0))
            while True:
                messages.append(self.messages.get_nowait())
        except queue.Empty:
            return messages


class ForwardedProgress(Progress):
    """Sends what it would show to the process that shows it."""

    def __init__(self, send: Callable[[tuple[Any, ...]], None]) -> None:
        super().__init__()
        self.send: Callable[[tuple[Any, ...]], None] = (lambda message: None) if self.quiet else send

    def say(self, message: str) -> None:
        self.send((message,))

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        send = self.send

        class ForwardedBar(Bar):
            def show(self) -> None:
                send((what, total, unit, self.done, self.note))

        yield ForwardedBar(what, total, unit)


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
