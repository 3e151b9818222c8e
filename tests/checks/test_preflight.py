"""What `lweave run` refuses before anything is sampled, and that doctor says the same."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from lightning_weave.checks import models as models_module
from lightning_weave.checks import preflight as memory_module
from lightning_weave.checks.findings import Finding
from lightning_weave.checks.preflight import as_computed, check_disk, preflight, this_machine
from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.plan.plan import make_plan
from lightning_weave.progress import Progress
from lightning_weave.stages import run as run_stage
from lightning_weave.views import doctor
from tiny import make_world, run_of, save_prompts

Change = Callable[[dict[str, Any], Path], None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("world")
    recipe = make_world(root, prompts=4)
    bench = save_prompts(root / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    recipe["compositions"] = {"acc-only": {"weights": {"acc": 1.0, "brief": 0.0}}}
    return recipe


@pytest.fixture
def recipe(world: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    return json.loads(json.dumps(world | {"runs": str(tmp_path / "runs")}))


def look_ahead(recipe: dict[str, Any]) -> list[Finding]:
    return preflight(run_of(recipe, trust=True))


def errors(recipe: dict[str, Any]) -> list[Finding]:
    return [finding for finding in look_ahead(recipe) if finding.verdict == "error"]


def lweave(recipe: dict[str, Any], folder: Path, *words: str) -> tuple[int, str]:
    path = folder / "r.toml"
    path.write_text(dump_recipe(check_recipe(recipe)))
    ended = CliRunner().invoke(app, [words[0], str(path), *words[1:]])
    return (2 if isinstance(ended.exception, InputError) else ended.exit_code), f"{ended.output}{ended.exception or ''}"


def _adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    (folder / "adapter_model.safetensors").touch()


def _trainer(folder: Path) -> None:
    for step in (90, 100):
        (folder / f"checkpoint-{step}").mkdir()


DIRECTORIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "adapter": (_adapter, "a LoRA adapter whose base cannot be used: model 'org/base'"),
    "gguf": (lambda folder: (folder / "model.Q4_K_M.gguf").touch(), "holds GGUF weights"),
    "trainer": (_trainer, "the output directory of a Trainer. Give one of its 2 checkpoints: "),
    "empty": (lambda folder: None, "an empty directory"),
    "nested": (lambda folder: shutil.copytree(folder.parent / "whole", folder / "inner"), "did you mean "),
}


@pytest.mark.parametrize("kind", list(DIRECTORIES))
@pytest.mark.parametrize("place", ["student", "anchor", "policy"])
def test_a_directory_that_is_no_checkpoint_is_named_for_what_it_is(
    recipe: dict[str, Any], tmp_path: Path, kind: str, place: str
) -> None:
    shutil.copytree(recipe["student"]["model"], tmp_path / "whole")
    folder = tmp_path / "model"
    folder.mkdir()
    fill, text = DIRECTORIES[kind]
    fill(folder)
    about = {"student": "student", "anchor": "anchors.brief.post", "policy": "policies.y"}[place]
    match place:
        case "student":
            recipe["student"]["model"] = str(folder)
        case "anchor":
            recipe["anchors"]["brief"]["post"] = str(folder)
        case "policy":
            recipe["policies"] = {"y": {"model": str(folder)}}
    [found] = errors(recipe)
    assert found.about == about
    assert text in found.text
    if kind == "trainer":
        assert "checkpoint-100 is the last" in found.text
    assert found in doctor.examine(run_of(recipe, trust=True))


def test_run_refuses_and_doctor_exits_one_with_the_same_words(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "m.gguf").touch()
    recipe["anchors"]["acc"]["post"] = str(tmp_path / "gguf")
    code, said = lweave(recipe, tmp_path, "run")
    assert code == 2
    assert "anchors.acc.post: " in said
    assert "holds GGUF weights, for llama.cpp. Give the directory" in said
    assert not (tmp_path / "runs" / "tiny").exists()
    code, said = lweave(recipe, tmp_path, "doctor")
    assert code == 1
    assert "error    checkpoint: " in said
    assert "holds GGUF weights, for llama.cpp. Give the directory" in said


def test_a_tokenizer_with_more_tokens_than_the_model_has_rows(recipe: dict[str, Any], tmp_path: Path) -> None:
    """As fine-tuned checkpoints with an added padding token have it; a policy is only sampled from."""
    folder = shutil.copytree(recipe["anchors"]["acc"]["pre"], tmp_path / "longer")
    tokenizer = Checkpoint(str(folder)).tokenizer
    tokenizer.add_tokens([f"<extra-{number}>" for number in range(40)])
    tokenizer.save_pretrained(folder)
    recipe["policies"] = {"longer": {"model": str(folder)}}
    assert errors(recipe) == []
    recipe["anchors"]["acc"]["pre"] = str(folder)
    [found] = [finding for finding in errors(recipe) if finding.about == "anchors.acc.pre"]
    assert found.text.startswith(f"{folder}: the tokenizer has ")
    assert f"model.resize_token_embeddings({Checkpoint(str(folder)).vocabulary})" in found.text


def test_weights_without_a_tokenizer_and_missing_parts(recipe: dict[str, Any], tmp_path: Path) -> None:
    saved = Path(shutil.copytree(recipe["student"]["model"], tmp_path / "checkpoint-100"))
    for file in saved.glob("tokenizer*"):
        file.unlink()
    recipe["student"]["model"] = str(saved)
    assert "weights without a tokenizer" in errors(recipe)[0].text
    part = Path(shutil.copytree(recipe["anchors"]["acc"]["post"], tmp_path / "part"))
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    recipe["anchors"]["acc"]["post"] = str(part)
    assert any("1 of 2 weight files are missing, model-2.safetensors" in found.text for found in errors(recipe))


def _set(*keys: str, value: Any) -> Change:
    def change(recipe: dict[str, Any], folder: Path) -> None:
        table = recipe
        for key in keys[:-1]:
            table = table.setdefault(key, {})
        table[keys[-1]] = value

    return change


def _bench(line: str) -> Change:
    def change(recipe: dict[str, Any], folder: Path) -> None:
        (folder / "own.jsonl").write_text(line + "\n")
        recipe["eval"]["benchmarks"].append(f"file:{folder / 'own.jsonl'}")

    return change


def _same_sides(recipe: dict[str, Any], folder: Path) -> None:
    recipe["anchors"]["acc"]["post"] = recipe["anchors"]["acc"]["pre"]


WRONG: dict[str, tuple[Change, str, str]] = {
    "benchmark typo": (_set("eval", "benchmarks", value=["file:typo.jsonl"]), "eval.benchmarks", "no such file"),
    "benchmark column": (_bench('{"frage": "1+1?"}'), "eval.benchmarks", "has frage; expected problem and answer"),
    "long problem": (_bench('{"problem": "%s", "answer": "1"}' % ("1+" * 200)), "eval", "leaves no room in the 256"),
    "eval template": (_set("eval", "chat", value=True), "eval", "no chat template"),
    "prompt template": (_set("prompts", "chat", value=True), "prompts", "no chat template"),
    "prompt column": (
        _set("prompts", "columns", "prompt", value="frage"),
        "prompts",
        'By their names: prompts.columns = { prompt = "problem", answer = "answer", id = "id" }',
    ),
    "prompt file": (_set("prompts", "source", value="nope.jsonl"), "prompts", "prompts.source = 'nope.jsonl'"),
    "alias": (_set("anchors", "acc", "aliases", value={"<|end|>": "nope"}), "anchors.acc", "'nope' is not a token"),
    "same model": (_same_sides, "anchors.acc", "the same model"),
    "tracker": (_set("train", "trackers", value=["wandb"]), "train.trackers", "needs the package wandb"),
    "peft": (_set("train", "lora", value={"rank": 4}), "train.lora", "needs the package peft"),
    "engine": (_set("engine", value={"eval": "vllm"}), "engine.eval", "has no package vllm"),
    "python": (
        _set("engine", value={"rollout": "vllm", "python": "/no/python"}),
        "engine.rollout",
        "engine.python = '/no/python': no such executable",
    ),
    "policy": (_set("policies", value={"y": {"model": "./nowhere"}}), "policies.y", "no such directory"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_is_wrong_is_found_before_anything_is_sampled(
    recipe: dict[str, Any], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, about, text = WRONG[name]
    absent = {"wandb", "vllm", "peft"}  # whether they are installed here or not
    monkeypatch.setattr(models_module, "find_spec", lambda package: None if package in absent else find_spec(package))
    change(recipe, tmp_path)
    found = errors(recipe)
    assert {finding.about for finding in found} == {about}
    assert text in found[0].text
    with pytest.raises(InputError):
        run_stage.refuse(found, force=name != "same model")
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_shares_nothing_with_the_student_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Before anything is sampled only prompts and answers are known, so the share of positions is an upper bound."""
    letters = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "<pad>": 2}, unk_token="<unk>"))
    foreign = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    anchor = recipe["anchors"]["acc"]
    for role in ("post", "pre"):
        anchor[role] = str(shutil.copytree(anchor[role], tmp_path / role))
        foreign.save_pretrained(anchor[role])
    anchor["aliases"] = {}
    code, said = lweave(recipe, tmp_path, "run")
    assert code == 2
    assert re.search(r"anchors\.acc: at most 0 % of \d+ positions survive \(4 prompts; .*its tokenizer", said), said
    assert "--force" in said
    code, said = lweave(recipe, tmp_path, "doctor")
    assert code == 1
    assert "error    positions: at most 0 % of" in said
    recipe["checks"] = {"surviving": "warn"}
    assert errors(recipe) == []


