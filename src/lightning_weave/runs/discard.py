"""Nothing is thrown away in silence: what would be discarded, with what it cost, and whether the user agrees."""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from lightning_weave.errors import InputError
from lightning_weave.progress import duration
from lightning_weave.ranks import is_alone
from lightning_weave.runs.changes import cause
from lightning_weave.runs.costs import Cost, cost_of
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Step
from lightning_weave.store.ledger import read_ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Doomed:
    """Something on disk that a command is about to remove."""

    path: Path
    why: str
    cost: Cost | None = None  # what it took to make; None where nothing was measured

    @property
    def size(self) -> int:
        return size_of(self.path)


def discards(steps: Steps, wanted: Iterable[Step]) -> list[Doomed]:
    """The stages that have to be discarded for these steps to be made: what another recipe has made in their place."""
    stages = [steps.store.stage(step) for step in wanted]
    ledger = read_ledger(steps.store.run_dir)
    return [
        Doomed(stage.folder, cause(stage), cost_of(stage.folder, steps.store.run_dir, ledger))
        for stage in stages
        if stage.state() == "stale"
    ]


def allow_discards(steps: Steps, wanted: Iterable[Step], yes: bool, check: Callable[[], None] = lambda: None) -> None:
    """Ask before stale stages are made again, or refuse where nobody can be asked. Every rank decides the same.

    `check` raises first if the new ones cannot be made at all.
    """
    wanted = list(wanted)
    if doomed := discards(steps, wanted):
        _require_inputs(steps, wanted)
        check()
        title = f"The recipe has changed since these were made in {steps.store.run_dir}. Making them again discards:"
        keep = "To keep them, give this recipe a name of its own: --set name=NAME"
        agree(
            [title, *listing(doomed, steps.store.run_dir)],
            yes,
            f"Nothing was made. To discard them: --yes (in Python: yes=True). {keep}",
        )


def _require_inputs(steps: Steps, wanted: Sequence[Step]) -> None:
    """Refuse first what cannot be made again, for want of an input that another command makes."""
    paths = {step.path for step in wanted}
    for step in wanted:
        if steps.store.stage(step).state() == "stale":
            for inner in step.inputs:
                if inner.path not in paths:
                    steps.store.stage(inner).require()


def listing(doomed: Sequence[Doomed], run_dir: Path) -> list[str]:
    """List what would go, with its size, its cost and the reason; the last line adds up."""
    names = [str(one.path.relative_to(run_dir)) for one in doomed]
    width = max(map(len, names), default=0)
    lines = []
    for why, group in groupby(zip(names, doomed, strict=True), key=lambda pair: pair[1].why):
        lines.append(f"  {why}:")
        lines += [f"    {name:<{width}}  {_amount(one.size, [one.cost] if one.cost else [])}" for name, one in group]
    total = _amount(sum(one.size for one in doomed), [one.cost for one in doomed if one.cost])
    return [*lines, f"In all: {total}."]


def _amount(size: int, costs: Sequence[Cost]) -> str:
    """Say bytes, and what they cost.

    >>> _amount(5_012, [Cost(95.0, 251, 5_012, 0)])
    '5.0 kB, 1 m 35 s of device time, 251 tokens'
    """
    if not costs:
        return file_size(size)
    tokens = sum(cost.tokens for cost in costs)
    return f"{file_size(size)}, {duration(sum(cost.seconds for cost in costs))} of device time, {tokens:,} tokens"


def agree(lines: Sequence[str], yes: bool, refusal: str) -> None:
    """Continue if the user agreed before, or agrees now on a terminal; else refuse."""
    text = "\n".join(lines)
    if yes:
        log.info(text)
        return
    if not (is_alone() and sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"{text}\n{refusal}")
    print(text, "Continue? [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was discarded")


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file() or file.is_symlink())


def file_size(size: int) -> str:
    """Format bytes for people.

    >>> file_size(12), file_size(5_012), file_size(2_500_000), file_size(7_000_000_000)
    ('12 bytes', '5.0 kB', '2.5 MB', '7.0 GB')
    """
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= divisor:
            return f"{size / divisor:,.1f} {unit}"
    return f"{size} bytes"
