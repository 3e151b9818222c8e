"""Which layers are compiled by default, and that only training uses what was compiled."""

import json
from functools import partialmethod
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from lightning_weave.config import check_recipe
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.train import student
from lightning_weave.train.parallel import join
from lightning_weave.train.student import TrainContext, find_blocks, open_trainee
from train.cached import make_run
from train.computed import train_and_see

CPU = torch.device("cpu")
QUIET = Progress(quiet=True)


@pytest.mark.parametrize(
    ("setting", "dtype", "has_compiler", "compiled"),
    [
        ("auto", "bfloat16", True, True),
        ("auto", "bfloat16", False, False),
        ("auto", "float32", True, False),  # rows attend one by one
        (False, "bfloat16", True, False),
        (True, "float32", False, True),
    ],
)
def test_layers_are_compiled_where_a_compiler_makes_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: bool | str,
    dtype: str,
    has_compiler: bool,
    compiled: bool,
) -> None:
    run = make_run(tmp_path, train={"dtype": dtype} | ({} if setting == "auto" else {"compile": setting}))
    assert run.recipe.train.compile == setting, "auto is the default"
    monkeypatch.setattr(student, "has_compiler", lambda device: has_compiler)
    with torch._dynamo.config.patch(suppress_errors=False), join(CPU, sharded=dtype == "bfloat16") as ranks:
        trainee = open_trainee(run, TrainContext(ranks, getattr(torch, dtype), QUIET))
        blocks = find_blocks(trainee.model)[0]
        assert [block._compiled_call_impl is not None for block in blocks] == [compiled] * len(blocks)
        # A layer that cannot be compiled stops only a run that asks for it.
        assert torch._dynamo.config.suppress_errors == (compiled and setting == "auto")


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler, which means to hide it
@pytest.mark.slow
def test_sampling_in_training_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer and length of a cache would be a graph of its own, until torch compiles no more."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"id": f"s{n}", "problem": "w3 w4", "answer": "0"}) + "\n" for n in range(3)))
    graphs = {}
    for every in (0, 1):
        run = make_run(tmp_path / str(every), groups=4, train={"epochs": 1, "compile": True})
        evaluation = {"benchmarks": [f"file:{sums}"], "samples": 1, "max_tokens": 8, "chat": False}
        recipe = run.recipe.model_dump(by_alias=True, exclude_none=True)
        sections = {"eval": recipe["eval"] | evaluation, "train": recipe["train"] | {"eval_every": every}}
        run = Run(check_recipe(recipe | sections), run.arguments)
        torch._dynamo.reset()
        counters.clear()
        train_and_see(run, "both", QUIET)
        graphs[every] = counters["stats"]["unique_graphs"]
    assert graphs[0] == graphs[1] > 0
