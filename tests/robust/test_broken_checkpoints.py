"""Damaged checkpoints, met by the program itself: one line that names a file, never a traceback."""

import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from safetensors.torch import load_file, save_file

from lightning_weave import cli
from lightning_weave.errors import WeaveError
from lightning_weave.models.checkpoint import Checkpoint

Recipe = dict[str, Any]
Program = Callable[[str, Recipe], tuple[int, str]]
FEW, MANY = 36, 220
SECONDS = 30  # for a command, on a busy machine
WHOLE = (b"", b"null", b"[]", b"7", b'"text"', b"{", b"\x00" * 64, b"\xff\xfe\x1b[31m", b"[" * 100_000, b"{}")
ODD: tuple[Any, ...] = (
    *(None, -1, 0, 1, 10**7, 10**30, 1.5, True, float("nan"), "", "text", "\x1b[31mred\u202e", [], [-1], ["a"], {}),
    *({"a": 1}, {"\x1b": None}, "../../config", "float99"),
)
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def lweave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Program]:
    """Run the program in this process; returns its exit code and what it prints."""
    before = signal.getsignal(signal.SIGTERM)

    def run(verb: str, recipe: Recipe) -> tuple[int, str]:
        (tmp_path / "recipe.toml").write_text(tomli_w.dumps(recipe))
        monkeypatch.setattr(sys, "argv", ["lweave", verb, str(tmp_path / "recipe.toml")])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        return int(ended.value.code or 0), captured.out + captured.err

    yield run
    signal.signal(signal.SIGTERM, before)


def places(content: Any) -> list[tuple[Any, Any]]:
    """List every (container, key) of a JSON document."""
    found = []
    for key in list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        found += [(content, key), *places(content[key])]
    return found


def damage_json(path: Path, dice: random.Random) -> str:
    """Replace the whole file, cut it off, or give one of its keys an odd value."""
    original = path.read_bytes()
    how = dice.choice(["whole", "cut", "key", "key", "key", "key", "drop"])
    if how == "whole":
        path.write_bytes(new := dice.choice(WHOLE))
        return f"{path.name} = {new[:10]!r}"
    if how == "cut":
        path.write_bytes(original[: dice.randrange(len(original))])
        return f"{path.name} cut"
    content = json.loads(original)
    container, key = dice.choice([(content, key) for key in content] if dice.random() < 0.6 else places(content))
    value = dice.choice(ODD)
    if how == "drop":
        del container[key]
    else:
        container[key] = value
    path.write_text(json.dumps(content))
    return f"{path.name}: {key} {'removed' if how == 'drop' else f'= {value!r}'}"


