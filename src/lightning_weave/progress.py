"""Progress of long steps: bars with rate and time left on a terminal, plain lines when piped."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lightning_weave.ranks import is_first

PLAIN_EVERY = 10.0  # seconds between plain lines


@dataclass
class Bar:
    """One long step in progress. `advance` counts units; `note` is shown beside the rate."""

    what: str
    total: int
    unit: str
    done: int = 0
    note: str = ""
    started: float = field(default_factory=time.monotonic)

    def advance(self, units: int = 1, note: str = "") -> None:
        self.done += units
        self.note = note or self.note
        self.show()

    def show(self) -> None:
        """Display the current state; subclasses override this."""

    def line(self) -> str:
        """Describe the current state in one line."""
        left = f", {duration((self.total - self.done) / self.rate)} left" if 0 < self.done < self.total else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.what}: {self.done}/{self.total} {self.unit}s, {self.rate:.3g} {self.unit}s/s{left}{note}"

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(time.monotonic() - self.started, 1e-9)


@dataclass
class LineBar(Bar):
    """Plain lines, at most one every PLAIN_EVERY seconds."""

    shown: float = field(default_factory=time.monotonic)

    def show(self) -> None:
        now = time.monotonic()
        if now - self.shown >= PLAIN_EVERY or self.done >= self.total:
            self.shown = now
            print(self.line(), file=sys.stderr, flush=True)


class Progress:
    """Where stages report their progress. Ranks other than 0 stay silent."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet or not is_first()
        self.console = Console(stderr=True, highlight=False)

    def say(self, message: str) -> None:
        """Print one line to stderr."""
        if not self.quiet:
            self.console.print(message, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        """Show one long step. A resumed step counts only the remaining work."""
        if self.quiet or total == 0:
            yield Bar(what, total, unit)
        elif not self.console.is_terminal:
            yield LineBar(what, total, unit)
        else:
            with _rich_bar(self.console, what, total, unit) as bar:
                yield bar


@contextmanager
def _rich_bar(console: Console, what: str, total: int, unit: str) -> Iterator[Bar]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", style="dim"),
    )
    with RichProgress(*columns, console=console) as display:
        task = display.add_task(what, total=total, rate="", note="")

        class _RichBar(Bar):
            def show(self) -> None:
                display.update(task, completed=self.done, rate=f"{self.rate:.3g} {unit}s/s", note=self.note)

        yield _RichBar(what, total, unit)


def duration(seconds: float) -> str:
    """Format seconds for people.

    >>> duration(7.4), duration(95), duration(7500)
    ('7 s', '1 m 35 s', '2 h 05 m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
