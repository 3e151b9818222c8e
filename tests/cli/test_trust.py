"""Python that a recipe names runs only where the command says --trust, whatever the recipe says."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_weave import Run
from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from tiny import make_world

RUN = ["run", "train", "eval", "preview", "doctor", "sweep --shares 0.5"]
LOOK = ["status", "show", "cost", "clean --yes", "run --dry-run", "plan"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world without a run, an objective and a grader that leave a trace, and a recipe that trusts itself."""
    root = tmp_path_factory.mktemp("trust")
    data = make_world(root)
    code = (
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\ndef loss(*_): ...\ndef grade(*_): ...\n"
    )
    (root / "own.py").write_text(code)
    (root / "sums.jsonl").write_text('{"id": "q", "problem": "1+1", "answer": "2"}\n')
    own = {"kind": "python", "function": f"{root / 'own.py'}:grade"}
    data["eval"] = {"benchmarks": [f"file:{root / 'sums.jsonl'}"], "graders": {"sums": own}, "chat": False}
    data["train"]["objective"] = f"{root / 'own.py'}:loss"
    text = dump_recipe(check_recipe(data)).replace("[train]\n", "[train]\ntrust = true\n")
    (root / "tiny.toml").write_text(text.replace('kind = "python"', 'kind = "python"\ntrust = true'))
    return root / "tiny.toml"


def lweave(command: str, recipe: Path, *more: str) -> str:
    verb, *options = command.split()
    result = CliRunner().invoke(app, [verb, str(recipe), *options, *more])
    return f"{result.output} {result.exception or ''}"


@pytest.mark.parametrize("command", [*RUN, *LOOK])
def test_no_command_runs_it_unasked(recipe: Path, command: str) -> None:
    said = lweave(command, recipe)
    assert not (recipe.parent / "ran").exists(), said
    if command in ("run", "eval", "doctor", "run --dry-run"):  # the others miss what comes before
        assert "own.py" in said
        assert "add --trust to the command" in said


def test_a_run_from_python_needs_it_too(recipe: Path) -> None:
    with pytest.raises(InputError, match=r"own\.py:.*from Python: Run\(\.\.\., trust=True\)"):
        Run(recipe, quiet=True).run()
    assert not (recipe.parent / "ran").exists()


def test_it_runs_where_the_command_says_so(recipe: Path) -> None:
    assert "add --trust" not in lweave("doctor", recipe, "--trust")
    assert (recipe.parent / "ran").exists()
    (recipe.parent / "ran").unlink()
