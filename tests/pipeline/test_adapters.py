"""LoRA adapters as anchors and as the student: one load, on and off, against merged checkpoints."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_weave.checks.preflight import preflight
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.plan.architecture import find_gpu
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan
from lightning_weave.run import Run
from lightning_weave.stages import run as flow
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.score import score
from lightning_weave.stages.train import validate
from pipeline.small_runs import QUIET, make_cache, make_recipe, run_of
from rounding import LOGPROB, assert_same_weights

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MOVED = "model.layers.0.self_attn.v_proj.weight"


def save_adapter(
    folder: Path, base: Path, seed: int, targets: tuple[str, ...] = ("q_proj", "down_proj"), dora: bool = False
) -> Path:
    """Save a random low-rank update of a checkpoint, whose two factors are both of a size."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=2, lora_alpha=8, target_modules=list(targets), use_dora=dora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of an adapter of the head
        adapted.save_pretrained(folder)
    return folder


def save_merged(folder: Path, adapter: Path, base: Path) -> Path:
    """What a user without adapters would give: peft's own merge."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    """Two adapters of one base, with layers of their own, and their merged checkpoints as another two pairs."""
    recipe = make_recipe(tmp_path, "qwen3", "llama", "bytes")
    base = Path(recipe["anchors"].pop("one")["pre"])
    for number, targets in enumerate((("q_proj", "down_proj"), ("v_proj", "down_proj"))):
        adapter = save_adapter(tmp_path / f"lora-{number}", base, seed=number, targets=targets)
        merged = save_merged(tmp_path / f"merged-{number}", adapter, base)
        recipe["anchors"][f"lora{number}"] = {"post": str(adapter)}
        recipe["anchors"][f"merged{number}"] = {"post": str(merged), "pre": str(base)}
    even = dict.fromkeys(recipe["anchors"], 0.25)
    recipe["compositions"] = {"all": {"weights": even}}
    return recipe


def test_an_adapter_on_and_off_is_two_merged_checkpoints(
    recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda self, *rest: (loads.append(self.name), load(self, *rest))[1])
    run = make_cache(recipe)
    assert len(run.score_names) == 5, "the base is scored once for all four"
    base = recipe["anchors"]["merged0"]["pre"]
    assert loads.count(base) == 1, "and loaded once"
    cache = open_cache(run, "all")
    block = cache.block(range(len(cache)))
    shifts = dict(zip(cache.names, block.r_KPC, strict=True))
    for number in (0, 1):
        assert np.abs(shifts[f"lora{number}"]).max() > 0.1
        np.testing.assert_allclose(shifts[f"lora{number}"], shifts[f"merged{number}"], atol=2 * LOGPROB, rtol=0)
    assert not np.allclose(shifts["lora0"], shifts["lora1"], atol=0.01)


@pytest.mark.parametrize("is_copy", [False, True])
def test_an_adapter_of_the_student_costs_one_more_scoring(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copy: bool
) -> None:
    """Its base is the student, also under another name: loaded once for all sides, and scored by the reference."""
    base = Path(recipe["student"]["model"])
    if is_copy:
        base = Path(shutil.copytree(base, tmp_path / "copy"))
    adapter = save_adapter(tmp_path / "of-student", base, seed=5)
    recipe["anchors"] = {
        "brief": {"model": "student", "post_prompt": {"prefix": "the "}},
        "lora": {"post": str(adapter)},
    }
    recipe["compositions"] = {"all": {"weights": {"brief": 0.5, "lora": 0.5}}}
    run = run_of(recipe)
    flow.make_cache(run, QUIET, until="reference")
    loads: list[str] = []
    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda self, *rest: (loads.append(self.name), load(self, *rest))[1])
    score(run, QUIET)
    assert loads == [recipe["student"]["model"]]
    assert len(run.stages("score")) == 3
    planned = [row for row in make_plan(run.recipe, PlannedMachine(find_gpu("H100"), 1)).stages if row.stage == "score"]
    if not is_copy:  # a plan reads no weights: it knows models by their names
        assert [bool(row.operations) for row in planned] == [True, False, True]
    cache = open_cache(run, "all")
    shifts = dict(zip(cache.names, cache.block(range(len(cache))).r_KPC, strict=True))
    assert all(np.abs(shift).max() > 0.1 for shift in shifts.values())


def test_an_adapter_is_known_by_content_and_its_scores_outlive_it(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = make_cache(recipe)
    post, pre = run.scores_of("lora0")
    again = save_adapter(tmp_path / "elsewhere", Path(recipe["anchors"]["merged0"]["pre"]), seed=0)
    assert Checkpoint(str(again)).identity == run.identity_of(run.anchor("lora0", "post"))
    assert post.settings["model"] != pre.settings["model"] != run.scores_of("lora1")[0].settings["model"]
    run.remember()
    (tmp_path / "lora-0").rename(tmp_path / "gone")
    fresh = run_of(recipe)
    assert [step.state() for step in fresh.scores_of("lora0")] == ["complete", "complete"]


def test_a_policy_may_be_an_adapter(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Where it is loaded alone, it is merged as peft merges it."""
    base = Path(recipe["student"]["model"])
    adapter = save_adapter(tmp_path / "start", base, seed=3)
    merged = save_merged(tmp_path / "start-merged", adapter, base)
    models = [Checkpoint(str(path)).load(torch.float32, CPU) for path in (adapter, merged)]
    assert models[0].state_dict().keys() == models[1].state_dict().keys()
    for name, tensor in models[0].state_dict().items():
        torch.testing.assert_close(tensor, models[1].state_dict()[name], atol=1e-6, rtol=0)
    plain = Checkpoint(str(base)).load(torch.float32, CPU).state_dict()
    added = {name: tensor - plain[name] for name, tensor in models[1].state_dict().items()}
    updates = Checkpoint(str(adapter)).updates
    assert updates.keys() == {name for name, tensor in added.items() if tensor.any()}
    for name, update in updates.items():  # as a rank reads its rows of a student
        torch.testing.assert_close(update.rows(slice(1, 4), CPU), added[name][1:4], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_student_that_begins_as_an_adapter_is_trained_as_the_merged_checkpoint_is(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    """All weights, and low-rank: also what this training leaves alone is the merged checkpoint's in the export."""
    base = Path(recipe["student"]["model"])
    adapter = save_adapter(tmp_path / "start", base, seed=3)
    merged = save_merged(tmp_path / "start-merged", adapter, base)
    recipe["anchors"] = {"one": recipe["anchors"]["merged0"]}
    rows = {"prompts_per_round": 2, "updates_per_round": 1, "epochs": 1, "learning_rate": 1e-2}
    ways = {"whole": rows, "low-rank": {**rows, "lora": {"rank": 2, "targets": ["v_proj"]}}}
    losses: dict[str, list[list[float]]] = {way: [] for way in ways}
    finals: dict[str, list[Path]] = {way: [] for way in ways}
    for student in (adapter, merged):
        asked = {**recipe, "name": student.name, "student": {"model": str(student)}}
        for way, train in ways.items():
            run = make_cache({**asked, "compositions": {way: {"weights": {"one": 1.0}}}, "train": train})
            assert not [one for one in validate(run) if one.verdict == "error"]
            flow.make_students(run, QUIET)
            folder = run.stage("train", way).folder
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            losses[way].append([json.loads(line)["loss"] for line in lines])
            finals[way].append(folder / "final")
    for way in ways:
        np.testing.assert_allclose(*losses[way], rtol=1e-4)
        ours, theirs, start = (load_file(path / "model.safetensors") for path in (*finals[way], merged))
        updates = len(losses[way][0])
        assert_same_weights(ours, theirs, updates=updates, learning_rate=rows["learning_rate"], apart=1e-5)
        assert not torch.equal(ours[MOVED], start[MOVED])
        assert not (finals[way][0] / "adapter").exists(), "its base would be an adapter, which no engine loads"


def test_an_adapter_that_is_no_plain_low_rank_update_cannot_be_a_student(
    recipe: dict[str, Any], tmp_path: Path
) -> None:
    base = Path(recipe["student"]["model"])
    recipe["student"] = {"model": str(save_adapter(tmp_path / "start", base, seed=3))}
    assert _said(recipe, "student") == ""
    assert 'engine.rollout = "vllm" cannot load a LoRA adapter' in _said(
        {**recipe, "engine": {"rollout": "vllm"}}, "student"
    )
    save_adapter(tmp_path / "start", base, seed=3, dora=True)
    assert "more than a low-rank update" in _said(recipe, "student")


def _said(recipe: dict[str, Any], about: str = "anchors.") -> str:
    run: Run = run_of(recipe)
    found = [finding for finding in preflight(run) if finding.about.startswith(about)]
    return " ".join(finding.text for finding in found if finding.verdict == "error")


def test_what_is_no_safe_adapter_is_refused_before_anything_is_made(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe["anchors"] = {"one": {"post": str(tmp_path / "lora-0")}}
    recipe["compositions"] = {"only": {"weights": {"one": 1.0}}}
    assert _said(recipe) == ""
    weights, config = tmp_path / "lora-0" / "adapter_model.safetensors", tmp_path / "lora-0" / "adapter_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps(said | {"peft_type": "IA3"}))
    assert "peft_type IA3 is not supported, only LORA" in _said(recipe)
    config.write_text(json.dumps(said | {"modules_to_save": ["lm_head"]}))
    assert "has full modules in addition to its low-rank updates" in _said(recipe)
    config.write_text(json.dumps(said | {"base_model_name_or_path": None}))
    assert "has no base_model_name_or_path" in _said(recipe)
    config.write_text(json.dumps(said))
    weights.rename(weights.with_suffix(".bin"))
    assert "adapter_model.bin is pickled" in _said(recipe)
    with pytest.raises(InputError, match="is pickled"):
        make_cache(recipe)
    recipe["anchors"]["one"] = {"post": said["base_model_name_or_path"]}
    assert "anchors.one.pre is missing" in _said(recipe)
    assert "is not a LoRA adapter" in _said(recipe)


def test_an_adapter_of_the_head_is_refused(recipe: dict[str, Any], tmp_path: Path) -> None:
    base = Path(recipe["anchors"]["merged0"]["pre"])
    adapter = save_adapter(tmp_path / "head", base, seed=5, targets=("q_proj", "lm_head"))
    recipe["anchors"] = {"one": {"post": str(adapter)}}
    recipe["compositions"] = {"only": {"weights": {"one": 1.0}}}
    assert "the head or the embeddings. Merge it" in _said(recipe)
