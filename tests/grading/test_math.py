"""The paper's rule for mathematics: last balanced box, surface off, exact."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_weave.grading.math import canonical, extract_boxed, grade

SHARED = Path(__file__).parents[3] / "shared" / "data" / "boxed_examples.jsonl"


def matching_box(text: str) -> str | None:
    """Oracle for `extract_boxed`: from each box, latest first, count braces one character at a time."""
    for match in reversed(list(re.finditer(r"\\boxed(?![A-Za-z])\s*\{", text))):
        depth, position = 1, match.end()
        while position < len(text):
            slashes = len(text[:position]) - len(text[:position].rstrip("\\"))
            if text[position] in "{}" and slashes % 2 == 0:
                depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[match.end() : position]
            position += 1
    return None


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{12}", "12"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        (r"good \boxed{1}, cut \boxed{2", "1"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed {4}", "4"),
        (r"x \\\boxed{5}", "5"),
        (r"\boxed{}", ""),
        (r"\boxed5", None),
        (r"\boxedx{6}", None),
        (r"\fbox{6}", None),
        ("", None),
        (r"}}}\boxed{7}", "7"),
        (r"{{{\boxed{8}", "8"),
    ],
)
def test_the_last_balanced_box_is_found(text: str, box: str | None) -> None:
    assert extract_boxed(text) == box


@given(st.lists(st.sampled_from(["\\boxed{", "\\boxed", "{", "}", "\\", "\\{", "\\}", "7", " ", "a"]), max_size=25))
def test_the_box_is_the_one_that_counting_braces_finds(parts: list[str]) -> None:
    text = "".join(parts)
    assert extract_boxed(text) == matching_box(text)


EQUAL = [
    ("42", 42),
    (" 42 ", "42"),
    ("042", "42"),
    ("42", "042"),
    ("+42", "42"),
    ("-0", "0"),
    ("−7", "-7"),
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    (r"1,\!234", "1234"),
    (r"12\,345", "12345"),
    (r"$42$", "42"),
    (r"\$42", "42"),
    (r"\(42\)", "42"),
    (r"42\%", "42"),
    ("42%", "42"),
    (r"42^\circ", "42"),
    (r"42^{\circ}", "42"),
    ("42°", "42"),
    ("42.", "42"),
    ("{42}", "42"),
    (r"\text{42}", "42"),
    (r"\text{\textbf{\mathrm{42}}}", "42"),
    (r"42\text{ cm}", "42"),
    (r"42\,\mathrm{cm}^2", "42"),
    (r"42\text{ m}/\text{s}", "42"),
    (r"42\text{ square units}.", "42"),
    ("42 degrees", "42"),
    (r"3\sqrt{2}\text{ cm}", r"3\sqrt2"),
    (r"\dfrac{1}{2}", r"\frac12"),
    (r"\tfrac{ 1 }{ 2 }", r"\frac{1}{2}"),
    (r"\frac{\pi}{3}", r"\frac\pi3"),
    (r"\left(1,\ 2\right)", "(1,2)"),
    (r"\bigl[1, 2\bigr]", "[1,2]"),
    (r"\displaystyle x^{2}", "x^2"),
    (r"\text{Yes}", "Yes"),
    ("0", 0),
    ("1.50", "1.50"),
]

UNEQUAL = [
    ("", ""),
    ("", "0"),
    (" ", "0"),
    (".", ""),
    ("42.0", "42"),
    ("4.2e1", "42"),
    ("0x2a", "42"),
    ("-42", "42"),
    ("42", "-42"),
    ("True", "1"),
    ("x=42", "42"),
    ("42m", "42"),
    (r"42\mathrm{i}", "42"),
    (r"x_\text{max}", "x_"),
    ("4_2", "42"),
    ("4^2", "42"),
    ("1,23", "123"),
    ("1,2345", "12345"),
    ("(1,234)", "(1234)"),
    ("1, 234", "1234"),
    (r"\{100,200\}", r"\{100200\}"),
    ("1/2", r"\frac{1}{2}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"\frac{1}{23}", r"\frac{12}{3}"),
    ("x^{12}", "x^12"),
    (r"\pi r", r"\pir"),
    ("٤٢", "42"),
]


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_superficial_differences_do_not_count(answer: str, reference: object) -> None:
    assert grade(f"So \\boxed{{{answer}}}.", reference)
    assert canonical(str(reference)) == canonical(answer)


@pytest.mark.parametrize(("answer", "reference"), UNEQUAL)
def test_real_differences_count(answer: str, reference: object) -> None:
    assert not grade(f"So \\boxed{{{answer}}}.", reference)


def test_only_the_last_box_counts_and_thinking_is_not_stripped() -> None:
    assert grade(r"<think>\boxed{5}</think> It is 5.", 5)
    assert not grade(r"<think>\boxed{5}</think> It is \boxed{6}.", 5)
    assert not grade("The answer is 5.", 5)
    assert grade(r"\boxed{5} and on and on \boxed{", 5)  # cut off by the token limit


@pytest.mark.skipif(not SHARED.exists(), reason="the labelled examples are not beside this checkout")
def test_the_labelled_examples_are_graded_as_labelled() -> None:
    rows = [json.loads(line) for line in SHARED.read_text().splitlines()]
    assert [row for row in rows if grade(row["response"], row["reference"]) != row["correct"]] == []


LATEX = st.lists(
    st.sampled_from(
        [
            "\\boxed{",
            "{",
            "}",
            "\\",
            "\\text{",
            "\\mathrm{cm}",
            "\\frac",
            "^",
            "\\circ",
            "$",
            ",",
            ".",
            "0",
            "42",
            " ",
            "\n",
        ]
    )
    | st.text(max_size=3),
    max_size=30,
).map("".join)


@given(LATEX, LATEX | st.integers(-(10**20), 10**20) | st.floats() | st.booleans() | st.none())
def test_nothing_raises(response: str, reference: object) -> None:
    assert grade(response, reference) in (True, False)


@given(LATEX)
@pytest.mark.slow
def test_an_answer_equals_itself_unless_it_is_blank(answer: str) -> None:
    box = extract_boxed(f"\\boxed{{{answer}}}")
    if box is not None and canonical(box):
        assert grade(f"\\boxed{{{answer}}}", box)


@given(st.integers(-(10**30), 10**30), st.integers(0, 5))
def test_every_spelling_of_an_integer_is_the_integer(number: int, zeros: int) -> None:
    spelled = f"{'-' if number < 0 else ''}{'0' * zeros}{abs(number)}"
    assert grade(f"\\boxed{{{spelled}}}", number)
    assert grade(f"\\boxed{{{number:,}}}", number)
    assert not grade(f"\\boxed{{{spelled}}}", number + 1)


class Run:
    """Count the lines of Python that a call runs, in this module's own functions."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, frame: object, event: str, argument: object) -> "Run":
        self.lines += event == "line"
        return self


