"""Every way to train in bfloat16: one process then shards the student as a GPU does, and two ranks train as one."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightning_weave.pipeline.flow import make_students
from lightning_weave.runs.steps import Steps
from lightning_weave.store import read_lines
from pipeline.scored import HALF, QUIET, make_scored
from tiny import steps_of
from train.launch import Plan, start

WAYS: dict[str, dict[str, Any]] = {
    "joint": {"weights": HALF},
    "mixture": {"weights": HALF, "method": "mixture"},
    "naive": {"weights": HALF, "objective": "direct-opd"},
    "teacher": {"weights": {"acc": 1.0}, "method": "teacher"},
    "self": {"method": "self", "sharpen": 0.6},
    "sequential": {"weights": HALF, "method": "sequential", "sequence": ["acc", "brief"]},
    "online": {"weights": HALF, "method": "online"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 2}},
    "checkpointing": {"gradient_checkpointing": True},
    "compiled": {"compile": True},
}
SAMPLING = ("sequential", "online")
BFLOAT16 = {"dtype": "bfloat16", "epochs": 1, "allow_disagreement": True}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return make_scored(tmp_path_factory.mktemp("bfloat16"))


def steps_for(recipe: dict, name: str, way: str, **train: Any) -> Steps:
    """A composition of its own name in the run whose cache is made."""
    return steps_of({**recipe, "compositions": {name: WAYS[way]}, "train": {**recipe["train"], **train}})


def losses(steps: Steps, name: str) -> list[float]:
    folder = steps.store.run_dir / "train" / name
    files = sorted(folder.rglob("metrics.jsonl"))
    return [row["loss"] for file in files for row in read_lines(file)]


def weights(steps: Steps, name: str) -> dict[str, torch.Tensor]:
    return load_file(steps.store.run_dir / "train" / name / "final" / "model.safetensors")


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.slow
def test_every_method_trains_as_in_float32(recipe: dict, way: str) -> None:
    ended = {}
    for dtype in ("float32", "bfloat16"):
        steps = steps_for(recipe, f"{way}-{dtype}", way, **{**BFLOAT16, "dtype": dtype})
        make_students(steps, QUIET)
        ended[dtype] = losses(steps, f"{way}-{dtype}")
    assert len(ended["bfloat16"]) == len(ended["float32"]) > 0
    assert np.isfinite(ended["bfloat16"]).all()
    if way == "online":  # where one token that is drawn otherwise changes all that comes after it
        return
    np.testing.assert_allclose(ended["bfloat16"], ended["float32"], rtol=0.1, atol=0.02)


COMPILED = pytest.param("compiled", marks=pytest.mark.slow)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of the compiler, which means to hide it
@pytest.mark.parametrize("setting", ["lora", "checkpointing", COMPILED])
def test_every_setting_trains(recipe: dict, setting: str) -> None:
    steps = steps_for(recipe, setting, "joint", **BFLOAT16, **SETTINGS[setting])
    make_students(steps, QUIET)
    student = load_file(steps.student.path / "model.safetensors")
    trained = weights(steps, setting)
    assert trained.keys() == student.keys()
    assert any(not torch.equal(trained[key], student[key]) for key in student)


@pytest.mark.slow
def test_two_ranks_train_as_one_by_every_method(recipe: dict) -> None:
    """Two ranks round otherwise, which in bfloat16 draws other tokens: what samples is compared in float32."""
    alone, together = ([made(recipe, way, who) for way in WAYS] for who in ("alone", "together"))
    in_bfloat16 = steps_for(recipe, "online-in-bfloat16", "online", **BFLOAT16)
    assert start(Plan(alone)) == [0]
    assert start(Plan([*together, in_bfloat16]), ranks=2) == [0, 0]
    for way, one, other in zip(WAYS, alone, together, strict=True):
        close = {"rtol": 0, "atol": 1e-5} if way in SAMPLING else {"rtol": 0.02, "atol": 0.01}
        expected = losses(one, f"{way}-alone")
        np.testing.assert_allclose(losses(other, f"{way}-together"), expected, err_msg=way, **close)
    assert np.isfinite(losses(in_bfloat16, "online-in-bfloat16")).all()


def made(recipe: dict, way: str, who: str) -> Steps:
    dtype = "float32" if way in SAMPLING else "bfloat16"
    return steps_for(recipe, f"{way}-{who}", way, **{**BFLOAT16, "dtype": dtype})
