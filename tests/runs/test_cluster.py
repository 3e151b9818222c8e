"""Shards on a Ray cluster (`make test-ray`): two nodes on this machine, one of them killed while it works."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from lightning_weave.config import Machine
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.pipeline import eval as eval_stage
from lightning_weave.pipeline import reference, score
from lightning_weave.pipeline.flow import make_rollouts
from lightning_weave.progress import Bar, Progress
from lightning_weave.runs.cluster import check_address, connect, plan_workers
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, Job, Made
from lightning_weave.store.ledger import read_ledger

QUIET = Progress(quiet=True)


def world(root: Path, models: dict | None = None) -> dict:
    recipe = models or tiny.make_world(root / "models", prompts=24)
    problems = tiny.save_prompts(root / "problems.jsonl", 6, seed=9)
    recipe = {**recipe, "runs": str(root / "runs")}
    recipe["rollout"] = {"responses": 4, "max_tokens": 24, "prompts_per_shard": 2}
    recipe["eval"] = {"benchmarks": [f"file:{problems}"], "samples": 4, "max_tokens": 12, "chat": False, "block": 4}
    return recipe


def make_everything(steps: Steps, progress: Progress, do: Do | None = None) -> None:
    here = {} if do is None else {"do": do}
    make_rollouts(steps, progress, **here)
    reference.run(steps, progress, **here)
    score.run(steps, progress, **here)
    eval_stage.run(steps, progress, ["base"], **here)


class Watching(Progress):
    """Counts shards as they are finished, and does something after some of them."""

    def __init__(self, stage: str, after: int, then: Callable[[], None]) -> None:
        super().__init__(quiet=True)
        self.stage, self.after, self.then = stage, after, then
        self.counts: dict[str, int] = {}

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        watching = self

        class Counting(Bar):
            def show(self) -> None:
                watching.counts[what] = watching.counts.get(what, 0) + 1
                if what == watching.stage and watching.counts[what] == watching.after:
                    watching.then()

        yield Counting(what, total, unit)


def test_a_crew_is_as_large_as_the_cluster_or_as_the_recipe_says() -> None:
    gpus = {"CPU": 64.0, "GPU": 16.0}
    crew = plan_workers(Machine(), gpus, 100)
    assert (crew.workers, crew.cpus, crew.gpus) == (16, 1, 1)
    assert plan_workers(Machine(gpus_per_worker=2.0), gpus, 100).workers == 8
    assert plan_workers(Machine(gpus_per_worker=2.0), gpus, 3).devices == 6  # what the ledger counts
    assert plan_workers(Machine(gpus_per_worker=0.5), gpus, 5).devices == 2.5
    assert plan_workers(Machine(device="cpu"), gpus, 100).devices == 64
    assert plan_workers(Machine(gpus_per_worker=0.5), gpus, 5).workers == 5  # never more than shards
    assert plan_workers(Machine(workers=3, threads=2), gpus, 100) == plan_workers(
        Machine(workers=3, threads=2), gpus, 50
    )
    assert plan_workers(Machine(device="cpu", threads=4), gpus, 100).workers == 16
    assert plan_workers(Machine(), {"CPU": 8.0}, 100).gpus == 0
    with pytest.raises(InputError, match=r"no worker of 1 CPUs and 32 GPUs fits into the cluster, which has CPU 64"):
        plan_workers(Machine(gpus_per_worker=32.0), gpus, 100)


def test_an_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        check_address(f"127.0.0.1:{port}")
        check_address(f"ray://127.0.0.1:{port}")
    with pytest.raises(InputError, match=rf"--address 127\.0\.0\.1:{port}: no answer there"):
        check_address(f"127.0.0.1:{port}")
    check_address("auto")
    check_address(None)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head that does no work, and two nodes with room for one worker each."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"  # or Ray warns that it will be so one day
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    ray.init(address=made.address, log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_dies_costs_nothing_but_time(cluster: Any, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = world(tmp_path)
    alone = tiny.steps_of(recipe)
    make_everything(alone, QUIET)

    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    together = tiny.steps_of({**recipe, "runs": str(tmp_path / "cluster")})
    watching = Watching("score acc-pre", 3, lambda: cluster.remove_node(nodes[0], allow_graceful=False))
    make_everything(together, watching, connect(None))

    # Every shard was counted once, those of the dead worker too.
    models = ["acc-post", "acc-pre", "brief-post", "brief-pre"]
    shards = {"rollout": 12, "reference": 12, **{f"score {name}": 12 for name in models}, "eval base/problems": 6}
    assert watching.counts == shards
    assert not nodes[0].any_processes_alive()
    one, many = alone.store.run_dir, together.store.run_dir
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.suffix in (".safetensors", ".jsonl"))
    assert sum(path.suffix == ".safetensors" for path in files) == 12 * 6
    for path in files:
        if path.name != "ledger.jsonl":
            assert (many / path).read_bytes() == (one / path).read_bytes(), path
    tokens = [sum(row["tokens"] for row in read_ledger(run)) for run in (one, many)]
    assert tokens[0] == tokens[1]


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_the_shard_of_a_worker_that_dies_goes_to_another(
    cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first worker that gets shard 1 is gone in the middle of it."""
    died = tmp_path / "died"

    def open_dying(steps: Steps) -> Any:
        class Dying:
            def make(self, shards: list[int]) -> list[Made]:
                if 1 in shards and not died.exists():
                    died.touch()
                    os._exit(1)
                return [Made(tokens=10 + shard) for shard in shards]

            def close(self) -> None: ...

        return Dying()

    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    steps, counted = tiny.steps_of(world(tmp_path)), Watching("", 0, lambda: None)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        connect(None)(Job("score", "acc-pre", "shard", [0, 1, 2], open_dying), steps, counted)
    assert "score acc-pre: a worker died; shard 1 goes to another" in caplog.text
    assert counted.counts == {"score acc-pre": 3}
    assert sum(row["tokens"] for row in read_ledger(steps.store.run_dir)) == 10 + 11 + 12


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_an_error_of_a_worker_is_the_users_to_read(cluster: Any, tmp_path: Path) -> None:
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    recipe = world(tmp_path)
    recipe["reference"] = {"candidates": 500}
    steps = tiny.steps_of(recipe)
    make_rollouts(steps, QUIET)
    with pytest.raises(InputError, match=r"reference\.candidates = 500: the student has only"):
        reference.run(steps, QUIET, connect(None))


def _open_poisoned(steps: Steps) -> Any:
    import os as system

    class Poisoned:
        def make(self, shards: list[int]) -> list[Made]:
            if 1 in shards:
                system._exit(1)
            return [Made(1) for _ in shards]

    return Poisoned()


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_a_shard_that_kills_every_worker_is_given_up_by_name(cluster: Any, tmp_path: Path) -> None:
    import sys

    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    steps = tiny.steps_of(world(tmp_path))
    with pytest.raises(WeaveError, match="3 workers died making shard 1"):
        connect(None)(Job("score", "poison", "shard", [0, 1, 2], _open_poisoned), steps, QUIET)
