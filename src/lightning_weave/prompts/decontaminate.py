"""Keep benchmark problems out of the prompts.

Two texts overlap if their normal forms are equal, or if at least 65 % of the words of one lie in runs of four words
that also occur in the other, so a problem inside a longer prompt is found. Words are counted, not n-grams, because one
changed word spoils n of them. On 130 AIME, HMMT and LeetCode problems, 1,296 of 1,300 copies with a tenth of their
words changed at random were found (the others were the shortest), and different problems shared at most 60 %: two
LeetCode problems with the same stock phrases. Texts under twelve words are compared by normal form only, because stock
phrases would decide.
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
    """A prompt and the benchmark problem that it overlaps with most."""

    where: str  # location of the prompt
    problem: str  # location of the problem
    share: float  # of the words of one of the two
    same: bool  # equal normal forms


class Screen:
    """Benchmark problems, indexed by runs of words so that a text is compared only with those that share one."""

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
        text_words = words(text)
        if same := self._by_words.get(tuple(text_words)):
            return Overlap(where, same, 1.0, same=True)
        shares = self._shares(text_words)
        overlaps = [Overlap(where, self._where[problem], share, same=False) for problem, share in shares]
        return max(overlaps, key=lambda overlap: overlap.share, default=None)

    def _add(self, where: str, text_words: list[str]) -> None:
        problem = len(self._where)
        self._where.append(where)
        self._lengths.append(len(text_words))
        if text_words:
            self._by_words.setdefault(tuple(text_words), where)
        for position, run in enumerate(_runs(text_words)):
            self._by_run[run].setdefault(problem, []).append(position)

    def _shares(self, text_words: list[str]) -> list[tuple[int, float]]:
        """Measure the overlap with every problem that reaches the threshold."""
        here: dict[int, list[int]] = defaultdict(list)  # problem -> positions in this text
        there: dict[int, set[int]] = defaultdict(set)  # problem -> positions in the problem
        for position, run in enumerate(_runs(text_words)):
            for problem, positions in self._by_run.get(run, {}).items():
                here[problem].append(position)
                there[problem].update(positions)
        shares = []
        for problem in here:
            length = self._lengths[problem]
            if min(length, len(text_words)) >= SHORTEST:
                share = max(_share(here[problem], len(text_words)), _share(sorted(there[problem]), length))
                shares.append((problem, share))
        return [(problem, share) for problem, share in shares if share >= SHARE]


def _runs(text_words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(text_words[offset:] for offset in range(RUN)), strict=False))


def _share(starts: list[int], length: int) -> float:
    """Measure the share of a text that lies in runs, given their start positions in ascending order.

    >>> _share([0, 1, 10], 18)
    0.5
    """
    ends = [*starts[1:], starts[-1] + RUN]
    return sum(min(RUN, end - start) for start, end in zip(starts, ends, strict=True)) / length
