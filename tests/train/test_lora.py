"""LoRA as people use it: the frozen student as its files have it, and an adapter that can be served on its own."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_weave.errors import InputError
from lightning_weave.stages import train as train_stage
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_json, read_lines
from lightning_weave.train import student
from lightning_weave.train.parallel import Ranks, join
from lightning_weave.train.student import needs_sharding, open_trainee
from train.cached import QUIET, context, make_run

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 8.0, "stabilised": True, "targets": "all-linear"}


@pytest.mark.slow
def test_a_frozen_student_stays_in_its_own_dtype_and_its_adapter_can_be_served(tmp_path: Path) -> None:
    train = {"lora": LORA, "learning_rate": 1e-2, "epochs": 2}
    run = make_run(tmp_path, student={"dtype": torch.bfloat16}, train=train)
    with join(CPU, sharded=needs_sharding(run, torch.float32, CPU)) as ranks:
        trainee = open_trainee(run, context(ranks))
        stored = {(weight.requires_grad, weight.dtype) for weight in trainee.parameters()}
        assert stored == {(False, torch.bfloat16), (True, torch.float32)}
        assert trainee.packs

    make_students(run, QUIET)  # it stops where trainer and cache, which computed in float32, disagree by 1e-4
    stage = run.stage("train", "both")
    final = stage.folder / "final"
    recorded = {entry["file"] for entry in stage.require()["shards"]}
    assert {"final/adapter/adapter_config.json", "final/adapter/adapter_model.safetensors"} <= recorded
    assert read_json(final / "adapter" / "adapter_config.json")["base_model_name_or_path"] == run.student.name

    student = AutoModelForCausalLM.from_pretrained(run.student.path, dtype=torch.float32)
    served = PeftModel.from_pretrained(student, str(final / "adapter"))
    layer = served.base_model.model.model.layers[0]
    assert layer.mlp.up_proj.scaling == layer.self_attn.k_proj.scaling == {"default": 8.0 / 4**0.5}
    own, exported = served.merge_and_unload().state_dict(), load_file(final / "model.safetensors")
    moved = 0
    for name, weight in exported.items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(own[name].bfloat16(), weight)
        moved += not torch.equal(weight, load_file(run.student.path / "model.safetensors")[name])
    assert moved == 2 * 7, "all seven matrices of both layers"


@pytest.mark.slow
def test_a_frozen_student_in_the_dtype_of_the_computation_is_not_sharded_on_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy is made of it then, and training is that of the sharded student up to bfloat16."""
    train = {"lora": LORA, "learning_rate": 1e-2, "epochs": 2, "dtype": "bfloat16", "agreement": False}
    curves = []
    for name in ("whole", "sharded"):
        run = make_run(tmp_path / name, student={"dtype": torch.bfloat16}, train=train)
        assert not needs_sharding(run, torch.bfloat16, CPU)
        if name == "sharded":
            for module in (student, train_stage):
                monkeypatch.setattr(module, "needs_sharding", lambda *_: True)
        make_students(run, QUIET)
        metrics = run.stage("train", "both").folder / "metrics.jsonl"
        curves.append([row["reverse_kl"] for row in read_lines(metrics)])
    assert curves[0] == pytest.approx(curves[1], rel=0.1)
    assert abs(curves[0][-1] - curves[0][0]) > 0.1 * curves[0][0], "something has been trained"


def test_where_nothing_can_be_sharded_a_frozen_student_is_kept_as_it_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apple's GPU, whose place the CPU takes here: no collective knows it."""
    monkeypatch.setattr(student, "can_shard", lambda device: False)
    run = make_run(tmp_path / "lora", student={"dtype": torch.bfloat16}, train={"lora": LORA})
    assert not needs_sharding(run, torch.float32, CPU)
    trainee = open_trainee(run, context(Ranks(0, 1, CPU)))
    assert {weight.dtype for weight in trainee.parameters()} == {torch.float32}
    whole = make_run(tmp_path / "whole", train={"dtype": "bfloat16"})
    with pytest.raises(InputError, match=r"train\.dtype = 'bfloat16': on mps weights compute as they are kept"):
        needs_sharding(whole, torch.bfloat16, torch.device("mps"))
