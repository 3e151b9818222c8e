"""The task of a tiny world, and the pretraining corpus of solved problems.

The task is a chain of digits evaluated from left to right modulo 10; the answer is the last \\boxed{}. The corpus has
correct and incorrect solutions in four styles. Some facts have one fixed wrong result that the corpus gives nearly as
often as the right one. (Errors spread evenly over all wrong results would vanish when sampling below temperature 1.) A
re-check is wrong less often, so longer answers are more often right: accuracy and brevity pull in different directions.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Self
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

OPERATIONS = "+-*"
DIFFICULTIES = {"easy": 3, "medium": 4, "hard": 5}  # benchmark -> operations of each of its problems
ERROR_PRONE_SHARE = 0.40  # of the 300 facts
ERROR_PRONE = 0.45  # how often the corpus gives the wrong result of an error-prone fact
RELIABLE = 0.03  # and of any other
RECHECK_SCALE = 0.3  # times that, when a step is repeated after ` wait`
FILLERS = (" hmm", " so")
RECHECK = " wait"


def make_rng(seed: int, *names: str) -> np.random.Generator:
    """Create the random stream of one named use of a world's seed, so that adding a use does not change the others."""
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
    """Distinct digits joined by operations that are applied from left to right.

    >>> problem = Exercise.parse("9-1-4*0")
    >>> problem.text, problem.answer
    ('9-1-4*0', '0')
    """

    first: int
    steps: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(int(text[0]), tuple((text[at], int(text[at + 1])) for at in range(1, len(text), 2)))

    @classmethod
    def draw(cls, length: int, rng: np.random.Generator) -> Self:
        """Draw a problem of `length` operations, every one equally likely."""
        # Distinct digits let a model find its place in the question by the last digit it wrote.
        first, *others = rng.permutation(10)[: length + 1].tolist()
        return cls(first, tuple((OPERATIONS[int(rng.integers(3))], other) for other in others))

    @property
    def text(self) -> str:
        return str(self.first) + "".join(f"{operation}{digit}" for operation, digit in self.steps)

    @property
    def answer(self) -> str:
        value = self.first
        for operation, digit in self.steps:
            value = calculate(value, operation, digit)
        return str(value)

    @property
    def prompt(self) -> str:
        """The paper's evaluation prompt, used for every model of a world."""
        return f"Question: {self.text}\nAnswer:"


def draw_problems(
    rng: np.random.Generator,
    lengths: Collection[int] = tuple(DIFFICULTIES.values()),
    exclude: Collection[Exercise] = (),
) -> Iterator[Exercise]:
    """Draw problems of mixed lengths without end, with repeats but none from `exclude`."""
    choices = list(lengths)
    excluded = frozenset(exclude)
    while True:
        problem = Exercise.draw(choices[int(rng.integers(len(choices)))], rng)
        if problem not in excluded:
            yield problem


def unique(problems: Iterable[Exercise]) -> Iterator[Exercise]:
    """Skip repeats."""
    seen = set[Exercise]()
    for problem in problems:
        if problem not in seen:
            seen.add(problem)
            yield problem


@dataclass(frozen=True)
class Errors:
    """How often the corpus gives a wrong result for each fact (left, operation, right), and which."""

    probability: NDArray[np.float64]  # (10, 3, 10)
    wrong: NDArray[np.int64]  # (10, 3, 10)

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        error_prone = np.zeros(300, dtype=bool)
        error_prone[rng.permutation(300)[: round(300 * ERROR_PRONE_SHARE)]] = True
        right = [
            calculate(left, operation, other) for left in range(10) for operation in OPERATIONS for other in range(10)
        ]
        wrong = (np.array(right) + rng.integers(1, 10, size=300)) % 10
        return cls(np.where(error_prone, ERROR_PRONE, RELIABLE).reshape(10, 3, 10), wrong.reshape(10, 3, 10))

    def calculate(self, left: int, operation: str, right: int, scale: float, rng: np.random.Generator) -> int:
        """Calculate one step, wrong with the probability of its fact times `scale`."""
        fact = left, OPERATIONS.index(operation), right
        if rng.random() < scale * self.probability[fact]:
            return int(self.wrong[fact])
        return calculate(left, operation, right)


@dataclass(frozen=True)
class Style:
    """A style of writing; probabilities are per step, `_again` for a second one after the first."""

    share: float
    writes_steps: bool = True
    skip: float = 0.0  # leave out an intermediate result
    filler: float = 0.0
    filler_again: float = 0.0
    recheck: float = 0.0
    recheck_again: float = 0.0


STYLES = {
    "terse": Style(0.07, writes_steps=False),
    "jumpy": Style(0.10, skip=0.6),
    "stepwise": Style(0.18, filler=0.15, recheck=0.12),
    # Well away from one half: sampling below temperature 1 would amplify the noise of an even choice.
    "verbose": Style(0.65, filler=0.72, filler_again=0.25, recheck=0.70, recheck_again=0.3),
}


def draw_style(rng: np.random.Generator) -> Style:
    """Draw a style by its share of the corpus."""
    styles = list(STYLES.values())
    return styles[int(rng.choice(len(styles), p=[style.share for style in styles]))]


def write_response(problem: Exercise, style: Style, errors: Errors, rng: np.random.Generator) -> str:
    """Solve a problem in a style, with errors, such as ` hmm9-1=8 wait-1=8-4=4*0=0 \\boxed{0}.`."""

    def repeat(first: float, again: float, choices: tuple[str, ...]) -> list[str]:
        """Draw none, one or two of the choices."""
        count = 0 if rng.random() >= first else 1 if rng.random() >= again else 2
        return [choices[int(rng.integers(len(choices)))] for _ in range(count)]

    value = problem.first
    parts: list[str] = []
    shown = str(value)  # only the first step starts with a digit
    for number, (operation, right) in enumerate(problem.steps, start=1):
        parts += repeat(style.filler, style.filler_again, FILLERS)
        before = value
        value = errors.calculate(before, operation, right, 1.0, rng)
        skipped = number < len(problem.steps) and rng.random() < style.skip
        parts.append(f"{shown}{operation}{right}" + ("" if skipped else f"={value}"))
        shown = ""
        for again in repeat(style.recheck, style.recheck_again, (RECHECK,)):
            value = errors.calculate(before, operation, right, RECHECK_SCALE, rng)
            parts.append(f"{again}{operation}{right}={value}")
    working = "".join(parts) if style.writes_steps else ""
    return f"{working} \\boxed{{{value}}}."
