"""A program in its own process and, where `python` says so, in its own environment: vLLM, or another harness."""

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

_SECONDS_TO_END = 30
Answer = dict[str, Any] | None  # None: the process has ended


@dataclass(frozen=True)
class EngineProgram:
    """What runs in the process: a file that reads and writes JSON lines, and the package that it needs."""

    worker: Path
    name: str  # for people
    package: str  # as pip knows it


VLLM = EngineProgram(Path(__file__).with_name("vllm_worker.py"), "vLLM", "vllm")


class EngineProcess:
    """One program, which lives until `close` or the end of this process.

    Several threads may have streams of answers at once; other questions are answered one at a time. The answer to the
    settings is kept as `hello`.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        python: str | None,
        environment: dict[str, str] | None,
        program: EngineProgram = VLLM,
    ) -> None:
        self.program = program
        self.python = python or sys.executable
        self.environment = environment or {}  # beside that of this process, such as the GPUs that are the engine's
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process that writes to it)
        self._process = self._launch()
        self._open: dict[int | None, queue.SimpleQueue[Answer]] = {}  # by the number of a stream; None: no stream
        self._since = 0.0  # when the last answer came, or a question where none was open
        self._is_up = False
        self._ended = False
        self._failure: WeaveError | None = None
        self._numbers = itertools.count()
        self._state = threading.Lock()  # of what is open, and of what has ended
        self._asking = threading.Lock()
        self._writing = threading.Lock()
        self._failing = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.hello = self.ask(settings)

    def close(self) -> None:
        """Stop the engine by closing its input."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # what a dead engine did not read
                self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_SECONDS_TO_END)
        with suppress(ProcessLookupError):  # processes that it has started and that have not ended with it
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._words.close()

    def _launch(self) -> "subprocess.Popen[str]":
        try:
            return subprocess.Popen(
                [self.python, str(self.program.worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                env=_environment(self.python) | self.environment,
                text=True,
                start_new_session=True,  # a group of its own, which ends with it
            )
        except OSError as error:
            self._words.close()
            raise _cannot_run(self.python, error) from error

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Put a question and wait for the answer."""
        with self._asking, self._answers(None, question) as answers:
            return self._checked(answers.get())

    def stream(self, question: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Put a question and yield its answers as they come; the engine does not wait for whoever reads them."""
        number = next(self._numbers)
        with self._answers(number, {**question, "question": number}) as answers:
            while "end" not in (answer := self._checked(answers.get())):
                yield answer

    @contextmanager
    def _answers(self, number: int | None, question: dict[str, Any]) -> "Iterator[queue.SimpleQueue[Answer]]":
        """Put a question; its answers come into a queue of its own."""
        answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        line = json.dumps(question) + "\n"
        with self._state:
            if not self._open:
                self._since = time.monotonic()
            self._open[number] = answers
            if self._ended:
                answers.put(None)
        try:
            # A dead engine, or one that was closed because of another's question, says nothing more: that is noticed.
            with self._writing, suppress(BrokenPipeError, ValueError):
                assert self._process.stdin is not None
                self._process.stdin.write(line)
                self._process.stdin.flush()
            yield answers
        finally:
            with self._state:
                del self._open[number]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):  # the last one may be cut
                self._deliver(json.loads(line))
        self._deliver(None)

    def _deliver(self, answer: Answer) -> None:
        """Hand an answer to whoever asked; an error, and the end, to all."""
        came = time.monotonic()
        with self._state:
            if self._open and self._is_up:
                engine_clock.busy += came - self._since
            elif self._open:
                engine_clock.starting += came - self._since
            self._is_up = True
            self._since = came
            self._ended = self._ended or answer is None
            if answer is None or "error" in answer:
                for each in self._open.values():
                    each.put(answer)
                return
            if asker := self._open.get(answer.get("question")):  # who may not wait for it any more
                asker.put(answer)

    def _checked(self, answer: Answer) -> dict[str, Any]:
        if answer is not None and "error" not in answer:
            return answer
        with self._failing:
            self._failure = self._failure or self._failed(answer or {"error": self._last_words()})
        raise self._failure

    def _failed(self, answer: dict[str, Any]) -> WeaveError:
        """Say why the process failed, and stop it."""
        cause = "" if "missing" in answer else self._cause(answer["error"])
        self.close()
        if "missing" in answer:
            return _not_installed(self.program, self.python, answer["error"])
        return WeaveError(f"the {self.program.name} process failed: {answer['error']}{cause}")

    def _cause(self, error: str) -> str:
        """Find what lies behind "see root cause above": the first error that the engine has logged, not a warning."""
        lines = [line for line in self._said() if not re.search(r"\b(?:DEBUG|INFO|WARNING)\b", line)]
        lines.sort(key=lambda line: not re.search(r"\bERROR\b", line))
        named = (re.search(r"\b\w*(?:Error|Exception): .+", line) for line in lines)
        cause = next((match.group() for match in named if match and match.group() not in error), None)
        return f"\nIts first error was {cause}" if cause else ""

    def _said(self) -> list[str]:
        self._words.seek(0)
        return [line.strip() for line in self._words.read().decode(errors="replace").splitlines() if line.strip()]

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = self._said()
        return f"it ended with code {code}; its last output: {lines[-1] if lines else 'none'}"


def engine_version(python: str | None) -> str:
    """Ask which vLLM an environment has, before anything is loaded for it."""
    python = python or sys.executable
    command = [python, str(VLLM.worker), "--version"]
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
    """Leave out what is not the engine's: our ranks, a port that others have too, packages of another Python."""
    ours = {"VLLM_PORT"} if python == sys.executable else {"VLLM_PORT", "PYTHONPATH", "PYTHONHOME"}
    return {name: value for name, value in without_ranks(os.environ).items() if name not in ours}


def _cannot_run(python: str, error: OSError) -> InputError:
    return InputError(
        f"the engine's Python {python!r} (key python of an engine's section) cannot be run ({error.strerror})"
    )


def _not_installed(program: EngineProgram, python: str, error: str) -> InputError:
    return InputError(
        f"{program.name} cannot be imported by {python} ({error}). Install it there (pip install {program.package}), "
        "or name the Python of an environment that has it: the key python of its section"
    )
