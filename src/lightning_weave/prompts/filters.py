"""Drop duplicates, take some by seed, and keep count of every row."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeVar

from lightning_weave.prompts.decontaminate import Overlap
from lightning_weave.prompts.normal import normalise
from lightning_weave.prompts.questions import Question
from lightning_weave.store.tables import BadRow

Dedup = Literal["none", "exact", "normalised"]
T = TypeVar("T")

_NAMED = 5  # how many of a kind are named in the printed report; the JSON has them all


@dataclass
class PromptReport:
    """What became of every row: `read` is the sum of all the others."""

    read: int = 0
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0
    overlaps: list[Overlap] = field(default_factory=list)
    too_long: int = 0
    not_taken: int = 0
    kept: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Tell it in plain words, one line each, nothing that did not happen."""
        lines = [
            (len(self.bad), "could not be used:", [f"{row.where}: {row.why}" for row in self.bad]),
            (self.duplicates, "were there before", []),
            (len(self.overlaps), "overlap with a benchmark:", [_tell(overlap) for overlap in self.overlaps]),
            (self.too_long, "were too long", []),
            (self.not_taken, "were not drawn", []),
        ]
        told = [f"{self.kept:,} prompts kept of {self.read:,} rows read"]
        for count, what, named in lines:
            if count:
                told += [f"  {count:,} {what}", *(f"    {name}" for name in named[:_NAMED])]
                told += [f"    and {count - _NAMED:,} more"] if len(named) > _NAMED else []
        return "\n".join(told + [f"  note: {note}" for note in self.notes])

    def as_json(self) -> dict[str, Any]:
        """Give it to machines, every bad row and every overlap included."""
        return asdict(self)


def drop_duplicates(items: Iterable[T], key: Callable[[T], str]) -> tuple[list[T], int]:
    """Keep the first of the items with equal keys and count the others."""
    first: dict[str, T] = {}
    count = 0
    for item in items:
        count += 1
        first.setdefault(key(item), item)
    return list(first.values()), count - len(first)


def duplicate_key(question: Question, dedup: Literal["exact", "normalised"]) -> str:
    """Say in what two questions must be equal to be one: every turn, and the code they start from."""
    form = normalise if dedup == "normalised" else str
    return json.dumps([[(turn["role"], form(turn["content"])) for turn in question.messages], question.starter])


def take_by_seed(items: Sequence[T], key: Callable[[T], str], take: int | None, seed: int) -> list[T]:
    """Draw some items by their keys, the same ones whatever order they came in.

    The draw is a ranking, so a larger `take` begins with the smaller one's items. None takes all, in their own order.
    """
    if take is None:
        return list(items)
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\n{key(item)}".encode()).digest())[:take]


def _tell(overlap: Overlap) -> str:
    how = "the same as" if overlap.same else f"shares {overlap.share:.0%} with"
    return f"{overlap.where}: {how} {overlap.problem}"
