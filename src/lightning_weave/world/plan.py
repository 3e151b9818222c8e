"""The models and problems of a world, at each size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_weave.world.posttrain import Attempt, Practice, correct_ones, longest_ones, shortest_ones
from lightning_weave.world.pretrain import Dimensions, Family

Size = Literal["full", "miniature"]


@dataclass(frozen=True)
class Base:
    """A model to pretrain."""

    family: Family
    dimensions: Dimensions
    spelling: str
    steps: int


@dataclass(frozen=True)
class Specialist:
    """A model to post-train from its base."""

    base: str
    choose: Callable[[Sequence[Attempt]], list[Attempt]]
    practice: Practice


@dataclass(frozen=True)
class WorldPlan:
    """Everything that a build makes."""

    bases: dict[str, Base]
    specialists: dict[str, Specialist]
    batch: int  # of pretraining
    prompts: int
    problems: int  # of each benchmark
    samples: int  # of each problem, when models are measured


def _bases(widths: Sequence[int], layers: int, heads: int, feed_forward: int, steps: int) -> dict[str, Base]:
    student, accuracy, brevity, thorough = (Dimensions(layers, width, heads, feed_forward) for width in widths)
    return {
        "student": Base("qwen3", student, "student", steps),
        "accuracy-pre": Base("qwen3", accuracy, "accuracy", steps),
        "brevity-pre": Base("llama", brevity, "brevity", steps),
        "thorough-pre": Base("llama", thorough, "thorough", steps),
    }


def _specialists(practice: Practice, brevity: Practice, mastered: float) -> dict[str, Specialist]:
    return {
        "accuracy-post": Specialist("accuracy-pre", correct_ones, practice),
        "brevity-post": Specialist("brevity-pre", partial(shortest_ones, mastered=mastered), brevity),
        "thorough-post": Specialist("thorough-pre", longest_ones, practice),
    }


USUAL = Practice(rounds=4, prompts=700, rate=1e-3)
# Slightly below temperature 1: at 1 too few prompts are mastered and the pair loses accuracy, at 0.9 it loses none.
BREVITY = Practice(rounds=3, prompts=700, rate=1e-3, temperature=0.95)
SHORT = Practice(rounds=1, prompts=100, rate=1e-3)
PLANS: dict[Size, WorldPlan] = {
    "full": WorldPlan(
        bases=_bases([64, 56, 48, 56], layers=3, heads=4, feed_forward=128, steps=450),
        specialists=_specialists(USUAL, BREVITY, mastered=0.75),
        batch=96,
        prompts=1000,
        problems=200,
        samples=4,
    ),
    # For tests: takes seconds, and its models learn to write, not to calculate.
    "miniature": WorldPlan(
        bases=_bases([32] * 4, layers=1, heads=2, feed_forward=32, steps=60),
        specialists=_specialists(SHORT, SHORT, mastered=0.0),
        batch=16,
        prompts=24,
        problems=8,
        samples=2,
    ),
}
