"""Checkpoints as they are laid out on disk: each is read, trained and written back as the architecture that it is."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from lightning_weave.checks.preflight import preflight
from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.sampler import HFSampler
from lightning_weave.models.scorer import Scorer
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.train.export import write_model
from lightning_weave.train.parallel import Ranks, join
from lightning_weave.train.student import open_trainee
from lightning_weave.types import Request, SamplingSettings
from train.cached import QUIET, VOCABULARY, context, make_run
from train.launch import Plan, start
from train.layouts import LAYOUTS, save_layout, save_quantised, set_quantisation, stored_tensors

CPU = torch.device("cpu")
NOT_OF_TEXT = ("visual", "vision_tower", "multi_modal_projector", "mtp", "unused")
TRAIN = {"dtype": "bfloat16", "epochs": 1, "learning_rate": 1e-2, "agreement": False}
QUICK = "multimodal Gemma 3"
every_layout = pytest.mark.parametrize("name", LAYOUTS)


def is_text(key: str) -> bool:
    return not any(part in key for part in NOT_OF_TEXT)


def checkpoint(name: str, folder: Path) -> Checkpoint:
    return Checkpoint(str(save_layout(name, folder)), trust_remote_code=name == "own code")


def run_of(student: Checkpoint, root: Path) -> Run:
    """A recipe with this student of which nothing is made."""
    (root / "prompts.jsonl").write_text('{"prompt": "w3 w4"}\n')
    recipe = {
        "name": "layout",
        "runs": str(root / "runs"),
        "student": {"model": student.name, "trust_remote_code": student.trust_remote_code},
        "anchors": {"one": {"post": student.name, "pre": student.name}},
        "compositions": {"one": {"weights": {"one": 1.0}}},
        "prompts": {"source": str(root / "prompts.jsonl")},
    }
    return Run(check_recipe(recipe), "layout.toml", trust=True)


def assert_loads_as_itself(folder: Path) -> None:
    """Load a directory as the class that its config names, without a tensor too many or too few."""
    named = json.loads((folder / "config.json").read_text())["architectures"][0]
    own = getattr(transformers, named, transformers.AutoModelForCausalLM)
    trusted: dict[str, Any] = {} if hasattr(transformers, named) else {"trust_remote_code": True}
    model, info = own.from_pretrained(folder, output_loading_info=True, **trusted)
    assert type(model).__name__ == named
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]


@every_layout
def test_weights_are_read_as_transformers_reads_them_and_written_back(tmp_path: Path, name: str) -> None:
    student = checkpoint(name, tmp_path / "student")
    layout = student.layout
    weights = student.load(torch.float32, CPU).state_dict()
    names = [each for piece in layout.pieces for each in piece.names]
    for rows in (slice(None), slice(1, 3), slice(3, 4)):
        for key, tensor in layout.read(dict.fromkeys(names, rows)):
            torch.testing.assert_close(tensor.float(), weights[key][rows], rtol=0, atol=0)
    copy = Path(shutil.copytree(student.path, tmp_path / "copy"))
    for file in copy.glob("*.safetensors"):
        content = file.read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:header] + bytes(len(content) - header))
    whole = dict(layout.read(dict.fromkeys(names, slice(None))))
    for piece in layout.pieces:
        layout.write(copy, piece, {each: whole[each] for each in piece.names})
    written, original = stored_tensors(copy), stored_tensors(student.path)
    assert all(torch.equal(written[key], original[key]) for key in original if is_text(key))


@every_layout
def test_what_is_trained_is_written_in_its_place_and_the_rest_is_the_students(tmp_path: Path, name: str) -> None:
    student = checkpoint(name, tmp_path / "student")
    with join(CPU, sharded=True) as ranks:
        trainee = open_trainee(run_of(student, tmp_path), context(ranks, torch.bfloat16))
        with torch.no_grad():
            for weight in trainee.parameters():
                weight.mul_(2 if weight.requires_grad else 1)
        write_model(tmp_path / "final", trainee, student.layout, "a card", ranks)
    before, after = stored_tensors(student.path), stored_tensors(tmp_path / "final")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], 2 * tensor if is_text(key) else tensor), key
    assert {file.name for file in student.path.iterdir()} <= {file.name for file in (tmp_path / "final").iterdir()}
    assert_loads_as_itself(tmp_path / "final")


@pytest.mark.parametrize(
    "name", [each if each == QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_every_layout_is_sampled_scored_trained_and_exported(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path, save=partial(save_layout, name), groups=4, train=TRAIN)  # scores the student
    make_students(run, QUIET)
    final = run.directory / "train" / "both" / "final"
    assert len(list(read_lines(final.parent / "metrics.jsonl"))) == 2
    before, after = stored_tensors(run.student.path), stored_tensors(final)
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert all(is_text(key) for key in moved)
    assert {key for key in before if is_text(key) and "q_proj" in key} <= moved
    assert_loads_as_itself(final)
    trained = run.student.at(final)
    sampler = HFSampler(trained.load(torch.float32, CPU), trained.stop_ids, VOCABULARY)
    assert sampler.sample([Request([3, 4], 0, 0)], SamplingSettings(1.0, 1.0, 4, 0))[0].ids


def test_a_student_that_is_opened_again_is_opened_the_same_way(tmp_path: Path) -> None:
    student = checkpoint("tied", tmp_path / "student")
    run = run_of(student, tmp_path)
    one, other = (open_trainee(run, context(Ranks(0, 1, CPU))) for _ in range(2))
    assert one.packs
    assert other.packs
    assert one.model.config._attn_implementation == other.model.config._attn_implementation != "sdpa"


def without(folder: Path, key: str) -> None:
    kept = {name: tensor for name, tensor in stored_tensors(folder).items() if name != key}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("tied", "model.layers.1.mlp.up_proj.weight", "lack 1 tensors of the model, model.layers.1.mlp.up_proj"),
        ("experts", "model.layers.1.mlp.experts.3.up_proj.weight", r"7 tensors of .*gate_up_proj do not fit together"),
        (
            "experts",
            "model.layers.1.mlp.experts.3.down_proj.weight",
            r"down_proj do not have the shapes of the model's configuration",
        ),
    ],
)
def test_a_student_that_lacks_a_tensor_is_not_trained(tmp_path: Path, name: str, key: str, said: str) -> None:
    student = checkpoint(name, tmp_path / "student")
    without(student.path, key)
    with pytest.raises(InputError, match=said):
        assert student.layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_weights_are_scored_as_what_they_stand_for(tmp_path: Path, dtype: torch.dtype) -> None:
    meant = save_quantised(tmp_path)
    model = Checkpoint(str(tmp_path)).load(dtype, CPU)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(weight, meant[key].to(dtype), rtol=2**-7, atol=0)
    Scorer.from_model(model, VOCABULARY)  # compares its head with the model's own logits


def test_quantised_weights_are_not_trained(tmp_path: Path) -> None:
    save_quantised(tmp_path / "student")
    run = run_of(Checkpoint(str(tmp_path / "student")), tmp_path)
    findings = [finding.text for finding in preflight(run) if finding.about == "student"]
    assert len(findings) == 1
    assert re.search(r"quantised \(fp8\): it can be scored, but not trained.*student\.model", findings[0])
    with join(CPU, sharded=True) as ranks, pytest.raises(InputError, match="scored, but not trained"):
        open_trainee(run, context(ranks, torch.bfloat16))


def test_weights_that_nobody_here_can_dequantise_are_refused(tmp_path: Path) -> None:
    save_quantised(tmp_path)
    set_quantisation(tmp_path, {"quant_method": "unheard-of"})
    with pytest.raises(InputError, match=r"quantised \(unheard-of\), and transformers does not use 14 of its tensors"):
        Checkpoint(str(tmp_path)).load(torch.float32, CPU)
    set_quantisation(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(InputError, match=r"cannot be loaded.*(GPTQ|gptq)"):
        Checkpoint(str(tmp_path)).load(torch.float32, CPU)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_write_what_one_writes(tmp_path: Path) -> None:
    """In float32, also with adapters, whose base has no memory before it is sharded either."""
    exact = {**TRAIN, "dtype": "float32"}
    lora = {"lora": {"rank": 2, "targets": ["q_proj"]}}

    def runs(who: str) -> list[Run]:
        return [
            make_run(tmp_path / who / name / kind, save=partial(save_layout, name), groups=4, train={**exact, **train})
            for name in (
                QUICK,
                "multimodal Qwen3.5 with experts",
                "experts",
                "tied but stored twice",
                "in several files",
            )
            for kind, train in (("full", {}), ("lora", lora))
        ]

    alone, together = runs("alone"), runs("together")
    assert start(Plan(alone)) == [0]
    assert start(Plan(together), ranks=2) == [0, 0]
    for one, other in zip(alone, together, strict=True):
        folders = [run.directory / "train" / "both" for run in (one, other)]
        expected, losses = ([row["loss"] for row in read_lines(folder / "metrics.jsonl")] for folder in folders)
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
        first, second = (stored_tensors(folder / "final") for folder in folders)
        for key in first:  # Adam's first run turn the sign of a tiny gradient into a whole step
            close = (first[key].float() - second[key].float()).abs() <= 0.05
            assert close.float().mean() > 0.99, key
