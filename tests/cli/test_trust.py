"""Python that a recipe names runs only where the command says --trust, whatever the recipe says."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from typer.testing import CliRunner

from lightning_weave import Run
from lightning_weave.cli import app
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.views.keys import recipe_keys
from tiny import make_world

RUN = ["run", "train", "eval", "preview", "doctor", "sweep --shares 0.5"]
LOOK = ["status", "recipe show", "status --cost", "clean --yes", "run --dry-run", "plan"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world without a run, an objective and a grader that leave a trace, and a recipe that names them."""
    root = tmp_path_factory.mktemp("trust")
    data = make_world(root)
    code = (
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\ndef loss(*_): ...\ndef grade(*_): ...\n"
    )
    (root / "own.py").write_text(code)
    (root / "sums.jsonl").write_text('{"id": "q", "problem": "1+1", "answer": "2"}\n')
    own = f"{root / 'own.py'}:grade"
    data["eval"] = {"benchmarks": [f"file:{root / 'sums.jsonl'}"], "graders": {"sums": own}, "chat": False}
    data["train"]["objective"] = f"{root / 'own.py'}:loss"
    (root / "tiny.toml").write_text(dump_recipe(check_recipe(data)))
    return root / "tiny.toml"


def lweave(command: str, recipe: Path, *more: str) -> str:
    words = command.split()
    at = 2 if words[0] == "recipe" else 1
    result = CliRunner().invoke(app, [*words[:at], str(recipe), *words[at:], *more])
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


# Every key, so that none can be forgotten.

CODE: dict[str, object] = {  # each with a value that would run something
    "student.trust_remote_code": True,
    "anchors.NAME.trust_remote_code": True,
    "anchors.NAME.options": {"worker_cls": "evil.Worker"},
    "policies.NAME.trust_remote_code": True,
    "compositions.NAME.objective": "EVIL.py:loss",
    "train.objective": "EVIL.py:loss",
    "eval.graders": {"sums": "EVIL.py:grade"},
    "eval.unsafe_local": True,
    "engine.python": "EVIL.sh",
    "engine.options": {"eval": {"logits_processors": "evil.Processor"}},
    "harness.python": "EVIL.sh",
    "harness.include": "EVIL",
    "harness.args": {"model": "local-completions", "confirm_run_unsafe_code": True},
    "tracking": {"settings": {"base_url": "http://evil"}},
}
DATA = """
name runs date student.model anchors.NAME.post anchors.NAME.pre anchors.NAME.model anchors.NAME.post_prompt
anchors.NAME.cache anchors.NAME.pre_prompt anchors.NAME.engine anchors.NAME.aliases anchors.NAME.bos anchors.NAME.shift
anchors.NAME.where anchors.NAME.kl_budget spans tags.column tags.rules compositions.NAME.normalize
compositions.NAME.allow_negative compositions.NAME.weights compositions.NAME.levels compositions.NAME.default
compositions.NAME.control compositions.NAME.flip compositions.NAME.sequence compositions.NAME.resample
policies.NAME.model policies.NAME.weights policies.NAME.decode policies.NAME.system policies.NAME.thinking
policies.NAME.template eval.final prompts.system prompts.chat prompts.thinking prompts.source prompts.name
prompts.split prompts.columns prompts.format prompts.screen_against engine.dtype rollout.from train.optimizer
train.lora.targets train.lora.stabilised train.gradient_checkpointing train.compile train.keep_anchors rehearsal
eval.system eval.chat eval.thinking eval.benchmarks eval.columns eval.sources eval.format eval.adapters harness.tasks
harness.metrics report.students report.cases machine.tf32
"""  # read as data, or sent to a model as text


def test_every_key_that_could_name_a_program_is_known() -> None:
    kinds = ("text", "table", "true or false")
    texts = {key.name for key in recipe_keys() if any(kind in key.type.split(":")[0] for kind in kinds)}
    assert texts == {*CODE, *DATA.split()}, (
        "a new key: does its value start a program or run code? Then Recipe.code has it"
    )


def _with_code(recipe: Path, key: str) -> tuple[Path, str]:
    """Write the recipe with one key that runs something; the program leaves a trace."""
    root = recipe.parent
    program = root / "EVIL.sh"
    program.write_text(f"#!/bin/sh\ntouch {root / 'ran'}\n")
    program.chmod(0o755)
    data = tomllib.loads(recipe.read_text())
    del data["train"]["objective"], data["eval"]["graders"]
    data["engine"] = {"rollout": "vllm", "eval": "vllm"}
    data["policies"] = {"other": dict(data["student"])}
    names = {"anchors": "acc", "policies": "other", "compositions": next(iter(data["compositions"]))}
    named = key.replace("NAME", names.get(key.split(".")[0], ""))
    *path, last = named.split(".")
    table = data
    for part in path:
        table = table.setdefault(part, {})
    table[last] = json.loads(json.dumps(CODE[key]).replace("EVIL", str(root / "EVIL")))
    if key == "anchors.NAME.options":
        table["engine"] = "vllm"
    file = root / "evil.toml"
    file.write_text(tomli_w.dumps(data))
    return file, named


@pytest.mark.parametrize("key", CODE)
def test_no_key_runs_anything_unasked(recipe: Path, key: str) -> None:
    """The error names the key and the flag, and nothing is computed."""
    file, named = _with_code(recipe, key)
    for command in ("run", "doctor", "rollout", "eval", "rehearse"):
        said = lweave(command, file)
        assert re.search(rf"{re.escape(named)}\S* = .* runs code or a program with your permissions", said), said
        assert "add --trust to the command" in said
    for command in LOOK:
        lweave(command, file)
    assert not (recipe.parent / "ran").exists()


def test_trusted_programs_run(recipe: Path) -> None:
    file, _ = _with_code(recipe, "engine.python")
    assert "runs code" not in lweave("doctor", file, "--trust")
    assert (recipe.parent / "ran").exists()
    (recipe.parent / "ran").unlink()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("harness.args={model_args={trust_remote_code=true}}", "model_args.trust_remote_code is set by the policy"),
        ("harness.args={model_args={pretrained='x'}}", "model_args.pretrained is set by the policy"),
        ("engine.options={trust_remote_code=true}", "trust_remote_code is a key of [student]"),
        ("engine.options={eval={trust_remote_code=true}}", "trust_remote_code is a key of [student]"),
    ],
)
def test_what_a_model_may_run_is_set_with_the_model(recipe: Path, override: str, said: str) -> None:
    assert said in lweave("doctor", recipe, "--trust", "--set", override)
