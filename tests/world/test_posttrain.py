"""What each specialist imitates."""

from tiny_world.models import Attempt, select_correct, select_longest, select_shortest


def attempts(*lengths: int) -> list[Attempt]:
    """Right answers of these lengths; a negative length is a wrong one."""
    return [Attempt([0] * abs(length), finished=True, correct=length > 0) for length in lengths]


def lengths(chosen: list[Attempt]) -> list[int]:
    return [len(attempt.ids) for attempt in chosen]


def test_accuracy_takes_every_right_answer() -> None:
    assert lengths(select_correct(attempts(9, -3, 5, -1, 7))) == [9, 5, 7]
    assert select_correct(attempts(-1, -2)) == []


def test_an_answer_that_was_cut_is_never_imitated() -> None:
    """It would teach not to stop."""
    cut = Attempt([0] * 4, finished=False, correct=True)
    assert select_correct([cut]) == select_longest([cut]) == []
    assert select_shortest([cut] * 6 + attempts(-1, -1)) == []


def test_brevity_takes_the_two_shortest_of_mastered_prompts() -> None:
    assert lengths(select_shortest(attempts(9, 8, 3, 7, 4, 6, -1, -2))) == [3, 4]  # 6 of 8
    assert select_shortest(attempts(9, 8, 3, 7, 4, -5, -1, -2)) == []  # 5 of 8


def test_thorough_takes_the_four_longest() -> None:
    assert lengths(select_longest(attempts(9, -30, 3, 7, 4, 6, -1, 2))) == [9, 7, 6, 4]
    assert lengths(select_longest(attempts(-3, 5))) == [5]
