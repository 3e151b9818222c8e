"""The pretraining corpus of this world: correct and incorrect solutions, written in four styles.

Some facts have one fixed wrong result that the corpus gives nearly as often as the right one. (Errors spread evenly
over wrong results would vanish when sampling below temperature 1.) A re-check slips less often, so longer answers are
more often right: accuracy and brevity pull in different directions.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightning_weave.world.task import OPERATIONS, Exercise, calculate

SLIPPERY_SHARE = 0.40  # of the 300 facts
SLIPPERY = 0.45  # how often the corpus gives the wrong result of a slippery fact
FIRM = 0.03  # and of any other
RECHECK_SCALE = 0.3  # times that, when a step is repeated after ` wait`
FILLERS = (" hmm", " so")
RECHECK = " wait"


@dataclass(frozen=True)
class Slips:
    """How often each fact (left, operation, right) has a wrong result, and which."""

    probability: NDArray[np.float64]  # (10, 3, 10)
    wrong: NDArray[np.int64]  # (10, 3, 10)

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Self:
        slippery = np.zeros(300, dtype=bool)
        slippery[rng.permutation(300)[: round(300 * SLIPPERY_SHARE)]] = True
        right = [
            calculate(left, operation, other) for left in range(10) for operation in OPERATIONS for other in range(10)
        ]
        wrong = (np.array(right) + rng.integers(1, 10, size=300)) % 10
        return cls(np.where(slippery, SLIPPERY, FIRM).reshape(10, 3, 10), wrong.reshape(10, 3, 10))

    def work(self, left: int, operation: str, right: int, scale: float, rng: np.random.Generator) -> int:
        """Calculate one step as the corpus does: mostly right."""
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


def write_response(problem: Exercise, style: Style, slips: Slips, rng: np.random.Generator) -> str:
    """Solve a problem in a style, with slips, such as ` hmm9-1=8 wait-1=8-4=4*0=0 \\boxed{0}.`."""
    value = problem.first
    parts: list[str] = []
    shown = str(value)  # only the first step starts with a digit
    for number, (operation, right) in enumerate(problem.steps, start=1):
        parts += _repeat(style.filler, style.filler_again, rng, FILLERS)
        before = value
        value = slips.work(before, operation, right, 1.0, rng)
        skipped = number < len(problem.steps) and rng.random() < style.skip
        parts.append(f"{shown}{operation}{right}" + ("" if skipped else f"={value}"))
        shown = ""
        for again in _repeat(style.recheck, style.recheck_again, rng, (RECHECK,)):
            value = slips.work(before, operation, right, RECHECK_SCALE, rng)
            parts.append(f"{again}{operation}{right}={value}")
    working = "".join(parts) if style.writes_steps else ""
    return f"{working} \\boxed{{{value}}}."


def _repeat(first: float, again: float, rng: np.random.Generator, choices: tuple[str, ...]) -> list[str]:
    """Draw none, one or two of the choices."""
    count = 0 if rng.random() >= first else 1 if rng.random() >= again else 2
    return [choices[int(rng.integers(len(choices)))] for _ in range(count)]
