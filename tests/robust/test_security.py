"""Hostile checkpoints, run directories and names, met by the program itself."""

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file

from lightning_weave import cli
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.stages.run import make_students
from lightning_weave.train.checkpoint import load_state, save_state, stage_state
from lightning_weave.train.parallel import Ranks
from tiny import run_of, save_model

Recipe = dict[str, Any]
Program = Callable[..., int]
QUIET = Progress(quiet=True)
HOSTILE = (
    "../../escaped",
    "/escaped",
    "..",
    ".",
    "a/b",
    "a\\b",
    "nul\0",
    "line\nbreak",
    "",
    "~root",
    "-rf",
    "x/../../y",
)


class Payload:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def lweave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """Run the program in this process; returns its exit code."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*words: str, recipe: Recipe | None = None) -> int:
        if recipe is not None:
            (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
            words = (*words, str(tmp_path / "recipe.toml"))
        monkeypatch.setattr(sys, "argv", ["lweave", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _code_of_models_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


# Checkpoints.


def test_pickled_weights_are_never_unpickled(
    lweave: Program, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(recipe["student"]["model"], tmp_path / "pickled"))
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Payload(tmp_path / "marker"), file)
    recipe["student"]["model"] = str(folder)
    assert lweave("rollout", recipe=recipe) == 2
    said = capsys.readouterr().err
    assert "pytorch_model.bin is pickled, and loading it would run code" in said
    assert "safetensors" in said
    assert "save_pretrained" in said
    assert "Traceback" not in said
    assert not (tmp_path / "marker").exists()
    with (folder / "pytorch_model.bin").open("rb") as file:  # it is a working trap
        pickle.load(file)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("part", ["pytorch_model.bin", "../elsewhere/model.safetensors", "/model.safetensors"])
def test_an_index_leads_to_safetensors_beside_it_and_nowhere_else(cached: Recipe, tmp_path: Path, part: str) -> None:
    folder = Path(shutil.copytree(cached["student"]["model"], tmp_path / "indexed"))
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, part)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        InputError, match=r"index\.json refers to .*only read from \*\.safetensors in the same directory"
    ):
        Checkpoint(str(folder)).load(torch.float32, torch.device("cpu"))


def test_an_adapter_beside_the_weights_is_refused(cached: Recipe, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cached["student"]["model"], tmp_path / "adapted"))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "someone/else"}')
    with pytest.raises(InputError, match="has a LoRA adapter as well as weights"):
        Checkpoint(str(folder)).load(torch.float32, torch.device("cpu"))


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM

Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own-architecture"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    """A checkpoint of an architecture that only its own code knows."""
    folder = save_model(tmp_path / "own-code", "student", "llama", 7)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    config |= {"model_type": "own-architecture", "architectures": ["OwnModel"], "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text(OWN_CODE.format(marker=str(tmp_path / "ran")))
    return folder


def test_code_of_a_checkpoint_is_not_run_unless_the_recipe_says_so(
    lweave: Program, recipe: Recipe, own_code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe["student"] = {"model": str(own_code)}
    assert lweave("rollout", recipe=recipe) == 2
    said = capsys.readouterr().err
    assert (
        "comes with Python code (auto_map in its config), which is not run unless the recipe and the command allow it"
        in said
    )
    assert "trust_remote_code = true for this model (student, anchors.NAME or policies.NAME) and add --trust" in said
    recipe["student"]["trust_remote_code"] = True
    assert lweave("rollout", recipe=recipe) == 2
    assert "student.trust_remote_code = true runs code" in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_code_that_the_recipe_trusts_is_run_with_a_warning_and_trained(
    lweave: Program, recipe: Recipe, own_code: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe["student"] = {"model": str(own_code), "trust_remote_code": True}
    for verb in ("rollout", "reference", "score", "train"):
        assert lweave(verb, "--trust", recipe=recipe) == 0
    assert (tmp_path / "ran").exists()
    warning = f"warning: trust_remote_code = true: code that comes with {own_code} is run with your rights"
    assert caplog.messages.count(warning) == 1
    final = tmp_path / "runs" / "tiny" / "train" / "both" / "final"
    with pytest.raises(InputError, match="comes with Python code"):
        Checkpoint(str(final)).load(torch.float32, torch.device("cpu"))
    kept = Checkpoint(str(final), trust_remote_code=True).load(torch.float32, torch.device("cpu"))
    assert type(kept).__name__ == "OwnModel"


# A run directory that somebody else made.


@pytest.mark.slow
def test_a_checkpoint_that_holds_more_than_one_is_not_resumed_from(
    make_run: Callable[[str], Recipe], tmp_path: Path
) -> None:
    recipe = make_run("runs")
    run = run_of(recipe)
    make_students(run, QUIET)
    folder = run.directory / "train" / "both"
    (folder / "manifest.json").unlink()
    newest = max((folder / "checkpoints").iterdir())
    (newest / ".metadata").write_bytes(pickle.dumps(Payload(tmp_path / "marker")))
    with pytest.raises(CorruptData, match=r"cannot be read \(it holds [\w.]+, which our checkpoints never contain"):
        make_students(run_of(recipe), QUIET)
    assert not (tmp_path / "marker").exists()


def test_settings_of_an_optimizer_are_data(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    alone = Ranks(0, 1, torch.device("cpu"))
    save_state(tmp_path / "good", stage_state(module, optimizer), alone)
    load_state(tmp_path / "good", module, optimizer)
    state = stage_state(module, optimizer)
    state["optimizer"]["param_groups"][0]["lr"] = Payload(tmp_path / "marker")
    save_state(tmp_path / "bad", state, alone)
    other = torch.nn.Linear(2, 2)
    with pytest.raises(Exception, match="Unsupported global"):
        load_state(tmp_path / "bad", other, torch.optim.AdamW(other.parameters(), 1e-3))
    assert not (tmp_path / "marker").exists()


# Names.


@pytest.mark.parametrize("section", ["name", "anchors", "compositions", "policies", "cases"])
def test_a_name_that_is_a_path_is_refused(
    lweave: Program, recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], section: str
) -> None:
    base = recipe | {"compositions": {"both": recipe["compositions"]["both"]}}
    for name in HOSTILE:
        changed = {
            "name": {"name": name},
            "anchors": {"anchors": {**base["anchors"], name: base["anchors"]["acc"]}},
            "compositions": {"compositions": {**base["compositions"], name: base["compositions"]["both"]}},
            "policies": {"policies": {name: {"model": base["student"]["model"]}}},
            "cases": {"report": {"cases": {name: {"right": ["base"]}}}},
        }[section]
        assert lweave("run", recipe=base | changed) == 2, name
        why = "contains a control character" if "\0" in name else "must be a plain name of letters, digits"
        assert why in capsys.readouterr().err, name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


WATCHED = """
import os, shlex, sys
_, log, *commands = sys.argv
log = open(log, "a", buffering=1)
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and isinstance(path, (str, bytes)):
            print(os.path.abspath(os.fsdecode(path)), file=log)
    elif event in ("os.mkdir", "os.rename", "os.link", "os.symlink"):
        print(os.path.abspath(os.fsdecode(arguments[1 if event != "os.mkdir" else 0])), file=log)
