"""Each grader finds the answer it is for, and says None where there is none."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_weave.config import Eval, Grading
from lightning_weave.errors import InputError
from lightning_weave.grading import graders
from lightning_weave.grading.graders import choose_grading, grade_answer, grade_rollout
from lightning_weave.plugins import load_function

CASES = [
    ("paper", r"so \boxed{4}", "4", ("4", True)),
    ("paper", "so 4", "4", (None, False)),
    ("exact", r"\boxed{Paris}", "Paris", ("Paris", True)),
    ("exact", "It is far.\nAnswer: **Paris**.", "Paris", ("Paris", True)),
    ("exact", "Paris", "paris", ("Paris", False)),
    ("exact", " \n", "Paris", (None, False)),
    ("numeric", r"\boxed{1,024.0000001}", "1024", ("1,024.0000001", True)),
    ("numeric", "the answer is 0.25", r"\frac{1}{4}", ("0.25", True)),
    ("numeric", "2 + 2 makes\n4 apples", "4", ("4", True)),
    ("numeric", r"\boxed{-3e2}", "-300", ("-3e2", True)),
    ("numeric", "about 4.1", "4", ("4.1", False)),
    ("numeric", "The answer is 4.5. Done", "4.5", ("4.5", True)),
    ("numeric", "3/2/4", "4", ("4", True)),
    ("numeric", "1e5e4", "4", ("4", True)),
    ("numeric", "I do not know", "4", (None, False)),
    ("choice", "The answer is (C) Paris", "C", ("C", True)),
    ("choice", r"\boxed{c}", "C", ("C", True)),
    ("choice", r"\boxed{\text{B}}", "(B)", ("B", True)),
    ("choice", "I'd say it is Paris", "C", (None, False)),
]


@pytest.mark.parametrize(("kind", "response", "reference", "expected"), CASES)
def test_each_grader_reads_the_answer_it_is_for(kind: str, response: str, reference: str, expected: object) -> None:
    assert grade_answer(Grading(kind=kind), response, reference) == expected


def test_tolerance_is_relative_or_absolute() -> None:
    loose = Grading(kind="numeric", tolerance=0.05)
    assert grade_answer(loose, "102", "100")[1]
    assert grade_answer(loose, "0.01", "0")[1]
    assert not grade_answer(loose, "110", "100")[1]


def test_a_regular_expression_takes_its_last_match() -> None:
    rule = Grading(kind="regex", pattern=r"#### (.*)")
    assert grade_answer(rule, "#### 3\nno, #### 4 ", "4") == ("4", True)
    assert grade_answer(rule, "4", "4") == (None, False)


@pytest.mark.parametrize(("kind", "reference"), [("numeric", "many"), ("choice", "12"), ("code", "4")])
def test_a_reference_that_no_answer_could_equal_is_refused(kind: str, reference: str) -> None:
    with pytest.raises(InputError, match="choose another"):
        grade_answer(Grading(kind=kind), "4", reference)


def test_math_verify_grants_what_the_paper_does_not() -> None:
    pytest.importorskip("math_verify")
    rule = Grading(kind="math-verify")
    response = r"\boxed{\frac{2}{4}}"
    assert not grade_answer(Grading(kind="paper"), response, r"\frac{1}{2}")[1]
    assert grade_answer(rule, response, r"\frac{1}{2}") == (r"\frac{2}{4}", True)
    assert not grade_answer(rule, response, r"\frac{1}{3}")[1]
    assert grade_answer(rule, "So the answer is 12.", "12") == ("12", True)
    assert grade_answer(rule, "I cannot say", "12") == (None, False)
    with ThreadPoolExecutor(1) as pool:  # where it can set no alarm
        assert pool.submit(grade_answer, rule, response, r"\frac{1}{2}").result()[1]


def test_a_missing_math_verify_is_said_with_its_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(InputError, match="pip install"):
        grade_answer(Grading(kind="math-verify"), r"\boxed{1}", "1")


def test_own_files_are_graded_forgivingly_and_the_papers_benchmarks_by_its_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["aime-2024", "file:a/mine.jsonl", "file:b/letters.jsonl"]
    section = Eval(benchmarks=names, graders={"letters": "choice"})
    monkeypatch.setattr(graders, "has_math_verify", lambda: True)
    assert [choose_grading(section, name).kind for name in names] == ["paper", "math-verify", "choice"]
    monkeypatch.setattr(graders, "has_math_verify", lambda: False)
    assert [choose_grading(section, name).kind for name in names] == ["paper", "paper", "choice"]
    section = section.model_copy(update={"profile": "math-verify"})
    assert [choose_grading(section, name).kind for name in names] == ["math-verify", "math-verify", "choice"]


def test_rollouts_are_graded_without_running_code() -> None:
    assert grade_rollout(Grading("numeric"), "It is 4.", "4") == ("4", True)
    assert grade_rollout(Grading("numeric"), "It is 4.", "four") == (None, False), "no number to compare with"
    for rule in (Grading("paper"), Grading("code"), Grading("python", function="nowhere.py:grade")):
        assert grade_rollout(rule, "It is 4.", "4") == (None, False)
        assert grade_rollout(rule, r"\boxed{4}", "4") == ("4", True)


def test_a_function_of_ones_own_grades(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text("def grade(response, answer):\n    return answer in response\n")
    function = f"{tmp_path / 'my.py'}:grade"
    rule = Grading(kind="python", function=function)
    assert grade_answer(rule, "it is 4", "4", load_function(function, trusted=True)) == ("it is 4", True)
    assert grade_answer(rule, " ", "4", load_function(function, trusted=True)) == (None, False)
    for wrong in ("nothing", "grade\n"):
        with pytest.raises(InputError, match="cannot be loaded"):
            load_function(f"{tmp_path / 'my.py'}:{wrong}", trusted=True)
