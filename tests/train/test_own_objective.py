"""An objective of the user's own: trusted explicitly, known by its content, and trained like any other."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.train import validate
from lightning_weave.train.loop import make_fit
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.student import open_trainee
from train.cached import context, make_run

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
SAME = "from lightning_weave.maths import log_residual_loss as loss\n"
MINIMAL: dict[str, Any] = {
    "name": "r",
    "student": {"model": "m"},
    "anchors": {"a": {"post": "p", "pre": "q"}},
    "compositions": {"c": {"weights": {"a": 1.0}}},
}


def make(root: Path, text: str) -> Run:
    root.mkdir(exist_ok=True)
    (root / "own.py").write_text(text)
    both = {"weights": {"long": 0.7, "short": 0.3}, "alpha": 1.5}
    own = {**both, "objective": f"{root / 'own.py'}:loss"}
    return replace(make_run(root, compositions={"both": both, "own": own}), trust=True)


def losses(run: Run, name: str) -> list[float]:
    ranks = Ranks(0, 1, torch.device("cpu"))
    trainee = open_trainee(run, context(ranks))
    fit = make_fit(run, name, trainee, open_cache(run, name), alpha=1.5, ranks=ranks)
    return [fit.update(step, range(12))["loss"] for step in (1, 2, 3)]


def test_the_same_function_of_ones_own_trains_the_same(tmp_path: Path) -> None:
    run = make(tmp_path, SAME)
    ours = losses(run, "both")
    own = losses(run, "own")
    np.testing.assert_allclose(own[0], ours[0], rtol=1e-5)
    np.testing.assert_allclose(own, ours, rtol=1e-2)  # Adam makes much of gradients that are almost zero
    assert ours[-1] < ours[0]


def test_the_example_of_the_page_trains(tmp_path: Path) -> None:
    text = PAGE.read_text().partition("```python\n# my_losses.py\n")[2].partition("```")[0]
    found = losses(make(tmp_path, text), "own")
    assert found[-1] < found[0]


def test_a_wrong_shape_is_an_error_that_names_the_function(tmp_path: Path) -> None:
    run = make(tmp_path, "def loss(log_pi, log_b, log_q, alpha):\n    return log_pi.sum()\n")
    with pytest.raises(InputError, match=r"own.py:loss gives \(\) for \d+ decisions; give one loss for each"):
        losses(run, "own")


def test_it_runs_only_if_the_command_trusts_it(tmp_path: Path) -> None:
    run = make(tmp_path, f"open({str(tmp_path / 'ran')!r}, 'w')\n{SAME}")
    with pytest.raises(InputError, match=r"own.py:loss is Python that would run here .*add --trust to the command"):
        losses(replace(run, trust=False), "own")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match=r"train.objective = \"tilte\": must be 'tilted'.*or your own function"):
        check_recipe({**MINIMAL, "train": {"objective": "tilte"}})
    with pytest.raises(InputError, match=r"unknown key train\.trust"):  # a recipe cannot trust itself
        check_recipe({**MINIMAL, "train": {"objective": "own.py:loss", "trust": True}})


def test_it_is_known_by_its_content_and_looked_at_before_a_run(tmp_path: Path) -> None:
    run = make(tmp_path, SAME)
    before = {name: run.stage("train", name).fingerprint for name in ("own", "both")}
    (tmp_path / "own.py").write_text(SAME + "# changed\n")
    again = Run(run.recipe, run.arguments, trust=True)
    assert again.stage("train", "own").fingerprint != before["own"]
    assert again.stage("train", "both").fingerprint == before["both"]

    def found() -> list[str]:
        return [finding.text for finding in validate(again) if finding.about == "compositions.own"]

    assert found() == []
    (tmp_path / "own.py").write_text("def los(")
    assert "own.py:loss cannot be loaded (SyntaxError" in found()[0]
    (tmp_path / "own.py").unlink()
    assert "cannot be loaded (FileNotFoundError" in found()[0]
