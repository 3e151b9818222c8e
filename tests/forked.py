"""Run commands in forked processes to which something happens: a signal at a planned write, or no more memory.

A program of its own, so that torch is imported once and not in every process. It reads lists of jobs from stdin, one
numbered list per line, forks for each job, and answers with one line that says how each of them ended. The jobs of one
list run side by side. Audit events of the interpreter tell a child which file it is about to write or to rename;
nothing of the package is replaced.

Tests use it through the session fixture `forked`, or start another one with `serve`.
"""

import itertools
import json
import os
import pkgutil
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Literal

from lightning_weave.errors import InputError
from lightning_weave.grading.math import verify_answer

COMMAND_LINE = "lightning_weave.cli:main"
PACKAGES = ("lightning_weave.stages", "lightning_weave.views")
MODELS = ("transformers.models.qwen3.modeling_qwen3", "transformers.models.llama.modeling_llama")
UNCLEAN = 99  # the exit code of a process that ends with an exception
HANGING = 60  # seconds: a thread that cannot start for want of memory may be waited for without end


@dataclass(frozen=True)
class Fault:
    """What happens to a process, and when."""

    kind: str = "SIGKILL"  # the name of a signal, or "memory"
    event: int = 1  # the write or rename, of those that the job counts, at whose beginning it strikes
    renamed: bool = False  # instead: as soon as that rename has been made
    delay: float = 0.0  # seconds later ...
    latest: int = 1  # ... but before this many further events begin and before the end, however slow the machine is
    bytes: int = 0  # of memory that may still be allocated


@dataclass(frozen=True)
class Job:
    """A command line to run, or a function of the tests to call with these arguments."""

    arguments: Sequence[str]
    function: str = COMMAND_LINE
    folder: str | None = None  # to run in
    environment: Mapping[str, str] | None = None  # added to that of the program
    counted: str = (
        "."  # a pattern for `write PATH` and `rename PATH`: those that are reported and at which faults strike
    )
    fault: Fault | None = None


def kill_at(action: Literal["write", "rename"], path: str, count: int = 2) -> dict[str, Any]:
    """Plan a kill, for a job: at the nth opening of such a path for writing, or a moment after its nth rename."""
    fault = Fault(event=count) if action == "write" else Fault(event=count, renamed=True, delay=0.01)
    return {"counted": rf"^{action} .*{path}", "fault": fault}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code or minus a signal, what it wrote in order, what it said."""

    code: int
    events: list[str]
    said: str


class Forked:
    """The program, running."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._jobs, self._answers = process.stdin, process.stdout
        self._asked = 0

    def start(self, *jobs: Job) -> None:
        """Start processes side by side."""
        self._asked += 1
        self._jobs.write(json.dumps([self._asked, [asdict(job) for job in jobs]]) + "\n")
        self._jobs.flush()

    def wait(self) -> list[Ended]:
        """Wait for the end of all that were started together."""
        answered = 0
        while answered != self._asked:  # a test that failed may not have waited for its own
            answered, ended = json.loads(self._answers.readline())
        return [Ended(**one) for one in ended]

    def together(self, *jobs: Job) -> list[Ended]:
        """Run jobs side by side to their ends."""
        self.start(*jobs)
        return self.wait()

    def run(self, job: Job) -> Ended:
        """Run one job to its end."""
        (ended,) = self.together(job)
        return ended

    def lweave(self, *arguments: object, **job: Any) -> Ended:
        """Run one command line to its end."""
        return self.run(Job([str(argument) for argument in arguments], **job))


@contextmanager
def serve() -> Iterator[Forked]:
    """Start the program."""
    command, pipe = [sys.executable, __file__], subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        forked = Forked(process)
        try:
            yield forked
        finally:
            forked._jobs.close()


# What follows runs in the program.


def main() -> None:
    for package in map(import_module, PACKAGES):  # here, not once in every child
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            import_module(module.name)
    for name in MODELS:
        import_module(name)
    with suppress(InputError):  # its first answer takes the longest, and a clock ends it
        verify_answer("$1$", "1")
    for line in sys.stdin:
        number, jobs = json.loads(line)
        children = [_Child(job) for job in jobs]
        print(json.dumps([number, [child.wait() for child in children]]), flush=True)


