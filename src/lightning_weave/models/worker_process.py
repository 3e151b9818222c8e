"""A worker program in its own process and, if `python` names one, its own environment: vLLM or lm-eval."""

import itertools
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.ranks import without_ranks
from lightning_weave.store.ledger import engine_clock

SECONDS_TO_END = 30
Answer = dict[str, Any] | None  # None: the process has ended


@dataclass(frozen=True)
class WorkerProgram:
    """What runs in the process: a file that reads and writes JSON lines, and the package that it needs."""

    file: Path
    name: str  # for messages
    package: str  # as pip knows it


VLLM = WorkerProgram(Path(__file__).with_name("vllm_worker.py"), "vLLM", "vllm")


class WorkerProcess:
    """One worker, which lives until `close` or the end of this process.

    Several threads may have streams of answers at once; other requests are answered one at a time. The answer to the
    settings is kept as `started`.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        python: str | None,
        environment: dict[str, str] | None,
        program: WorkerProgram = VLLM,
    ) -> None:
        self.program = program
        self.python = python or sys.executable
        self.environment = environment or {}  # in addition to that of this process, such as the worker's GPUs
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process that writes to it)
        self._process = self._launch()
        self._open: dict[int | None, queue.SimpleQueue[Answer]] = {}  # by the number of a stream; None: `ask`
        self._since = 0.0  # time of the last answer, or of a request if none was open
        self._is_up = False
        self._ended = False
        self._failure: WeaveError | None = None
        self._numbers = itertools.count()
        self._state = threading.Lock()  # for what is open, and what has ended
        self._asking = threading.Lock()
        self._writing = threading.Lock()
        self._failing = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.started = self.ask(settings)

    def _launch(self) -> "subprocess.Popen[str]":
        try:
            return subprocess.Popen(
                [self.python, str(self.program.file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=_environment(self.python) | self.environment,
                text=True,
                start_new_session=True,  # its own process group, which is killed with it
            )
        except OSError as error:
            self._stderr.close()
            raise _cannot_run(self.python, error) from error

    def close(self) -> None:
        """Stop the worker by closing its input."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what a dead worker did not read
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=SECONDS_TO_END)
        with suppress(ProcessLookupError):  # processes that it started and that have not ended with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer."""
        with self._asking, self._send(None, request) as answers:
            return self._check(answers.get())

    def stream(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield its answers as they come; the worker does not wait for the reader."""
        number = next(self._numbers)
        with self._send(number, {**request, "question": number}) as answers:
            while "end" not in (answer := self._check(answers.get())):
                yield answer

    @contextmanager
    def _send(self, number: int | None, request: dict[str, Any]) -> "Iterator[queue.SimpleQueue[Answer]]":
        """Send a request; its answers are put into a queue."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        line = json.dumps(request) + "\n"
        with self._state:
            if not self._open:
                self._since = time.monotonic()
            self._open[number] = answers
            if self._ended:
                answers.put(None)
        try:
            # A dead worker, or one that was closed because of another request, sends no answer, which is noticed.
            with self._writing, suppress(BrokenPipeError, ValueError):
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            yield answers
        finally:
            with self._state:
                del self._open[number]

    def _read(self) -> None:
        """Put each answer into the queue of its request; an error, and the end, into all queues."""
        assert self._process.stdout is not None
        answer: Answer = {}
        while answer is not None:
            line = self._process.stdout.readline()
            answer = json.loads(line) if line.endswith("\n") else None  # the last one may be cut off
            now = time.monotonic()
            with self._state:
                if self._open and self._is_up:
                    engine_clock.busy += now - self._since
                elif self._open:
                    engine_clock.starting += now - self._since
                self._is_up = True
                self._since = now
                self._ended = answer is None
                if answer is None or "error" in answer:
                    for each in self._open.values():
                        each.put(answer)
                elif (waiting := self._open.get(answer.get("question"))) is not None:
                    waiting.put(answer)

    def _check(self, answer: Answer) -> dict[str, Any]:
        """Return an answer that is not an error; otherwise stop the worker and explain why it failed."""
        if answer is not None and "error" not in answer:
            return answer
        with self._failing:
            if self._failure is None:
                code = self._process.wait() if answer is None else None
                self._stderr.seek(0)
                lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines()]
                lines = [line for line in lines if line]
                self.close()
                last = lines[-1] if lines else "none"
                error = f"it ended with code {code}; its last output: {last}" if answer is None else answer["error"]
                # Engines write "see root cause above": the cause is the first error in the log, not a warning.
                logged = [line for line in lines if not re.search(r"\b(?:DEBUG|INFO|WARNING)\b", line)]
                logged.sort(key=lambda line: not re.search(r"\bERROR\b", line))
                named = (re.search(r"\b\w*(?:Error|Exception): .+", line) for line in logged)
                cause = next((match.group() for match in named if match and match.group() not in error), None)
                if answer is not None and "missing" in answer:
                    self._failure = _not_installed(self.program, self.python, error)
                else:
                    first = f"\nIts first error was {cause}" if cause else ""
                    self._failure = WeaveError(f"the {self.program.name} process failed: {error}{first}")
        raise self._failure


def engine_version(python: str | None) -> str:
    """Ask which vLLM an environment has, without starting an engine."""
    python = python or sys.executable
    command = [python, str(VLLM.file), "--version"]
    try:
        output = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=_environment(python), text=True, check=False
        ).stdout
    except OSError as error:
        raise _cannot_run(python, error) from error
    try:
        answer = json.loads(output)
    except ValueError:
        return "unknown"
    if "missing" in answer:
        raise _not_installed(VLLM, python, answer["error"])
    return str(answer.get("version", "unknown"))


def _environment(python: str) -> dict[str, str]:
    """Remove our ranks, a port that other engines have too, and packages of another Python."""
    ours = {"VLLM_PORT"} if python == sys.executable else {"VLLM_PORT", "PYTHONPATH", "PYTHONHOME"}
    return {name: value for name, value in without_ranks(os.environ).items() if name not in ours}


def _cannot_run(python: str, error: OSError) -> InputError:
    return InputError(
        f"the engine's Python {python!r} (key python of an engine's section) cannot be run ({error.strerror})"
    )


def _not_installed(program: WorkerProgram, python: str, error: str) -> InputError:
    return InputError(
        f"{program.name} cannot be imported by {python} ({error}). Install it there (pip install {program.package}), "
        "or name the Python of an environment that has it: the key python of its section"
    )
