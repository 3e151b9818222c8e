"""The program as people meet it: its help, its version, and what it does not import."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from lightning_weave import __version__
from lightning_weave.errors import InputError
from ports import held_port
from tiny import make_world

LIGHT = """
import sys
from lightning_weave.cli import main
sys.argv = ["lweave", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
assert not {"torch", "transformers", "datasets", "matplotlib"} & sys.modules.keys()
"""


def lweave(*words: str, cwd: Path | None = None, code: int = 0) -> str:
    """Run the program; returns what it said."""
    command = [sys.executable, "-m", "lightning_weave.cli", *words]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    data = make_world(root)
    ledger = root / "runs" / "tiny" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(
        '{"stage": "rollout", "name": "", "device_seconds": 1, "tokens": 1, "bytes": 1, "peak_memory": 1}\n'
    )
    file = root / "tiny.toml"
    file.write_text(tomli_w.dumps(data))
    return file


@pytest.mark.parametrize("option", [[], ["--cost"], ["--verify"]])
def test_looking_at_a_run_imports_neither_torch_nor_transformers(recipe: Path, option: list[str]) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, "status", str(recipe), *option], check=True)


VERBS = (
    "init recipe doctor plan rehearse run eval forecast sweep compare preview status report inspect export push "
    "pull clean demo"
)
MOVED = {
    "show r.toml": "lweave recipe show",
    "keys": "lweave recipe keys",
    "verify r.toml": "lweave status RECIPE --verify",
    "cost r.toml --json": "lweave status RECIPE --cost",
    "card r.toml --composition x": "--as student",
    "forget r.toml --policy x": "lweave clean RECIPE --policy",
    "world build x": "scripts/build-world DIR",
}


def test_help_lists_the_verbs_in_the_order_of_their_use() -> None:
    said = lweave("--help").partition("Commands:\n")[2]
    assert [line.split()[0] for line in said.splitlines()] == VERBS.split()
    assert "..." not in said, "a summary is too long"


@pytest.mark.parametrize("words", MOVED)
def test_a_verb_that_has_moved_is_answered_with_the_new_command(words: str) -> None:
    said = lweave(*words.split(), code=2)
    assert said.startswith(f"lweave: {words.split()[0]} is now: ")
    assert MOVED[words] in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("verb", ["rollout", "reference", "score", "train"])
def test_hidden_verbs_work(verb: str) -> None:
    assert f"{verb} [OPTIONS]" in lweave(verb, "--help")


def test_the_version_is_said() -> None:
    assert lweave("--version") == f"lweave {__version__}\n"


def _every_command() -> list[list[str]]:
    from lightning_weave import cli

    words: list[list[str]] = [[]]
    for group in cli.app.registered_groups:
        before = [group.name] if group.name else []
        names = [command.name or command.callback.__name__ for command in group.typer_instance.registered_commands]
        words += [[*before, name] for name in names]
    return words


def test_help_speaks_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    from lightning_weave import cli

    for words in _every_command():
        with pytest.raises(SystemExit):
            cli.app([*words, "--help"])
        verb = " ".join(words)
        said = capsys.readouterr().out
        assert not re.search(r"<(bool|int|str|float|list)|[{}]|None", said), said
        options = re.findall(r"^  --[\w-]+.*(?:\n {10,}.*)*", said, re.MULTILINE)
        assert all(re.search(r"  \w", option[4:]) for option in options), f"{verb}: an option that explains nothing"
        assert "Usage: " in said


def test_warnings_of_libraries_about_themselves_are_for_those_who_debug() -> None:
    code = """
import logging, sys
from lightning_weave.cli import app
app(sys.argv[1:], standalone_mode=False)
logging.getLogger("bitsandbytes.backends.cpu.ops").warning("pip install kernels")
logging.getLogger("transformers").warning("the weights are not whole")
"""
    plain, debugging = (
        subprocess.run(
            [sys.executable, "-c", code, *words, "recipe", "keys"], check=True, capture_output=True, text=True
        ).stderr
        for words in ([], ["--debug"])
    )
    assert plain == "the weights are not whole\n"
    assert "pip install kernels" in debugging


def test_a_missing_argument_is_named_without_braces() -> None:
    said = " ".join(lweave("run", code=2).split())  # in whatever width it is written
    assert "run [OPTIONS] RECIPE... Try" in said
    assert "Missing argument 'RECIPE'" in said


def test_status_lists_the_runs_of_a_directory_and_takes_one_of_them(recipe: Path) -> None:
    """By the recipe that each directory holds; without an argument those in ./runs."""
    root = recipe.parent
    assert "runs: no run here" in lweave("status", "runs/tiny", cwd=root, code=2) + lweave("status", cwd=root, code=2)
    (root / "runs" / "tiny" / "recipe.toml").write_bytes(recipe.read_bytes())
    try:
        for words in ([], ["runs"]):
            said = lweave("status", *words, cwd=root)
            assert re.search(r"runs/tiny +\S+/student +\d+ missing", said), said
        said = lweave("status", "runs/tiny", cwd=root)
        assert "Next: lweave run runs/tiny/recipe.toml" in said
        assert json.loads(lweave("status", "--json", cwd=root))[0]["run"] == "runs/tiny"
    finally:
        (root / "runs" / "tiny" / "recipe.toml").unlink()


def test_a_shell_completes_commands_and_options() -> None:
    assert "--install-completion" in lweave("--help")
    code = "import sys; from lightning_weave.cli import main; sys.argv = ['lweave']; main()"
    for typed, expected in (("lweave re", {"recipe", "rehearse", "report"}), ("lweave run --dry", {"--dry-run"})):
        words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_LWEAVE_COMPLETE": "complete_bash"}
        said = subprocess.run([sys.executable, "-c", code], env=os.environ | words, capture_output=True, text=True)
        assert set(said.stdout.split()) == expected


def test_an_unreachable_hub_is_asked_once_and_the_answer_names_the_model(tmp_path: Path) -> None:
    """huggingface_hub tells of every try; with one try there is nothing to tell."""
    (tmp_path / "r.toml").write_text('name = "r"\n[student]\nmodel = "nobody/nothing"\n')
    with held_port() as port:
        endpoint = f"http://127.0.0.1:{port}"
        words = [sys.executable, "-m", "lightning_weave.cli", "--debug", "plan", "r.toml"]
        environment = os.environ | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        ended = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "model 'nobody/nothing'" in ended.stderr
    assert "Retrying" not in ended.stderr


def test_report_merges_files_and_takes_other_runs_by_name_or_directory(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_weave import cli
    from lightning_weave.report import report

    seen: list[list[str]] = []
    monkeypatch.setattr(report, "run", lambda runs, *_: seen.append([run.recipe.name for run in runs]))
    over = tmp_path / "over.toml"
    over.write_text('name = "over"\n')
    cli.app(["report", str(recipe), str(over)], standalone_mode=False)
    cli.app(["report", str(recipe), "--run", str(recipe), "--run", str(recipe)], standalone_mode=False)
    for name in ("math", "code"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_bytes(recipe.read_bytes())
    cli.app(["report", str(tmp_path / "math"), str(tmp_path / "code"), "--run", str(recipe)], standalone_mode=False)
    assert seen == [["over"], ["tiny", "tiny", "tiny"], ["math", "code", "tiny"]]
    with pytest.raises(InputError, match="give run directories, or recipe files that merge into one"):
        cli.app(["report", str(tmp_path / "math"), str(recipe)], standalone_mode=False)


@pytest.mark.parametrize("command", ["plan", "compare --composition weave-50 --dry-run"])
def test_without_its_files_the_demo_recipe_leads_to_lweave_demo(tmp_path: Path, command: str) -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "demo.toml"
    verb, *options = command.split()
    (said,) = lweave(verb, str(recipe), *options, cwd=tmp_path, code=2).splitlines()
    assert "runs/demo-world" in said
    assert "lweave demo" in said
    assert not list(tmp_path.iterdir())