sys.addaudithook(watch)
from lightning_weave.cli import main
for command in commands:
    sys.argv = ["lweave", *shlex.split(command)]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


@pytest.mark.slow
def test_ids_of_data_name_no_file(recipe: Recipe, tmp_path: Path) -> None:
    """Every file that the program opens for writing is one of the run's own, whatever prompts and problems say."""
    work = tmp_path / "work"
    work.mkdir()
    ids = [*HOSTILE[:3], str(tmp_path / "absolute"), *HOSTILE[4:7], "$(touch escaped)"]
    rows = [{"problem": f"{n}+{n}", "answer": str(2 * n), "id": name} for n, name in enumerate(ids)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (work / "prompts.jsonl").write_text(text)
    problems = work / "..strange $(touch escaped);.jsonl"
    problems.write_text(text)
    recipe |= {"runs": str(work / "runs")}
    recipe["prompts"] |= {"source": str(work / "prompts.jsonl"), "take": len(ids)}
    recipe["eval"] = {"benchmarks": [f"file:{problems}"], "samples": 1, "max_tokens": 4, "chat": False}
    recipe["report"] = {"cases": {"any": {"wrong": ["base", "both"]}}}
    (work / "recipe.toml").write_text(tomli_w.dumps(recipe))
    (tmp_path / "watched.py").write_text(WATCHED)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    verbs = ("run", "report", f"eval --lm-eval {work / 'runs' / 'lm-eval'}")
    command = [
        sys.executable,
        str(tmp_path / "watched.py"),
        str(tmp_path / "opened"),
        *(f"{v} recipe.toml" for v in verbs),
    ]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = [Path(line) for line in (tmp_path / "opened").read_text().splitlines()]
    ours = [path for path in written if path.is_relative_to(work / "runs")]
    assert len(ours) > 40
    elsewhere = {str(path) for path in written if not path.is_relative_to(tmp_path / "cache")} - set(map(str, ours))
    assert not [path for path in elsewhere if path.startswith(str(tmp_path)) or "escaped" in path]
    left = {path.name for path in tmp_path.iterdir()} | {path.name for path in work.iterdir()}
    assert left == {"work", "watched.py", "opened", "cache", "runs", "prompts.jsonl", problems.name, "recipe.toml"}
    samples = next((work / "runs").rglob("eval/base/*/samples.jsonl"))
    assert {json.loads(line)["problem"] for line in samples.read_text().splitlines()} == set(ids)
