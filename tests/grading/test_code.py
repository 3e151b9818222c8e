"""Code grading: what passes, what fails and why, and that nothing is decided by the program itself."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grading import problems
from lightning_weave.errors import InputError
from lightning_weave.grading.code import decode_tests, extract_code, grade_code, grade_many, pickled_string, same_text
from lightning_weave.grading.driver import to_plain
from lightning_weave.grading.sandbox import Sandbox

SAMPLE = Path(__file__).parents[3] / "shared" / "data" / "benchmarks" / "leetcode_sample.jsonl"


def pickled(text: str) -> bytes:
    """What pickling a string gives, protocol 4 with a long string."""
    body = text.encode()
    return b"\x80\x04X" + struct.pack("<I", len(body)) + body + b"\x94."


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


# Extraction


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nold\n```\nthen\n```python\nnew\n  x\n```\nbye", "new\n  x"),
        ("<think>```a\n1\n```</think>\n```py\n2\n```", "2"),
        ("```python\ncut off", ""),
        ("no fence", ""),
        ("", ""),
        ("```python\na\n```\nand ```inline```", ""),  # the last two lines with a fence enclose nothing
        ("```\n```", ""),
    ],
)
def test_code_is_between_the_last_two_fences(text: str, code: str) -> None:
    assert extract_code(text) == code


@given(st.text(alphabet="`a\n ", max_size=60))
def test_extraction_never_raises_and_returns_whole_lines(text: str) -> None:
    code = extract_code(text)
    assert code in text
    assert "```" not in code


# Tests of a row


def test_private_tests_are_read_plain_and_packed() -> None:
    plain_row = problems.ADD
    packed_row = {**plain_row, "private_test_cases": packed(pickled(plain_row["private_test_cases"]))}
    assert decode_tests(packed_row) == decode_tests(plain_row)
    assert [test.input for test in decode_tests(plain_row)] == ["1 2\n", "10 -4\n", "0 0\n"]
    kinds = ("public_test_cases", "private_test_cases")
    by_hand = {**plain_row, **{kind: json.loads(plain_row[kind]) for kind in kinds}}
    assert decode_tests(by_hand) == decode_tests(plain_row)


@pytest.mark.parametrize(
    "hostile",
    [
        b"cos\nsystem\n(S'touch pwned'\ntR.",
        b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
        b"\x80\x04]\x94.",
        pickled("[]")[:-1],
        b"not a pickle",
        b"",
    ],
)
def test_a_pickle_that_is_not_one_string_is_refused(hostile: bytes, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        pickled_string(hostile)
    with pytest.raises(InputError, match="problem bad"):
        decode_tests({**problems.ADD, "question_id": "bad", "private_test_cases": packed(hostile)})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
        ({"public_test_cases": "", "private_test_cases": ""}, "no tests"),
        ({"public_test_cases": "[{]"}, "cannot be read"),
        ({"private_test_cases": "AAAA"}, "cannot be read"),
        ({"public_test_cases": '[{"input": "", "output": "", "testtype": "odd"}]'}, "testtype"),
        ({"public_test_cases": problems.DOUBLE["public_test_cases"]}, "has both functional and stdin tests"),
        ({**problems.DOUBLE, "metadata": "{}"}, "func_name"),
        ({**problems.DOUBLE, "public_test_cases": '[{"input": "x", "output": "1", "testtype": "functional"}]'}, "JSON"),
    ],
)
def test_a_bad_row_is_an_error_and_never_a_verdict(sandbox: Sandbox, change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        grade_code(problems.ADD_SOLUTION, {**problems.ADD, **change}, sandbox)


# Comparison


@pytest.mark.parametrize(
    ("actual", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3  \n\n", "3", True),
        ("1 \n 2", "1\n2", True),
        ("1\n\n2", "1\n2", False),
        ("1  2", "1 2", True),  # as decimals
        ("a  b", "a b", False),
        ("1.0 2e0", "1 2", True),
        ("0.1", "0.10000000000000001", False),
        ("1 2 3", "1 2", False),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("NaN x", "NaN y", False),
        ("sNaN", "1", False),
        ("1e999999999", "1e999999998", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_printed_text_is_compared_as_the_benchmark_says(actual: str, expected: str, same: bool) -> None:
    assert same_text(actual, expected) is same


@given(st.text(alphabet="01. -eEnNaAiIfFsS_\n\t", max_size=30), st.text(alphabet="01. -eEnNaAiIfFsS_\n\t", max_size=30))
def test_comparison_never_raises_and_is_symmetric(one: str, other: str) -> None:
    assert same_text(one, other) == same_text(other, one)
    assert same_text(one, one)


def test_results_keep_what_equality_can_see() -> None:
    class Always(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert to_plain((1, (2, "a"), [None, True])) == [1, {"tuple": [2, "a"]}, [None, True]]
    assert type(to_plain(Always(4))) is int
    assert to_plain({1: 2}) == {"dict": [[1, 2]]}
    assert to_plain({3}) == {"object": "set"}


# Verdicts


@pytest.mark.parametrize("name", problems.PROBLEMS)
def test_right_solutions_pass(sandbox: Sandbox, name: str) -> None:
    problem, solution = problems.PROBLEMS[name]
    verdict = grade_code(solution, problem, sandbox)
    assert (verdict.correct, verdict.reason, verdict.detail) == (True, "passed", "")


WRONG = problems.programs("wrong")  # problem / reason / test that fails: program


@pytest.mark.parametrize("title", WRONG)
def test_wrong_solutions_fail_for_the_right_reason(sandbox: Sandbox, title: str) -> None:
    name, reason, test, _ = title.split(" / ")
    verdict = grade_code(WRONG[title], problems.PROBLEMS[name][0], sandbox)
    assert (verdict.correct, verdict.reason, verdict.test) == (False, reason, int(test))


@pytest.mark.parametrize("code", ["", " \n"])
def test_a_response_without_code_fails(sandbox: Sandbox, code: str) -> None:
    assert grade_code(code, problems.ADD, sandbox).reason == "no code"


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import time\ndef f(): time.sleep(60)\nf()"]
)
def test_a_program_that_does_not_end_is_a_timeout(hasty: Sandbox, code: str) -> None:
    assert grade_code(code, problems.ADD, hasty).reason == "timeout"


def test_a_failing_program_says_what_went_wrong(sandbox: Sandbox) -> None:
    assert (
        grade_code("print(1 // 0)", problems.ADD, sandbox).detail
        == "ZeroDivisionError: integer division or modulo by zero"
    )
    assert grade_code("print(4)", problems.ADD, sandbox).detail == "expected '3', got '4'"


OFFICIALLY_FAILED = problems.programs("officially-failed")


@pytest.mark.parametrize("name", OFFICIALLY_FAILED)
def test_right_programs_that_the_official_runner_fails_pass_and_say_so(sandbox: Sandbox, name: str) -> None:
    verdict = grade_code(OFFICIALLY_FAILED[name], problems.ADD, sandbox)
    assert verdict.correct
    assert verdict.official is not None


def test_a_result_that_would_judge_itself_is_named_as_such(sandbox: Sandbox) -> None:
    code = "class Same:\n    def __eq__(self, other): return True\ndef double(xs): return Same()"
    verdict = grade_code(code, problems.DOUBLE, sandbox)
    assert not verdict.correct
    assert verdict.official is not None


USUAL = problems.programs("usual")


@pytest.mark.parametrize("name", USUAL)
def test_usual_ways_of_reading_and_writing_pass(sandbox: Sandbox, name: str) -> None:
    verdict = grade_code(USUAL[name], problems.ADD, sandbox)
    assert verdict.correct, verdict


def test_large_input_and_output_arrive_whole(sandbox: Sandbox) -> None:
    numbers = " ".join(map(str, range(300_000)))
    problem = problems.row("copy", [(numbers, numbers.replace(" ", "\n"))])
    verdict = grade_code("print(*input().split(), sep='\\n')", problem, sandbox)
    assert verdict.correct, verdict


def test_many_are_graded_in_order_in_all_slots(sandbox: Sandbox) -> None:
    wrong = "print(0)"
    jobs = [(solution, problem) for problem, solution in problems.PROBLEMS.values()]
    verdicts = list(grade_many([*jobs, (wrong, problems.ADD), *jobs], sandbox))
    assert [verdict.correct for verdict in verdicts] == [True] * 6 + [False] + [True] * 6


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLE.exists(), reason="the sample problems are not beside this checkout")
def test_every_reference_solution_passes_and_every_mutation_fails(sandbox: Sandbox, hasty: Sandbox) -> None:
    rows = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    passed = list(grade_many([(row["reference_solution"], row) for row in rows], sandbox))
    assert [verdict for verdict in passed if not verdict.correct] == []
    mutants = [(mutant, row) for row in rows[::8] for mutant in mutations(row)]
    for (code, reason), row in mutants:
        assert grade_code(code, row, hasty if reason == "timeout" else sandbox).reason == reason


def mutations(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Wrap a solution so that its result is a wrong constant, off by one, an exception, or never comes."""
    name = json.loads(row["metadata"])["func_name"]

    def mutated(body: str) -> str:
        wrapper = (
            f"class Solution(Solution):\n    def {name}(self, *a):\n        r = super().{name}(*a)\n        {body}\n"
        )
        return f"{row['reference_solution']}\n{wrapper}"

    return [
        (mutated("return 987654321"), "wrong answer"),
        (
            mutated("return r + ['x'] if type(r) is list else r + 'x' if type(r) is str else r + 1"),
            "wrong answer",
        ),
        (mutated("raise ValueError(r)"), "runtime error"),
        (mutated("while True: pass"), "timeout"),
    ]