def damage_weights(path: Path, dice: random.Random) -> str:
    """Cut the file off, flip bytes, or change what its header says or which tensors it has."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    how = dice.choice(["cut", "header length", "header bytes", "header keys", "shape", "drop", "rename", "dtype"])
    if how == "cut":
        path.write_bytes(content[: dice.randrange(len(content))])
    elif how == "header length":
        path.write_bytes(dice.choice([0, 1, length + 1, 2**40, 2**64 - 1]).to_bytes(8, "little") + content[8:])
    elif how == "header bytes":
        for _ in range(dice.randrange(1, 5)):
            content[8 + dice.randrange(length)] = dice.randrange(256)
        path.write_bytes(content)
    elif how == "header keys":
        header = json.loads(content[8 : 8 + length])
        name = dice.choice([name for name in header if name != "__metadata__"])
        header[name][dice.choice(["dtype", "shape", "data_offsets"])] = dice.choice(["F99", "\x1b[31m", [], [1], None])
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    else:
        tensors = load_file(path)
        name = dice.choice(sorted(tensors))
        tensor = tensors.pop(name)
        if how == "shape":
            tensors[name] = torch.cat([tensor, tensor])
        elif how == "rename":
            tensors[f"{name}\x1b[31m"] = tensor
        elif how == "dtype":
            tensors[name] = tensor.to(dice.choice([torch.int64, torch.bool, torch.uint8]))
        save_file(tensors, path, {"format": "pt"})
    return f"{path.name}: {how}"


def damage_template(path: Path, dice: random.Random) -> str:
    texts = [
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "\x1b[31m",
        "{{ raise_exception('\x1b[31m') }}",
        "",
    ]
    path.write_text(text := dice.choice(texts))
    return f"{path.name} = {text!r}"


def damage(folder: Path, dice: random.Random) -> str:
    """Damage one file of a checkpoint."""
    files = ["config.json"] * 4 + ["model.safetensors"] * 3 + ["tokenizer.json", "tokenizer_config.json"]
    path = folder / dice.choice([*files, "generation_config.json", "chat_template.jinja"])
    match path.suffix:
        case ".safetensors":
            return damage_weights(path, dice)
        case ".jinja":
            return damage_template(path, dice)
        case _:
            return damage_json(path, dice)


@pytest.mark.parametrize(
    "number",
    [*range(FEW), *(pytest.param(number, marks=pytest.mark.fuzz) for number in range(FEW, MANY))],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    make_run: Callable[[str], Recipe], tmp_path: Path, lweave: Program, number: int
) -> None:
    dice = random.Random(number)
    recipe = make_run("runs")  # what an anchor needs is there
    of_anchor = number % 4 == 0
    section, key = (next(iter(recipe["anchors"].values())), "post") if of_anchor else (recipe["student"], "model")
    folder = Path(shutil.copytree(section[key], tmp_path / "damaged"))
    section[key] = str(folder)
    how = damage(folder, dice)
    for verb in ("doctor", "score" if of_anchor else "rollout"):
        start = time.monotonic()
        code, said = lweave(verb, recipe)
        assert code in (0, 1, 2), (how, said)
        assert "Traceback" not in said, (how, said)
        raw = [char for char in said if not char.isprintable() and char not in "\n\t\r"]
        assert not raw, (how, said)
        assert time.monotonic() - start < SECONDS, how
    checkpoint = Checkpoint(str(folder))  # whatever doctor has refused before it was loaded
    for load in (
        lambda: checkpoint.load(torch.float32, torch.device("cpu")),
        lambda: checkpoint.stop_ids,
        lambda: checkpoint.layout,
    ):
        with suppress(WeaveError):
            load()


def set_key(name: str, key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {key: value}))

    return change


NAMED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "null": ("config.json", lambda folder: (folder / "config.json").write_text("null")),
    "negative": ("config.json", set_key("config.json", "hidden_size", -16)),
    "text": ("config.json", set_key("config.json", "num_attention_heads", "two")),
    "layers": ("config.json", set_key("config.json", "num_hidden_layers", 10**7)),
    "dtype": ("config.json", set_key("config.json", "dtype", "float99")),
    "eos": ("generation_config.json", set_key("generation_config.json", "eos_token_id", -5)),
    "eos beyond": ("config.json", set_key("config.json", "eos_token_id", [2**40])),
    "truncated": ("model.safetensors", lambda folder: (file := folder / "model.safetensors").write_bytes(
        file.read_bytes()[:-100]
    )),
    "garbage": ("model.safetensors", lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100)),
    "shapes": ("model.safetensors", set_key("config.json", "intermediate_size", 64)),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["doctor", "rollout"])
@pytest.mark.parametrize("damage", NAMED)
def test_the_message_names_the_file(recipe: Recipe, tmp_path: Path, lweave: Program, damage: str, verb: str) -> None:
    folder = Path(shutil.copytree(recipe["student"]["model"], tmp_path / "damaged"))
    recipe["student"]["model"] = str(folder)
    file, change = NAMED[damage]
    change(folder)
    code, said = lweave(verb, recipe)
    assert code == (1 if verb == "doctor" else 2)  # doctor has made its report
    assert "Traceback" not in said
    assert str(folder) in said.replace("\n", "")
    assert file in said


@pytest.fixture(scope="module")
def adapter(cached: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of the student."""
    peft = pytest.importorskip("peft")
    base = cached["student"]["model"]
    model = Checkpoint(base).load(torch.float32, torch.device("cpu"))
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    config.base_model_name_or_path = base
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "number", [*range(8), *(pytest.param(number, marks=pytest.mark.fuzz) for number in range(8, 60))]
)
def test_a_damaged_adapter_is_refused_in_one_line(
    recipe: Recipe, adapter: Path, tmp_path: Path, lweave: Program, number: int
) -> None:
    dice = random.Random(number)
    folder = Path(shutil.copytree(adapter, tmp_path / "damaged"))
    path = folder / dice.choice(["adapter_config.json", "adapter_model.safetensors"])
    how = damage_json(path, dice) if path.suffix == ".json" else damage_weights(path, dice)
    recipe["anchors"] = {next(iter(recipe["anchors"])): {"post": str(folder)}}
    recipe["compositions"] = {}
    code, said = lweave("doctor", recipe)
    assert code in (0, 1, 2), (how, said)
    assert "Traceback" not in said, (how, said)
    assert all(char.isprintable() or char in "\n\t\r" for char in said), (how, said)
    with suppress(WeaveError):
        Checkpoint(str(folder)).load(torch.float32, torch.device("cpu"))
