"""Which engine does what: `engine = "auto"` is decided once per run, and anchors may have engines of their own."""

import sys
from pathlib import Path

import pytest

import tiny
from lightning_weave import devices
from lightning_weave import run as settings
from lightning_weave.config import Recipe, check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.run import Run, choose_engines
from lightning_weave.views import keys as show


def recipe_of(tmp_path: Path, **sections: dict) -> Recipe:
    return check_recipe({"name": "mine", "runs": str(tmp_path / "runs"), "student": {"model": "m"}, **sections})


def engines_of(recipe: Recipe) -> tuple[str, ...]:
    resolved = Run(recipe).recipe
    return tuple(getattr(resolved.engine, name) for name in settings.ENGINES)


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
    assert engines_of(recipe_of(tmp_path)) == ("hf", "hf", "hf", "hf")
    elsewhere = {"score": "auto", "python": sys.executable}
    assert engines_of(recipe_of(tmp_path, engine=elsewhere)) == ("vllm", "hf", "vllm", "vllm")


def test_what_is_said_is_not_decided(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    assert engines_of(recipe_of(tmp_path, engine={"rollout": "hf"}))[0] == "hf"
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    assert engines_of(recipe_of(tmp_path, engine={"eval": "vllm"}))[3] == "vllm"


def test_a_student_that_is_an_adapter_stays_with_transformers(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    recipe = recipe_of(tmp_path, student={"model": str(tmp_path)})
    assert choose_engines(recipe)["rollout"] == ("hf", "vLLM cannot load a LoRA adapter")


def test_a_run_keeps_the_engine_that_it_began_with(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path)
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    (run / "recipe.toml").write_text(dump_recipe(Run(recipe).recipe))  # as every command writes it
    gpu.setattr(settings, "sees_gpu", lambda device: True)
    assert engines_of(recipe) == ("hf", "hf", "hf", "hf")
    assert choose_engines(recipe)["eval"] == ("hf", "as the run has it")


def test_the_engine_that_is_chosen_is_part_of_the_fingerprint(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    recipe = tiny.make_world(tmp_path)
    said = {engine: tiny.run_of({**recipe, "engine": {"rollout": engine}}) for engine in ("hf", "vllm")}
    assert tiny.run_of(recipe).stage("rollout").fingerprint == said["vllm"].stage("rollout").fingerprint
    gpu.setattr(settings, "sees_gpu", lambda device: False)
    assert tiny.run_of(recipe).stage("rollout").fingerprint == said["hf"].stage("rollout").fingerprint


def test_show_says_what_is_chosen_here(tmp_path: Path, gpu: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.toml"
    file.write_text(f'name = "mine"\nruns = "{tmp_path}"\n[student]\nmodel = "m"\n')
    assert 'rollout = "auto"' in show.show([str(file)])
    assert "# default; here vllm: it is installed and there is a GPU" in show.show([str(file)])


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
    plain = tiny.run_of(recipe)
    recipe["anchors"]["brief"] |= {
        "engine": "vllm",
        "options": {"tensor_parallel_size": 2, "quantization": "fp8", "kv_cache_dtype": "fp8"},
    }
    own = tiny.run_of(recipe)
    assert list(own.score_names.values()) == list(plain.score_names.values())
    assert own.scores_of("acc") == plain.scores_of("acc")
    for now, before in zip(own.scores_of("brief"), plain.scores_of("brief"), strict=True):
        assert now.settings == {**before.settings, "engine": "vllm", "quantization": "fp8", "kv_cache_dtype": "fp8"}
    assert own.scoring(own.side("brief", "post")).options == {
        "tensor_parallel_size": 2,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
    }
    assert own.scoring(own.side("acc", "post")) == own.recipe.engine_of("score")


def test_a_model_of_two_anchors_is_scored_by_the_engine_of_each(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    recipe["anchors"]["again"] = {**recipe["anchors"]["brief"], "engine": "vllm"}
    recipe["anchors"]["served"] = {**recipe["anchors"]["brief"], "engine": {"pre": "http://somewhere:8000"}}
    run = tiny.run_of(recipe)
    assert len(run.score_names) == len(set(run.score_names.values())) == 7  # the post of brief serves two
    assert run.scores_of("served")[0] == run.scores_of("brief")[0]
    assert [run.scores_of(name)[1].settings["engine"] for name in ("brief", "again", "served")] == [
        "hf",
        "vllm",
        "vllm server",
    ]
    assert [run.recipe.scored_by("served", role) for role in ("post", "pre")] == ["hf", "server"]


def test_options_without_an_engine_are_refused(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    recipe["anchors"]["brief"] |= {"options": {"tensor_parallel_size": 2}}
    with pytest.raises(InputError, match=r"options need engine = .vllm. in this anchor.*engine\.options"):
        check_recipe(recipe)


def test_students_as_adapters_are_another_evaluation(tmp_path: Path) -> None:
    recipe = tiny.make_world(tmp_path)
    bench = tiny.save_prompts(tmp_path / "bench.jsonl", 3, seed=9)
    recipe["engine"] = {"eval": "vllm"}
    evaluation = {"benchmarks": [f"file:{bench}"], "chat": False}
    low_rank = {"train": recipe["train"] | {"lora": {"rank": 4}}}
    merged = tiny.run_of({**recipe, **low_rank, "eval": evaluation})
    adapters = tiny.run_of({**recipe, **low_rank, "eval": evaluation | {"adapters": True}})
    whole = tiny.run_of({**recipe, "eval": evaluation | {"adapters": True}})
    name = f"file:{bench}"
    assert adapters.stage("eval", "base", name) == merged.stage("eval", "base", name)
    assert adapters.stage("eval", "both", name).settings == {
        **merged.stage("eval", "both", name).settings,
        "adapters": True,
    }
    assert "adapters" not in whole.stage("eval", "both", name).settings