@pytest.mark.parametrize("unit", ["{", "}", "\\boxed{", "\\text{", "\\", "\\{", "^ ", "1,234", "\\text{a}", "\\boxed "])
def test_python_steps_grow_in_proportion_to_hostile_input(unit: str) -> None:
    def run(repeats: int) -> int:
        counter, before = Run(), sys.gettrace()
        text = "\\boxed{" + unit * repeats + "}" * repeats + "}"
        sys.settrace(counter)
        try:
            grade(text, "1")
        finally:
            sys.settrace(before)
        return counter.lines

    assert run(2_000) <= 12 * run(200)


@pytest.mark.parametrize("unit", ["{", "\\text{", "\\", " ", "0", "1,234"])
def test_hostile_input_of_full_length_is_answered(unit: str) -> None:
    """A quadratic pattern would need 10**10 run here, far beyond this test's time limit."""
    text = "\\boxed{" + unit * 100_000 + "x" + "}" * 100_000 + "}"
    assert not grade(text, "1")
    assert canonical(unit * 100_000 + "x")


def test_nested_braces_to_any_depth_are_balanced() -> None:
    inner = "{" * 100_000 + "7" + "}" * 100_000
    assert extract_boxed(f"\\boxed{{{inner}}}") == inner
    assert extract_boxed("\\boxed{1}" + "\\boxed{" * 100_000) == "1"


def test_random_edits_of_an_integer_are_wrong() -> None:
    draw = random.Random(0)
    for _ in range(300):
        number = str(draw.randrange(100, 10**6))
        place = draw.randrange(len(number))
        wrong = number[:place] + draw.choice([d for d in "123456789" if d != number[place]]) + number[place + 1 :]
        assert not grade(f"\\boxed{{{wrong}}}", number)
