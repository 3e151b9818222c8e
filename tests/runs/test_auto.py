"""`engine = "auto"` is decided in one place, once per run, and changes no run that is there."""

import sys
from pathlib import Path

import pytest

import tiny
from lightning_weave import devices
from lightning_weave.config import Recipe, check_recipe, dump_recipe
from lightning_weave.runs import settings
from lightning_weave.runs.settings import choose_engines
from lightning_weave.runs.steps import Steps
from lightning_weave.views import show


def recipe_of(tmp_path: Path, **sections: dict) -> Recipe:
    return check_recipe({"name": "mine", "runs": str(tmp_path / "runs"), "student": {"model": "m"}, **sections})


def engines_of(recipe: Recipe) -> tuple[str, ...]:
    resolved = Steps(recipe).recipe
    return tuple(getattr(resolved, name).engine for name in settings.ENGINES)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a GPU, on which vLLM is installed."""
    monkeypatch.setattr(settings, "sees_gpu", lambda device: device == "auto")
    monkeypatch.setattr(settings, "find_spec", lambda name: object())
    return monkeypatch


def test_without_a_gpu_transformers_samples(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    assert engines_of(recipe_of(tmp_path)) == ("hf", "hf", "hf", "hf")


def test_with_a_gpu_and_vllm_it_samples_and_transformers_scores(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    assert engines_of(recipe_of(tmp_path)) == ("vllm", "hf", "hf", "vllm")
    assert engines_of(recipe_of(tmp_path, machine={"device": "cpu"})) == ("hf", "hf", "hf", "hf")
    gpu.setattr(settings, "find_spec", lambda name: None)
    named = {"rollout": {"python": sys.executable}, "score": {"engine": "auto", "python": sys.executable}}
    assert engines_of(recipe_of(tmp_path, **named)) == ("vllm", "hf", "vllm", "hf")


def test_what_is_said_is_not_decided(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    assert engines_of(recipe_of(tmp_path, rollout={"engine": "hf"}))[0] == "hf"
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    assert engines_of(recipe_of(tmp_path, eval={"engine": "vllm"}))[3] == "vllm"


def test_a_student_that_is_an_adapter_stays_with_transformers(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    recipe = recipe_of(tmp_path, student={"model": str(tmp_path)})
    assert choose_engines(recipe)["rollout"] == ("hf", "vLLM reads no LoRA adapter")


def test_a_run_keeps_the_engine_that_it_began_with(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    (run / "recipe.toml").write_text(dump_recipe(Steps(recipe).recipe))  # as every command writes it
    gpu.setattr(settings, "sees_gpu", lambda device: True)
    assert engines_of(recipe) == ("hf", "hf", "hf", "hf")
    assert choose_engines(recipe)["eval"] == ("hf", "as the run has it")


def test_the_engine_that_is_chosen_is_part_of_the_fingerprint(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    recipe = tiny.make_world(tmp_path)
    said = {
        engine: tiny.steps_of({**recipe, "rollout": recipe["rollout"] | {"engine": engine}})
        for engine in ("hf", "vllm")
    }
    assert tiny.steps_of(recipe).rollout.fingerprint == said["vllm"].rollout.fingerprint
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    assert tiny.steps_of(recipe).rollout.fingerprint == said["hf"].rollout.fingerprint


def test_show_says_what_is_chosen_here(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f'name = "mine"\nruns = "{tmp_path}"\n[student]\nmodel = "m"\n')
    assert 'engine = "auto"' in show.run([str(file)])
    assert "# default; here vllm: it is installed and there is a GPU" in show.run([str(file)])


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.Path, "exists", lambda path: str(path) == "/dev/nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.sees_gpu("auto")
    assert devices.sees_gpu("cuda")
    assert not devices.sees_gpu("cpu")
    assert not devices.sees_gpu("mps")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not devices.sees_gpu("auto")
