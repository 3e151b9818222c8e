"""Grade answers: find the answer in a response and compare it with the reference, by the rule of each benchmark."""

import importlib.util
import math
import os
import queue
import re
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing.connection import Connection, Pipe
from typing import assert_never

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.config import HELD_OUT, Eval, Grading, benchmark_folder
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.grading.code import extract_code, grade_many
from lightning_weave.grading.math import TIMEOUT, extract_boxed, grade, time_limit, verify_answer
from lightning_weave.grading.sandbox import open_sandbox
from lightning_weave.plugins import load_function

GraderFunction = Callable[[str, str], object]

_ANSWER = re.compile(r"\banswer(?:\s+is\b|\s*:)[\s:*]*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")
# Where a fraction has no end, no later one of its line has, which is skipped: each line is read once.
_FRACTION = re.compile(r"\\[dt]?frac\{(?:(.+?)\}\{(.+?)\}|.*)")
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")


def choose_grading(section: Eval, benchmark: str) -> Grading:
    """Choose how to grade a benchmark: by its entry in eval.graders, else by eval.profile, else by a default.

    The default is the paper's rule, and math-verify (if installed) for the user's own problems.
    """
    for name, rule in section.graders.items():
        if benchmark_folder(name) == benchmark_folder(benchmark):
            return Grading.parse(rule)
    lenient = (benchmark == HELD_OUT or benchmark.startswith("file:")) and has_math_verify()
    return Grading(kind=section.profile or ("math-verify" if lenient else "paper"))


def grade_rollout(rule: Grading, response: str, reference: str) -> tuple[str | None, bool]:
    """Grade the student's own response to a prompt, for a check: no code is run, the paper's rule is used instead.

    No response is right if the grader cannot read the reference, such as a word where it expects a number.
    """
    try:
        return grade_answer(Grading("paper") if rule.kind in ("code", "python") else rule, response, reference)
    except InputError:
        return None, False


def has_math_verify() -> bool:
    """Check whether the optional package is installed."""
    return importlib.util.find_spec("math_verify") is not None


def grade_answer(
    rule: Grading, response: str, reference: str, function: GraderFunction | None = None
) -> tuple[str | None, bool]:
    """Find the answer in a response, and whether it is right; `function` is the user's, if the rule names one."""
    match rule.kind:
        case "paper":
            return extract_boxed(response), grade(response, reference)
        case "math-verify":
            return verify_answer(response, reference)
        case "exact":
            answer = final_answer(response)
            return answer, answer is not None and answer == _strip_markup(reference)
        case "numeric":
            expected = _last_number(reference)
            if expected is None:
                raise InputError(f"the answer {reference!r} is not a number; choose another grader than numeric")
            number = _last_number(final_answer(response) or "")
            if number is None:
                return None, False
            return number[0], math.isclose(number[1], expected[1], rel_tol=rule.tolerance, abs_tol=rule.tolerance)
        case "choice":
            wanted = _LETTER.findall(reference.strip().upper() if len(reference.strip()) == 1 else reference)
            if not wanted:
                raise InputError(
                    f"the answer {reference!r} is not the letter of a choice; choose another grader than choice"
                )
            answer = final_answer(response) or ""
            letters = _LETTER.findall(answer.upper() if len(answer) == 1 else answer)
            return (letters[0], letters[0] == wanted[0]) if letters else (None, False)
        case "regex":
            last: re.Match[str] | None = None
            with suppress(TimeoutError), time_limit(TIMEOUT):  # a response may make a pattern take forever
                for match in re.finditer(rule.pattern or "", response):
                    last = match
            if last is None:
                return None, False
            text = ((last[1] if last.re.groups else last[0]) or "").strip()
            return text or None, text == reference.strip()
        case "python":
            assert function is not None
            return response.strip() or None, bool(function(response, reference))
        case "code":
            raise InputError('the grader "code" needs LiveCodeBench rows with tests; choose another for answers')
        case _:
            assert_never(rule.kind)


def final_answer(text: str) -> str | None:
    r"""Find the final answer: the last box, else what the last "answer:" or "answer is" says, else the last line.

    >>> final_answer("so \\boxed{4}."), final_answer("The answer is **4**.\nBye"), final_answer("first\n4\n")
    ('4', '4', '4')
    """
    boxed = extract_boxed(text)
    answers = _ANSWER.findall(text)
    lines = text.strip().splitlines()
    answer = boxed if boxed is not None else answers[-1] if answers else lines[-1] if lines else ""
    return _strip_markup(answer) or None


