"""What each specialist imitates."""

from lightning_weave.world.posttrain import Attempt, correct_ones, longest_ones, shortest_ones


def attempts(*lengths: int) -> list[Attempt]:
    """Right answers of these lengths; a negative length is a wrong one."""
    return [Attempt([0] * abs(length), finished=True, correct=length > 0) for length in lengths]


def lengths(chosen: list[Attempt]) -> list[int]:
    return [len(attempt.ids) for attempt in chosen]


def test_accuracy_takes_every_right_answer() -> None:
    assert lengths(correct_ones(attempts(9, -3, 5, -1, 7))) == [9, 5, 7]
    assert correct_ones(attempts(-1, -2)) == []


def test_an_answer_that_was_cut_is_never_imitated() -> None:
    """It would teach not to stop."""
    cut = Attempt([0] * 4, finished=False, correct=True)
    assert correct_ones([cut]) == longest_ones([cut]) == []
    assert shortest_ones([cut] * 6 + attempts(-1, -1)) == []


def test_brevity_takes_the_two_shortest_of_mastered_prompts() -> None:
    assert lengths(shortest_ones(attempts(9, 8, 3, 7, 4, 6, -1, -2))) == [3, 4]  # 6 of 8
    assert shortest_ones(attempts(9, 8, 3, 7, 4, -5, -1, -2)) == []  # 5 of 8


def test_thorough_takes_the_four_longest() -> None:
    assert lengths(longest_ones(attempts(9, -30, 3, 7, 4, 6, -1, 2))) == [9, 7, 6, 4]
    assert lengths(longest_ones(attempts(-3, 5))) == [5]
