"""Training and whole runs on a Ray cluster (`make test-ray`): two nodes on this machine, killed as they work."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import ports
import tiny
from cluster.clustered import Watching, world
from lightning_weave import cluster as cluster_ranks
from lightning_weave.api import Run
from lightning_weave.cluster import connect
from lightning_weave.config import dump_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.report.results import read_results
from lightning_weave.report.tables import format_results, plain
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import run as run_stage
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from lightning_weave.store import read_lines
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.schedule import POSITION
from train import launch
from train.cached import make_run

QUIET = Progress(quiet=True)
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
# The loss of the method itself. Where nobody has been there before it waits in the tenth pass until it is let go.
LOSS = """
import time
from pathlib import Path
from lightning_weave.maths import log_residual_loss

passes = []


def loss(log_pi_NO, log_b_NO, log_q_NO, alpha):
    passes.append(None)
    if len(passes) == 10 and not Path({reached!r}).exists():
        Path({reached!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.1)
    return log_residual_loss(log_pi_NO, log_b_NO, log_q_NO, alpha)
"""


@dataclass(frozen=True)
class Alone:
    """A run that nothing disturbs: this process makes all but its student, which two ranks train without Ray."""

    recipe: dict[str, Any]
    run: Run
    reached: Path
    go: Path

    def again(self, runs: Path) -> Run:
        """The same run elsewhere, which will wait in the middle of its training."""
        self.reached.unlink(missing_ok=True)
        self.go.unlink(missing_ok=True)
        return tiny.run_of({**self.recipe, "runs": str(runs)}, trust=True)

    def wait(self, run: Run) -> None:
        """Return when training is in its middle and a checkpoint, which a thread writes, is complete."""
        while not self.reached.exists() or not [
            path for path in run.directory.rglob(POSITION) if path.parent.name.isdigit()
        ]:
            time.sleep(0.1)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    root = tmp_path_factory.mktemp("alone")
    reached, go = root / "reached", root / "go"
    (root / "losses.py").write_text(LOSS.format(reached=str(reached), go=str(go)))
    recipe = world(root)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    recipe["train"] |= {"epochs": 1, "checkpoint_every": 2, "objective": f"{root / 'losses.py'}:loss"}
    recipe["machine"] = {"threads": 1, "workers": 2}
    run = tiny.run_of(recipe, trust=True)
    reached.touch()
    make_cache(run, QUIET)
    assert launch.start(launch.Plan([run]), ranks=2) == [0, 0]
    eval_stage.evaluate(run, QUIET)
    return Alone(recipe, run, reached, go)


def results(run: Run) -> dict[Path, bytes]:
    """All that a run has made: shards, weights, samples, summaries."""
    root = run.directory
    paths = [*root.rglob("*.safetensors"), *root.rglob("samples.jsonl"), *root.rglob("summary.json")]
    return {path.relative_to(root): path.read_bytes() for path in paths}


def table(run: Run) -> str:
    return plain(format_results(read_results(run)))


def test_a_node_that_dies_in_every_phase_costs_nothing_but_time(cluster: Any, alone: Alone, tmp_path: Path) -> None:
    run = alone.again(tmp_path)

    def kill_a_node() -> None:
        cluster.remove_node(cluster.worker_nodes.copy().pop(), allow_graceful=False)

    def add_a_node() -> None:
        cluster.add_node(num_cpus=1)

    def replace_a_node() -> None:
        kill_a_node()
        add_a_node()

    def kill_a_node_in_training() -> None:
        alone.wait(run)
        kill_a_node()  # its rank dies a little later, so the other one is not let go: training would finish

    phases = ("rollout", "score acc-pre", "eval both/problems")
    watching = Watching(dict.fromkeys(phases, replace_a_node), on_death=add_a_node)  # only this thread can add one
    killer = Thread(target=kill_a_node_in_training, daemon=True)
    killer.start()
    run_stage.run_all(run, watching, connect(None), force=True)
    killer.join()

    made, expected = results(run), results(alone.run)
    assert made.keys() == expected.keys()
    assert sum(path.suffix == ".safetensors" for path in made) == 12 * 6 + 1
    assert [path for path in made if made[path] != expected[path]] == []
    assert table(run) == table(alone.run)
    # Every shard was counted once, those of the dead workers too; training went back to a checkpoint.
    models = ["acc-post", "acc-pre", "brief-post", "brief-pre"]
    shards = {"rollout": 12, "reference": 12, **{f"score {name}": 12 for name in models}}
    assert {what: watching.counts[what] for what in shards} == shards
    assert {what: watching.counts[what] for what in ("eval base/problems", "eval both/problems")} == {
        "eval base/problems": 6,
        "eval both/problems": 6,
    }
    said = "\n".join(watching.said)
    assert "a rank died" in said
    assert "train both: resuming from update" in said
    tokens = [
        sum(row["tokens"] for row in read_ledger(one.directory) if row["stage"] != "train") for one in (run, alone.run)
    ]
    assert tokens[0] == tokens[1]


def test_a_command_that_is_killed_goes_on_where_it_was(cluster: Any, alone: Alone, tmp_path: Path) -> None:
    run = alone.again(tmp_path)
    shutil.copytree(
        alone.run.directory, run.directory, ignore=shutil.ignore_patterns("train", "eval", ".lock", ".holder")
    )
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(dump_recipe(run.recipe))
    command = [sys.executable, "-m", "lightning_weave.cli", "train", str(recipe), "--trust"]
    command += ["--cluster", "ray", "--address", cluster.address]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    alone.wait(run)
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "train: 2 ranks on the cluster" in done.stderr
    assert "train both: resuming from update" in done.stderr
    weights = "train/both/final/model.safetensors"
    assert (run.directory / weights).read_bytes() == (alone.run.directory / weights).read_bytes()


def test_what_is_wrong_with_a_recipe_is_said_here_and_not_tried_again(cluster: Any, alone: Alone) -> None:
    wrong = {**alone.recipe, "train": {**alone.recipe["train"], "dtype": "float16"}}
    watching = Watching()
    with pytest.raises(InputError, match=r'train\.dtype = "float16": small gradients'):
        make_students(tiny.run_of(wrong, trust=True), watching, executor=connect(None))
    assert watching.said == ["train: 2 ranks on the cluster"]


def test_a_sweep_is_what_it_is_without_a_cluster(cluster: Any, tmp_path: Path) -> None:
    """One rank trains, as here; workers on both nodes do the rest."""
    recipe = world(tmp_path)
    recipe["compositions"] = {}
    recipe["train"] |= {"epochs": 1}
    recipe["machine"] = {"threads": 1, "workers": 1}
    here, there = (Run({**recipe, "runs": str(tmp_path / str(name))}, cluster=name) for name in (None, "ray"))
    here.progress, there.progress = Watching(), Watching()
    for one in (here, there):
        one.sweep([0.25])
    assert results(there) == results(here)
    assert (there.directory / "train/brief-0.250/final/model.safetensors").exists()
    assert "train: 1 ranks on the cluster" in there.progress.said


def no_models(root: Path) -> Run:
    """A recipe for what never looks at a model."""
    machine = {"threads": 1, "workers": 2}
    return tiny.run_of({"name": "r", "runs": str(root), "student": {"model": "none"}, "machine": machine})


def _die(run: Run, progress: Progress) -> None:
    """The first rank dies; the other would wait for it."""
    import os as system
    import time as clock

    if system.environ["RANK"] == "0":
        system._exit(1)
    clock.sleep(3600)


def test_ranks_that_die_again_and_again_are_given_up(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_value()
    monkeypatch.setattr(cluster_ranks, "LAST_WORDS", 0.0)
    watching = Watching()
    with pytest.raises(WeaveError, match="3 times a rank died before a new checkpoint was written"):
        connect(None).train(_die, no_models(tmp_path), watching)
    assert watching.said.count("train: 2 ranks on the cluster") == 3


def _die_with_the_node(run: Run, progress: Progress) -> None:
    """Two ranks lose the node of the second, once the first was heard; one goes on alone."""
    import os as system
    import signal as signals
    import time as clock

    progress.say(f"rank {system.environ['RANK']} of {system.environ['WORLD_SIZE']}")
    if system.environ["WORLD_SIZE"] == "2":
        if system.environ["RANK"] == "1":
            while not run.directory.joinpath("heard").exists():
                clock.sleep(0.1)
            system.kill(system.getppid(), signals.SIGKILL)
        clock.sleep(3600)


def test_training_goes_on_with_fewer_ranks_where_no_node_comes_back(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _by_value()
    monkeypatch.setattr(cluster_ranks, "LAST_WORDS", 0.0)
    monkeypatch.setattr(cluster_ranks, "NODE_PATIENCE", 0.0)
    run = no_models(tmp_path)
    run.directory.mkdir()

    class Hearing(Watching):
        def say(self, message: str) -> None:
            super().say(message)
            if message.startswith("rank"):
                run.directory.joinpath("heard").touch()

    watching = Hearing()
    connect(None).train(_die_with_the_node, run, watching)
    assert [line for line in watching.said if line.startswith("rank")] == ["rank 0 of 2", "rank 0 of 1"]


def _look(run: Run, progress: Progress) -> None:
    import os as system

    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    rank, *others = (system.environ[name] for name in names)
    (run.directory / rank).write_text(" ".join(others))


def test_each_rank_has_its_own_gpu(cluster: Any, tmp_path: Path) -> None:
    """Ray believes in the GPUs of two nodes that have none; those of one node follow each other."""
    _by_value()
    for gpus in (2, 1):
        cluster.add_node(num_cpus=gpus, num_gpus=gpus)
    cluster.wait_for_nodes()
    run = tiny.run_of({"name": "r", "runs": str(tmp_path), "student": {"model": "none"}})
    connect(None).train(_look, run, QUIET)
    seen = [(run.directory / str(rank)).read_text().split() for rank in range(3)]
    alone, first, second = ["3", "0", "1"], ["3", "0", "2"], ["3", "1", "2"]
    assert [places for *places, _ in seen] in ([alone, first, second], [first, second, alone])
    assert {gpu for *places, gpu in seen if places != alone} == {"0", "1"}


def _train_with_little_memory(run: Run, progress: Progress) -> None:
    """The second rank has no room for a backward pass of 15 tokens."""
    import os as system

    if system.environ["RANK"] == "1":
        launch.run_out_of_memory("backward", least=15)
    make_students(run, progress)


def test_ranks_that_run_out_of_memory_start_again_with_less(cluster: Any, tmp_path: Path) -> None:
    """The second rank begins with 47 tokens, and half is too much: two starts are in vain. The losses are the same."""
    _by_value()
    settings = {"prompts_per_round": 6, "checkpoint_every": 1, "token_budget": 1000}
    run, undisturbed = (make_run(tmp_path / name, train=settings) for name in ("disturbed", "undisturbed"))
    assert launch.start(launch.Plan([undisturbed]), ranks=2) == [0, 0]
    watching = Watching()
    connect(None).train(_train_with_little_memory, run, watching)
    vain = [line for line in watching.said if line.startswith("train: out of memory on rank 1 at update 1")]
    assert len(vain) == 2
    assert "All start again: it resumes with" in vain[0]
    assert watching.said.count("train: 2 ranks on the cluster") == 3
    expected = losses(undisturbed)
    assert expected[-1] < expected[0], "it learns"
    assert losses(run) == pytest.approx(expected, abs=1e-5)


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in read_lines(run.directory / "train" / "both" / "metrics.jsonl")]


def _by_value() -> None:
    """Send the functions of the tests to workers, which cannot import them."""
    from ray import cloudpickle

    for module in (sys.modules[__name__], launch, ports):
        cloudpickle.register_pickle_by_value(module)
