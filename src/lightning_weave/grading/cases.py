"""Read the tests of a LiveCodeBench row. Nothing in a row is ever executed."""

import base64
import binascii
import functools
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pickletools import genops
from typing import Any

from lightning_weave.errors import InputError

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
        tests = _decoded(*(_as_text(problem[kind]) for kind in ("public_test_cases", "private_test_cases")))
    except KeyError as error:
        raise InputError(f"{where}: field {error} is missing. Use a LiveCodeBench row.") from error
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise InputError(f"{where}: its tests cannot be read ({error}). Download the benchmark again.") from error
    if not tests:
        raise InputError(f"{where}: has no tests, so it cannot be graded. Remove it or download it again.")
    if len({test.functional for test in tests}) > 1:
        raise InputError(f"{where}: has both functional and stdin tests. Use one kind.")
    return list(tests)


def _as_text(tests: Any) -> str:
    """Convert tests that are a list, as in data written by hand, to the JSON text of the release."""
    return json.dumps(tests) if isinstance(tests, list) else tests


@functools.lru_cache(maxsize=4)  # the samples of one problem are graded one after another
def _decoded(public: str, private: str) -> tuple[TestCase, ...]:
    rows = [*json.loads(public or "[]"), *_private_rows(private or "[]")]
    return tuple(TestCase(row["input"], row["output"], _is_functional(row["testtype"])) for row in rows)


def _is_functional(kind: str) -> bool:
    if kind not in ("functional", "stdin"):
        raise ValueError(f"testtype is {kind!r}, not 'functional' or 'stdin'")
    return kind == "functional"


def _private_rows(private: str) -> Any:
    if private.lstrip().startswith("["):
        return json.loads(private)
    return json.loads(pickled_string(zlib.decompress(base64.b64decode(private))))


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
