"""Small problems in LiveCodeBench's row format, each with a solution that is right."""

import json
import uuid
from pathlib import Path
from typing import Any

MARK = f"planted-{uuid.uuid4().hex}"  # begins the name of every file that a hostile program tries to write


def row(name: str, tests: list[tuple[str, str]], method: str | None = None) -> dict[str, Any]:
    """Make a row whose first test is public and whose other tests are private."""
    kind = "functional" if method else "stdin"
    cases = [{"input": given, "output": wanted, "testtype": kind} for given, wanted in tests]
    return {
        "question_id": name,
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": json.dumps(cases[1:]),
        "metadata": json.dumps({"func_name": method} if method else {}),
    }


ADD = row("add", [("1 2\n", "3\n"), ("10 -4\n", "6\n"), ("0 0\n", "0\n")])
ADD_SOLUTION = "a, b = map(int, input().split())\nprint(a + b)\n"

LINES = row("sum of lines", [("3\n1\n2\n3\n", "6"), ("1\n5\n", "5"), ("2\n-1\n1\n", "0")])
LINES_SOLUTION = "n = int(input())\nprint(sum(int(input()) for _ in range(n)))\n"

HALVES = row("halves", [("3\n", "1.5\n"), ("4\n", "2\n"), ("1\n", "0.50\n")])
HALVES_SOLUTION = "print(int(input()) / 2)\n"

DOUBLE = row("double", [("[1, 2]", "[2, 4]"), ("[]", "[]"), ("[-3]", "[-6]")], "double")
DOUBLE_SOLUTION = (
    "class Solution:\n    def double(self, xs: List[int]) -> List[int]:\n        return [2 * x for x in xs]\n"
)

JOIN = row("join", [('"a"\n["b", "c"]', '"abac"'), ('"x"\n[]', '""'), ('"é\\n"\n["\\""]', '"é\\n\\""')], "join")
JOIN_SOLUTION = "class Solution:\n    def join(self, p, xs):\n        return ''.join(p + x for x in xs)\n"

SPLIT = row("split", [("7\n2", "[3, 1]"), ("9\n3", "[3, 0]")], "split")
SPLIT_SOLUTION = "def split(a, b):\n    return divmod(a, b)\n"  # a tuple at the top counts as a list

PROBLEMS = {
    "add": (ADD, ADD_SOLUTION),
    "lines": (LINES, LINES_SOLUTION),
    "halves": (HALVES, HALVES_SOLUTION),
    "double": (DOUBLE, DOUBLE_SOLUTION),
    "join": (JOIN, JOIN_SOLUTION),
    "split": (SPLIT, SPLIT_SOLUTION),
}


def programs(name: str) -> dict[str, str]:
    """Read a file of programs, each below a line `#### title`; PLANTED stands for MARK, which nobody else uses."""
    text = Path(__file__).with_name("programs").joinpath(f"{name}.txt").read_text().replace("PLANTED", MARK)
    sections = [section.partition("\n") for section in text.split("#### ")[1:]]
    found = {title: code.rstrip() + "\n" for title, _, code in sections}
    assert len(found) == len(sections), "two programs have the same title"
    return found
