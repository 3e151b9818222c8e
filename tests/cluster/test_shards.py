"""Shards on a Ray cluster (`make test-ray`): workers that die, that fail, and that go from one job to the next."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import tiny
from cluster.clustered import Watching, world
from lightning_weave.cluster import Rank, ShardWorker, check_address, connect, plan_ranks, plan_workers
from lightning_weave.config import Machine, check_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import reference, rollout
from lightning_weave.stages.work import Job, ShardStats
from lightning_weave.store.ledger import read_ledger
from ports import held_port

QUIET = Progress(quiet=True)


def test_workers_are_as_many_as_the_nodes_have_room_for_or_as_the_recipe_says() -> None:
    gpus = [{"CPU": 32.0, "GPU": 8.0}] * 2
    plan = plan_workers(Machine(), gpus, 100)
    assert (plan.workers, plan.cpus, plan.gpus) == (16, 1, 1)
    assert plan_workers(Machine(gpus_per_worker=2.0), gpus, 100).workers == 8
    assert plan_workers(Machine(gpus_per_worker=0.1), gpus, 1000).workers == 64  # CPUs end before 160 of them
    assert plan_workers(Machine(gpus_per_worker=0.5), gpus, 5).workers == 5  # never more than shards
    assert plan_workers(Machine(workers=3, threads=2), gpus, 100).workers == 3
    assert plan_workers(Machine(device="cpu", threads=4), gpus, 100).workers == 16
    assert plan_workers(Machine(), [{"CPU": 8.0}], 100).gpus == 0
    with pytest.raises(InputError, match=r"1 CPUs and 16 GPUs fits onto one node .*\(2 x 32 CPUs and 8 GPUs\)"):
        plan_workers(Machine(gpus_per_worker=16.0), gpus, 100)


def test_an_engine_gets_all_its_gpus_on_one_node() -> None:
    """Six GPUs of a node hold one engine of four; two nodes with two of their own hold none."""
    nodes = [{"CPU": 32.0, "GPU": 6.0}, {"CPU": 32.0, "GPU": 2.0}, {"CPU": 32.0, "GPU": 2.0}]
    plan = plan_workers(Machine(), nodes, 100, devices=4)
    assert (plan.workers, plan.gpus) == (1, 4)
    with pytest.raises(InputError, match="tensor_parallel_size"):
        plan_workers(Machine(), nodes, 100, devices=8)


def test_ranks_are_one_per_gpu_or_one_per_node() -> None:
    def ranks(nodes: list[dict[str, float]], **sections: Any) -> int:
        return plan_ranks(check_recipe({"name": "r", "student": {"model": "s"}, **sections}), nodes).workers

    gpus, cpus = [{"CPU": 32.0, "GPU": 8.0}] * 2, [{"CPU": 0.0}, {"CPU": 32.0}, {"CPU": 32.0}]
    assert ranks(gpus) == 16
    assert ranks(gpus, machine={"gpus_per_worker": 0.5}) == 16
    assert ranks(gpus, machine={"workers": 4, "gpus_per_worker": 2.0}) == 8  # all GPUs of four engines
    assert ranks(gpus, machine={"workers": 4, "gpus_per_worker": 0.5}) == 2
    assert ranks([*gpus[:1], {"CPU": 32.0, "GPU": 7.0}], train={"shard_ranks": 4}) == 12
    assert ranks(gpus, train={"lora": {"base": "nf4"}}) == 1
    assert ranks(cpus) == 2
    assert ranks(cpus, machine={"workers": 3}) == 3
    with pytest.raises(InputError, match=r"train\.shard_ranks = 32: the cluster has room for 16 ranks"):
        ranks(gpus, train={"shard_ranks": 32})


def test_a_folder_that_a_node_does_not_have_is_said(tmp_path: Path) -> None:
    recipe = check_recipe({"name": "r", "student": {"model": "s"}})
    with pytest.raises(InputError, match=r"gone is not on node .*: start the command in a folder that all nodes share"):
        ShardWorker([], recipe, "", False, str(tmp_path / "gone")).ready()


def test_the_port_at_which_ranks_meet_is_kept_for_them() -> None:
    rank = Rank()
    port = rank.hold_port()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("", port))
    assert TCPStore("127.0.0.1", port, world_size=1, is_master=True).port == port
    rank.meeting.close()


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
        check_address(f"ray://127.0.0.1:{port}")
    with held_port() as port, pytest.raises(InputError, match=rf"--address 127\.0\.0\.1:{port}: no answer there"):
        check_address(f"127.0.0.1:{port}")
    check_address("auto")
    check_address(None)


OWN_CLUSTER = """
import os
import psutil
from lightning_weave.cluster import connect

