"""A directory for the hub: complete, made again by the same command, and never put over anything else."""

from pathlib import Path

import pytest
import torch

from lightning_weave.config import dump_recipe, load_recipe
from lightning_weave.errors import InputError
from lightning_weave.pipeline.flow import make_cache, make_students
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic
from lightning_weave.views import card
from tiny import make_world, steps_of

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    torch.set_num_threads(1)
    recipe = make_world(tmp_path_factory.mktemp("card"), prompts=4)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    steps = steps_of(recipe)
    make_cache(steps, QUIET)
    make_students(steps, QUIET)
    return steps


def test_the_directory_holds_student_card_and_recipe(trained: Steps, tmp_path: Path) -> None:
    out = card.run(trained, "both", tmp_path / "my-student", QUIET)
    final = trained.store.run_dir / "train" / "both" / "final"
    assert (out / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()
    assert {path.name for path in out.iterdir()} == {path.name for path in final.iterdir()} | {"recipe.toml"}
    assert load_recipe([out / "recipe.toml"]) == trained.recipe
    text = (out / "README.md").read_text()
    assert "| acc | 0.5 | 0.25 |" in text
    assert "Not evaluated yet (`lweave eval RECIPE --only both`)" in text
    assert card.run(trained, "both", out, QUIET) == out, "made by this command, so it may be replaced"


def test_nothing_else_is_replaced(trained: Steps, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    run_dir = trained.store.run_dir
    write_atomic(run_dir / "recipe.toml", dump_recipe(trained.recipe).encode())
    final = run_dir / "train" / "both" / "final"
    before = sorted(run_dir.rglob("*"))
    for place in (tmp_path / "precious", run_dir, final):  # the last two have a recipe, or a card, of their own
        with pytest.raises(InputError, match="was not made by this command"):
            card.run(trained, "both", place, QUIET)
    assert sorted(run_dir.rglob("*")) == before
    with pytest.raises(InputError, match="no directory can be made there"):
        card.run(trained, "both", run_dir / "recipe.toml" / "x", QUIET)
    with pytest.raises(InputError, match="no such composition; this run has both"):
        card.run(trained, "bot", None, QUIET)
