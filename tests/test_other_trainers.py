"""The examples of other trainers begin with our loss and learn (`make test-peers`)."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import keep_prompts
from lightning_weave.train.loop import make_fit
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import open_trainee
from lightning_weave.types import Prompt
from lightning_weave.views import export
from train.cached import context, make_run

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
EXAMPLES = Path(__file__).parents[1] / "examples"
ROWS = list(range(12))


def make_targets(root: Path) -> tuple[Run, Path]:
    run = make_run(root, compositions={"both": {"weights": {"long": 0.7, "short": 0.3}, "alpha": 1.5}})
    keep_prompts(run, [Prompt(f"p{number}", [], "w3", [3]) for number in range(6)], {})
    return run, export.run(run, "both", root / "targets", Progress(quiet=True))


def first_loss(run: Run) -> float:
    ranks = Ranks(0, 1, torch.device("cpu"))
    trainee = open_trainee(run, context(ranks))
    return make_fit(run, "both", trainee, open_cache(run, "both"), alpha=1.5, ranks=ranks).update(1, ROWS)["loss"]


@pytest.mark.parametrize("example", ["transformers_trainer", "trl_trainer"])
def test_the_first_loss_is_ours_and_it_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str) -> None:
    pytest.importorskip("trl")
    run, targets = make_targets(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 3,  # all twelve rows make one update
        "num_train_epochs": 12,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
    }
    student = str(run.student.path)
    trainer = importlib.import_module(example).main(student, str(targets), str(tmp_path / "out"), **settings)
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 12
    np.testing.assert_allclose(losses[0], first_loss(run), rtol=1e-5)
    assert losses[-1] < 0.8 * losses[0]
    assert any((tmp_path / "out").glob("*.safetensors"))


@pytest.mark.parametrize("example", ["transformers_trainer", "trl_trainer"])
def test_the_examples_are_short(example: str) -> None:
    assert len((EXAMPLES / f"{example}.py").read_text().splitlines()) <= 80
