"""Damaged recipes and data, closed files and impatient users: one line, an exit code, never a traceback or a hang."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tomli_w

from lightning_weave import cli
from lightning_weave.config import load_recipe
from lightning_weave.errors import InputError
from tiny import make_world, save_prompts

RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
FAST, SLOW = range(40), range(40, 340)
SECONDS = 600  # until a hang is noticed, however busy the machine


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("odd")
    recipe = make_world(root, prompts=6)
    bench = save_prompts(root / "bench.jsonl", 3, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 1, "max_tokens": 8, "chat": False}
    return recipe


@pytest.fixture
def lweave(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Run the program in this process, for at most SECONDS; returns its exit code and what it printed."""
    kept = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise AssertionError(f"still running after {SECONDS} s")

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["lweave", *words])
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        signal.alarm(0)
        printed = capsys.readouterr()
        said = printed.out + printed.err
        assert "Traceback" not in said
        assert not RAW.search(said), said
        return int(ended.value.code or 0), said

    yield run
    signal.alarm(0)
    for one, handler in kept.items():
        signal.signal(one, handler)


DEEP: Any = 1
for _ in range(150):
    DEEP = [DEEP]
VALUES: list[Any] = [
    *(0, -1, 2**31, 2**63 - 1, 2**64, 10**4000, 0.0, -0.5, 1e308, float("nan"), float("inf"), True, False),
    *("", " ", "\0", "\x1b[31mred", "\u202eevil", "é数", "x" * 100_000, "/" * 5000, "../..", "~", "/proc/self/mem"),
    *("/dev/zero", "/dev/null", "/", ".", "{", "{}", "{problem:>999999999999}", "{problem!r}", "{0}", "%s", "a@b@c"),
    *("file:", "file:/dev/zero", "regex:(", "regex:(a+)+$", "numeric:", "http://", "hf", "vllm", "auto", "nan"),
    *([], {}, [[]], {"": 1}, {"a.b": {"c": 1}}, ["a", 1], {"\x1b": "\x1b"}, DEEP),
]


def change_value(recipe: dict[str, Any], rng: random.Random) -> str:
    """Put an odd value in place of one that a good recipe has, or under a new key."""
    data = tomllib.loads(tomli_w.dumps(recipe))
    table: Any = data
    while True:
        key = rng.choice([*table, "new"])
        if not isinstance(table.get(key), dict) or not table[key] or rng.random() < 0.2:
            break
        table = table[key]
    value = rng.choice(VALUES)
    table[rng.choice([key, "x" * 300, "a\x1bb"]) if rng.random() < 0.1 else key] = value
    try:
        return tomli_w.dumps(data)
    except ValueError:  # an integer of thousands of digits
        table[key] = 0
        return tomli_w.dumps(data) + f"\nbig = {'9' * 5000}\n"


def damage(content: bytes, rng: random.Random) -> bytes:
    """Cut, flip, repeat or insert bytes."""
    at = rng.randrange(len(content))
    end = min(len(content), at + rng.choice([1, 2, 40]))
    odd = [b"\0", b"\xff\xfe", b"\x1b[2J", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"[" * 5000, b'"', b"\\", b"}\n{", b"\r"]
    odd += [b"9" * 5000, b"null", b"\\ud800", b"\n" * 100, b"a." * 3000, "\u202e".encode()]
    match rng.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + content[end:]
        case 2:
            return content[:at] + bytes(rng.randrange(256) for _ in range(end - at)) + content[end:]
        case 3:
            return content[:end] + content[at:]
        case _:
            return content[:at] + rng.choice(odd) + content[at:]