@pytest.mark.parametrize("command", ["run", "rehearse"])
def test_data_that_is_not_there_is_named_before_anything_heavy_is_imported(
    recipe: dict[str, Any], tmp_path: Path, command: str
) -> None:
    recipe["prompts"]["source"] = "nope.jsonl"
    recipe["eval"]["benchmarks"] += ["aime-2042", "file:typo.jsonl"]
    (tmp_path / "r.toml").write_text(dump_recipe(check_recipe(recipe)))
    program = "import sys; from lightning_weave.cli import main; code = main()\n"
    program += "sys.exit(code + 10 * ('torch' in sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", program, command, "r.toml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("lweave: prompts.source = 'nope.jsonl': no such file.")
    assert lines[1].startswith("eval.benchmarks: unknown benchmark 'aime-2042'. Use one of aime-2024")
    assert lines[2].startswith("eval.benchmarks: benchmark file:typo.jsonl: no such file")
    assert not (tmp_path / "runs").exists()


def test_a_model_that_is_missing_in_several_places_is_named_once(recipe: dict[str, Any]) -> None:
    recipe["anchors"]["acc"] |= {"post": "./nowhere", "pre": "./nowhere"}
    with pytest.raises(InputError) as refused:
        run_stage.refuse(errors(recipe), force=False)
    assert str(refused.value).startswith("anchors.acc.post, anchors.acc.pre: model './nowhere': no such directory")
    assert str(refused.value).count("nowhere") == 1


