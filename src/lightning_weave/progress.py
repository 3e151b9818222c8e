"""Progress of long steps: bars with rate and time left on a terminal, dated lines when piped, and the log of a run."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lightning_weave.ranks import is_first

PLAIN_EVERY = 10.0  # seconds between plain lines
DATE = "%Y-%m-%d %H:%M:%S"
NAME_WIDTH = 26  # of a bar's name on a terminal
REST_WIDTH = NAME_WIDTH + 38  # with counts, rate, time left and the spaces between
SAID = logging.getLogger("lightning_weave.said")  # what goes to the log of a run, and is shown by other means
SAID.propagate = False
SAID.setLevel(logging.INFO)


@dataclass
class Bar:
    """One long step in progress. `advance` counts units; `note` is shown beside the rate."""

    what: str
    total: int
    unit: str
    done: int = 0
    note: str = ""
    started: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)

    def advance(self, units: int = 1, note: str = "") -> None:
        self.done += units
        self.note = note or self.note
        self.show()
        now = time.monotonic()
        if now - self.told >= PLAIN_EVERY or self.done >= self.total:
            self.told = now
            self.tell(self.line())

    def show(self) -> None:
        """Display the current state, at every step; a bar on a terminal overrides this."""

    def tell(self, line: str) -> None:
        """Say the current state, every PLAIN_EVERY seconds."""
        SAID.info(line)

    def line(self) -> str:
        """Describe the current state in one line."""
        rest = f", {duration((self.total - self.done) / self.rate)} left" if 0 < self.done < self.total else ""
        note = f", {self.note}" if self.note else ""
        return f"{self.what}: {self.done}/{self.total} {self.unit}s, {self.rate:.3g} {self.unit}s/s{rest}{note}"

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(time.monotonic() - self.started, 1e-9)


@dataclass
class LineBar(Bar):
    """Plain lines, at most one every PLAIN_EVERY seconds."""

    def tell(self, line: str) -> None:
        super().tell(line)
        print(f"{time.strftime(DATE)} {line}", file=sys.stderr, flush=True)


class Progress:
    """Where stages report their progress. Ranks other than 0 stay silent."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet or not is_first()
        self.console = Console(stderr=True, highlight=False)

    def say(self, message: str) -> None:
        """Print one line to stderr, dated where no one sits before it, and log it."""
        if not self.quiet:
            SAID.info(message)
            dated = (
                message if self.console.is_terminal or self.console.is_jupyter else f"{time.strftime(DATE)} {message}"
            )
            self.console.print(dated, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        """Show one long step. A resumed step counts only the remaining work."""
        if self.quiet or total == 0:
            yield Bar(what, total, unit)
        elif not (self.console.is_terminal or _has_widgets(self.console)):
            yield LineBar(what, total, unit)
        else:
            with _rich_bar(self.console, what, total, unit) as bar:
                yield bar


def _has_widgets(console: Console) -> bool:
    """Whether a notebook can draw a bar in place; without ipywidgets each step of it would be a new line."""
    return console.is_jupyter and find_spec("ipywidgets") is not None


@contextmanager
def _rich_bar(console: Console, what: str, total: int, unit: str) -> Iterator[Bar]:
    bar_width = 40 if console.width >= 140 else 20 if console.width >= 100 else max(4, console.width - REST_WIDTH)
    room = console.width - REST_WIDTH - bar_width - 1  # for details
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width),
        TextColumn("{task.completed}/{task.total} {task.fields[unit]}s"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        *([TextColumn("{task.fields[note]}", style="dim", markup=False)] if room >= 12 else []),
    )
    with RichProgress(*columns, console=console) as display:
        task = display.add_task(_cut(what, NAME_WIDTH), total=total, rate="", note="", unit=unit)

        class _RichBar(Bar):
            def show(self) -> None:
                display.update(task, completed=self.done, rate=f"{self.rate:.3g}/s", note=_cut(self.note, room))

        yield _RichBar(what, total, unit)
        if console.is_jupyter:  # there the end itself is not drawn
            display.refresh()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


@contextmanager
def keep_log(path: Path, command: str | None = None) -> Iterator[None]:
    """Append everything that is said meanwhile to a file, after the command if one begins, each line with its time."""
    if not is_first():
        yield
        return
    handler = _LogFile()
    handler.path = path
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", DATE))
    loggers = (SAID, logging.getLogger("lightning_weave"))
    for logger in loggers:
        logger.addHandler(handler)
    if command is not None:
        SAID.info(f"$ {command}")
    try:
        yield
    except BaseException as error:
        SAID.info(f"ended early: {str(error) or type(error).__name__.lstrip('_')}")
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _LogFile(logging.Handler):
    """Opens the file for every line, so that a full disk costs lines and nothing else."""

    path: Path

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError), self.path.open("a", encoding="utf-8") as file:
            file.write(f"{self.format(record)}\n")


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