def _strip_markup(text: str) -> str:
    return text.strip().strip("*$`").rstrip(".").strip("*$` ")


def _last_number(text: str) -> tuple[str, float] | None:
    r"""Read the last number of a text, also as a fraction.

    >>> _last_number(r"about 1,024.5 m"), _last_number(r"\frac{1}{4}"), _last_number("none")
    (('1,024.5', 1024.5), ('1/4', 0.25), None)
    """
    text = _FRACTION.sub(lambda found: f"{found[1]}/{found[2]}" if found[1] else found[0], text)
    matches = _NUMBER.findall(text)
    if not matches:
        return None
    over, _, under = matches[-1].replace(",", "").partition("/")
    return matches[-1], float(over) / float(under) if under and float(under) else float(over)


@dataclass(frozen=True)
class Grade:
    """The answer of one response, and whether it is right."""

    answer: str | None
    correct: bool
    why: str
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


@dataclass(frozen=True)
class Grader:
    """The way to grade one benchmark."""

    benchmark: Benchmark
    rule: Grading
    unsafe_local: bool = False
    trust: bool = False  # whether a user-defined function may run

    @classmethod
    def from_section(cls, benchmark: Benchmark, section: Eval, trust: bool = False) -> "Grader":
        """Choose the grader of a benchmark, and try it before anything is sampled."""
        grader = cls(benchmark, choose_grading(section, benchmark.name), section.unsafe_local, trust)
        if benchmark.kind == "math":
            has_strict_answers = grader.rule.kind in ("numeric", "choice")
            tried = benchmark.problems if has_strict_answers else benchmark.problems[:1]
            grader.grade([(problem, "") for problem in tried])
        elif grader.rule.kind not in ("code", "paper", "math-verify"):  # these profiles are for mathematics
            key = "eval.profile" if grader.rule.kind == section.profile else f"eval.graders.{benchmark.slug}"
            raise InputError(f"{key} = {grader.rule.kind!r}: the benchmark has programs to run; leave its grader out")
        return grader

    @property
    def name(self) -> str:
        """The name of the protocol: policies are comparable only if it is the same."""
        parts = [self.rule.kind, self.rule.pattern, self.rule.function]
        return " ".join(filter(None, parts)) if self.benchmark.kind == "math" else "livecodebench"

    def lacks_math_verify(self, section: Eval) -> bool:
        """Check whether a user's own file falls back to the paper's rule because math-verify is not installed."""
        own_file = self.benchmark.name.startswith("file:") and self.benchmark.kind == "math"
        return own_file and section.profile is None and self.rule.kind == "paper" and not has_math_verify()

    @cached_property
    def _function(self) -> GraderFunction | None:
        return load_function(self.rule.function, self.trust) if self.rule.function else None

    def grade(self, responses: Sequence[tuple[Problem, str]]) -> list[Grade]:
        """Grade responses; code runs in a sandbox, on all cores."""
        grades = []
        if self.benchmark.kind == "code":
            programs = [extract_code(text) for _, text in responses]
            jobs = [(code, problem.row or {}) for code, (problem, _) in zip(programs, responses, strict=True)]
            with open_sandbox(self.unsafe_local) as sandbox:
                for code, verdict in zip(programs, grade_many(jobs, sandbox), strict=True):
                    grades.append(Grade(code or None, verdict.correct, verdict.reason, verdict.official))
            return grades
        for problem, text in responses:
            assert problem.answer is not None, "a mathematics problem has an answer"
            reference = extract_boxed(problem.answer) or problem.answer  # some data box it, as a response does
            try:
                answer, correct = grade_answer(self.rule, text, reference, self._function)
            except InputError as error:
                raise InputError(f"{self.benchmark.name}, problem {problem.id}: {error}") from error
            except Exception as error:
                if self._function is None:
                    raise
                what = f"{type(error).__name__}: {error}"
                raise InputError(f"{self.rule.function} failed on problem {problem.id} ({what}). Correct it") from error
            grades.append(
                Grade(answer, correct, "equal" if correct else "no answer" if answer is None else "different")
            )
        return grades


class GraderProcess:
    """Grades in another process, which ends with `close` or with this one, so that sampling does not wait for grades.

    The process is a new Python: a fork would copy running threads and a device in use, and importing a user's script
    must not repeat its side effects. A user-defined grading function is loaded there, by its name.
    """

    def __init__(self, grader: Grader) -> None:
        self._line, theirs = Pipe()
        self._lock = threading.Lock()
        with theirs:
            start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({theirs.fileno()})"
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


def serve(descriptor: int) -> None:
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