def test_force_overrides_a_judgement_only(recipe: dict[str, Any], tmp_path: Path) -> None:
    _same_sides(recipe, tmp_path)
    found = errors(recipe)
    with pytest.raises(InputError, match="To continue anyway: --force"):
        run_stage.refuse(found, force=False)
    run_stage.refuse(found, force=True)


@pytest.mark.parametrize("asked", [{"format": "plain"}, {"format": "boxed"}, {"format": "Answer: {problem}"}])
def test_prompts_that_are_benchmark_problems_are_a_warning(recipe: dict[str, Any], asked: dict[str, str]) -> None:
    """Short ones too, whatever the prompts say around them; different problems in the same words are none."""
    del recipe["prompts"]["format"]
    recipe["prompts"] |= asked
    assert not [finding for finding in look_ahead(recipe) if finding.check == "overlap"]
    recipe["eval"]["benchmarks"] = [f"file:{recipe['prompts']['source']}"]
    found = [finding for finding in look_ahead(recipe) if finding.check == "overlap"]
    assert [finding.verdict for finding in found] == ["warning"]
    assert found[0].text.startswith("4 of 4 prompts overlap with benchmark problems")
    assert re.search(r': "[^"]+" with ', found[0].text)  # the question, not the id of a prompt


def test_a_dry_run_says_what_would_be_made_and_writes_nothing(recipe: dict[str, Any], tmp_path: Path) -> None:
    code, said = lweave(recipe, tmp_path, "run", "--dry-run")
    assert code == 0, said
    lines = [line.split()[:2] for line in said.splitlines()]
    for path in ("prompts", "rollout", "score/acc-post", "train/acc-only", "eval/base/bench"):
        assert [path, "missing"] in lines
    rows = {words[0]: words[1:] for words in (line.split() for line in said.splitlines()) if words}
    assert rows["rollout"] == ["missing", "?", "5.3", "kB"]  # 4 x 2 rows of at most 154 + 12 tokens
    assert rows["score/acc-post"] == ["missing", "?", "2.3", "kB"]  # 8 x 12 x (5 x 4 + 4)
    assert "10 of 10 would be made: time unknown, " in said
    assert "? unknown: " in said
    assert not (tmp_path / "runs").exists()
    recipe["eval"]["benchmarks"] = ["file:typo.jsonl"]
    code, said = lweave(recipe, tmp_path, "run", "--dry-run")
    assert code == 2
    assert "eval.benchmarks: benchmark file:typo.jsonl: no such file" in said


