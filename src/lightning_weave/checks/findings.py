"""What a check has found: a verdict, a sentence for people, and its figures for machines."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_weave.config import Threshold

Level = Literal["ok", "note", "warning", "error"]  # an error: it cannot work, or it would be wasted


@dataclass(frozen=True)
class Bounds:
    """When a figure is worth a warning and when a run stops; false is never."""

    warn: Threshold
    stop: Threshold
    below: bool = False  # it is the small figures that are bad
    share: bool = True

    @property
    def words(self) -> str:
        """State both.

        >>> Bounds(0.5, 0.95).words, Bounds(1.05, False, share=False).words, Bounds(False, 0.001, below=True).words
        ('warns above 50 %, stops above 95 %', 'warns above 1.05', 'stops below 0.1 %')
        """
        side = "below" if self.below else "above"
        phrases = [
            f"{verb} {side} {f'{100 * limit:g} %' if self.share else f'{limit:g}'}"
            for verb, limit in (("warns", self.warn), ("stops", self.stop))
            if limit is not False
        ]
        return ", ".join(phrases) or "off"


@dataclass(frozen=True)
class Finding:
    """One line of `lweave doctor`, or what `lweave run` says on its way."""

    about: str  # the dotted key of the recipe that it concerns
    check: str
    verdict: Level
    text: str
    figures: dict[str, Any] = field(default_factory=dict)
    judged: bool = False  # an error that `lweave run --force` overrides
    bounds: Bounds | None = None  # of [checks], where a figure was compared with them

    @property
    def line(self) -> str:
        """One line for people, with what it concerns."""
        return self.text if self.text.startswith(self.about) else f"{self.about}: {self.text}"


def visible(text: str) -> str:
    """Write a text so that a terminal shows every character of it and obeys none.

    >>> visible("a\\n\\x1b[31m\\u202eb é 数")
    'a\\\\n\\\\x1b[31m\\\\u202eb é 数'
    """
    return "".join(
        char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode() for char in text
    )


def percent(share: float) -> str:
    """Write a share so that 99.99 % never reads as all, nor 0.01 % as none.

    >>> percent(1.0), percent(0.99996), percent(0.5), percent(0.00004), percent(0.0)
    ('100 %', '99.99 %', '50.0 %', '0.01 %', '0 %')
    """
    if share in (0, 1):
        return f"{100 * share:.0f} %"
    value = 100 * share
    if value > 99.9 or value < 0.1:
        return f"{min(max(value, 0.01), 99.99):.2f} %"
    return f"{value:.1f} %"


def size(count: float) -> str:
    """Write bytes as people say them.

    >>> size(1234), size(56_700_000), size(12e9)
    ('1.2 kB', '56.7 MB', '12.0 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    return f"{count:.1f} TB"


def listed(words: Iterable[str], most: int = 8) -> str:
    """Name a few and count the rest.

    >>> listed(["a", "b"]), listed("abc", most=2)
    ('a, b', 'a, b and 1 more')
    """
    items = list(words)
    rest = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest
