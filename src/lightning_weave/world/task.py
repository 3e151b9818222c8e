"""The task: a chain of digits evaluated left to right modulo 10, and the verifier of its answers."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Self
from zlib import crc32

import numpy as np

from lightning_weave.grading.math import grade

OPERATIONS = "+-*"
DIFFICULTIES = {"easy": 3, "medium": 4, "hard": 5}  # benchmark -> operations of each of its problems


def random_numbers(seed: int, *names: str) -> np.random.Generator:
    """Give each named use of a world's seed its own stream, so that adding one does not change the others."""
    return np.random.default_rng([seed, *(crc32(name.encode()) for name in names)])


def calculate(left: int, operation: str, right: int) -> int:
    """Apply one operation modulo 10.

    >>> calculate(1, "-", 4)
    7
    """
    match operation:
        case "+":
            return (left + right) % 10
        case "-":
            return (left - right) % 10
        case "*":
            return (left * right) % 10
        case _:
            raise ValueError(f"unknown operation {operation!r}")


@dataclass(frozen=True)
class Exercise:
    """Digits, all different, joined by operations that bind from left to right.

    >>> problem = Exercise.read("9-1-4*0")
    >>> problem.text, problem.answer
    ('9-1-4*0', '0')
    """

    first: int
    steps: tuple[tuple[str, int], ...]

    @classmethod
    def read(cls, text: str) -> Self:
        return cls(int(text[0]), tuple((text[at], int(text[at + 1])) for at in range(1, len(text), 2)))

    @classmethod
    def draw(cls, length: int, rng: np.random.Generator) -> Self:
        """Draw a problem of `length` operations, every one equally likely."""
        # Digits that differ let a model find its place in the question by the last digit it wrote.
        first, *others = rng.permutation(10)[: length + 1].tolist()
        return cls(first, tuple((OPERATIONS[int(rng.integers(3))], other) for other in others))

    @property
    def text(self) -> str:
        return str(self.first) + "".join(f"{operation}{digit}" for operation, digit in self.steps)

    @property
    def answer(self) -> str:
        return str(reduce(lambda value, step: calculate(value, *step), self.steps, self.first))

    @property
    def prompt(self) -> str:
        """The paper's evaluation prompt, used for every model of this world."""
        return f"Question: {self.text}\nAnswer:"


def endless_problems(
    rng: np.random.Generator, lengths: Collection[int] = tuple(DIFFICULTIES.values()), unlike: Collection[Exercise] = ()
) -> Iterator[Exercise]:
    """Draw problems of mixed lengths without end, with repeats but none from `unlike`."""
    choices = list(lengths)
    avoided = frozenset(unlike)
    while True:
        problem = Exercise.draw(choices[int(rng.integers(len(choices)))], rng)
        if problem not in avoided:
            yield problem


def different(problems: Iterable[Exercise]) -> Iterator[Exercise]:
    """Leave out repeats."""
    seen = set[Exercise]()
    for problem in problems:
        if problem not in seen:
            seen.add(problem)
            yield problem


def verify(response: str, problem: Exercise) -> bool:
    """Decide whether the last balanced box of a response holds the answer."""
    return grade(response, problem.answer)
