"""Online training that samples with an engine: it draws from the weights of each round, on any number of ranks."""

import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from lightning_weave.errors import Mismatch
from lightning_weave.models.hf import hf_scorer
from lightning_weave.models.load import load_model
from lightning_weave.models.vllm import Drawn, VLLMSampler
from lightning_weave.pipeline.flow import make_students
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines
from lightning_weave.train import round_engine
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.round_engine import room_beside
from lightning_weave.train.training import open_trainee
from lightning_weave.types import Request, SamplingSettings
from pipeline.scored import HALF, QUIET, same
from programs import write_program
from runs.test_engines import make_recipe
from tiny import make_world, steps_of
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
    engine = {"engine": "vllm", "python": str(python), "parity": 1e-3, "options": options}
    return {**world, "runs": str(folder / "runs"), "rollout": {**world["rollout"], **engine}}


def calls(folder: Path) -> list[str]:
    """What one engine was asked to do, in order; weights by the name of their folder."""
    (file,) = folder.glob("*.calls")
    return [re.sub(r"/\S*/", "", line) for line in file.read_text().splitlines()]


def train(recipe: dict) -> Steps:
    steps = steps_of(recipe)
    make_students(steps, QUIET)
    return steps


def final(steps: Steps) -> dict[str, torch.Tensor]:
    return load_file(steps.store.run_dir / "train/live/final/model.safetensors")


@pytest.fixture(scope="module")
def whole(world: dict, tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """A run in peace."""
    return train(with_engine(world, tmp_path_factory.mktemp("whole") / "engine"))


@pytest.mark.slow
def test_an_engine_samples_each_round_from_the_weights_of_that_round(whole: Steps) -> None:
    """The rounds' own check holds every token to 1e-3 nats of the student that is trained."""
    assert calls(Path(whole.recipe.rollout.python).parent) == [
        *("reload student", "reset"),
        *("reload round-000002", "reset"),
        *("reload round-000004", "reset"),
    ]
    folder = whole.store.run_dir / "train" / "live"
    assert not list(folder.glob("round-*")), "what an engine was given goes with it"
    assert len(list(read_lines(folder / "metrics.jsonl"))) == 6
    other = steps_of(
        whole.recipe.model_copy(update={"rollout": whole.recipe.rollout.model_copy(update={"engine": "hf"})})
    )
    assert other.train("live").fingerprint != whole.train("live").fingerprint


@pytest.mark.slow
def test_an_engine_that_keeps_its_old_weights_is_found_out(world: dict, tmp_path: Path) -> None:
    with pytest.raises(Mismatch, match=r"rollout\.engine = 'vllm' and the scorer disagree by .* rollout\.parity"):
        train(with_engine(world, tmp_path / "deaf", "STAND_IN_DEAF=1"))


@pytest.mark.slow
def test_an_engine_sleeps_while_the_student_computes(world: dict, whole: Steps, tmp_path: Path) -> None:
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
def test_engines_of_two_ranks_draw_what_one_draws(world: dict, whole: Steps, tmp_path: Path) -> None:
    together = steps_of(with_engine(world, tmp_path / "engines"))
    assert start(Plan([together]), ranks=2) == [0, 0]
    assert len(list((tmp_path / "engines").glob("*.calls"))) == 2
    alone, both = (
        [row["loss"] for row in read_lines(steps.store.run_dir / "train/live/metrics.jsonl")]
        for steps in (whole, together)
    )
    np.testing.assert_allclose(both, alone, rtol=1e-4)


@pytest.mark.vllm
def test_vllm_takes_the_weights_of_another_checkpoint_and_back(vllm_python: str, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, vllm_python)
    student = steps_of(recipe).student
    models = {student.path: load_model(student.path, dtype=torch.float32, device=torch.device("cpu"))}
    other = tmp_path / "other"
    shutil.copytree(student.path, other)
    models[other] = load_model(other, dtype=torch.float32, device=torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in models[other].parameters():
            weight.add_(0.3 * weight.std() * torch.randn_like(weight))
    models[other].save_pretrained(other)
    row = [5, 7, 9, 11, 3]
    options = recipe["rollout"]["options"]
    said = []
    with VLLMSampler.open(student, "float32", max_length=64, python=vllm_python, options=options) as engine:
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
    reload, sample = VLLMSampler.reload, VLLMSampler.sample_with_logprobs

    def reload_and_keep(self: VLLMSampler, folder: Path) -> None:
        reload(self, folder)
        given.append(shutil.copytree(folder, tmp_path / f"given-{len(given)}"))

    def sample_and_keep(self: VLLMSampler, requests: list[Request], settings: SamplingSettings) -> list[Drawn]:
        drawn = sample(self, requests, settings)
        rounds.append([(request.prompt_ids, one) for request, one in zip(requests, drawn, strict=True)])
        return drawn

    monkeypatch.setattr(VLLMSampler, "reload", reload_and_keep)
    monkeypatch.setattr(VLLMSampler, "sample_with_logprobs", sample_and_keep)
    steps = train({**recipe, "compositions": {"live": LIVE}})
    losses = [row["loss"] for row in read_lines(steps.store.run_dir / "train/live/metrics.jsonl")]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    assert [len(drawn) for drawn in rounds[-2:]] == [8, 8]
    initial, updated = (load_model(one, dtype=torch.float32, device=torch.device("cpu")) for one in given[-2:])
    said = np.concatenate([one.logprobs for _, one in rounds[-1]])
    np.testing.assert_allclose(said, _logprobs(updated, rounds[-1]), atol=1e-4)
    assert np.abs(said - _logprobs(initial, rounds[-1])).mean() > 0.01


def _logprobs(model: PreTrainedModel, drawn: list[tuple[list[int], Drawn]]) -> np.ndarray:
    """What transformers says of drawn tokens, over all rows of the output matrix."""
    scorer = hf_scorer(model, model.get_output_embeddings().weight.shape[0])
    scored = scorer.candidates([(prompt_ids, one.response.ids) for prompt_ids, one in drawn], 1)
    return np.concatenate([sampled_T for *_, sampled_T in scored])


def test_an_engine_takes_what_a_trainer_leaves_of_a_gpu(world: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    trainee = open_trainee(steps_of(world), context(Ranks(0, 1, torch.device("cpu"))))
    numbers = sum(weight.numel() for weight in trainee.parameters())
    assert room_beside(trainee, torch.device("cpu")) == {}
    for left, share in ((50 * numbers, 0.35), (9 * numbers, 0.05)):  # (50 - 8) / 100 of it, and next to nothing
        monkeypatch.setattr(round_engine, "memory_left", lambda device, left=left: (left, 100 * numbers))
        taken = room_beside(trainee, torch.device("cpu"))
        assert taken == {"enable_sleep_mode": True, "gpu_memory_utilization": share}
