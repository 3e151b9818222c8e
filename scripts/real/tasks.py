"""Word problems with numbers for answers, made by rule: what `make real` asks SmolLM2.

Every problem has its answer and a worked solution. A kind is one function of a random generator.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

NAMES = ("Tom", "Anna", "Sam", "Maria", "Ben", "Lucy", "Omar", "Nina", "Jack", "Ella", "Leo", "Ruth")
THINGS = ("apples", "pencils", "books", "coins", "stamps", "marbles", "shells", "cards", "stickers", "cookies")


class Problem(NamedTuple):
    """A question, the number that answers it, and how one gets there."""

    question: str
    answer: int
    solution: str


def gain(rng: Random) -> Problem:
    """One addition."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 20), rng.randint(2, 20)
    question = f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?"
    return Problem(question, a + b, f"{a} + {b} = {a + b}. {name} has {a + b} {thing}.")


def total(rng: Random) -> Problem:
    """An addition in figures."""
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    return Problem(f"What is {a} + {b}?", a + b, f"{a} + {b} = {a + b}.")


def half(rng: Random) -> Problem:
    """Half of an even number."""
    a = rng.randint(2, 40)
    return Problem(f"What is half of {2 * a}?", a, f"{2 * a} / 2 = {a}.")


def double(rng: Random) -> Problem:
    """Twice a number."""
    a = rng.randint(2, 99)
    return Problem(f"What is twice {a}?", 2 * a, f"2 x {a} = {2 * a}.")


def times(rng: Random) -> Problem:
    """A multiplication in figures."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return Problem(f"What is {a} times {b}?", a * b, f"{a} x {b} = {a * b}.")


def larger(rng: Random) -> Problem:
    """The larger of two numbers."""
    a, b = rng.sample(range(2, 99), 2)
    return Problem(f"Which is larger, {a} or {b}?", max(a, b), f"{max(a, b)} is larger than {min(a, b)}.")


KINDS: dict[str, Callable[[Random], Problem]] = {
    "gain": gain,
    "sum": total,
    "times": times,
    "double": double,
    "half": half,
    "larger": larger,
}
TRAINED = ("gain", "sum", "times", "double")
OTHER = ("half", "larger")


def make(kind: str, seed: int) -> Iterator[Problem]:
    """Problems of one kind, no question twice."""
    rng, seen = Random(f"{kind} {seed}"), set[str]()
    while True:
        problem = KINDS[kind](rng)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem


EVERYDAY = """\
Write a short note to thank a neighbour for watering the plants.
Give me three tips for sleeping better.
Explain in simple words what a rainbow is.
Suggest a name for a small bakery, and say why.
What should I pack for a weekend at the beach?
Describe a quiet morning in a village.
How do I make a cup of green tea?
Why do leaves change colour in autumn?
Write two sentences about a friendly dog.
What is the difference between a lake and a river?
Tell me a short story about a lost key.
Give me an idea for a cheap dinner with rice.
How can I learn to play the guitar at home?
What makes a good friend?
Describe the taste of a lemon.
Write a polite reminder about an overdue library book.
Why is it useful to read every day?
Suggest a game for five children on a rainy day.
How does a bicycle stay upright?
What would you say to someone who is nervous before an exam?
Explain what a volcano is to a child.
Write a slogan for a bicycle shop.
What are good reasons to walk to work?
Describe what a librarian does.""".splitlines()


def rows(kinds: Iterable[str], each: int, seed: int, unlike: Iterable[str] = ()) -> list[dict[str, str]]:
    """Problems of several kinds in turn as rows of a file, none of them a question of `unlike`."""
    taken = set(unlike)
    made = {kind: list(islice((one for one in make(kind, seed) if one.question not in taken), each)) for kind in kinds}
    return [
        {
            "id": f"{kind}-{number}",
            "kind": kind,
            "problem": made[kind][number].question,
            "answer": str(made[kind][number].answer),
            "solution": made[kind][number].solution,
        }
        for number in range(each)
        for kind in made
    ]


def write(folder: Path) -> None:
    """Write all files of the experiment: no question is in two of them."""
    same = rows(TRAINED, 24, seed=1)
    asked = [row["problem"] for row in same]
    prompts = rows(TRAINED, 24, seed=2, unlike=asked)
    expert = rows(TRAINED, 48, seed=3, unlike=[*asked, *(row["problem"] for row in prompts)])
    everyday = [{"id": f"everyday-{n}", "problem": text, "answer": "none"} for n, text in enumerate(EVERYDAY)]
    files = {"same": same, "other": rows(OTHER, 24, seed=1), "everyday": everyday, "prompts": prompts, "expert": expert}
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
