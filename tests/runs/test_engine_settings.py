"""Which engine does what: `engine = "auto"` is decided once per run, and anchors may have engines of their own."""

import sys
from pathlib import Path

import pytest

import tiny
from lightning_weave import devices
from lightning_weave.config import Recipe, check_recipe, dump_recipe
from lightning_weave.errors import InputError
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


def test_an_anchor_with_an_engine_of_its_own_changes_its_own_scores_alone(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    plain = tiny.steps_of(recipe)
    recipe["anchors"]["brief"] |= {"engine": "vllm", "options": {"tensor_parallel_size": 2, "quantization": "fp8"}}
    own = tiny.steps_of(recipe)
    assert list(own.score_names.values()) == list(plain.score_names.values())
    assert own.scores_of("acc") == plain.scores_of("acc")
    for now, before in zip(own.scores_of("brief"), plain.scores_of("brief"), strict=True):
        assert now.settings == {**before.settings, "engine": "vllm", "quantization": "fp8"}
    assert own.scoring(own.side("brief", "post")).options == {"tensor_parallel_size": 2, "quantization": "fp8"}
    assert own.scoring(own.side("acc", "post")) == own.recipe.score


def test_a_model_of_two_anchors_is_scored_by_the_engine_of_each(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    recipe["anchors"]["again"] = {**recipe["anchors"]["brief"], "engine": "vllm"}
    recipe["anchors"]["served"] = {**recipe["anchors"]["brief"], "pre_url": "http://somewhere:8000"}
    steps = tiny.steps_of(recipe)
    assert len(steps.score_names) == len(set(steps.score_names.values())) == 7  # the post of brief serves two
    assert steps.scores_of("served")[0] == steps.scores_of("brief")[0]
    assert [steps.scores_of(name)[1].settings.get("engine") for name in ("brief", "again", "served")] == [
        None,
        "vllm",
        "vllm server",
    ]
    assert [steps.recipe.scored_by("served", role) for role in ("post", "pre")] == ["hf", "server"]


def test_options_without_an_engine_are_refused(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    recipe["anchors"]["brief"] |= {"options": {"tensor_parallel_size": 2}}
    with pytest.raises(InputError, match=r"options are of an engine of its own.*score\.options"):
        check_recipe(recipe)


def test_students_as_adapters_are_another_evaluation(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    bench = tiny.save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    evaluation = {"engine": "vllm", "benchmarks": [f"file:{bench}"], "chat": False}
    low_rank = {"train": recipe["train"] | {"lora": {"rank": 4}}}
    merged = tiny.steps_of({**recipe, **low_rank, "eval": evaluation})
    adapters = tiny.steps_of({**recipe, **low_rank, "eval": evaluation | {"adapters": True}})
    whole = tiny.steps_of({**recipe, "eval": evaluation | {"adapters": True}})
    name = f"file:{bench}"
    assert adapters.eval("base", name) == merged.eval("base", name)
    assert adapters.eval("both", name).settings == {**merged.eval("both", name).settings, "adapters": True}
    assert "adapters" not in whole.eval("both", name).settings
