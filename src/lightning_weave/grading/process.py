"""Grade in a separate process, so that sampling does not wait for the grader.

The process is a new Python: a fork would copy running threads and a device in use, and importing a user's script must
not repeat its side effects. A user-defined grading function is loaded there, by its name.
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

from lightning_weave.bench.definitions import Problem
from lightning_weave.errors import WeaveError
from lightning_weave.grading.graders import Grade, Grader


class GraderProcess:
    """Grades in another process, which ends with `close` or with this process."""

    def __init__(self, grader: Grader) -> None:
        self._line, theirs = Pipe()
        self._lock = threading.Lock()
        with theirs:
            start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", start],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Control-C in the terminal does not reach the grader
            )
        with suppress(BrokenPipeError):  # if the process could not start, `grade` raises
            # `replace` drops a loaded function; the problems are dropped because their tests may take gigabytes.
            self._line.send(replace(grader, benchmark=replace(grader.benchmark, problems=())))

    def grade(self, responses: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """Grade responses; raises what the grader raises."""
        try:
            with self._lock:
                self._line.send(list(responses))
                answer = self._line.recv()
        except (EOFError, OSError):
            raise WeaveError(f"the grading process has exited with code {self._process.wait()}") from None
        if isinstance(answer, Exception):
            raise answer
        grades: list[Grade] = answer
        return grades

    def close(self) -> None:
        """Kill the process; a caller that waits for its answer gets an error."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._line.close()


def main(descriptor: int) -> None:
    """Grade requests in the main thread (the time limits of math-verify are alarms) until the input ends."""
    line = Connection(descriptor)
    try:
        grader: Grader = line.recv()
    except (EOFError, OSError):  # the command was stopped while this process started
        return
    requests: queue.SimpleQueue[list[tuple[Problem, str]]] = queue.SimpleQueue()

    def receive() -> None:
        """Queue requests; the end of the input ends the process at once, even while it grades."""
        while True:
            try:
                requests.put(line.recv())
            except (EOFError, OSError):
                os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    while True:
        responses = requests.get()
        answer: list[Grade] | Exception
        try:
            answer = grader.grade(responses)
        except WeaveError as error:
            answer = error
        except Exception as error:  # its class may not exist in the other process
            answer = RuntimeError(f"{type(error).__name__}: {error}")
            answer.add_note(traceback.format_exc())
        with suppress(BrokenPipeError):  # nobody waits for it any more
            line.send(answer)
