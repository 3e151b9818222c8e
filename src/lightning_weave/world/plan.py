"""What a world is made of, at each size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from lightning_weave.world.posttrain import Attempt, Practice, correct_ones, longest_ones, shortest_ones
from lightning_weave.world.pretrain import Family, Shape

Size = Literal["full", "miniature"]


@dataclass(frozen=True)
class Base:
    """A model to pretrain."""

    family: Family
    shape: Shape
    spelling: str
    steps: int


@dataclass(frozen=True)
class Specialist:
    """A model to post-train from its base."""

    base: str
    choose: Callable[[Sequence[Attempt]], list[Attempt]]
    practice: Practice


@dataclass(frozen=True)
class Plan:
    """All that a build makes."""

    bases: dict[str, Base]
    specialists: dict[str, Specialist]
    batch: int  # of pretraining
    prompts: int
    problems: int  # of each benchmark
    samples: int  # of each problem, when models are measured


def _full() -> Plan:
    practice = Practice(rounds=4, prompts=700, rate=1e-3)
    # A little below 1: at 1 too little is mastered for the pair to keep its accuracy, at 0.9 it loses none of it.
    brevity = Practice(rounds=3, prompts=700, rate=1e-3, temperature=0.95)
    return Plan(
        bases={
            "student": Base("qwen3", Shape(layers=3, width=64, heads=4, feed_forward=128), "student", steps=450),
            "accuracy-pre": Base("qwen3", Shape(layers=3, width=56, heads=4, feed_forward=128), "accuracy", steps=450),
            "brevity-pre": Base("llama", Shape(layers=3, width=48, heads=4, feed_forward=128), "brevity", steps=450),
            "thorough-pre": Base("llama", Shape(layers=3, width=56, heads=4, feed_forward=128), "thorough", steps=450),
        },
        specialists={
            "accuracy-post": Specialist("accuracy-pre", correct_ones, practice),
            "brevity-post": Specialist("brevity-pre", shortest_ones, brevity),
            "thorough-post": Specialist("thorough-pre", longest_ones, practice),
        },
        batch=96,
        prompts=1000,
        problems=200,
        samples=4,
    )


def _miniature() -> Plan:
    """Go through all the same motions in seconds; its models learn to write, not to calculate."""
    shape, practice = Shape(layers=1, width=32, heads=2, feed_forward=32), Practice(rounds=1, prompts=100, rate=1e-3)
    return Plan(
        bases={
            "student": Base("qwen3", shape, "student", steps=60),
            "accuracy-pre": Base("qwen3", shape, "accuracy", steps=60),
            "brevity-pre": Base("llama", shape, "brevity", steps=60),
            "thorough-pre": Base("llama", shape, "thorough", steps=60),
        },
        specialists={
            "accuracy-post": Specialist("accuracy-pre", correct_ones, practice),
            "brevity-post": Specialist("brevity-pre", partial(shortest_ones, mastered=0.0), practice),
            "thorough-post": Specialist("thorough-pre", longest_ones, practice),
        },
        batch=16,
        prompts=24,
        problems=8,
        samples=2,
    )


PLANS: dict[Size, Plan] = {"full": _full(), "miniature": _miniature()}
