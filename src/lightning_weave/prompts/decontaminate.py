"""Keep a benchmark's problems out of the prompts.

Two texts overlap if their normal forms are equal, or if at least 65 % of the words of one lie in runs of four words
that the other has too; so a whole problem inside a longer prompt is found. Words count, not n-grams, because one
changed word spoils n of them. On 130 AIME, HMMT and LeetCode problems, 1,296 of 1,300 copies with a tenth of their
words changed at random were found (the rest were of the shortest), and different problems shared 60 % at most, which
two of LeetCode's do by their stock phrases. Texts under twelve words are compared by normal form only: in so few, stock
phrases decide.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_weave.prompts.normal import words

RUN = 4
SHARE = 0.65
SHORTEST = 12


@dataclass(frozen=True)
class Overlap:
    """A prompt and the benchmark's problem that it overlaps with most."""

    where: str  # the prompt
    problem: str  # where the benchmark's problem stands
    share: float  # of the words of one of the two
    same: bool  # equal but for case, spacing, punctuation and Unicode form


class Screen:
    """A benchmark's problems, indexed by their runs of words so that a text meets only those it shares some with."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        """Index problems given as (where, text)."""
        self._where: list[str] = []
        self._lengths: list[int] = []
        self._by_words: dict[tuple[str, ...], str] = {}
        self._by_run: dict[tuple[str, ...], dict[int, list[int]]] = defaultdict(dict)  # run -> problem -> positions
        for where, text in problems:
            self._add(where, words(text))

    def find(self, where: str, text: str) -> Overlap | None:
        """Find the problem that a text overlaps with most, if any."""
        if not self._where:
            return None
        spoken = words(text)
        if same := self._by_words.get(tuple(spoken)):
            return Overlap(where, same, 1.0, same=True)
        overlaps = [Overlap(where, self._where[problem], share, same=False) for problem, share in self._shares(spoken)]
        return max(overlaps, key=lambda overlap: overlap.share, default=None)

    def _add(self, where: str, spoken: list[str]) -> None:
        problem = len(self._where)
        self._where.append(where)
        self._lengths.append(len(spoken))
        if spoken:
            self._by_words.setdefault(tuple(spoken), where)
        for position, run in enumerate(_runs(spoken)):
            self._by_run[run].setdefault(problem, []).append(position)

    def _shares(self, spoken: list[str]) -> list[tuple[int, float]]:
        """Measure the overlap with every problem that may reach the threshold."""
        here: dict[int, list[int]] = defaultdict(list)  # problem -> positions in this text
        there: dict[int, set[int]] = defaultdict(set)  # problem -> positions in the problem
        for position, run in enumerate(_runs(spoken)):
            for problem, positions in self._by_run.get(run, {}).items():
                here[problem].append(position)
                there[problem].update(positions)
        shares = []
        for problem in here:
            length = self._lengths[problem]
            if min(length, len(spoken)) >= SHORTEST:
                share = max(_share(here[problem], len(spoken)), _share(sorted(there[problem]), length))
                shares.append((problem, share))
        return [(problem, share) for problem, share in shares if share >= SHARE]


def _runs(spoken: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(spoken[offset:] for offset in range(RUN)), strict=False))


def _share(starts: list[int], length: int) -> float:
    """Measure how much of a text lies in runs, given where they start in ascending order.

    >>> _share([0, 1, 10], 18)
    0.5
    """
    ends = [*starts[1:], starts[-1] + RUN]
    return sum(min(RUN, end - start) for start, end in zip(starts, ends, strict=True)) / length