connect(None)
import ray

ray.get(ray.remote(num_cpus=0)(lambda: 1).remote())  # a worker runs
for process in psutil.process_iter():
    try:
        if os.getpid() in [process.pid, *(parent.pid for parent in process.parents())]:
            print(*(one.laddr.ip for one in process.net_connections() if one.status == "LISTEN"), sep="\\n")
    except psutil.Error:  # it has ended
        pass
"""


@pytest.mark.ray
def test_only_this_machine_reaches_a_cluster_that_we_start(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # short, for names of sockets
        environment["RAY_TMPDIR"] = folder
        ended = subprocess.run([sys.executable, "-c", OWN_CLUSTER], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert {address.removeprefix("::ffff:") for address in ended.stdout.split()} == {"127.0.0.1"}
    assert (tmp_path / ".ray" / "auth_token").exists(), "and nobody else on it without the token"


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_the_shard_of_a_worker_that_dies_goes_to_another(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first worker that gets shard 1 is gone in the middle of it."""
    died = tmp_path / "died"

    def open_dying(run: Run) -> Any:
        def compute_shards(shards: list[int]) -> list[ShardStats]:
            if 1 in shards and not died.exists():
                died.touch()
                os._exit(1)
            return [ShardStats(tokens=10 + shard) for shard in shards]

        return nullcontext(compute_shards)

    run, counted = tiny.run_of(world(tmp_path)), Watching()
    with caplog.at_level(logging.INFO, "lightning_weave"):
        connect(None).run_jobs([Job("score/acc-pre", [0, 1, 2], open_dying)], run, counted)
    assert "score acc-pre: a worker died; shard 1 goes to another" in caplog.text
    assert counted.counts == {"score acc-pre": 3}
    assert sum(row["tokens"] for row in read_ledger(run.directory)) == 10 + 11 + 12


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_a_worker_is_the_users_to_read(cluster: Any, tmp_path: Path) -> None:
    recipe = world(tmp_path)
    recipe["reference"] = {"candidates": 500}
    run = tiny.run_of(recipe)
    rollout.rollout(run, QUIET)
    with pytest.raises(InputError, match=r"reference\.candidates = 500: the student has only"):
        reference.reference(run, QUIET, connect(None))


def _wait_until(ready: Callable[[], bool], never: str) -> None:
    until = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < until, never
        time.sleep(0.1)


def _open_waiting(run: Run, others: Path | None, own: Path) -> Any:
    def compute_shards(shards: list[int]) -> list[ShardStats]:
        _wait_until(lambda: others is None or others.exists(), "nobody has begun the other job")
        own.touch()
        return [ShardStats(1) for _ in shards]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_free_worker_begins_the_next_job(cluster: Any, tmp_path: Path) -> None:
    """The only shard of the first job is made when the second job has been."""
    _by_value()
    run, counted, ended = tiny.run_of(world(tmp_path)), Watching(), list[str]()
    names = ["first", "second"]
    openers = [
        partial(_open_waiting, others=tmp_path / "second", own=tmp_path / "first"),
        partial(_open_waiting, others=None, own=tmp_path / "second"),
    ]
    jobs = [
        Job(f"score/{name}", [0], opener, finish=partial(ended.append, name))
        for name, opener in zip(names, openers, strict=True)
    ]
    connect(None).run_jobs(jobs, run, counted)
    assert ended == ["second", "first"]
    assert list(counted.counts.items()) == [("score first", 1), ("score second", 1)]  # bars keep the order
    rows = read_ledger(run.directory)
    assert [(row["name"], row["tokens"]) for row in rows] == [("second", 1), ("first", 1)]


def _open_meeting(run: Run, place: Path, killer: int | None) -> Any:
    import os as system

    def compute_shards(shards: list[int]) -> list[ShardStats]:
        (shard,) = shards
        died = place / "died"
        (place / f"{shard} of {system.getpid()}").touch()
        mine = f"* of {system.getpid()}"
        _wait_until(lambda: died.exists() or len(list(place.glob(mine))) >= 3, "it never had three shards")
        if shard == killer and not died.exists():
            died.touch()
            system._exit(1)
        _wait_until(lambda: killer is None or died.exists(), "its worker never died")
        return [ShardStats(10 + shard)]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("killer", [None, 1])
