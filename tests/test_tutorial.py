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
            exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    names["plt"].close("all")
    results = {point["policy"]: point for point in names["points"]}
    assert results.keys() == {"base", "mine", "accuracy-only"}
    losses = names["losses"]
    assert np.mean(losses[-4:]) < np.mean(losses[:4])
    assert len(names["samples"]) == 200


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_a_real_kernel_draws_what_a_person_would_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook the run, the decision and the results are tables, and the plots are pictures."""
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    notebook = nbformat.read(NOTEBOOK, 4)
    patience = {"timeout": None, "startup_timeout": 600, "iopub_timeout": 600}  # however busy the machine
    nbclient.NotebookClient(notebook, **patience, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {
        cell.id: {kind for out in cell.get("outputs", ()) for kind in out.get("data", {})} for cell in notebook.cells
    }
    html = {cell for cell in ("c01", "c05", "c09") if "text/html" in shown[cell]}
    pictures = {cell for cell in ("c07", "c10") if "image/png" in shown[cell]}
    assert (html, pictures) == ({"c01", "c05", "c09"}, {"c07", "c10"})
    said = [out.text for cell in notebook.cells for out in cell.get("outputs", ()) if out.output_type == "stream"]
    assert "Warning" not in "".join(said)
    shows = {cell.id: len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"}
    assert (shows["c01"], shows["c05"]) == (1, 1), "a table is shown once"
