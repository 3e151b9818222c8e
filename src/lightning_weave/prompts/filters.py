"""Drop duplicates, draw by seed, and count every row."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from lightning_weave.prompts.decontaminate import Overlap
from lightning_weave.prompts.normal import normalise
from lightning_weave.prompts.questions import Question
from lightning_weave.store.tables import BadRow

Dedup = Literal["none", "exact", "normalised"]
T = TypeVar("T")

_LISTED = 5  # rows of each kind in the printed report; the manifest of the stage has all of them


@dataclass
class PromptReport:
    """What happened to every row: `read` is the sum of all other counts."""

    read: int = 0
    bad: list[BadRow] = field(default_factory=list)
    duplicates: int = 0
    overlaps: list[Overlap] = field(default_factory=list)
    too_long: int = 0
    not_taken: int = 0
    kept: int = 0
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Print the counts that are not zero, one per line."""
        counts = [
            (len(self.bad), "cannot be used:", [f"{row.where}: {row.why}" for row in self.bad]),
            (self.duplicates, "duplicates", []),
            (len(self.overlaps), "overlap with a benchmark:", [_describe(overlap) for overlap in self.overlaps]),
            (self.too_long, "too long", []),
            (self.not_taken, "not drawn", []),
        ]
        lines = [f"{self.kept:,} prompts from {self.read:,} rows"]
        for count, what, rows in counts:
            if count:
                lines += [f"  {count:,} {what}", *(f"    {row}" for row in rows[:_LISTED])]
                lines += [f"    and {count - _LISTED:,} more"] if len(rows) > _LISTED else []
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def drop_duplicates(items: Iterable[T], key: Callable[[T], str]) -> tuple[list[T], int]:
    """Keep the first item of each key and count the others."""
    first: dict[str, T] = {}
    count = 0
    for item in items:
        count += 1
        first.setdefault(key(item), item)
    return list(first.values()), count - len(first)


def duplicate_key(question: Question, dedup: Literal["exact", "normalised"]) -> str:
    """Make the key by which questions are duplicates: every turn, the starter code and a template's columns."""
    form = normalise if dedup == "normalised" else str
    turns = [(turn["role"], form(turn["content"])) for turn in question.messages]
    columns = [question.columns] if question.columns else []
    return json.dumps([turns, question.starter, *columns], default=str)


def take_by_seed(items: Sequence[T], key: Callable[[T], str], take: int | None, seed: int) -> list[T]:
    """Draw items by their keys, independent of the order they come in.

    The draw is a ranking, so a larger `take` begins with the items of a smaller one. None takes all in their order.
    """
    if take is None:
        return list(items)
    return sorted(items, key=lambda item: hashlib.sha256(f"{seed}\n{key(item)}".encode()).digest())[:take]


def _describe(overlap: Overlap) -> str:
    how = "same as" if overlap.same else f"shares {overlap.share:.0%} with"
    return f"{overlap.where}: {how} {overlap.problem}"
