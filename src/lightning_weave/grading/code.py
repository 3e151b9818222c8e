"""Grade code as LiveCodeBench does: public tests, then private ones, six seconds each, up to the first failure.

Programs run in the sandbox with real standard input and output; outputs are compared outside of it.
"""

import base64
import binascii
import functools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pickletools import genops
from typing import Any, Literal

from lightning_weave.errors import InputError
from lightning_weave.grading.driver import to_plain
from lightning_weave.grading.sandbox import Program, RunResult, Sandbox

# What makes the official runner fail a script that passes here, as far as its text shows: it replaces standard input
# and output with objects and wraps a script in a function.
_FAILS_OFFICIALLY = (
    (re.compile(r"\bin\s+(?:sys\.)?stdin\b(?!\s*\.)"), "iterating over sys.stdin"),
    (re.compile(r"\bstdin\.buffer\.readline\b"), "sys.stdin.buffer.readline, which returns the first line every time"),
    (re.compile(r"\bopen\(\s*0\s*[,)]"), "open(0)"),
    (re.compile(r"\bstdout\.buffer\b"), "sys.stdout.buffer"),
    (re.compile(r"\bquit\("), "quit()"),
    (re.compile(r"^[^\S\n]*global\s", re.MULTILINE), "a global statement"),
)


