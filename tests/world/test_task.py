"""The task and its verifier."""

import doctest
from itertools import islice

import pytest

from lightning_weave.grading.math import grade
from tiny_world import task
from tiny_world.task import Exercise, draw_problems, make_rng, unique


def by_hand(text: str) -> int:
    """Evaluate with Python's own integers, brackets put where left to right wants them."""
    return (
        eval("(" * (len(text) // 2) + text[0] + "".join(f"{text[at : at + 2]})" for at in range(1, len(text), 2))) % 10
    )


def test_answers_are_left_to_right_and_modulo_ten() -> None:
    assert by_hand("2+3*4") == 0  # not 14 % 10
    for problem in islice(draw_problems(make_rng(0, "test")), 2000):
        assert problem.answer == str(by_hand(problem.text))
        assert Exercise.parse(problem.text) == problem


def test_problems_have_three_to_five_operations_and_digits_that_differ() -> None:
    problems = list(islice(draw_problems(make_rng(1, "test")), 3000))
    lengths = [len(problem.steps) for problem in problems]
    assert {length: round(lengths.count(length) / 3000, 1) for length in set(lengths)} == {3: 0.3, 4: 0.3, 5: 0.3}
    for problem in problems:
        digits = [problem.first, *(digit for _, digit in problem.steps)]
        assert len(set(digits)) == len(digits)
    operations = [operation for problem in problems for operation, _ in problem.steps]
    assert all(abs(operations.count(operation) / len(operations) - 1 / 3) < 0.02 for operation in "+-*")


def test_unwanted_and_repeated_problems_are_left_out() -> None:
    short = list(islice(unique(draw_problems(make_rng(2, "test"), lengths=[1])), 270))
    assert len({problem.text for problem in short}) == 270  # every ordered pair of digits with every operation
    left = islice(draw_problems(make_rng(3, "test"), lengths=[1], exclude=short[:260]), 500)
    assert {problem.text for problem in left} == {problem.text for problem in short[260:]}


def test_prompt_is_the_papers_evaluation_prompt() -> None:
    assert Exercise.parse("9-1-4*0").prompt == "Question: 9-1-4*0\nAnswer:"


def test_streams_of_one_seed_differ_and_repeat() -> None:
    draws = [make_rng(seed, *names).random() for seed in (0, 1) for names in [("a",), ("b",), ("a", "b"), ("b", "a")]]
    assert len(set(draws)) == len(draws)
    assert make_rng(1, "a", "b").random() == draws[6]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (" hmm9-1=8 wait-1=8-4=4*0=0 \\boxed{0}.", True),
        (" \\boxed{0}", True),
        (" \\boxed{4}. \\boxed{0}.", True),  # the last box counts
        (" \\boxed{0}. \\boxed{4}.", False),
        (" \\boxed{0}. \\boxed{4", True),  # the last that is closed
        ("9-1=8-4=4*0=0.", False),  # nothing in a box
        (" \\boxed{}.", False),
        (" \\boxed{-0}.", True),
        (" \\boxed{10}.", False),
        ("", False),
    ],
)
def test_verifier_reads_the_last_balanced_box(response: str, right: bool) -> None:
    assert grade(response, Exercise.parse("9-1-4*0").answer) is right


def test_examples_in_the_docstrings_hold() -> None:
    result = doctest.testmod(task)
    assert result.attempted
    assert not result.failed
