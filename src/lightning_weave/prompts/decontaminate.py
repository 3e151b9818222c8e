"""Keep benchmark problems out of the prompts.

Two texts overlap if their normal forms are equal, or if at least 65 % of the words of one lie in runs of four words
that also occur in the other, so a problem inside a longer prompt is found. Words are counted, not n-grams, because one
changed word spoils n of them. On 130 AIME, HMMT and LeetCode problems, 1,296 of 1,300 copies with a tenth of their
words changed at random were found (the others were the shortest), and different problems shared at most 60 %: two
LeetCode problems with the same stock phrases. Texts under twelve words are compared by normal form only, because stock
phrases would decide.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts in which every character counts as a word
# Numbers keep their decimal point. Punctuation of prose is dropped; operators of arithmetic and code are words of their
# own: 3 - 2 is not 3 + 2, and 9! is not 9.
_WORD = re.compile(rf"\d+(?:\.\d+)*|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|[^\w\s.,;:?\"'`$]|_")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_DASHES = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
# NFKC flattens these (10² would become 102), so they are written out first.
_SPELLED_OUT = {"<super>": "^", "<sub>": "_", "<fraction>": " "}


def words(text: str) -> list[str]:
    """Split a text into comparable words, without case, spacing, prose punctuation and Unicode variants.

    >>> words("What is  $x\u00b2 \u2212 3.5$?")
    ['what', 'is', 'x', '^', '2', '-', '3.5']
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    text = _FOREIGN.sub(
        lambda match: _SPELLED_OUT.get(unicodedata.decomposition(match[0]).partition(" ")[0], "") + match[0], text
    )
    text = unicodedata.normalize("NFKC", text.translate(_DASHES))
    found = _WORD.findall(text.casefold())
    return [word for word in found if word.isascii() or len(word) > 1 or unicodedata.category(word)[0] != "P"]


def normalise(text: str) -> str:
    """Join a text's words: texts with the same normal form count as equal.

    A text of punctuation alone is its own normal form, so that "?" and "!?" differ.
    """
    return " ".join(words(text)) or " ".join(text.split())


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
        for problem, (where, text) in enumerate(problems):
            text_words = words(text)
            self._where.append(where)
            self._lengths.append(len(text_words))
            if text_words:
                self._by_words.setdefault(tuple(text_words), where)
            for position, run in enumerate(_runs(text_words)):
                self._by_run[run].setdefault(problem, []).append(position)

    def find(self, where: str, text: str) -> Overlap | None:
        """Find the problem that a text overlaps with most, if any."""
        if not self._where:
            return None
        text_words = words(text)
        if same := self._by_words.get(tuple(text_words)):
            return Overlap(where, same, 1.0, same=True)
        here: dict[int, list[int]] = defaultdict(list)  # problem -> positions in this text
        there: dict[int, set[int]] = defaultdict(set)  # problem -> positions in the problem
        for position, run in enumerate(_runs(text_words)):
            for problem, positions in self._by_run.get(run, {}).items():
                here[problem].append(position)
                there[problem].update(positions)
        best: Overlap | None = None
        for problem, length in ((problem, self._lengths[problem]) for problem in here):
            if min(length, len(text_words)) >= SHORTEST:
                share = max(_share(here[problem], len(text_words)), _share(sorted(there[problem]), length))
                if share >= SHARE and (best is None or share > best.share):
                    best = Overlap(where, self._where[problem], share, same=False)
        return best


def _runs(text_words: list[str]) -> list[tuple[str, ...]]:
    return list(zip(*(text_words[offset:] for offset in range(RUN)), strict=False))


def _share(starts: list[int], length: int) -> float:
    """Measure the share of a text that lies in runs, given their start positions in ascending order.

    >>> _share([0, 1, 10], 18)
    0.5
    """
    ends = [*starts[1:], starts[-1] + RUN]
    return sum(min(RUN, end - start) for start, end in zip(starts, ends, strict=True)) / length
