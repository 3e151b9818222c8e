"""Comparing is bounded as running is: no response or output takes a grader long, or much memory, or ends it."""

import gc
import json
import tracemalloc
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grading import problems
from lightning_weave.config import Grading
from lightning_weave.grading import graders
from lightning_weave.grading.code import _equal, grade_code, same_text
from lightning_weave.grading.driver import to_plain
from lightning_weave.grading.graders import grade_answer
from lightning_weave.grading.sandbox import Sandbox

MB = 1 << 20
REFERENCES = {"choice": "B", "numeric": "4", "math-verify": "4"}
KINDS = ["paper", "exact", "numeric", "choice", "math-verify"]
REPEATED = [
    *("\\frac{", "\\frac{1}", "\\frac{1}{", "}{", "\\boxed{", "\\boxed{1}", "{", "}", "\\", "\\text{a}", "\\text{a "),
    *(
        "answer ",
        "answer: ",
        "answer is",
        ":",
        "*",
        "$",
        "\n",
        " ",
        "1",
        "1,234",
        ",111",
        "1/",
        "1 / ",
        "1e",
        ".",
        "A ",
    ),
]


no_hang = pytest.mark.timeout(600)  # quadratic time would take longer, on any machine


@no_hang
def test_integers_with_one_hash_are_compared_in_linear_time() -> None:
    """A dict of them would take an hour."""
    pairs = [[k * (2**61 - 1), 0] for k in range(400_000)]
    assert not _equal({"dict": pairs}, {"1": 0})


def test_a_result_with_integers_of_one_hash_is_graded(sandbox: Sandbox) -> None:
    code = "class K(int):\n    __hash__ = object.__hash__\n"
    code += "def double(xs): return {K(k * (2**61 - 1)): 0 for k in range(1_000)}"
    assert grade_code(code, problems.DOUBLE, sandbox).reason == "wrong answer"


@no_hang
@pytest.mark.parametrize(
    ("problem", "code"),
    [
        (problems.ADD, "print('1 ' * (3 << 19))"),
        (problems.ADD, "print('1\\n' * (3 << 19))"),
        (problems.DOUBLE, "def double(xs): return [[]] * 900_000"),
        (problems.DOUBLE, "def double(xs): return {str(n): 0 for n in range(200_000)}"),
    ],
)
def test_a_long_output_takes_little_more_memory_than_it_has_bytes(
    sandbox: Sandbox, problem: dict[str, Any], code: str
) -> None:
    tracemalloc.start()
    try:
        assert grade_code(code, problem, sandbox).reason == "wrong answer"
        assert tracemalloc.get_traced_memory()[1] < 32 * MB
    finally:
        tracemalloc.stop()


def test_a_long_output_that_is_right_passes(sandbox: Sandbox) -> None:
    wanted = [[number, str(number)] for number in range(120_000)]
    problem = problems.row("count", [("120000", json.dumps(wanted))], "count")
    code = "def count(n): return [[i, str(i)] for i in range(n)]"
    assert grade_code(code, problem, sandbox).correct
    assert grade_code(code.replace("str(i)", "str(i + 1)"), problem, sandbox).reason == "wrong answer"


@no_hang
def test_a_program_full_of_blank_lines_is_read_once(sandbox: Sandbox) -> None:
    assert grade_code(problems.ADD_SOLUTION + "\n" * 400_000, problems.ADD, sandbox).correct


@pytest.fixture
def no_callbacks() -> Iterator[None]:
    """Without what hypothesis does after a collection: an alarm of math-verify that arrives in it would be lost."""
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@no_hang
@pytest.mark.usefixtures("no_callbacks")
@pytest.mark.parametrize("kind", [*KINDS[:-1], pytest.param("math-verify", marks=pytest.mark.slow)])
@pytest.mark.parametrize("before", ["", "\\boxed{", "the answer is "])
def test_a_grader_takes_linear_time(kind: str, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "math-verify":
        pytest.importorskip("math_verify")
        monkeypatch.setattr("lightning_weave.grading.math.TIMEOUT", 1)
    for unit in REPEATED:
        grade_answer(Grading(kind=kind), before + unit * (400_000 // len(unit)), REFERENCES.get(kind, "4"))


@no_hang
def test_a_pattern_that_a_response_makes_take_forever_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graders, "TIMEOUT", 0.3)
    rule = Grading(kind="regex", pattern="(a+)+$")
    assert grade_answer(rule, "a" * 60 + "b", "a") == (None, False)
    assert grade_answer(rule, "aa", "aa") == ("aa", True)


# Fuzzing: a few examples in the fast tests, many in `make test-fuzz`.

some = [pytest.param(100, id="some"), pytest.param(3000, id="many", marks=pytest.mark.fuzz)]
RESPONSES = st.lists(
    st.builds(
        str.__mul__,
        st.sampled_from([*REPEATED, "-", "+", "E5", "B", "\x00", "é", "٣", "½", "\\sqrt{2}"]),
        st.integers(0, 40),
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(-2, 2) | st.sampled_from(["a", "b", '[,{"é']),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from(["a", "b", 0, 1]), inner, max_size=3)
    ),
    max_leaves=8,
)


def fuzz(examples: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Run a property over so many examples, the same ones every time."""

    def run(check: Callable[..., None]) -> None:
        chosen = settings(
            max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
        )
        chosen(given(*strategies)(check))()

    return run


@pytest.mark.parametrize("examples", some)
@pytest.mark.parametrize("kind", [*KINDS, "regex"])
def test_no_response_ends_a_grader(kind: str, examples: int) -> None:
    if kind == "math-verify":
        pytest.importorskip("math_verify")
        examples //= 10  # it takes tens of milliseconds
    rule = Grading(kind=kind, pattern=r"answer\D*(\d+)?") if kind == "regex" else Grading(kind=kind)

    @fuzz(examples, RESPONSES)
    def check(response: str) -> None:
        answer, correct = grade_answer(rule, response, REFERENCES.get(kind, "4"))
        assert answer is None or isinstance(answer, str)
        assert correct is False or answer is not None


@pytest.mark.parametrize("examples", some)
def test_results_are_compared_as_python_compares_them(examples: int) -> None:
    def untupled(value: Any) -> Any:  # a tuple at the top counts as a list
        return list(value) if isinstance(value, tuple) else value

    @fuzz(examples, VALUES, VALUES)
    def check(value: Any, other: Any) -> None:
        for wanted in (value, other):
            parsed = json.loads(json.dumps(wanted))  # tuples become lists, and keys text
            assert _equal(json.loads(json.dumps(to_plain(value))), parsed) == (untupled(value) == parsed)


@pytest.mark.parametrize("examples", some)
def test_texts_are_compared_as_decimals_token_by_token(examples: int) -> None:
    def expected(actual: str, wanted: str) -> bool:
        lines = [text.strip().split("\n") for text in (actual, wanted)]
        if len(lines[0]) != len(lines[1]):
            return False
        for one, other in zip(*lines, strict=True):
            try:
                if one.strip() != other.strip() and list(map(Decimal, one.split())) != list(
                    map(Decimal, other.split())
                ):
                    return False
            except InvalidOperation:
                return False
        return True

    text = st.lists(st.sampled_from(["1", "1.0", "01", "2", "a", " ", "\n", "\t", "nan", "1e0", "\u3000"])).map("".join)

    @fuzz(examples, text, text)
    def check(actual: str, wanted: str) -> None:
        for other in (actual.replace(" ", "  "), actual.replace("1", "1.0"), wanted):
            assert same_text(actual, other) == expected(actual, other)
