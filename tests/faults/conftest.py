"""A tiny run to do harm to, the program that does it, and the count of what came of it."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from forked import Ended, Fault, Forked, Job
from lightning_weave.config import check_recipe, dump_recipe
from tiny import make_world, save_prompts

VERBS = ("rollout", "reference", "score", "train", "eval")
SWEEP = ("--shares", "0.25,0.75")
CLOCKS = {"ledger.jsonl", "log.txt", ".lock", ".holder", "machine.json", ".metadata"}  # say when and where, never what
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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Give the count of one worker to whoever adds them up."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["tally"] = {name: dict(counts) for name, counts in vars(TALLY).items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for name, counts in node.workeroutput.get("tally", {}).items():
        getattr(TALLY, name).update(counts)


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
class Lab:
    """A recipe, and what its run looks like before each verb and at the end when nothing ever goes wrong."""

    root: Path
    recipe: dict[str, Any]
    forked: Forked

    def folder(self, name: str) -> Path:
        """The run directory of a trial."""
        return self.root / name / "runs" / "tiny"

    def write(self, name: str, **changes: Any) -> None:
        """Write a trial's recipe; sections are replaced whole."""
        (self.root / name / "r.toml").write_text(dump_recipe(check_recipe(self.recipe | changes)))

    def copy(self, name: str, moment: str) -> str:
        """Lay out a trial: the run as it was at some moment, such as `before-train`."""
        shutil.copytree(self.root / moment, self.root / name, symlinks=True)
        return name

    def job(self, name: str, verb: str, *more: str, fault: Fault | None = None) -> Job:
        """A command line to be run in a trial. What it writes in the folders of its stages counts, no other file."""
        arguments = [verb, "r.toml", *(SWEEP if verb == "sweep" else ()), *more]
        counted = rf" {re.escape(str(self.folder(name)))}/[^/]+/."
        return Job(arguments, folder=str(self.root / name), counted=counted, fault=fault)

    def lweave(self, name: str, verb: str, *more: str, fault: Fault | None = None) -> Ended:
        """Run the command line in a trial to its end; what it wrote is named from the run directory."""
        ended = self.forked.run(self.job(name, verb, *more, fault=fault))
        return replace(ended, events=[event.replace(f"{self.folder(name)}/", "", 1) for event in ended.events])

    def contents(self, name: str) -> dict[str, Any]:
        """Everything in a run that does not tell the time, and where the plain names lead."""
        folder = self.folder(name)
        paths = list(folder.rglob("*"))
        links = {path: os.readlink(path) for path in paths if path.is_symlink()}
        files = [path for path in paths if path not in links and path.is_file() and path.name not in CLOCKS]
        return {str(path.relative_to(folder)): _timeless(path) for path in files} | {
            str(path.relative_to(folder)): f"-> {target}" for path, target in links.items()
        }


def _timeless(path: Path) -> Any:
    """The bytes of a file; of a log, its rows without their clocks."""
    if path.name != "metrics.jsonl":
        return path.read_bytes()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Lab:
    """Make the world, run every verb once undisturbed, and keep the run as it was before each."""
    root = tmp_path_factory.mktemp("faults")
    recipe = make_world(root / "world", prompts=12)
    recipe["runs"] = "runs"
    recipe["rollout"] |= {"prompts_per_shard": 2}
    recipe["train"] |= {"epochs": 2, "checkpoint_every": 2}
    bench = save_prompts(root / "world" / "bench.jsonl", 6, seed=9)
    recipe["eval"] = {"benchmarks": [f"file:{bench}"], "samples": 2, "max_tokens": 12, "chat": False, "block": 4}
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    made = Lab(root, recipe, forked)
    (root / "whole").mkdir()
    made.write("whole")
    for verb in (*VERBS, "sweep"):
        made.copy(f"before-{verb}", "whole")
        ended = made.lweave("whole", verb)
        assert ended.code == 0, ended.said
        made.copy(f"after-{verb}", "whole")
    return made
