"""LoRA beside a student in 4 or 8 bits: what is trained, what is exported, and what is refused."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lightning_weave.devices import free_memory
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.plan.memory import QUANTISED
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.train import checkpoint
from lightning_weave.train.parallel import Ranks, join
from lightning_weave.train.student import needs_sharding, open_trainee
from rounding import UNIT
from train.cached import QUIET, context, make_run, save_student

CPU = torch.device("cpu")


def settings(base: str, **others: object) -> dict:
    lora = {"rank": 4, "alpha": 8.0, "targets": "all-linear", "base": base}
    return {"lora": lora, "learning_rate": 1e-2, "epochs": 4, **others}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "stored"), [("nf4", torch.uint8), ("int8", torch.int8)])
def test_an_adapter_is_trained_beside_a_quantised_student_and_exported_on_its_own_weights(
    tmp_path: Path, base: str, stored: torch.dtype
) -> None:
    run = make_run(tmp_path, student={"dtype": torch.bfloat16}, train=settings(base))
    assert not needs_sharding(run, torch.bfloat16, torch.device("cpu")), "nothing is sharded on one rank"
    with join(CPU, sharded=False) as ranks:
        trainee = open_trainee(run, context(ranks))
    kept = {(weight.requires_grad, weight.dtype) for weight in trainee.parameters()}
    assert kept == {(False, stored), (False, torch.float32), (True, torch.float32)}
    assert trainee.packs
    del trainee
    free_memory()

    make_students(run, QUIET)
    folder = run.stage("train", "both").folder
    kl = [row["reverse_kl"] for row in read_lines(folder / "metrics.jsonl")]
    assert kl[-1] < 0.8 * kl[0], "it learns"
    student = AutoModelForCausalLM.from_pretrained(run.student.path, dtype=torch.float32)
    before = load_file(run.student.path / "model.safetensors")
    served = PeftModel.from_pretrained(student, str(folder / "final" / "adapter")).merge_and_unload().state_dict()
    moved = 0
    for name, weight in load_file(folder / "final" / "model.safetensors").items():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight, served[name].bfloat16(), rtol=2 * 2**-8, atol=UNIT)
        moved += not torch.equal(weight, before[name])
    assert moved == 2 * 7, "all seven matrices of both layers, and nothing else"


@pytest.mark.slow
def test_a_resumed_quantised_training_ends_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "KEPT_CHECKPOINTS", 100)
    finals = []
    for name, every in (("whole", 50), ("resumed", 1)):
        run = make_run(tmp_path / name, train=settings("nf4", checkpoint_every=every))
        make_students(run, QUIET)
        stage = run.stage("train", "both")
        if name == "resumed":  # as after a kill in the middle
            stage.manifest_path.unlink()
            for late in sorted((stage.folder / "checkpoints").glob("[0-9]*"))[2:]:
                late.rename(tmp_path / late.name)
            make_students(run, QUIET)
        finals.append(load_file(stage.folder / "final" / "model.safetensors"))
    assert all(torch.equal(weight, finals[1][name]) for name, weight in finals[0].items())


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_quantised_weights_take_the_memory_that_plan_counts(tmp_path: Path, base: str) -> None:
    student = save_student(tmp_path, dtype=torch.bfloat16, hidden_size=256, intermediate_size=512)
    model = Checkpoint(str(student)).load_quantised(base, torch.float32, CPU)
    held = weights = 0
    for module in model.modules():
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor) and not weight.is_floating_point():
            weights += module.in_features * module.out_features
            held += weight.nbytes
            if base == "nf4":
                state = weight.quant_state
                held += state.absmax.nbytes + state.state2.absmax.nbytes
    assert weights
    assert held / weights == pytest.approx(QUANTISED[base], rel=0.01)


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, train=settings("nf4"))
    with pytest.raises(InputError, match=r"train\.lora\.base = 'nf4': a quantised student is on one rank, and .* 2"):
        open_trainee(run, context(Ranks(0, 2, CPU)))
