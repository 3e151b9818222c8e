"""A run that is killed anywhere, as often as one likes, ends with the very weights of one that was left in peace."""

from pathlib import Path
from threading import current_thread

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightning_weave.errors import WeaveError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.train import checkpoint
from lightning_weave.train.parallel import Ranks
from train.cached import make_run
from train.launch import Plan, on_ranks, start, train_where_files_come_late

SETTINGS = {"prompts_per_round": 1, "updates_per_round": 1, "epochs": 2, "checkpoint_every": 2, "validation": 0.2}
DROPOUT = {"attention_dropout": 0.3}  # so that the random state matters


def folder(run: Run) -> Path:
    return run.directory / "train" / "both"


def checkpoints(run: Run) -> list[str]:
    return sorted(path.name for path in (folder(run) / "checkpoints").iterdir())


@pytest.mark.slow
def test_kills_leave_no_trace_in_the_weights(tmp_path: Path) -> None:
    left_alone = make_run(tmp_path / "alone", groups=5, train=SETTINGS, student=DROPOUT)
    killed = make_run(tmp_path / "killed", groups=5, train=SETTINGS, student=DROPOUT)
    make_students(left_alone, Progress(quiet=True))
    assert start(Plan([killed], kill="update", after=4)) == [-9]
    whole = [name for name in checkpoints(killed) if not name.startswith(".tmp-")]
    assert whole[0] == "000002", "the next one is not begun before it is written; that may have been too late to end"
    for place, passed in (("state", 0), ("position", 0), ("sync", 1)):  # one after the other, on the next checkpoint
        assert start(Plan([killed], kill=place, after=passed)) == [-9]
        assert checkpoints(killed) == [f".tmp-{int(whole[-1]) + 2:06d}", *whole]
    assert start(Plan([killed], kill="export")) == [-9]
    assert start(Plan([killed])) == [0]

    assert checkpoints(killed) == ["000006", "000008"]
    expected = load_file(folder(left_alone) / "final" / "model.safetensors")
    found = load_file(folder(killed) / "final" / "model.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    rows = [list(read_lines(folder(run) / "metrics.jsonl")) for run in (left_alone, killed)]
    assert [row["step"] for row in rows[1]] == list(range(1, 9))
    for one, other in zip(*rows, strict=True):
        same = one.keys() - {"seconds", "tokens_per_s", "loading", "memory"}
        assert {key: one[key] for key in same} == {key: other[key] for key in same}


@pytest.mark.slow
def test_rank_0_says_where_to_resume_and_the_others_wait_until_they_see_it(tmp_path: Path) -> None:
    left_alone = make_run(tmp_path / "alone", groups=5, train=SETTINGS)
    killed = make_run(tmp_path / "killed", groups=5, train=SETTINGS)
    make_students(left_alone, Progress(quiet=True))
    assert start(Plan([killed], kill="update", after=4)) == [-9]
    assert "000002" in checkpoints(killed), "the next one is not begun before it is written"
    assert on_ranks(2, train_where_files_come_late, Plan([killed])) == [0, 0]
    expected, losses = ([row["loss"] for row in read_lines(folder(s) / "metrics.jsonl")] for s in (left_alone, killed))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


def test_a_rank_that_never_sees_the_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "LATE", 0.3)
    module = torch.nn.Linear(2, 2)
    with pytest.raises(WeaveError, match="000004: rank 0 sees this checkpoint, and this rank does not"):
        checkpoint.restore_checkpoint(tmp_path, "a fingerprint", 4, module, torch.optim.AdamW(module.parameters()))


def test_the_thread_that_writes_checkpoints_sets_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What names no device would go to the first GPU there, whichever the rank has."""
    seen: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(checkpoint, "set_device", lambda device: seen.append((current_thread().name, device)))
    module = torch.nn.Linear(2, 2)
    ranks = Ranks(0, 1, torch.device("cpu"))
    with checkpoint.CheckpointWriter(tmp_path, "a fingerprint", ranks) as writer:
        writer.save(3, module, torch.optim.AdamW(module.parameters()))
    assert [path.name for path in checkpoint.complete_checkpoints(tmp_path, "a fingerprint")] == ["000003"]
    assert seen == [("checkpoint_0", ranks.device)]
