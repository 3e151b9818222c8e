"""A run directory with a damaged file: every command answers in a line, and verify notices what status trips over."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forked import Forked
from lightning_weave.config import check_recipe, dump_recipe
from tiny import make_world, save_prompts

FEW, MANY = 24, 200
Damage = Callable[[bytes, random.Random], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    """A finished run, and another that was begun: its last stage has no manifest."""
    root = tmp_path_factory.mktemp("damaged")
    recipe = make_world(root / "world", prompts=8)
    bench = save_prompts(root / "world" / "bench.jsonl", 3, seed=9)
    recipe |= {
        "runs": "runs",
        "compositions": {"both": recipe["compositions"]["both"]},
        "train": recipe["train"] | {"epochs": 1, "checkpoint_every": 1},
        "eval": {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 4, "chat": False},
    }
    (root / "r.toml").write_text(dump_recipe(check_recipe(recipe)))
    ended = forked.lweave("run", "r.toml", "--force", folder=str(root))
    assert ended.code == 0, ended.said
    return root


def _reparsed(change: Callable[[Any, random.Random], Any]) -> Damage:
    """Change a value somewhere in a JSON file, or in one line of several."""

    def damage(content: bytes, rng: random.Random) -> bytes:
        try:
            lines = [json.loads(content)]
        except ValueError:
            try:
                lines = [json.loads(line) for line in content.splitlines()]
            except ValueError:  # no JSON
                return content[: len(content) // 2]
        number = rng.randrange(len(lines)) if lines else 0
        lines[number : number + 1] = [_somewhere(lines[number], change, rng)] if lines else []
        return "\n".join(json.dumps(line) for line in lines).encode() + b"\n"

    return damage


def _somewhere(value: Any, change: Callable[[Any, random.Random], Any], rng: random.Random) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(sorted(value))
        return {**value, key: _somewhere(value[key], change, rng)}
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], _somewhere(value[place], change, rng), *value[place + 1 :]]
    return change(value, rng)


def _flip(content: bytes, rng: random.Random) -> bytes:
    flipped = bytearray(content or b" ")
    flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    return bytes(flipped)


def _without_a_key(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict) or not value:
        return None
    gone = rng.choice(sorted(value))
    return {key: one for key, one in value.items() if key != gone}


DAMAGES: dict[str, Damage] = {
    "truncated": lambda content, rng: content[: rng.randrange(len(content) + 1)],
    "a bit flipped": _flip,
    "a list": lambda content, rng: b"[]",
    "a list of lists": lambda content, rng: b"[[]]\n[[1]]\n",
    "null": lambda content, rng: b"null",
    "an empty table": lambda content, rng: b"{}",
    "bytes that are not text": lambda content, rng: b"\xff\xfe\x00" + content,
    "deep brackets": lambda content, rng: b"[" * 100_000,
    "a value of another kind": _reparsed(lambda value, rng: rng.choice([[], {}, "x", -1, 0.5, None, True])),
    "a key renamed": _reparsed(
        lambda value, rng: (
            {f"{key}-x" * (rng.random() < 0.5) or key: one for key, one in value.items()}
            if isinstance(value, dict)
            else "x"
        )
    ),
    "a key gone": _reparsed(_without_a_key),
}


@pytest.mark.parametrize(
    "number", [*range(FEW), *(pytest.param(number, marks=pytest.mark.fuzz) for number in range(FEW, MANY))]
)
def test_a_damaged_file_is_named_in_a_line(whole: Path, tmp_path: Path, forked: Forked, number: int) -> None:
    rng = random.Random(number)
    shutil.copytree(whole / "runs", tmp_path / "runs", symlinks=True)
    shutil.copy(whole / "r.toml", tmp_path)
    directory = tmp_path / "runs" / "tiny"
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    notes = [path for path in files if path.suffix in (".json", ".jsonl", ".toml") and "final" not in path.parts]
    path = rng.choice(notes if rng.random() < 0.8 else files)
    kind = rng.choice(sorted(DAMAGES))
    if begun := path.name == "manifest.json" and rng.random() < 0.3:  # an unfinished stage
        path = path.rename(path.with_name("stage.json"))
    path.write_bytes(DAMAGES[kind](path.read_bytes(), rng))
    where = f"{path.relative_to(directory)}: {kind}{' of an unfinished stage' * begun}"
    codes = {}
    more = [["status", "--cost"], [rng.choice(["run", "train", "report"])]] if number >= FEW else []
    for command in (["status"], ["status", "--verify"], *more):
        said = forked.lweave(command[0], "r.toml", *command[1:], folder=str(tmp_path))
        codes[" ".join(command)] = said.code
        assert "Traceback" not in said.said, f"{where}, {command}: {said.said}"
        assert said.code in (0, 1, 2), f"{where}, {command}: {said.said}"
        if said.code:
            assert len(said.said.strip().splitlines()) <= 4, f"{where}, {command}: {said.said}"
            assert "lweave: " in said.said, f"{where}, {command}: {said.said}"
    assert not codes["status"] or codes["status --verify"], f"{where}: verify passes what status trips over"