def test_a_worker_makes_several_shards_at_once(cluster: Any, tmp_path: Path, killer: int | None) -> None:
    """None of the first three is made before all are begun. When their worker dies, each is made again, once."""
    _by_value()
    run, counted = tiny.run_of({**world(tmp_path), "machine": {"threads": 1, "workers": 1}}), Watching()
    place = tmp_path / "place"
    place.mkdir()
    job = Job("rollout", range(5), partial(_open_meeting, place=place, killer=killer), at_once=3)
    since = time.monotonic()
    connect(None).run_jobs([job], run, counted)
    assert counted.counts == {"rollout": 5}
    rows = read_ledger(run.directory)
    assert sum(row["tokens"] for row in rows) == 50 + 1 + 2 + 3 + 4
    assert sum(row["device_seconds"] for row in rows) <= time.monotonic() - since, "one device, however many shards"


def _open_in_company(run: Run, place: Path) -> Any:
    import os as system

    def compute_shards(shards: list[int]) -> list[ShardStats]:
        (place / str(system.getpid())).touch()
        _wait_until(lambda: len(list(place.iterdir())) >= 2, "one worker has all shards")
        return [ShardStats(1)]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_the_first_worker_leaves_shards_to_the_second(cluster: Any, tmp_path: Path) -> None:
    """No shard is made before both workers have one."""
    _by_value()
    run, counted, place = tiny.run_of(world(tmp_path)), Watching(), tmp_path / "place"
    place.mkdir()
    job = Job("rollout", range(4), partial(_open_in_company, place=place), at_once=4)
    connect(None).run_jobs([job], run, counted)
    assert counted.counts == {"rollout": 4}


def _open_looking(run: Run, seen: Path) -> Any:
    import os as system

    def compute_shards(shards: list[int]) -> list[ShardStats]:
        for shard in shards:
            (seen / str(shard)).write_text(system.environ["CUDA_VISIBLE_DEVICES"])
        return [ShardStats(1) for _ in shards]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_worker_sees_the_gpus_of_its_engine(cluster: Any, tmp_path: Path) -> None:
    """Ray believes in the four GPUs of a node that has none."""
    _by_value()
    cluster.add_node(num_cpus=4, num_gpus=4)
    cluster.wait_for_nodes()
    run = tiny.run_of({"name": "r", "runs": str(tmp_path / "runs"), "student": {"model": "s"}})
    job = Job("rollout", [0, 1], partial(_open_looking, seen=tmp_path), devices=2)
    connect(None).run_jobs([job], run, QUIET)
    assert {(tmp_path / str(shard)).read_text() for shard in (0, 1)} <= {"0,1", "2,3"}


class _Engine:
    """Stays up from one benchmark to the next; `starts` counts how often it had to be started."""

    starts = 0

    def start(self) -> None:
        self.starts += 1


def _open_with(run: Run, engine: _Engine) -> Any:
    if not engine.starts:
        engine.start()

    def compute_shards(shards: list[int]) -> list[ShardStats]:
        return [ShardStats(1, written=engine.starts) for _ in shards]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_worker_keeps_what_two_jobs_share(cluster: Any, tmp_path: Path) -> None:
    _by_value()
    run = tiny.run_of({**world(tmp_path), "machine": {"threads": 1, "workers": 1}})
    engine = _Engine()
    jobs = [Job(f"eval/{name}", [0, 1], partial(_open_with, engine=engine), unit="block") for name in ("easy", "hard")]
    connect(None).run_jobs(jobs, run, QUIET)
    rows = read_ledger(run.directory)
    assert [(row["name"], row["bytes"]) for row in rows] == [("easy", 2), ("hard", 2)]  # one start, for all four blocks


def _by_value() -> None:
    """Send the functions of this file to workers, which cannot import it."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _open_poisoned(run: Run) -> Any:
    import os as system

    def compute_shards(shards: list[int]) -> list[ShardStats]:
        if 1 in shards:
            system._exit(1)
        return [ShardStats(1) for _ in shards]

    return nullcontext(compute_shards)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_a_shard_that_kills_every_worker_is_given_up_by_name(cluster: Any, tmp_path: Path) -> None:
    _by_value()
    run = tiny.run_of(world(tmp_path))
    with pytest.raises(WeaveError, match="3 workers died making shard 1"):
        connect(None).run_jobs([Job("score/poison", [0, 1, 2], _open_poisoned)], run, QUIET)
