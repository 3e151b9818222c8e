"""The tutorial notebook, run top to bottom."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

NOTEBOOK = Path(__file__).parents[1] / "docs" / "tutorial.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.set_num_threads(1)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "keep it without outputs"
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    names["plt"].close("all")
    results = {point["policy"]: point for point in names["points"]}
    assert results.keys() == {"base", "mine", "accuracy-only"}
    losses = names["losses"]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert len(names["samples"]) == 200
