"""One colour for each policy, the same in every figure, table and legend of a report.

The first six are Okabe and Ito's: distinguishable with colour blindness, and in grey. In the page a colour is a CSS
variable of its name, so that each theme has its own shade of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COLOURS = {
    "blue": "#0072b2",
    "vermilion": "#d55e00",
    "green": "#009e73",
    "orange": "#e69f00",
    "purple": "#cc79a7",
    "sky": "#56b4e9",
    "brown": "#8c564b",
    "olive": "#8a8b00",
    "indigo": "#5b4bb7",
    "grey": "#7f7f7f",
    # Not of policies: parts of a bar.
    "slate": "#4a5a6a",
    "steel": "#7d8fa1",
    "mist": "#aab8c5",
    "sand": "#c9b78e",
    "clay": "#a8806a",
}
BASE = "grey"
POLICIES = tuple(COLOURS)[:9]
PARTS = ("slate", "mist", "clay", "sand", "steel")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))


@dataclass(frozen=True)
class Hue:
    """The colour of a policy; `again` counts how often it was used before, which the dashes of a line show."""

    name: str
    again: int = 0

    @property
    def hex(self) -> str:
        return COLOURS[self.name]

    @property
    def css(self) -> str:
        return f"var(--{self.name})"

    @property
    def dash(self) -> str | tuple[int, tuple[float, ...]]:
        return DASHES[self.again % len(DASHES)]


Hues = dict[str, Hue]


def policy_hues(policies: Iterable[str]) -> Hues:
    """Give each policy its colour, in their order; the untrained student is grey.

    >>> [hue.name for hue in policy_hues(["base", "acc", "brief"]).values()]
    ['grey', 'blue', 'vermilion']
    """
    others = [policy for policy in dict.fromkeys(policies) if policy != "base"]
    hues = {policy: Hue(POLICIES[at % len(POLICIES)], at // len(POLICIES)) for at, policy in enumerate(others)}
    return {"base": Hue(BASE), **hues}


def part_hues(parts: Sequence[str]) -> Hues:
    """Give the parts of a bar colours that no policy has."""
    return {part: Hue(PARTS[at % len(PARTS)], at // len(PARTS)) for at, part in enumerate(parts)}