class _Child:
    """A forked process; what it writes and says goes to files, so that nothing waits for a reader."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._events = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._may_hang = bool(job["fault"]) and job["fault"]["kind"] == "memory"
        self._pid = os.fork()
        if self._pid == 0:
            code = UNCLEAN
            try:
                code = _run(job, self._events, self._said)
            finally:
                os._exit(code)

    def wait(self) -> dict[str, Any]:
        status = self._wait_or_kill() if self._may_hang else os.waitpid(self._pid, 0)[1]
        events, said = (_content(file) for file in (self._events, self._said))
        return {"code": os.waitstatus_to_exitcode(status), "events": events.splitlines(), "said": said}

    def _wait_or_kill(self) -> int:
        """Wait for a limited time; an alarm would not do, since math-verify sets its own."""
        patience = time.monotonic() + HANGING
        while time.monotonic() < patience:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
            if ended:
                return status
            time.sleep(0.05)
        os.kill(self._pid, signal.SIGKILL)
        return os.waitpid(self._pid, 0)[1]


def _content(file: IO[str]) -> str:
    with file:
        file.seek(0)
        return file.read()


def _run(job: dict[str, Any], events: IO[str], said: IO[str]) -> int:
    """Run a job in this process, a child; returns its exit code."""
    for stream in (1, 2):
        os.dup2(said.fileno(), stream)
    os.environ.update(job["environment"] or {})
    if job["folder"]:
        os.chdir(job["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # may be ignored where tests run in the background
    strike = _Strike(job["fault"] and Fault(**job["fault"]))
    _watch(job["counted"], events.fileno(), strike)
    code = _call(job["function"], job["arguments"])
    strike.wait_if_due()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _call(function: str, arguments: Sequence[str]) -> int:
    """Call a function, or the command line with its arguments where it looks for them; returns the exit code."""
    module, _, name = function.partition(":")
    called = getattr(import_module(module), name)
    try:
        if function == COMMAND_LINE:
            sys.argv = ["lweave", *arguments]
            called()
        else:
            called(*arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return UNCLEAN
    return 0


class _Strike:
    """The fault that is planned for this process, if there is one."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault
        self._falling: threading.Thread | None = None

    def at(self, event: int, path: str) -> None:
        """An event begins: strike, or start the clock, or let it wait for a strike that must come first."""
        if self._fault is None:
            return
        if event >= self._fault.event + self._fault.latest:
            self.wait_if_due()
        if event != self._fault.event:
            return
        if not self._fault.delay and not self._fault.renamed:
            self._fall(self._fault)
        else:
            self._falling = threading.Thread(target=self._fall_later, args=(self._fault, path), daemon=True)
            self._falling.start()

    def wait_if_due(self) -> None:
        """Wait for a strike whose clock is running."""
        if self._falling is not None:
            self._falling.join()

    def _fall_later(self, fault: Fault, path: str) -> None:
        while fault.renamed and os.path.lexists(path):
            time.sleep(0.001)
        time.sleep(fault.delay)
        self._fall(fault)

    def _fall(self, fault: Fault) -> None:
        """Send a signal to this process, or limit what it may still allocate."""
        if fault.kind != "memory":
            os.kill(os.getpid(), getattr(signal, fault.kind))
            return
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + fault.bytes, resource.RLIM_INFINITY))


def _watch(counted: str, report: int, strike: _Strike) -> None:
    """Report every write and rename that counts, from now on, and let the fault strike at the planned one."""
    pattern, numbers = re.compile(counted), itertools.count(1)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writing = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writing or event == "os.rename") or isinstance(arguments[0], int):  # an open descriptor has no name
            return
        path = os.path.abspath(os.fsdecode(arguments[0]))
        text = f"{'write' if writing else 'rename'} {path}"
        if not pattern.search(text):
            return
        number = next(numbers)  # once for each event, also where a thread writes meanwhile
        os.write(report, f"{text}\n".encode())
        strike.at(number, path)

    sys.addaudithook(hook)


if __name__ == "__main__":
    main()
