"""Where an anchor speaks: spans between delimiters, ends of turns, responses that were graded right or wrong.

Where it is silent its shift is 0 and it masks nothing. A decision at which no anchor of a composition speaks is not
trained on.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Self

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import ANSWER, Where
from lightning_weave.tokens.spelling import Origin, Spelling
from lightning_weave.types import Rollouts

Bools = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class WhereRule:
    """`where` of an anchor, with what it reads: delimiters, the bytes of the student's tokens, and grades."""

    section: Where
    spans: Mapping[str, tuple[bytes, bytes]]
    bytes_of: Mapping[int, bytes]
    added: Collection[int] = frozenset()  # tokens that begin and end turns: none of them is a delimiter
    grade_R: NDArray[np.float64] | None = None  # of all rows of the run; NaN: not known

    @classmethod
    def from_section(
        cls,
        section: Where,
        delimiters: Mapping[str, tuple[str, str]],
        spelling: Spelling,
        grade_R: NDArray[np.float64] | None,
    ) -> Self:
        """Read the rule of an anchor in the tokens of the student."""
        spans = {name: (first.encode(), last.encode()) for name, (first, last) in delimiters.items()}
        inner = {b"", *(text for pair in spans.values() for text in pair)}  # some tokenizers add runs of spaces
        added = {id for id, origin in spelling.origins.items() if origin <= Origin.ADDED}
        added -= {id for id in added if (text := spelling.bytes_of.get(id)) is not None and text.strip() in inner}
        return cls(section, spans, spelling.bytes_of, added, grade_R)

    def __str__(self) -> str:
        return str(self.section)

    def speaks(self, numbers: Sequence[int], rollouts: Rollouts) -> Bools:
        """Tell at which decisions of some rows the anchor speaks."""
        decided = rollouts.decided or map(np.ones_like, rollouts.response_ids)
        rows = zip(numbers, rollouts.prompt_ids, rollouts.response_ids, decided, strict=True)
        return np.concatenate([np.zeros(0, np.bool_), *(self._speaks(*row) for row in rows)])

    def _speaks(self, number: int, prompt_ids: NDArray, response_ids: NDArray, decided_T: NDArray) -> Bools:
        asked = self.section
        speaks_T = np.zeros(len(response_ids), np.bool_)
        if asked.answers is not None:
            assert self.grade_R is not None, "opened with the grades of the run"
            if self.grade_R[number] != (asked.answers == "right"):
                return speaks_T
        edges = np.flatnonzero(np.diff(decided_T.astype(np.bool_), prepend=False, append=False)).tolist()
        for start, end in zip(edges[::2], edges[1::2], strict=True):  # of each turn
            own_T = np.ones(end - start, np.bool_)
            ids = [*prompt_ids.tolist(), *response_ids[:end].tolist()]
            if asked.first is not None:
                own_T[asked.first :] = False
            if asked.end is not None:
                own_T[: -asked.end] = False
            if asked.inside is not None:
                own_T &= self._inside(asked.inside, ids, end - start, end == edges[-1])
            if asked.outside is not None:
                own_T &= ~self._inside(asked.outside, ids, end - start, end == edges[-1])
            speaks_T[start:end] = own_T
        return speaks_T

    def _inside(self, name: str, ids: Sequence[int], count: int, is_last: bool) -> Bools:
        """Find the tokens of a turn after an opening delimiter up to the end of the closing one.

        `ids` ends with the `count` tokens of the turn. What stands before them may open a span, as chat templates do,
        but only after the last added token. Delimiters are found in bytes, however tokens split them.
        """
        if name == ANSWER:
            busy = [self._inside(other, ids, count, is_last) for other in ("thinking", "tools")]
            other = np.flatnonzero(np.logical_or(*busy))
            return np.arange(count) > (other[-1] if len(other) else -1) if is_last else np.zeros(count, np.bool_)
        before = [*takewhile(lambda id: id not in self.added, reversed(ids[:-count]))]
        spelt = [self.bytes_of.get(id, b"") for id in (*reversed(before), *ids[-count:])]
        text = b"".join(spelt)
        start_T = np.cumsum([0, *map(len, spelt)])[len(before) : -1]
        inside_T = np.zeros(count, np.bool_)
        opening, closing = self.spans[name]
        at = text.find(opening)
        while at >= 0:
            begin = at + len(opening)
            close = text.find(closing, begin)
            end = close + len(closing) if close >= 0 else len(text) + 1
            inside_T |= (start_T >= begin) & (start_T < end)
            at = text.find(opening, end)
        return inside_T