def check_recipe_file(lweave: Callable[..., Any], world: dict[str, Any], folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    changed = change_value({**world, "runs": str(folder / "runs")}, rng).encode()
    file = folder / "odd.toml"
    file.write_bytes(changed if seed % 2 else damage(tomli_w.dumps(world).encode(), rng))
    code, said = lweave("doctor", str(file))
    try:
        load_recipe(file)
        assert code in (0, 1, 2), said
    except InputError:
        assert code == 2, said
        assert said.startswith("lweave: ")
        assert said.count("\n") <= 2
        assert str(file) in said


def check_data_file(lweave: Callable[..., Any], world: dict[str, Any], folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    file = folder / "odd.jsonl"
    file.write_bytes(damage(Path(world["prompts"]["source"]).read_bytes(), rng))
    recipe = {**world, "runs": str(folder / "runs")}
    if seed % 2:
        recipe["prompts"] = world["prompts"] | {"source": str(file)}
    else:
        recipe["eval"] = world["eval"] | {"benchmarks": [f"file:{file}"]}
    (folder / "r.toml").write_text(tomli_w.dumps(recipe))
    code, said = lweave("doctor", str(folder / "r.toml"))
    assert code in (0, 1, 2), said


@pytest.mark.parametrize("seed", FAST)
def test_a_damaged_recipe_is_refused_in_a_line(
    lweave: Callable[..., Any], world: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    check_recipe_file(lweave, world, tmp_path, seed)


@pytest.mark.parametrize("seed", FAST)
def test_damaged_data_is_named_and_never_a_traceback(
    lweave: Callable[..., Any], world: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    check_data_file(lweave, world, tmp_path, seed)


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", SLOW)
def test_many_damaged_recipes_and_data(
    lweave: Callable[..., Any], world: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    check_recipe_file(lweave, world, tmp_path, seed)
    check_data_file(lweave, world, tmp_path, seed)


GOOD = 'name = "mine"\n[student]\nmodel = "models/student"\n'
ODD: dict[str, tuple[bytes, str]] = {
    "digits": (f"seed = {'9' * 5000}\n{GOOD}".encode(), "broken TOML: Exceeds the limit (4300 digits)"),
    "lists": (f"x = {'[' * 5000}{']' * 5000}\n{GOOD}".encode(), "nested too deeply"),
    "keys": (f"{'.'.join('a' * 5000)} = 1\n{GOOD}".encode(), "nested too deeply"),
    "long name": (GOOD.replace("mine", "m" * 1_000_000).encode(), "100 at most"),
    "long key": (f"{GOOD}[anchors.{'a' * 1_000_000}]\npost = 'x'\n".encode(), "100 at most"),
    "long path": (GOOD.replace("models", "/m" * 2500).encode(), "student.model = "),
    "long file name": (GOOD.replace("models", "m" * 300).encode(), "File name too long"),
    "nul": (GOOD.replace("models", "\\u0000").encode(), "student.model contains a control character"),
    "escape": (GOOD.replace("models", "\\u001b[31m").encode(), "student.model contains a control character"),
    "direction": (GOOD.replace("models", "\\u202emodels").encode(), "change the direction of text"),
    "epochs": (f"train.epochs = {2**63 - 1}\n{GOOD}".encode(), "train.epochs = 9223372036854775807"),
    "responses": (f"rollout.responses = {2**63 - 1}\n{GOOD}".encode(), "must be less than or equal to 10000"),
    "format": (b"prompts.format = '{problem:>999999999999}'\n" + GOOD.encode(), "must have plain names in braces"),
    "tracking": (b"tracking.name = '{run:>999999999999}'\n" + GOOD.encode(), "must have plain names in braces"),
    "zeros": (b"\0" * (11 << 20), "larger than 10 MB, so not a recipe"),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_input_is_refused_by_name(lweave: Callable[..., Any], tmp_path: Path, kind: str) -> None:
    content, expected = ODD[kind]
    (tmp_path / "odd.toml").write_bytes(content)
    code, said = lweave("plan", str(tmp_path / "odd.toml"))
    assert code == 2, said
    assert expected in said
    assert len(said) < 2000


@pytest.mark.parametrize("path", ["/proc/self/mem", "/dev/zero", "x" * 5000, "a\x1b[2J\u202eb.toml"])
def test_a_file_that_is_no_recipe_is_named(lweave: Callable[..., Any], path: str) -> None:
    code, said = lweave("plan", path)
    assert code == 2
    assert ascii(path)[1:40].rstrip("'") in said


def test_a_recipe_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_recipe(tmp_path / "bom.toml").name == "mine"


# The system.


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lightning_weave.cli", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


INTERRUPTED_IMPORT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
sys.argv = [{program!r}, "--help"]
from lightning_weave.cli import main
main()
"""


@pytest.mark.parametrize("program", ["/usr/bin/lweave", "-m"])
@pytest.mark.parametrize("module", ["typer", "lightning_weave.cli.commands", "lightning_weave.ranks"])
def test_ctrl_c_during_the_imports_ends_it_with_130_and_no_traceback(program: str, module: str) -> None:
    code = INTERRUPTED_IMPORT.format(program=program, module=module)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("pause", [0.02, *(pytest.param(pause, marks=pytest.mark.slow) for pause in (0.0, 0.1))])
def test_ctrl_c_again_ends_it_with_130_and_no_traceback(world: dict[str, Any], tmp_path: Path, pause: float) -> None:
    recipe = {**world, "runs": str(tmp_path / "runs"), "prompts": world["prompts"] | {"take": 6}}
    recipe["rollout"] = world["rollout"] | {"responses": 4000, "max_tokens": 150}
    recipe["train"] = world["train"] | {"updates_per_round": 1}
    (tmp_path / "r.toml").write_text(tomli_w.dumps(recipe))
    running = start("rollout", str(tmp_path / "r.toml"))
    while not list(tmp_path.glob("runs/*/rollout@*")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    for _ in range(5):
        running.send_signal(signal.SIGINT)
        time.sleep(pause)
    _, said = running.communicate(timeout=SECONDS)
    assert "Traceback" not in said
    assert running.returncode == 130


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 3.0])
def test_ctrl_c_while_it_starts(world: dict[str, Any], tmp_path: Path, seconds: float) -> None:
    (tmp_path / "r.toml").write_text(tomli_w.dumps({**world, "runs": str(tmp_path / "runs")}))
    running = start("run", str(tmp_path / "r.toml"))
    while not _catches(running.pid, signal.SIGTERM):  # the interpreter has not reached the program yet
        time.sleep(0.01)
    time.sleep(seconds)
    for _ in range(3):
        running.send_signal(signal.SIGINT)
        time.sleep(0.015)
    _, said = running.communicate(timeout=SECONDS)
    assert "Traceback" not in said
    assert running.returncode == 130


def _catches(pid: int, number: signal.Signals) -> bool:
    caught = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9))


def no_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [few_files, no_memory])
def test_a_limit_of_the_system_is_named(world: dict[str, Any], tmp_path: Path, limit: Callable[[], None]) -> None:
    (tmp_path / "r.toml").write_text(tomli_w.dumps({**world, "runs": str(tmp_path / "runs")}))
    running = start("rollout", str(tmp_path / "r.toml"), preexec_fn=limit)
    _, said = running.communicate(timeout=2 * SECONDS)
    assert running.returncode != 0
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("lweave: ")
    assert "ulimit -" in said


@pytest.mark.parametrize(("closed", "code"), [("1", 0), ("2", 0), ("full", 1)])
def test_output_that_cannot_be_written(world: dict[str, Any], tmp_path: Path, closed: str, code: int) -> None:
    (tmp_path / "r.toml").write_text(tomli_w.dumps({**world, "runs": str(tmp_path / "runs")}))
    redirect = "> /dev/full" if closed == "full" else f"{closed}>&-"
    command = f"{sys.executable} -m lightning_weave.cli status {tmp_path / 'r.toml'} {redirect}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr
    assert closed != "full" or "No space left on device" in ended.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_unreadable_files_are_named(lweave: Callable[..., Any], world: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(tomli_w.dumps(world))
    (tmp_path / "r.toml").chmod(0)
    code, said = lweave("status", str(tmp_path / "r.toml"))
    assert code == 2
    assert said.startswith(f"lweave: {tmp_path / 'r.toml'}: cannot be read")
