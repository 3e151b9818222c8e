"""Screening against a benchmark: planted overlaps are found, near misses stay, the index equals brute force."""

import random

import pytest

from lightning_weave.prompts import Screen
from lightning_weave.prompts.decontaminate import RUN, SHARE, SHORTEST, words

PROBLEMS = [
    "A baker packs muffins into boxes of 12 and cookies into boxes of 18. One day she fills 45 boxes and packs 672 "
    "pieces in all. Find the number of boxes that hold cookies, and prove that your answer is the only possible one.",
    "Let $ABC$ be a triangle with $AB = 13$, $BC = 14$ and $CA = 15$. The circle through $B$ tangent to $AC$ at its "
    "midpoint meets line $AB$ again at $P$. The length $AP$ can be written as $\\frac{m}{n}$, where $m$ and $n$ are "
    "relatively prime positive integers. Find $m + n$.",
    "You are given a string s of lowercase letters and an integer k. In one move you may swap two neighbouring "
    "letters. Return the smallest string in dictionary order that at most k moves can reach.\n\nConstraints:\n"
    "1 <= s.length <= 10^5\n0 <= k <= 10^9",
    "给定一个长度为 n 的整数数组，请你求出其中和最大的连续子数组的长度，如果有多个答案请输出最小的一个。",
]
SCREEN = Screen((f"bench:{n}", problem) for n, problem in enumerate(PROBLEMS))


def change(text, share, seed):
    spoken = text.split(" ")
    rng = random.Random(seed)
    for position in rng.sample(range(len(spoken)), round(share * len(spoken))):
        spoken[position] = rng.choice(["seven", "blue", "quickly", "otherwise"])
    return " ".join(spoken)


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
@pytest.mark.parametrize(
    "plant",
    [
        lambda text: text,
        lambda text: "  " + text.upper().replace(" ", "\n\n\t") + " ",
        lambda text: text.replace(",", " ,").replace(". ", " ").replace("$", ""),
    ],
)
def test_the_same_problem_in_another_form_is_found(number, plant):
    found = SCREEN.find("mine:1", plant(PROBLEMS[number]))
    assert (found.where, found.problem, found.share, found.same) == ("mine:1", f"bench:{number}", 1.0, True)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("seed", range(20))
def test_nine_tenths_of_a_problem_are_found(number, seed):
    found = SCREEN.find("mine", change(PROBLEMS[number], 0.1, seed))
    assert found.problem == f"bench:{number}"
    assert not found.same
    assert SHARE <= found.share < 1


@pytest.mark.parametrize("number", range(len(PROBLEMS)))
def test_a_problem_inside_a_longer_prompt_and_nine_tenths_of_its_length_are_found(number):
    problem = PROBLEMS[number]
    wrapped = f"Please help me with this one, I have an exam tomorrow! {problem} Think aloud, and give the result last."
    assert SCREEN.find("mine", wrapped).share == 1.0
    assert SCREEN.find("mine", problem[: len(problem) * 9 // 10]).problem == f"bench:{number}"


@pytest.mark.parametrize(
    "near_miss",
    [
        # the same stock phrases, another problem
        "Let $S$ be the set of divisors of $720$. Two of them are drawn without replacement. The probability that one "
        "divides the other can be written as $\\frac{m}{n}$, where $m$ and $n$ are relatively prime positive integers. "
        "Find $m + n$.",
        "You are given a string s of lowercase letters. A letter is lonely if it occurs once. Return the number of "
        "lonely letters.\n\nConstraints:\n1 <= s.length <= 10^5",
        # the same subject
        "A baker sells muffins for 2 dollars and cookies for 1 dollar. She took 90 dollars for 70 pieces. How many "
        "muffins did she sell?",
        # half of a problem
        change(PROBLEMS[0], 0.5, seed=0),
        " ".join(PROBLEMS[0].split()[:20])
        + " What is the largest prime below the number of crumbs that she swept from "
        "the floor on each of the thirty days of June, if every one left exactly seven?",
        # too short to tell
        "Find the number of boxes that hold cookies.",
        "",
        "?",
    ],
)
def test_near_misses_stay(near_miss):
    assert SCREEN.find("mine", near_miss) is None


def test_without_problems_nothing_is_found():
    assert Screen(()).find("mine", "") is None


def brute_force(text, problem):
    one, other = words(text), words(problem)
    return max(share_of(one, other), share_of(other, one)) if min(len(one), len(other)) >= SHORTEST else 0.0


def share_of(one, other):
    runs = [other[i : i + RUN] for i in range(len(other) - RUN + 1)]
    covered = set()
    for i in range(len(one) - RUN + 1):
        if one[i : i + RUN] in runs:
            covered |= {i, i + 1, i + 2, i + 3}
    return len(covered) / len(one)


def test_the_index_finds_what_brute_force_finds():
    rng = random.Random(5)
    vocabulary = ["a", "b", "c"]  # few words: runs repeat within a text, which an index may miscount

    def text():
        return " ".join(rng.choices(vocabulary, weights=[5, 2, 1], k=rng.randint(0, 40)))

    problems = [text() for _ in range(60)]
    screen = Screen((str(n), problem) for n, problem in enumerate(problems))
    outcomes = []
    for _ in range(300):
        candidate = text()
        found = screen.find("mine", candidate)
        if found and found.same:
            assert words(problems[int(found.problem)]) == words(candidate)
            continue
        shares = [brute_force(candidate, problem) for problem in problems]
        best = max(shares)
        assert (found.share if found else None) == (best if best >= SHARE else None)
        assert found is None or shares[int(found.problem)] == best
        outcomes.append(found is None)
    assert 10 < sum(outcomes) < len(outcomes) - 10  # both happened often
