"""A grader in a process of its own, so that no model and no engine waits for it.

The process is a new Python: a fork would copy threads and a device that are at work, and what a user's script does when
it is imported must not happen twice. A function of the user's own is loaded there, by its name.
"""

import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from typing import Any

from lightning_weave.bench.definitions import Problem
from lightning_weave.errors import WeaveError
from lightning_weave.runs.grade import Graded, Grader


class GraderProcess:
    """Grades in another process, which ends with `close` or with this process."""

    def __init__(self, grader: Grader) -> None:
        self._line, theirs = Pipe()
        self._asking = threading.Lock()
        with theirs:
            start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # who interrupts the command does not interrupt the grader
            )
        with suppress(BrokenPipeError):  # of a process that could not begin, as `grade` will say
            # Without a function that it has loaded, and without the problems: their tests may take gigabytes.
            self._line.send(replace(grader, benchmark=replace(grader.benchmark, problems=())))

    def grade(self, responses: Sequence[tuple[Problem, str]]) -> list[Graded]:
        """Grade responses; raises what the grader raises."""
        try:
            with self._asking:
                self._line.send(list(responses))
                answer = self._line.recv()
        except (EOFError, OSError):
            raise WeaveError(f"the process that grades has ended, with code {self._process.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        graded: list[Graded] = answer
        return graded

    def close(self) -> None:
        """End the process, whatever it does; who waits for its answer gets an error."""
        self._process.kill()
        self._process.wait()
        with self._asking:  # which has its error by now
            self._line.close()


def main(descriptor: int) -> None:
    """Grade what is asked, in the main thread: the time limits of math-verify are alarms. The end of input ends it."""
    line = Connection(descriptor)
    grader: Grader = line.recv()
    questions: queue.SimpleQueue[list[tuple[Problem, str]]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, questions), daemon=True).start()
    while True:
        responses = questions.get()
        answer: Any
        try:
            answer = grader.grade(responses)
        except Exception as error:
            answer = _sendable(error)
        with suppress(BrokenPipeError):  # nobody waits for it any more
            line.send(answer)


def _listen(line: Connection, questions: "queue.SimpleQueue[list[tuple[Problem, str]]]") -> None:
    """Take questions, and notice at once when there will be no more, in the middle of grading too."""
    while True:
        try:
            questions.put(line.recv())
        except (EOFError, OSError):
            os._exit(0)


def _sendable(error: Exception) -> Exception:
    """A message for people as it is; of anything else, whose class may be of any package, what it said and where."""
    if isinstance(error, WeaveError):
        return error
    substitute = RuntimeError(f"{type(error).__name__}: {error}")
    substitute.add_note(traceback.format_exc())
    return substitute
