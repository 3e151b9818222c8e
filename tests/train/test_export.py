"""The export: it looks at no more than it needs, and never holds a second copy of the student."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_weave.models.weights import Layout
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_json
from lightning_weave.train import export
from lightning_weave.train.data import compose
from lightning_weave.train.export import round_weights
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import full_vocabulary, open_trainee, student_weights
from train.cached import QUIET, context, make_run

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


def test_the_first_decisions_run_only_the_tokens_that_they_need(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cache = open_cache(run, "both")
    trainee = open_trainee(run, context(ALONE)).eval()
    batch = compose(cache.block(range(4)), cache.weights, 2.0)
    with torch.no_grad():
        whole_NV = trainee(batch, full_vocabulary, 1.0)[1]
        for decisions in (1, 3, len(batch) - 1, len(batch) + 5):
            part = batch.first(decisions)
            assert len(part.input_ids_T) == sum(part.lengths) <= len(batch.input_ids_T)
            assert part.states_N.max() == len(part.input_ids_T) - 1, "nothing is run after the last decision"
            torch.testing.assert_close(trainee(part, full_vocabulary, 1.0)[1], whole_NV[:decisions])
    assert batch.first(1).lengths == (int(batch.states_N[0]) + 1,)
    assert batch.first(0).lengths == (2,)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_the_student_is_read_once(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = Layout.read

    def counted(self: Layout, wanted: Mapping[str, slice]) -> Any:
        reads.extend(wanted)
        return read(self, wanted)

    monkeypatch.setattr(Layout, "read", counted)
    train = {"dtype": dtype, "epochs": 1, "agreement": False}
    run = make_run(tmp_path, student={"dtype": torch.bfloat16}, train=train)
    make_students(run, QUIET)
    assert len(reads) == len(set(reads)) > 0
    lost = read_json(run.directory / "train" / "both" / "manifest.json")["export_kl"]
    assert lost > 0 if dtype == "float32" else lost == 0, "in bfloat16 the trainer computes with rounded weights"


def test_ranks_wait_for_the_disk_before_they_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To gather a weight is to wait in a group of GPUs, which after two hours takes rank 0 for dead."""
    done: list[str] = []

    @dataclass(frozen=True)
    class Watched(Ranks):
        def barrier(self) -> None:
            done.append("barrier")

    def watch(name: str, owner: Any) -> None:
        usual = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (done.append(name), usual(*args))[1])

    run = make_run(tmp_path)
    trainee = open_trainee(run, context(ALONE))
    for name, owner in (("copyfile", export.shutil), ("full_tensor", export), ("write", Layout)):
        watch(name, owner)
    export.write_model(tmp_path / "final", trainee, run.student.layout, "a card", Watched(0, 2, CPU))
    copied = done.count("copyfile")
    assert done[:copied] == ["copyfile"] * copied
    after_disk = [after for before, after in pairwise(done[copied - 1 :]) if before in ("copyfile", "write")]
    assert len(after_disk) == 1 + len(run.student.layout.pieces) - 1 > 1
    assert set(after_disk) == {"barrier"}


def test_rounding_costs_what_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    cache = open_cache(run, "both")
    trainee = open_trainee(run, context(ALONE))
    batch = compose(cache.block(range(2)), cache.weights, 2.0)
    names = student_weights(trainee)
    assert round_weights(trainee, dict.fromkeys(names, torch.float32), [batch]) == 0
    assert 0 < round_weights(trainee, dict.fromkeys(names, torch.bfloat16), [batch]) < 1e-2
    assert all(torch.equal(weight, weight.bfloat16().float()) for weight in trainee.parameters())
