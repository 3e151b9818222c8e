"""Online training that samples with an engine: it draws from the weights of each round, on any number of ranks."""

import os
import re
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from lightning_weave import devices
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.train import online as round_engine
from lightning_weave.train.online import memory_options
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import open_trainee
from lightning_weave.types import Request, Response, SamplingSettings
from pipeline.scored import HALF, QUIET, same
from programs import write_program
from runs.test_engines import make_recipe
from tiny import make_world, run_of
from train.cached import context
from train.launch import Plan, start

TESTS = Path(__file__).parents[1]
LIVE = {"weights": HALF, "method": "online"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """An online composition alone, quick to change, in three rounds of two updates."""
    recipe = make_world(tmp_path_factory.mktemp("round-engine"))
    train = {**recipe["train"], "epochs": 1, "learning_rate": 0.01, "checkpoint_every": 1}
    return {**recipe, "compositions": {"live": LIVE}, "train": train}


def with_engine(world: dict, folder: Path, *environment: str, **options: object) -> dict:
    """The recipe with an engine that computes; what it is asked to do is written down in `folder`."""
    folder.mkdir()
    paths = os.pathsep.join([str(TESTS / "stand_in"), *filter(None, sys.path)])
    said = [f"PYTHONPATH={paths}", f"STAND_IN_RECORDS={folder}", "STAND_IN_COMPUTES=1", *environment]
    python = write_program(folder / "python", "env", *said, sys.executable)
    engine = {"rollout": "vllm", "python": str(python), "parity": 1e-3, "options": options}
    return {**world, "runs": str(folder / "runs"), "engine": engine}


def calls(folder: Path) -> list[str]:
    """What one engine was asked to do, in order; weights by the name of their folder."""
    (file,) = folder.glob("*.calls")
    return [re.sub(r"/\S*/", "", line) for line in file.read_text().splitlines()]


def train(recipe: dict) -> Run:
    run = run_of(recipe)
    make_students(run, QUIET)
    return run


def final(run: Run) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "train/live/final/model.safetensors")


