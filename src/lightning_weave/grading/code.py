"""Grade code as LiveCodeBench does: public tests, then private ones, six seconds each, up to the first failure.

Programs run in the sandbox with real standard input and output; outputs are compared outside of it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from lightning_weave.errors import InputError
from lightning_weave.grading.cases import TestCase, decode_tests
from lightning_weave.grading.official import official_failure
from lightning_weave.grading.sandbox import Program, RunResult, Sandbox

Reason = Literal["passed", "no code", "wrong answer", "runtime error", "timeout", "memory limit", "output limit"]
_KILLED: dict[str, tuple[Reason, str]] = {  # how a run ended -> reason and detail
    "timeout": ("timeout", ""),
    "memory": ("memory limit", ""),
    "output": ("output limit", ""),
    "broken": ("runtime error", "the program destroyed its own sandbox"),
}
_SHOWN = 300  # characters of a program's output in a verdict


@dataclass(frozen=True)
class Verdict:
    """Whether a program passes every test; if not, why and which test failed."""

    correct: bool
    reason: Reason
    test: int | None = None  # the test that failed, from 0
    detail: str = ""
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


def extract_code(text: str) -> str:
    r"""Take the text between the last two lines with a triple backtick; empty if there are fewer than two.

    >>> extract_code("Think.\n```python\nprint(1)\n```\nDone.")
    'print(1)'
    """
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if "```" in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def grade_code(code: str, problem: Mapping[str, Any], sandbox: Sandbox) -> Verdict:
    """Run a program on every test of a LiveCodeBench row until one fails."""
    tests = decode_tests(problem)
    method = _method(problem) if tests[0].functional else None
    inputs = [_stdin(test, problem) for test in tests]  # a bad row is found before anything runs
    if not code.strip():
        return Verdict(False, "no code")
    program = Program(code, method)
    with sandbox.slot() as slot:
        for number, test in enumerate(tests):
            verdict = _judge(slot.run(program, inputs[number]), test, number)
            if not verdict.correct:
                return verdict
    return Verdict(True, "passed", official=None if method else official_failure(code))


def grade_many(jobs: Iterable[tuple[str, Mapping[str, Any]]], sandbox: Sandbox) -> Iterator[Verdict]:
    """Grade (code, problem) pairs in all slots of the sandbox at once; verdicts come in the order of the jobs.

    A failure of the sandbox is raised in place of its verdict.
    """
    with ThreadPoolExecutor(sandbox.slots) as pool:
        futures = [pool.submit(grade_code, code, problem, sandbox) for code, problem in jobs]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _method(problem: Mapping[str, Any]) -> str:
    try:
        return str(json.loads(problem["metadata"])["func_name"])
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"problem {problem.get('question_id')}: has functional tests, but its metadata {problem.get('metadata')!r} "
            "has no func_name. Download the benchmark again."
        ) from error


def _stdin(test: TestCase, problem: Mapping[str, Any]) -> bytes:
    """Pass a script its input unchanged, and a function its arguments (one per line) as a JSON list."""
    if not test.functional:
        return test.input.encode("utf-8", "surrogatepass")
    try:
        json.loads(test.output)
        return json.dumps([json.loads(line) for line in test.input.split("\n") if line.strip()]).encode()
    except ValueError as error:
        raise InputError(f"problem {problem.get('question_id')}: a functional test is not JSON ({error}).") from error


def _judge(result: RunResult, test: TestCase, number: int) -> Verdict:
    last_line = result.errors.decode(errors="replace").strip().rsplit("\n", 1)[-1][-_SHOWN:]
    if result.ending != "exited":
        reason, detail = _KILLED[result.ending]
        return Verdict(False, reason, number, detail)
    if result.exit_code != 0:
        reason = "memory limit" if last_line.startswith("MemoryError") else "runtime error"
        return Verdict(False, reason, number, last_line or f"exit code {result.exit_code}")
    judge = _judge_value if test.functional else _judge_text
    return judge(result.output, test, number)


def _judge_text(output: bytes, test: TestCase, number: int) -> Verdict:
    text = output.decode("utf-8", errors="replace")
    if same_text(text, test.output):
        return Verdict(True, "passed")
    return Verdict(False, "wrong answer", number, _difference(text.strip(), test.output.strip()))


def _judge_value(output: bytes, test: TestCase, number: int) -> Verdict:
    if not output:
        return Verdict(False, "runtime error", number, "ended without returning a result")
    expected = json.loads(test.output)
    try:
        result = _restored(json.loads(output))
        same = bool(result == expected)
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # only if the program forges its result
        return Verdict(False, "runtime error", number, f"its result cannot be read ({error})")
    if same:
        return Verdict(True, "passed")
    official = "it calls the result's own __eq__" if isinstance(result, _Opaque) else None
    return Verdict(False, "wrong answer", number, _difference(repr(result), test.output.strip()), official)


@dataclass(frozen=True, eq=False)
class _Opaque:
    """A result of a type that JSON does not have: equal to nothing."""

    type_name: str


def _restored(value: Any) -> Any:
    """Reverse `driver.plain`."""
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple(_restored(item) for item in content)
        case "dict":
            return {_restored(key): _restored(item) for key, item in content}
        case _:
            return _Opaque(str(content))


def same_text(actual: str, expected: str) -> bool:
    """Compare printed output: stripped as a whole and by line, lines equal as text or token by token as decimals.

    >>> same_text("1.50 2\\n", " 1.5 2.0"), same_text("1\\n\\n2", "1\\n2")
    (True, False)
    """
    actual_lines = actual.strip().split("\n")
    expected_lines = expected.strip().split("\n")
    return len(actual_lines) == len(expected_lines) and all(map(_same_line, actual_lines, expected_lines))


def _same_line(actual: str, expected: str) -> bool:
    if actual.strip() == expected.strip():
        return True
    try:
        return [Decimal(token) for token in actual.split()] == [Decimal(token) for token in expected.split()]
    except InvalidOperation:  # not numbers
        return False


def _difference(actual: str, expected: str) -> str:
    return f"expected {expected[:_SHOWN]!r}, got {actual[:_SHOWN]!r}"
