"""What training leaves behind: no model once a composition or a leg is trained, and few waits for the device."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_weave import devices as memory
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_json
from lightning_weave.train import student
from lightning_weave.train.loop import make_fit
from lightning_weave.train.parallel import join, shard
from lightning_weave.train.student import open_trainee
from pipeline.scored import HALF, QUIET, make_scored
from tiny import run_of
from train.cached import context, make_run
from train.launch import on_ranks
from train.measured import measure

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")


@pytest.mark.slow
def test_no_model_is_alive_when_the_next_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any way to train: its students, the models that sample and score for it; and the device's pool is emptied."""
    recipe = make_scored(tmp_path)
    models: list[weakref.ref] = []
    alive: list[int] = []
    pooled: list[bool] = []  # whether the pool had been emptied since the last model went
    pool = {"empty": True}

    def watch(model: Any) -> Any:
        models.append(weakref.ref(model))
        pool["empty"] = False
        return model

    class Watched(student.Trainee):
        def __init__(self, *args: Any) -> None:
            alive.append(sum(model() is not None for model in models))
            pooled.append(pool["empty"])
            super().__init__(*args)
            watch(self.model)

    def empty_pool() -> None:
        pool["empty"] = all(model() is None for model in models)

    load = Checkpoint.load
    monkeypatch.setattr(Checkpoint, "load", lambda *args: watch(load(*args)))
    monkeypatch.setattr(student, "Trainee", Watched)
    monkeypatch.setattr(memory, "empty_pool", empty_pool)
    compositions = {
        "one": {"weights": HALF},
        "two": {"weights": {"acc": 1.0}},
        "live": {"weights": HALF, "method": "online"},
        "legs": {"weights": HALF, "method": "sequential", "sequence": ["acc", "brief"]},
        "parts": {"weights": HALF, "refresh": 2},
    }
    shorter = {**recipe["train"], "dtype": "bfloat16", "epochs": 1, "agreement": False}
    gc.disable()  # nothing is freed by chance
    try:
        make_students(run_of({**recipe, "compositions": compositions, "train": shorter}), QUIET)
    finally:
        gc.enable()
    assert alive == [0] * 7
    assert pooled == [True] * 7
    assert all(model() is None for model in models)
    assert pool["empty"]


def test_sharding_leaves_no_whole_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: list[weakref.ref] = []

    def watched(module: Any, *rest: Any) -> None:
        whole.extend(weakref.ref(weight) for weight in module.parameters())
        shard(module, *rest)

    monkeypatch.setattr(student, "shard", watched)
    run = make_run(tmp_path)
    with join(torch.device("cpu"), sharded=True) as ranks:
        trainee = open_trainee(run, context(ranks, torch.bfloat16))
        gc.collect()
        assert whole
        assert not any(weight() is not None for weight in whole)
        assert trainee.head_description.plain


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in WAITS:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("objective", ["tilted", "reverse-kl", "direct-opd"])
@pytest.mark.slow
def test_an_update_waits_for_the_device_at_most_twice(tmp_path: Path, dtype: torch.dtype, objective: str) -> None:
    """Once for all that is watched and once for the norm of the gradient, however many micro-batches there are."""
    run = make_run(tmp_path, train={"objective": objective})
    with join(torch.device("cpu"), sharded=dtype != torch.float32) as ranks:
        trainee = open_trainee(run, context(ranks, dtype))
        fit = make_fit(run, "both", trainee, open_cache(run, "both"), alpha=2.0, ranks=ranks)
        fit.update(1, range(12))
        for budget in (1, 10_000):  # a micro-batch for each row, and one for all
            fit.token_budget = budget
            with Waits() as waits:
                fit.update(2, range(12))
            # What is watched comes over in one copy, which is no wait where the device is the host.
            assert waits.found == ["aten::_local_scalar_dense"]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.ranks
def test_two_ranks_read_half_each_and_never_hold_the_student(tmp_path: Path, lora: dict[str, int] | None) -> None:
    """Loading takes no more than training does, and the export no whole copy of the student, in any dtype."""
    wide = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 256}
    train = {"gradient_checkpointing": True, "lora": lora} if lora else {"gradient_checkpointing": True}
    run = make_run(tmp_path, student={"dtype": torch.bfloat16, **wide}, train=train)
    assert on_ranks(2, measure, run, torch.bfloat16, tmp_path) == [0, 0]
    whole = sum(tensor.nbytes for tensor in load_file(run.student.path / "model.safetensors").values())
    for rank in range(2):
        figures = read_json(tmp_path / f"{rank}.json")
        assert figures["read"] == whole / 2
        assert figures["loading"] <= figures["kept"] + figures["training"]
        assert figures["exporting"] < whole  # in bfloat16; blocks of the forward pass among it