@pytest.fixture(scope="module")
def whole(world: dict, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in peace."""
    return train(with_engine(world, tmp_path_factory.mktemp("whole") / "engine"))


@pytest.mark.slow
def test_an_engine_samples_each_round_from_the_weights_of_that_round(whole: Run) -> None:
    """The rounds' own check holds every token to 1e-3 nats of the student that is trained."""
    assert calls(Path(whole.recipe.engine.python).parent) == [
        *("reload student", "reset"),
        *("reload round-000002", "reset"),
        *("reload round-000004", "reset"),
    ]
    folder = whole.directory / "train" / "live"
    assert not list(folder.glob("round-*")), "what an engine was given goes with it"
    assert len(list(read_lines(folder / "metrics.jsonl"))) == 6
    by_hf = whole.recipe.engine.model_copy(update={"rollout": "hf"})
    other = run_of(whole.recipe.model_copy(update={"engine": by_hf}))
    assert other.stage("train", "live").fingerprint != whole.stage("train", "live").fingerprint


@pytest.mark.slow
def test_an_engine_that_keeps_its_old_weights_is_found_out(world: dict, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=r"engine\.rollout = 'vllm' and the scorer disagree by .* engine\.parity"):
        train(with_engine(world, tmp_path / "deaf", "STAND_IN_DEAF=1"))


@pytest.mark.slow
def test_an_engine_sleeps_while_the_student_computes(world: dict, whole: Run, tmp_path: Path) -> None:
    slept = train(with_engine(world, tmp_path / "engine", enable_sleep_mode=True))
    awake = ["wake up weights", "reload round-000002", "wake up kv_cache", "reset", "sleep 2"]
    assert calls(tmp_path / "engine")[:8] == ["reload student", "reset", "sleep 2", *awake]
    assert same(final(slept), final(whole))


@pytest.mark.slow
def test_adapters_are_given_to_an_engine_without_touching_the_weights_beside_them(world: dict, tmp_path: Path) -> None:
    lora = {**world, "train": {**world["train"], "lora": {"rank": 2}, "learning_rate": 0.1}}
    train(with_engine(lora, tmp_path / "engine"))
    assert "reload round-000004" in calls(tmp_path / "engine")
    with pytest.raises(Mismatch):  # the check would have seen weights without their adapters
        train(with_engine(lora, tmp_path / "deaf", "STAND_IN_DEAF=1"))


@pytest.mark.slow
@pytest.mark.ranks
def test_engines_of_two_ranks_draw_what_one_draws(world: dict, whole: Run, tmp_path: Path) -> None:
    together = run_of(with_engine(world, tmp_path / "engines"))
    assert start(Plan([together]), ranks=2) == [0, 0]
    assert len(list((tmp_path / "engines").glob("*.calls"))) == 2
    alone, both = (
        [row["loss"] for row in read_lines(run.directory / "train/live/metrics.jsonl")] for run in (whole, together)
    )
    np.testing.assert_allclose(both, alone, rtol=1e-4)


@pytest.mark.vllm
def test_vllm_takes_the_weights_of_another_checkpoint_and_back(vllm_python: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    student = run_of(recipe).student
    models = {student.path: Checkpoint(str(student.path)).load(torch.float32, torch.device("cpu"))}
    other = tmp_path / "other"
    shutil.copytree(student.path, other)
    models[other] = Checkpoint(str(other)).load(torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in models[other].parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    models[other].save_pretrained(other)
    row = [5, 7, 9, 11, 3]
    options = recipe["engine"]["options"]
    said = []
    with VLLMSampler.from_checkpoint(student, "float32", max_length=64, python=vllm_python, options=options) as engine:
        for folder in (student.path, other, student.path):
            engine.reload(folder)
            (found,) = engine.score([row])
            with torch.no_grad():
                logprobs_TV = models[folder](torch.tensor([row])).logits[0].log_softmax(-1)
            expected = [float(logprobs_TV[place, token]) for place, token in enumerate(row[1:])]
            np.testing.assert_allclose(found, expected, atol=1e-5)
            said.append(expected)
    assert np.abs(np.subtract(said[0], said[1])).mean() > 0.01, "the two checkpoints differ"


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_samples_both_rounds_of_online_training(
    vllm_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round is drawn from the weights that the first one has made, by transformers' own reading of them."""
    recipe = make_recipe(tmp_path, vllm_python)
    recipe["prompts"] |= {"take": 8}
    recipe["train"] |= {"epochs": 1, "learning_rate": 0.03}
    given, rounds = [], []
    reload, sample = VLLMSampler.reload, VLLMSampler.sample

    def reload_and_keep(self: VLLMSampler, folder: Path) -> None:
        reload(self, folder)
        given.append(shutil.copytree(folder, tmp_path / f"given-{len(given)}"))

    def sample_and_keep(
        self: VLLMSampler, requests: list[Request], settings: SamplingSettings, **rest: bool
    ) -> list[Response]:
        drawn = sample(self, requests, settings, **rest)
        rounds.append([(request.prompt_ids, one) for request, one in zip(requests, drawn, strict=True)])
        return drawn

    monkeypatch.setattr(VLLMSampler, "reload", reload_and_keep)
    monkeypatch.setattr(VLLMSampler, "sample", sample_and_keep)
    run = train({**recipe, "compositions": {"live": LIVE}})
    losses = [row["loss"] for row in read_lines(run.directory / "train/live/metrics.jsonl")]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert [len(drawn) for drawn in rounds[-2:]] == [8, 8]
    initial, updated = (Checkpoint(str(one)).load(torch.float32, torch.device("cpu")) for one in given[-2:])
    said = np.concatenate([one.logprobs for _, one in rounds[-1]])
    np.testing.assert_allclose(said, _logprobs(updated, rounds[-1]), atol=1e-4)
    assert np.abs(said - _logprobs(initial, rounds[-1])).mean() > 0.01


def _logprobs(model: PreTrainedModel, drawn: list[tuple[list[int], Response]]) -> np.ndarray:
    """What transformers says of drawn tokens, over all rows of the output matrix."""
    scorer = Scorer.from_model(model, model.get_output_embeddings().weight.shape[0])
    scored = scorer.candidates([(prompt_ids, one.ids) for prompt_ids, one in drawn], 1)
    return np.concatenate([sampled_T for *_, sampled_T in scored])


def test_an_engine_takes_what_a_trainer_leaves_of_a_gpu(world: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = open_trainee(run_of(world), context(Ranks(0, 1, torch.device("cpu"))))
    numbers = sum(weight.numel() for weight in trainee.parameters())
    assert memory_options(trainee, torch.device("cpu")) == {}
    monkeypatch.setattr(round_engine, "memory_left", lambda device: (50 * numbers, 100 * numbers))
    taken = memory_options(trainee, torch.device("cpu"))
    assert taken == {"enable_sleep_mode": True, "gpu_memory_utilization": 0.35}  # of it (50 - 8) / 100, less a tenth
    monkeypatch.setattr(round_engine, "memory_left", lambda device: (9 * numbers, 100 * numbers))
    with pytest.raises(InputError, match=r"train\.keep_anchors"):
        memory_options(trainee, torch.device("cpu"))


class SharedGPU(TorchDispatchMode):
    """The CPU as a GPU of `total` bytes, shared by torch's pool, which keeps what it once took, and an engine.

    Counts every storage that an operation reads or makes, and refuses what does not fit.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.live = self.pool = self.engine = 0
        self.wakes: list[int] = []  # what the pool held whenever the engine took its memory
        self._held: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in self._held:
                self._held.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._release, storage._cdata, storage.nbytes())
        self.pool = max(self.pool, self.live)
        assert self.pool + self.engine <= self.total, "the trainer is out of memory"
        return result

    def _release(self, key: int, size: int) -> None:
        self._held.remove(key)
        self.live -= size

    def empty_pool(self) -> None:
        self.pool = self.live

    def wake(self, size: int) -> None:
        self.engine = size
        self.wakes.append(self.pool)
        assert self.pool + self.engine <= self.total, f"the engine is out of memory at wake {len(self.wakes)}"


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_trainer_anchors_and_engine_fit_on_one_gpu_over_all_rounds(
    world: dict, keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is given what the anchors leave, and the pool is empty whenever it takes its memory back."""
    gpu = SharedGPU(total=1_000_000)
    start_engine, reload, sleep = VLLMSampler.__init__, VLLMSampler.reload, VLLMSampler.sleep

    def starting(self: VLLMSampler, *args: Any, options: dict[str, Any], **settings: Any) -> None:
        self.size = int(options["gpu_memory_utilization"] * gpu.total)  # type: ignore[attr-defined]
        gpu.wake(self.size)  # type: ignore[attr-defined]
        start_engine(self, *args, options=options, **settings)

    def reloading(self: VLLMSampler, folder: Path) -> None:
        gpu.wake(self.size)  # type: ignore[attr-defined]
        reload(self, folder)

    def sleeping(self: VLLMSampler) -> None:
        sleep(self)
        assert self._asleep
        gpu.engine = 0

    monkeypatch.setattr(VLLMSampler, "__init__", starting)
    monkeypatch.setattr(VLLMSampler, "reload", reloading)
    monkeypatch.setattr(VLLMSampler, "sleep", sleeping)
    monkeypatch.setattr(devices, "empty_pool", gpu.empty_pool)
    monkeypatch.setattr(round_engine, "memory_left", lambda device: (gpu.total - gpu.pool, gpu.total))
    recipe = with_engine(world, tmp_path / "engine")
    with gpu:
        train({**recipe, "train": {**recipe["train"], "keep_anchors": keep, "checkpoint_every": 100}})
    assert len(gpu.wakes) == 4  # at its start, and before each round