def test_a_dry_run_on_a_known_gpu_says_how_long(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(memory_module, "memory_of", lambda device: 85_000_000_000)
    _, said = lweave(recipe, tmp_path, "run", "--dry-run")
    assert re.search(r"10 of 10 would be made: about \d+ s of device time, [\d.]+ kB on disk", said), said
    assert "?" not in said


def test_a_dry_run_elsewhere_guesses_the_time_by_the_matrix_products(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(recipe)
    stages = list(run.everything())
    plan = make_plan(as_computed(run.recipe), this_machine(run.recipe))
    work = {row.stage: row.operations for row in plan.stages}
    for speed in (1e3, 1e4):
        monkeypatch.setattr(memory_module, "matmul_flops", lambda device, speed=speed: speed)
        found = memory_module.forecast(run, stages)
        assert found["rollout"].rough
        assert found["rollout"].seconds == pytest.approx(work["rollout"] / speed)
        assert found["eval/base/bench"].seconds is None
    _, said = lweave(recipe, tmp_path, "run", "--dry-run")
    assert re.search(r"rollout +missing +~ \d", said), said
    assert re.search(r"would be made: very roughly .* of device time and 2 stages of unknown time", said), said
    assert "~ rough: " in said


@pytest.mark.slow
def test_a_dry_run_takes_times_from_what_was_measured_and_bytes_from_what_was_sampled(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    run_stage.run_all(run_of(recipe), Progress(quiet=True), force=True)
    recipe["compositions"]["more"] = {"weights": {"acc": 0.5, "brief": 0.5}}
    recipe["compositions"]["longer"] = {"weights": {"acc": 0.5, "brief": 0.5}, "epochs": 3}
    code, said = lweave(recipe, tmp_path, "run", "--dry-run")
    assert code == 0, said
    rows = {words[0]: words[1:] for words in (line.split() for line in said.splitlines()) if words}
    assert rows["rollout"] == ["complete"]
    assert any(word.endswith("*") for word in rows["train/more"]), rows["train/more"]
    assert rows["train/longer"][1] == "?"  # three epochs were not measured
    assert "4 of 14 would be made: about " in said
    assert "of device time and 1 stages of unknown time" in said
    assert "* measured: " in said
    assert "Bytes of the cache" not in said


@pytest.mark.parametrize(("memory", "errors"), [(25e3, {"score", "train"}), (1e6, set())])
def test_memory_that_does_not_suffice_is_said_with_what_helps(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch, memory: float, errors: set[str]
) -> None:
    """Student and brief take 24 kB in float32, acc 29 kB, a student in training 71 kB; micro-batches some MB more."""
    assert not [finding for finding in look_ahead(recipe) if "memory" in finding.check]
    monkeypatch.setattr(memory_module, "memory_of", lambda device: memory)
    found = [finding for finding in look_ahead(recipe) if finding.check == "memory"]
    assert {finding.about for finding in found} == {"rollout", "reference", "score", "train"}
    assert {finding.about for finding in found if finding.verdict == "error"} == errors
    for finding in found:
        assert finding.judged == (finding.verdict == "error")
        assert (
            "a smaller model"
            if finding.verdict == "error"
            else f"{'score' if finding.about == 'reference' else finding.about}."
        ) in finding.text
    if errors:
        with pytest.raises(InputError, match=r"of memory.*(?s:.*)To continue anyway: --force"):
            run_stage.refuse(found, force=False)
    assert [one.about for one in look_ahead(recipe) if one.check == "host memory"] == ["train"]


@pytest.mark.parametrize(
    ("gpus", "started", "options", "said"),
    [
        (8, 1, {}, "GPUs for 8 processes.*torchrun --nproc-per-node 8 -m lightning_weave.cli"),
        (8, 1, {"rollout": "vllm", "options": {"tensor_parallel_size": 2}}, "GPUs for 4 processes"),
        (8, 8, {}, None),
        (1, 1, {}, None),
    ],
)
def test_gpus_that_no_process_uses_are_named(
    recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    started: int,
    options: dict[str, Any],
    said: str | None,
) -> None:
    recipe["engine"] = options
    monkeypatch.setattr(memory_module, "choose_device", lambda recipe: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(started))
    found = [finding.text for finding in memory_module.check_idle_gpus(check_recipe(recipe))]
    assert len(found) == (said is not None)
    assert not said or re.search(said, found[0])


@pytest.mark.parametrize("stage", ["prompts", "rollout", "reference", "score", "train"])
def test_a_run_until_a_stage_checks_what_comes_after_it(recipe: dict[str, Any], tmp_path: Path, stage: str) -> None:
    recipe["eval"]["benchmarks"] = ["file:typo.jsonl"]
    code, said = lweave(recipe, tmp_path, "run", "--until", stage)
    assert code == 2
    assert "eval.benchmarks: benchmark file:typo.jsonl: no such file" in said
    assert not list((tmp_path / "runs").rglob("manifest.json"))


def test_the_disk_that_is_needed_does_not_count_the_cache_of_another_recipe(recipe: dict[str, Any]) -> None:
    written = []
    for temperature in (1.0, 0.5):
        run = run_of({**recipe, "rollout": {**recipe["rollout"], "temperature": temperature}})
        if not written:
            stage = run.stage("rollout")
            stage.begin()
            stage.shard_path(0).write_bytes(bytes(1000))
        written.append(check_disk(run, prompts=4).figures["written"])
    assert written == [1000, 0]
