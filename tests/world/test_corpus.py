"""The corpus has the styles and errors that its constants state, counted from its text."""

import re
from collections import Counter
from functools import cache
from itertools import islice

import pytest

from tiny_world.task import (
    OPERATIONS,
    STYLES,
    Errors,
    Exercise,
    calculate,
    draw_problems,
    draw_style,
    make_rng,
    write_response,
)

STEP = re.compile(
    r"(?P<fillers>(?: hmm| so)*)(?P<wait> wait)?(?P<first>\d)?(?P<operation>[-+*])(?P<digit>\d)=(?P<result>\d)"
)
ERRORS = Errors.draw(make_rng(5, "slips"))


@cache
def written(style: str, count: int = 3000) -> list[tuple[Exercise, str]]:
    rng = make_rng(5, "corpus", style)
    problems = islice(draw_problems(rng), count)
    return [(problem, write_response(problem, STYLES[style], ERRORS, rng)) for problem in problems]


def steps(problem: Exercise, text: str) -> list[tuple[re.Match[str], int]]:
    """Read a working, checking its form; each written step with the value that it starts from."""
    value, before, found = problem.first, problem.first, list[tuple[re.Match[str], int]]()
    body, box = text.split(" \\boxed{")
    while body:
        step = STEP.match(body)
        assert step is not None, text
        before = before if step["wait"] else value
        found.append((step, before))
        value, body = int(step["result"]), body[step.end() :]
    assert box == f"{value}}}."
    return found


def assert_share(hits: int, trials: int, expected: float) -> None:
    error = (expected * (1 - expected) / trials) ** 0.5
    assert trials > 100
    assert abs(hits / trials - expected) <= 4 * error, f"{hits / trials:.3f} of {trials}, not {expected}"


def test_styles_are_drawn_by_their_shares() -> None:
    assert {name: style.share for name, style in STYLES.items()} == {
        "terse": 0.07,
        "jumpy": 0.10,
        "stepwise": 0.18,
        "verbose": 0.65,
    }
    rng = make_rng(5, "styles")
    drawn = Counter(draw_style(rng) for _ in range(5000))
    for style in STYLES.values():
        assert_share(drawn[style], 5000, style.share)


def test_two_facts_of_five_are_error_prone_and_their_wrong_result_is_wrong() -> None:
    assert (ERRORS.probability == 0.45).sum() == 120
    assert (ERRORS.probability == 0.03).sum() == 180
    for left in range(10):
        for place, operation in enumerate(OPERATIONS):
            for right in range(10):
                wrong = ERRORS.wrong[left, place, right]
                assert 0 <= wrong < 10
                assert wrong != calculate(left, operation, right)


@pytest.mark.parametrize(("wait", "error_prone", "reliable"), [(False, 0.45, 0.03), (True, 0.135, 0.009)])
def test_steps_are_wrong_as_often_as_stated_and_always_with_the_same_result(
    wait: bool, error_prone: float, reliable: float
) -> None:
    counts = Counter[tuple[float, bool]]()
    for problem, text in written("verbose"):
        for step, before in steps(problem, text):
            fact = before, OPERATIONS.index(step["operation"]), int(step["digit"])
            if bool(step["wait"]) is wait:
                is_wrong = int(step["result"]) != calculate(before, step["operation"], int(step["digit"]))
                assert not is_wrong or int(step["result"]) == ERRORS.wrong[fact]
                counts[ERRORS.probability[fact], is_wrong] += 1
    assert_share(counts[0.45, True], counts[0.45, True] + counts[0.45, False], error_prone)
    assert_share(counts[0.03, True], counts[0.03, True] + counts[0.03, False], reliable)


@pytest.mark.parametrize(
    ("style", "filler", "filler_again", "recheck", "recheck_again"),
    [("verbose", 0.72, 0.25, 0.70, 0.3), ("stepwise", 0.15, 0.0, 0.12, 0.0)],
)
def test_fillers_and_rechecks_are_as_frequent_as_stated(
    style: str, filler: float, filler_again: float, recheck: float, recheck_again: float
) -> None:
    fillers, rechecks, words, total = Counter[int](), Counter[int](), Counter[str](), 0
    for problem, text in written(style):
        waits: list[int] = []
        for step, _ in steps(problem, text):
            if step["wait"]:
                waits[-1] += 1
                continue
            waits.append(0)
            fillers[len(step["fillers"].split())] += 1
            words.update(step["fillers"].split())
        assert len(waits) == len(problem.steps)  # a re-check works the same step again and skips none
        rechecks.update(waits)
        total += len(waits)
    assert_share(fillers[1] + fillers[2], total, filler)
    assert_share(fillers[2], fillers[1] + fillers[2], filler_again)
    assert_share(rechecks[1] + rechecks[2], total, recheck)
    assert_share(rechecks[2], rechecks[1] + rechecks[2], recheck_again)
    assert_share(words["hmm"], words.total(), 0.5)


def test_terse_answers_box_at_once() -> None:
    assert all(re.fullmatch(r" \\boxed\{\d\}\.", text) for _, text in written("terse"))


def test_jumpy_answers_leave_out_intermediate_results() -> None:
    written_results, intermediate = 0, 0
    for problem, text in written("jumpy"):
        working = text.split(" \\boxed{")[0]
        assert re.sub(r"=\d", "", working) == problem.text
        assert working[-2] == "="  # the last result is never left out
        written_results += working.count("=") - 1
        intermediate += len(problem.steps) - 1
    assert_share(intermediate - written_results, intermediate, 0.6)


def test_rechecking_pays() -> None:
    """The tension of this world: longer answers are more often right."""

    def accuracy(style: str) -> float:
        return sum(text.endswith(f"{{{problem.answer}}}.") for problem, text in written(style)) / len(written(style))

    assert accuracy("verbose") > accuracy("stepwise") + 0.1
