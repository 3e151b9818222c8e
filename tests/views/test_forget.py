"""clean --policy removes one policy and nothing else; tests/runs/test_known.py does so after real trainings."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.views import clean
from tiny import make_world, run_of


def test_only_the_policy_goes(tmp_path: Path) -> None:
    run = run_of(make_world(tmp_path))
    run_dir = run.directory
    kept = ["train/both-too@12345678/final", "eval/base/bench@12345678", "preview/base/bench@12345678"]
    gone = [
        "train/both@12345678/final",
        "train/both@87654321",
        "eval/both/bench@12345678",
        "preview/both/bench@12345678",
    ]
    for name in kept + gone:
        (run_dir / name).mkdir(parents=True)
    for link in ("train/both", "train/both-too", "eval/both/bench", "eval/base/bench"):
        os.symlink(f"{Path(link).name}@12345678", run_dir / link)
    with pytest.raises(InputError, match=r"--policy bot: no such policy in .*, which has base, both, both-too"):
        clean.forget(run, "bot", Console(quiet=True), yes=True)
    clean.forget(run, "both", Console(quiet=True), yes=True)
    assert not [path for path in run_dir.rglob("*") if "both" in path.parts[-2:] or path.name.startswith("both@")]
    assert not list(run_dir.rglob(".tmp-*"))
    assert all((run_dir / name).is_dir() for name in kept)
    assert (run_dir / "train" / "both-too").resolve().is_dir()
    assert (run_dir / "eval" / "base" / "bench").resolve().is_dir()
