"""A student's tokens in another tokenizer: contexts token by token, candidates one to one (phi in the paper)."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.errors import InputError
from lightning_weave.tokens.spelling import Origin, Spelling

Ids = Sequence[int] | NDArray[Any] | Tensor


@dataclass(frozen=True, eq=False)
class TokenMap:
    """How one anchor reads one student's tokens.

    Where a candidate is mapped, its anchor token spells the same bytes (or an alias says so), and no two student
    tokens share an anchor token. Contexts follow the bytes alone: aliases play no part in them.
    """

    student: Spelling
    anchor: Spelling
    identical: bool  # the same tokenizer: contexts are their own projection
    table_V: Tensor | None  # student id -> anchor id or -1, one more entry of -1 at the end; None: every id is itself
    _pieces: dict[int, tuple[int, ...] | None] = field(default_factory=dict)  # filled as contexts need them

    @classmethod
    def between(
        cls, student_tokenizer: Any, anchor_tokenizer: Any, aliases: Mapping[str, str] | None = None
    ) -> "TokenMap":
        """Align two tokenizers; `aliases` leads from a student token's text to that of the anchor token to score."""
        student, anchor = Spelling.of(student_tokenizer), Spelling.of(anchor_tokenizer)
        identical = same_spelling(student, anchor)
        if identical and not aliases:
            return cls(student, anchor, identical=True, table_V=None)
        image = {id: id for id in student.strings} if identical else atomic_ids(student, anchor)
        _apply_aliases(image, student, anchor, aliases or {})
        table_V = torch.full((max(student.strings) + 2,), -1, dtype=torch.int64)
        table_V[torch.tensor(list(image))] = torch.tensor(list(image.values()))
        return cls(student, anchor, identical, table_V)

    def project(self, ids: Ids) -> tuple[list[int], list[int]]:
        """Spell student tokens in anchor tokens; `boundaries[t]` anchor tokens spell the first t student tokens.

        From the first token that has no lossless projection on nothing is added: boundaries stay where they are, and
        `lossless_prefix` says how many of them can be trusted.
        """
        if self.identical:
            return _listed(ids), list(range(len(ids) + 1))
        projected: list[int] = []
        boundaries = [0]
        for id in _listed(ids):
            pieces = self._pieces_of(id)
            if pieces is None:
                break
            projected.extend(pieces)
            boundaries.append(len(projected))
        return projected, boundaries + [len(projected)] * (len(ids) + 1 - len(boundaries))

    def lossless_prefix(self, ids: Ids) -> int:
        """Count the leading tokens that project losslessly: a decision t is valid only if t is not beyond it."""
        if self.identical:
            return len(ids)
        return next((t for t, id in enumerate(_listed(ids)) if self._pieces_of(id) is None), len(ids))

    def candidate_map(self, ids_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Map each candidate to its one anchor token (0 where it has none), and say which are mapped."""
        if self.table_V is None:
            return ids_TC, torch.ones_like(ids_TC, dtype=torch.bool)
        # An id from outside the vocabulary reads the last entry, which is unmapped.
        anchor_ids_TC = self.table_V.to(ids_TC.device)[ids_TC.clamp(-1, len(self.table_V) - 1).long()]
        return anchor_ids_TC.clamp(min=0).to(ids_TC.dtype), anchor_ids_TC >= 0

    def candidates(self, ids_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Map candidates; a position is valid only if every one of them is a single anchor token."""
        anchor_ids_TC, mapped_TC = self.candidate_map(ids_TC)
        return anchor_ids_TC, mapped_TC.all(dim=-1)

    def _pieces_of(self, id: int) -> tuple[int, ...] | None:
        if id not in self._pieces:
            self._pieces[id] = self._find_pieces(id)
        return self._pieces[id]

    def _find_pieces(self, id: int) -> tuple[int, ...] | None:
        if id not in self.student.bytes_of:
            return None
        same = counterparts(self.student, self.anchor, id)
        return (same[0],) if same else self.anchor.cut(self.student.bytes_of[id])


def counterparts(student: Spelling, anchor: Spelling, id: int) -> list[int]:
    """List the anchor tokens that are this student token, the one that the anchor's tokenizer prefers first.

    They have its spelling; but a control token and a piece of text that looks like it are two things.
    """
    found, kind = anchor.ids_of.get(student.bytes_of[id], []), student.origins[id]
    if kind == Origin.CONTROL:
        return [other for other in found if anchor.origins[other] <= Origin.ADDED]
    return [other for other in found if anchor.origins[other] != Origin.CONTROL or kind == Origin.ADDED]


def atomic_ids(student: Spelling, anchor: Spelling) -> dict[int, int]:
    """Find the one anchor token of each student token that has one (phi in cross-tokenizer-shift).

    Of several student tokens with one spelling, the one that the tokenizer itself prefers takes the anchor's; another
    is mapped only if the anchor has the spelling twice as well.
    """
    image: dict[int, int] = {}
    taken: set[int] = set()
    for ids in student.ids_of.values():
        for id in ids:
            free = [other for other in counterparts(student, anchor, id) if other not in taken]
            if free:
                image[id] = free[0]
                taken.add(free[0])
    return image


def same_spelling(student: Spelling, anchor: Spelling) -> bool:
    """Say whether every id stands for the same token on both sides."""
    return student is anchor or (student.strings == anchor.strings and student.script == anchor.script)


def _apply_aliases(image: dict[int, int], student: Spelling, anchor: Spelling, aliases: Mapping[str, str]) -> None:
    """Lead student tokens to other anchor tokens, each of which must be free and taken only once."""
    targets = [(_id_of(student, text, "student"), _id_of(anchor, aliases[text], "anchor")) for text in aliases]
    aliased = {id for id, _ in targets}
    owners = {other: id for id, other in image.items() if id not in aliased}
    for text, (id, target) in zip(aliases, targets, strict=True):
        if target in owners:
            raise InputError(
                f"aliases: {text!r} -> {aliases[text]!r} is not one to one, because the student's "
                f"{student.strings[owners[target]]!r} stands for that anchor token already. Remove one of the two."
            )
        owners[target] = id
        image[id] = target


def _id_of(spelling: Spelling, text: str, whose: str) -> int:
    """Find a token by its text or by how its vocabulary writes it."""
    id = spelling.backend.token_to_id(text)
    found = [id] if id is not None else spelling.ids_of.get(text.encode(), [])
    if found:
        return found[0]
    added = [string for id, string in spelling.strings.items() if spelling.origins[id] <= Origin.ADDED]
    near = difflib.get_close_matches(text, added or spelling.strings.values(), n=1, cutoff=0.0)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"aliases: {text!r} is no token of the {whose}'s tokenizer.{hint}")


def _listed(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray | Tensor) else list(ids)