# The opcodes of a pickled string. Any other opcode could build an object and is refused.
_TEXT = {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_HARMLESS = _TEXT | {"PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "STOP"}


@dataclass(frozen=True)
class TestCase:
    """One input and its expected output."""

    __test__ = False  # pytest: not a test class

    input: str
    output: str
    functional: bool


def decode_tests(problem: Mapping[str, Any]) -> list[TestCase]:
    """List a problem's tests, public ones first. A problem without tests is an error, never a pass."""
    where = f"problem {problem.get('question_id', '(without question_id)')}"
    try:
        columns = [problem[kind] for kind in ("public_test_cases", "private_test_cases")]
        # Data written by hand may hold a list instead of the release's JSON text.
        tests = _parse_tests(*(json.dumps(column) if isinstance(column, list) else column for column in columns))
    except KeyError as error:
        raise InputError(f"{where}: field {error} is missing. Use a LiveCodeBench row.") from error
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise InputError(f"{where}: its tests cannot be read ({error}). Download the benchmark again.") from error
    if not tests:
        raise InputError(f"{where}: has no tests, so it cannot be graded. Remove it or download it again.")
    if len({test.functional for test in tests}) > 1:
        raise InputError(f"{where}: has both functional and stdin tests. Use one kind.")
    return list(tests)


@functools.lru_cache(maxsize=4)  # the samples of one problem are graded one after another
def _parse_tests(public: str, private: str) -> tuple[TestCase, ...]:
    rows = json.loads(public or "[]")
    private = private or "[]"
    packed = not private.lstrip().startswith("[")
    rows += json.loads(pickled_string(zlib.decompress(base64.b64decode(private))) if packed else private)
    tests = []
    for row in rows:
        if row["testtype"] not in ("functional", "stdin"):
            raise ValueError(f"testtype is {row['testtype']!r}, not 'functional' or 'stdin'")
        tests.append(TestCase(row["input"], row["output"], row["testtype"] == "functional"))
    return tuple(tests)


def pickled_string(data: bytes) -> str:
    """Read the string in a pickle without running the pickle; anything but a single string is refused."""
    texts = []
    for opcode, argument, _ in genops(data):
        if opcode.name not in _HARMLESS:
            raise ValueError(f"the pickle has the opcode {opcode.name}, not only a string")
        if opcode.name in _TEXT:
            texts.append(argument)
    if len(texts) != 1:
        raise ValueError(f"the pickle has {len(texts)} strings, not one")
    return str(texts[0])


Reason = Literal["passed", "no code", "wrong answer", "runtime error", "timeout", "memory limit", "output limit"]
_KILLED: dict[str, tuple[Reason, str]] = {  # how a run ended -> reason and detail
    "timeout": ("timeout", ""),
    "memory": ("memory limit", ""),
    "output": ("output limit", ""),
    "broken": ("runtime error", "the program destroyed its own sandbox"),
}
_SHOWN = 300  # characters of a program's output in a verdict
_SMALL = 1 << 20  # bytes of a result that are parsed whatever they are


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
    where = f"problem {problem.get('question_id')}"
    method = None
    if tests[0].functional:
        try:
            method = str(json.loads(problem["metadata"])["func_name"])
        except (KeyError, ValueError, TypeError) as error:
            raise InputError(
                f"{where}: has functional tests, but its metadata {problem.get('metadata')!r} "
                "has no func_name. Download the benchmark again."
            ) from error
    inputs = []  # a bad row is found before anything runs
    for test in tests:
        given = test.input  # for a script as it is, for a function one argument per line
        try:
            if test.functional:
                json.loads(test.output)
                given = json.dumps([json.loads(line) for line in test.input.split("\n") if line.strip()])
        except ValueError as error:
            raise InputError(f"{where}: a functional test is not JSON ({error}).") from error
        inputs.append(given.encode("utf-8", "surrogatepass"))
    if not code.strip():
        return Verdict(False, "no code")
    program = Program(code, method)
    with sandbox.slot() as slot:
        for number, test in enumerate(tests):
            verdict = _judge(slot.run(program, inputs[number]), test, number)
            if not verdict.correct:
                return verdict
    reasons = [] if method else [reason for pattern, reason in _FAILS_OFFICIALLY if pattern.search(code)]
    return Verdict(True, "passed", official="; ".join(reasons) or None)


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


def _judge(result: RunResult, test: TestCase, number: int) -> Verdict:
    """Compare the result of one test with what is expected."""
    if result.ending != "exited":
        reason, detail = _KILLED[result.ending]
        return Verdict(False, reason, number, detail)
    if result.exit_code != 0:
        last_line = result.errors.decode(errors="replace").strip().rsplit("\n", 1)[-1][-_SHOWN:]
        reason = "memory limit" if last_line.startswith("MemoryError") else "runtime error"
        return Verdict(False, reason, number, last_line or f"exit code {result.exit_code}")
    expected = test.output.strip()[:_SHOWN]
    if not test.functional:
        text = result.output.decode("utf-8", errors="replace")
        if same_text(text, test.output):
            return Verdict(True, "passed")
        return Verdict(False, "wrong answer", number, f"expected {expected!r}, got {text.strip()[:_SHOWN]!r}")
    output = result.output
    if not output:
        return Verdict(False, "runtime error", number, "ended without returning a result")
    wanted = json.loads(test.output)
    correct = False
    # Equal values have equal punctuation. A long output that differs in it is not parsed: that takes 30 times its size.
    if len(output) <= _SMALL or _punctuation(output) == _punctuation(json.dumps(to_plain(wanted)).encode()):
        try:
            correct = _equal(json.loads(output), wanted)
        except (ValueError, TypeError, LookupError, RecursionError) as error:  # only if the program forges its result
            return Verdict(False, "runtime error", number, f"its result cannot be read ({error})")
    if correct:
        return Verdict(True, "passed")
    official = "it calls the result's own __eq__" if output.startswith(b'{"object"') else None
    got = output[:_SHOWN].decode(errors="replace")
    return Verdict(False, "wrong answer", number, f"expected {expected!r}, got {got!r}", official)


def _punctuation(encoded: bytes) -> list[int]:
    return [encoded.count(mark) for mark in (b",", b"[", b"{", b'"')]


def _equal(value: Any, wanted: Any) -> bool:
    """Compare a result, as `driver.to_plain` encodes it, with JSON, as `==` would have compared the result itself.

    No integer of the program becomes the key of a dict: those with equal hashes would take quadratic time.
    """
    if isinstance(value, list):
        return isinstance(wanted, list) and len(value) == len(wanted) and all(map(_equal, value, wanted))
    if not isinstance(value, dict):
        return bool(value == wanted)
    ((kind, content),) = value.items()
    if kind != "dict" or not isinstance(wanted, dict):  # a tuple that is not at the top, or an object
        return False
    pairs = {key: item for key, item in content if isinstance(key, str)}
    return len(content) == len(pairs) == len(wanted) and all(
        key in wanted and _equal(item, wanted[key]) for key, item in pairs.items()
    )


def same_text(actual: str, expected: str) -> bool:
    """Compare printed output: stripped as a whole and by line, lines equal as text or token by token as decimals.

    >>> same_text("1.50 2\\n", " 1.5 2.0"), same_text("1\\n\\n2", "1\\n2")
    (True, False)
    """
    actual, expected = actual.strip(), expected.strip()
    if actual.count("\n") != expected.count("\n"):
        return False
    for line, wanted in zip(actual.split("\n"), expected.split("\n"), strict=True):
        if line.strip() == wanted.strip():
            continue
        tokens = wanted.split()
        found = line.split(maxsplit=len(tokens))  # one more has the rest of the line, however long
        if len(found) != len(tokens):
            return False
        try:
            if any(Decimal(one) != Decimal(other) for one, other in zip(found, tokens, strict=True)):
                return False
        except InvalidOperation:  # not numbers
            return False
    return True
