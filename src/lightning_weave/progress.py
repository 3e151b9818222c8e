"""Progress of long steps: bars with rate and time left on a terminal, dated lines when piped, and the log of a run."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lightning_weave.ranks import is_main_process

PLAIN_EVERY = 10.0  # seconds between plain lines
DATE = "%Y-%m-%d %H:%M:%S"
NAME_WIDTH = 26  # of a bar's name on a terminal
REST_WIDTH = NAME_WIDTH + 38  # with counts, rate, time left and the spaces between
RUN_LOG = logging.getLogger("lightning_weave.run_log")  # goes to the log of a run only; the terminal has its own output
RUN_LOG.propagate = False
RUN_LOG.setLevel(logging.INFO)


@dataclass
class Bar:
    """One long step in progress. `advance` counts units; `note` is shown next to the rate."""

    what: str
    total: int
    unit: str
    done: int = 0
    note: str = ""
    rows: str = ""  # of the unit that is being computed
    prints: bool = False  # plain lines, at most one every PLAIN_EVERY seconds
    started: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)

    def advance(self, units: int = 1, note: str = "") -> None:
        self.done += units
        self.note = note or self.note
        self.rows = ""
        self._refresh(is_last=self.done >= self.total)

    def _refresh(self, is_last: bool = False) -> None:
        self.show()
        if is_last or time.monotonic() - self.logged >= PLAIN_EVERY:
            self.logged = time.monotonic()
            rest = f", {duration((self.total - self.done) / self.rate)} left" if 0 < self.done < self.total else ""
            rate = f"{self.rate:.3g} {self.unit}s/s{rest}" if self.done else ""
            parts = [f"{self.what}: {self.done}/{self.total} {self.unit}s", rate, self.details]
            line = ", ".join(filter(None, parts))
            RUN_LOG.info(line)
            if self.prints:
                print(f"{time.strftime(DATE)} {line}", file=sys.stderr, flush=True)

    def show(self) -> None:
        """Display the current state, at every step; a bar on a terminal overrides this."""

    @property
    def details(self) -> str:
        """What is shown next to the rate."""
        return ", ".join(filter(None, [self.rows, self.note]))

    @property
    def rate(self) -> float:
        """Units per second."""
        return self.done / max(time.monotonic() - self.started, 1e-9)


_shown: list[Bar] = []  # in this process, the innermost last


def show_rows(done: int, total: int) -> None:
    """Show how far the current unit of the innermost bar is: a shard may take an hour."""
    if _shown:
        _shown[-1].rows = f"{done:,}/{total:,} rows"
        _shown[-1]._refresh()


class Progress:
    """Where stages report their progress. Ranks other than 0 stay silent."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet or not is_main_process()
        self.console = Console(stderr=True, highlight=False)

    def say(self, message: str) -> None:
        """Print one line to stderr, with its time unless on a terminal, and log it."""
        if not self.quiet:
            RUN_LOG.info(message)
            is_interactive = self.console.is_terminal or self.console.is_jupyter
            line = message if is_interactive else f"{time.strftime(DATE)} {message}"
            self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str, total: int, unit: str) -> Iterator[Bar]:
        """Show one long step. A resumed step counts only the remaining work."""
        console = self.console
        with ExitStack() as stack:
            if self.quiet or total == 0:
                bar = Bar(what, total, unit)
            # Without ipywidgets, a notebook would draw every step of a bar on a new line.
            elif not console.is_terminal and not (console.is_jupyter and find_spec("ipywidgets")):
                bar = Bar(what, total, unit, prints=True)
            else:
                narrow = max(4, console.width - REST_WIDTH)
                bar_width = 40 if console.width >= 140 else 20 if console.width >= 100 else narrow
                room = console.width - REST_WIDTH - bar_width - 1  # for details
                columns = (
                    TextColumn("{task.description}", markup=False),
                    BarColumn(bar_width),
                    TextColumn("{task.completed}/{task.total} {task.fields[unit]}s"),
                    TextColumn("{task.fields[rate]}"),
                    TimeRemainingColumn(compact=True),
                    *([TextColumn("{task.fields[note]}", style="dim", markup=False)] if room >= 12 else []),
                )
                display = stack.enter_context(RichProgress(*columns, console=console))
                if console.is_jupyter:  # there the end itself is not drawn
                    stack.callback(display.refresh)
                task = display.add_task(_cut(what, NAME_WIDTH), total=total, rate="", note="", unit=unit)

                class RichBar(Bar):
                    def show(self) -> None:
                        note = _cut(self.details, room)
                        display.update(task, completed=self.done, rate=f"{self.rate:.3g}/s", note=note)

                bar = RichBar(what, total, unit)
            _shown.append(bar)
            stack.callback(_shown.remove, bar)
            yield bar


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


@contextmanager
def keep_log(path: Path, command: str | None = None) -> Iterator[None]:
    """Append everything that is logged meanwhile to a file, each line with its time; `command` is the first line."""
    if not is_main_process():
        yield
        return
    handler = _LogFile()
    handler.path = path
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", DATE))
    loggers = (RUN_LOG, logging.getLogger("lightning_weave"))
    for logger in loggers:
        logger.addHandler(handler)
    if command is not None:
        RUN_LOG.info(f"$ {command}")
    try:
        yield
    except BaseException as error:
        RUN_LOG.info(f"ended early: {str(error) or type(error).__name__.lstrip('_')}")
        raise
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _LogFile(logging.Handler):
    """Opens the file for every line, so that a full disk loses lines and nothing else."""

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
