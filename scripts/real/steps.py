"""Word problems of several steps with numbers for answers, made by rule: what `make reasoning` asks Qwen2.5-Coder-1.5B.

python scripts/real/steps.py FOLDER: writes all files of the experiment.

A problem is a story of events, each of which changes one quantity. The solver follows them: its lines are the worked
solution. How many events a kind has is its difficulty.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from random import Random

from tasks import KINDS, NAMES, THINGS, Problem, rows

EVENTS = {"store": 3, "budget": 3, "trip": 3, "garden": 3}  # the student alone is right in 50 to 90 % of them
TRAINED = ("store", "budget")
OTHER = ("trip", "garden")
FILES = {  # kinds, problems of each, seed
    "same": (TRAINED, 24, 1),
    "other": (OTHER, 8, 1),
    "prompts": (TRAINED, 32, 2),
    "expert": (TRAINED, 32, 3),
    "choice": ((*TRAINED, *OTHER), 12, 4),
}


class Story:
    """A problem as far as it is told: its sentences, the quantity, and the calculations."""

    def __init__(self, sentence: str, quantity: int) -> None:
        self.sentences, self.quantity, self.lines = [sentence], quantity, list[str]()

    def add(self, sentence: str, sign: str, number: int, times: int | None = None) -> None:
        """Append an event that changes the quantity by a number, or by a product of two."""
        self.sentences.append(sentence)
        if times is not None:
            self.lines.append(f"{number} x {times} = {number * times}")
            number *= times
        before = self.quantity
        self.quantity = {"+": before + number, "-": before - number, "x": before * number, "/": before // number}[sign]
        self.lines.append(f"{before} {sign} {number} = {self.quantity}")

    def ask(self, question: str) -> Problem:
        """End with the question."""
        return Problem(" ".join([*self.sentences, question]), self.quantity, ", ".join(self.lines) + ".")


def store(rng: Random, events: int) -> Problem:
    """Things that are bought, given away, doubled and shared; no event twice in a row."""
    name, other = rng.sample(NAMES, 2)
    thing, start, last = rng.choice(THINGS), rng.randint(12, 60), ""
    story = Story(f"{name} has {start} {thing}.", start)
    for _ in range(events):
        k, n = rng.randint(3, 9), rng.randint(4, 15)
        possible = {"buy": True, "double": True, "give": story.quantity > k * n, "share": story.quantity % k == 0}
        match last := rng.choice([event for event, is_possible in possible.items() if is_possible and event != last]):
            case "buy":
                story.add(f"{name} buys {k} boxes with {n} {thing} each.", "+", k, n)
            case "double":
                story.add(f"{other} gives {name} as many {thing} as {name} already has.", "x", 2)
            case "give":
                story.add(f"{name} gives {n} {thing} to each of {k} friends.", "-", k, n)
            case "share":
                story.add(f"{name} puts them equally into {k} bags, keeps one bag and sells the others.", "/", k)
    return story.ask(f"How many {thing} does {name} have in the end?")


def budget(rng: Random, events: int) -> Problem:
    """Money that is earned by the hour and spent on several things."""
    name, start = rng.choice(NAMES), rng.randint(20, 80)
    story = Story(f"{name} has {start} dollars.", start)
    for thing in rng.sample(THINGS, events):
        count, price = rng.randint(3, 9), rng.randint(2, 9)
        if story.quantity >= count * price and rng.random() < 0.6:
            story.add(f"{name} buys {count} {thing} for {price} dollars each.", "-", count, price)
        else:
            wage = price + 6
            story.add(f"{name} works for {count} hours at {wage} dollars an hour.", "+", count, wage)
    return story.ask(f"How many dollars does {name} have now?")


def trip(rng: Random, events: int) -> Problem:
    """Legs of a journey by hours and speed, and what remains of it."""
    name, legs = rng.choice(NAMES), [(rng.randint(2, 5), rng.randrange(30, 95, 5)) for _ in range(events)]
    length = sum(hours * speed for hours, speed in legs) + rng.randint(10, 200)
    story = Story(f"{name} goes on a trip of {length} kilometres.", length)
    for hours, speed in legs:
        story.add(f"{name} drives for {hours} hours at {speed} kilometres an hour.", "-", hours, speed)
    return story.ask("How many kilometres remain?")


def garden(rng: Random, events: int) -> Problem:
    """Rows of plants that are added, and plants that are lost."""
    name, count, each = rng.choice(NAMES), rng.randint(4, 12), rng.randint(5, 15)
    story = Story(f"{name} has a garden with one tulip.", 1)
    story.add(f"{name} plants {count} rows of {each} tulips.", "+", count, each)
    for number in range(1, events):
        k, n = rng.randint(2, 6), rng.randint(3, 9)
        if number % 2 and story.quantity > k * n:
            story.add(f"In each of {k} storms {n} tulips are destroyed.", "-", k, n)
        else:
            story.add(f"{name} plants {k} more rows of {n} tulips.", "+", k, n)
    return story.ask("How many tulips are there now?")


STORIES = {"store": store, "budget": budget, "trip": trip, "garden": garden}


def files(events: Mapping[str, int] = EVENTS) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Make the rows of every file: no question is in two of them."""
    KINDS.update({kind: partial(STORIES[kind], events=count) for kind, count in events.items()})
    asked: list[str] = []
    for name, (kinds, each, seed) in FILES.items():
        made = rows(kinds, each, seed, unlike=asked)
        asked += [row["problem"] for row in made]
        yield name, made


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in files():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
