"""A tiny run to do harm to, the program that does it, and the count of what came of it."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.config import check_recipe, dump_recipe
from tiny import make_world, save_prompts

PROGRAM = Path(__file__).with_name("program.py")
VERBS = ("rollout", "reference", "score", "train", "eval")
SWEEP = ("--shares", "0.25,0.75")
CLOCKS = {"ledger.jsonl", ".lock", "machine.json", ".metadata"}  # say when and where, never what
TIMES = ("seconds", "tokens_per_s", "loading", "memory")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.faults)


@dataclass
class Tally:
    """What was done to the product and how it took it."""

    survived: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)  # where they fell


TALLY = Tally()


@pytest.fixture(scope="session")
def tally() -> Tally:
    return TALLY


def pytest_terminal_summary(terminalreporter: Any) -> None:
    survived, refused = TALLY.survived.total(), TALLY.refused.total()
    if not survived + refused:
        return
    lost = len(terminalreporter.stats.get("failed", [])) + len(terminalreporter.stats.get("error", []))
    terminalreporter.section("faults")
    for place, count in sorted(TALLY.kills.items()):
        terminalreporter.line(f"killed {count:3d} x in {place}")
    for kind, count in sorted(TALLY.survived.items()):
        terminalreporter.line(f"survived {count:3d} x {kind}")
    for kind, count in sorted(TALLY.refused.items()):
        terminalreporter.line(f"refused with a message {count:3d} x {kind}")
    terminalreporter.line(
        f"faults injected {survived + refused + lost}, survived {survived}, refused with message {refused}, lost {lost}"
    )


@dataclass(frozen=True)
class Ended:
    """How a process ended: minus a signal or an exit code, what it wrote in order, what it said."""

    code: int
    events: list[str]
    said: str


@dataclass(frozen=True)
class Lab:
    """A recipe, and what its run looks like before each verb and at the end when nothing ever goes wrong."""

    root: Path
    recipe: dict[str, Any]
    process: subprocess.Popen[str]

    def folder(self, name: str) -> Path:
        """The run directory of a trial."""
        return self.root / name / "runs" / "tiny"

    def write(self, name: str, **changes: Any) -> None:
        """Write a trial's recipe; sections are replaced whole."""
        (self.root / name / "r.toml").write_text(dump_recipe(check_recipe(self.recipe | changes)))

    def copy(self, name: str, moment: str) -> str:
        """Lay out a trial: the run as it was at some moment, such as `before-train`."""
        shutil.copytree(self.root / moment, self.root / name)
        return name

    def lweave(self, name: str, verb: str, *more: str, fault: dict[str, Any] | None = None) -> Ended:
        """Run the command line in a trial to its end, whatever that is."""
        self.ask(name, verb, *more, fault=fault)
        return self.hear()

    def ask(self, name: str, verb: str, *more: str, fault: dict[str, Any] | None = None) -> None:
        """Let the command line run in a trial."""
        assert self.process.stdin is not None
        arguments = [verb, "r.toml", *(SWEEP if verb == "sweep" else ()), *more]
        job = {"arguments": arguments, "folder": str(self.root / name), "fault": fault}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Ended:
        """Wait for its end."""
        assert self.process.stdout is not None
        ended = json.loads(self.process.stdout.readline())
        return Ended(ended["ended"], ended["events"], ended["said"])

    def contents(self, name: str) -> dict[str, Any]:
        """Everything in a run that does not tell the time."""
        folder = self.folder(name)
        files = [path for path in folder.rglob("*") if path.is_file() and path.name not in CLOCKS]
        return {str(path.relative_to(folder)): _timeless(path) for path in files}


def _timeless(path: Path) -> Any:
    """The bytes of a file; of a log, its rows without their clocks."""
    if path.name != "metrics.jsonl":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@contextmanager
def serve() -> Iterator[subprocess.Popen[str]]:
    """Start the program that runs the command line in forks of itself."""
    command, pipe = [sys.executable, str(PROGRAM)], subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Make the world, run every verb once undisturbed, and keep the run as it was before each."""
    root = tmp_path_factory.mktemp("faults")
    recipe = make_world(root / "world", prompts=12)
    recipe["runs"] = "runs"
    recipe["rollout"] |= {"prompts_per_shard": 2}
    recipe["train"] |= {"epochs": 2, "checkpoint_every": 2}
    bench = save_prompts(root / "world" / "bench.jsonl", 6, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 2, "max_tokens": 12, "chat": False, "block": 4}
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    with serve() as process:
        made = Lab(root, recipe, process)
        (root / "whole").mkdir()
        made.write("whole")
        for verb in (*VERBS, "sweep"):
            made.copy(f"before-{verb}", "whole")
            ended = made.lweave("whole", verb)
            assert ended.code == 0, ended.said
            made.copy(f"after-{verb}", "whole")
        yield made
