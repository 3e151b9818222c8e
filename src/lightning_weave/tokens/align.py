"""A student's tokens in an anchor's tokenizer: contexts token by token, candidates one to one (phi in the paper)."""

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
    """The map from a student's tokens to an anchor's.

    A mapped candidate has an anchor token with the same bytes (or an alias), and no two student tokens share an anchor
    token. Contexts follow the bytes alone and ignore aliases.
    """

    student: Spelling
    anchor: Spelling
    identical: bool  # the same tokenizer: contexts need no projection
    table_V: Tensor | None  # student id -> anchor id or -1, plus a final -1; None maps every id to itself
    _pieces: dict[int, tuple[int, ...] | None] = field(default_factory=dict)  # a cache

    @classmethod
    def between(
        cls, student_tokenizer: Any, anchor_tokenizer: Any, aliases: Mapping[str, str] | None = None
    ) -> "TokenMap":
        """Align two tokenizers; `aliases` maps the text of a student token to that of the anchor token to score."""
        student = Spelling.from_tokenizer(student_tokenizer)
        anchor = Spelling.from_tokenizer(anchor_tokenizer)
        identical = same_spelling(student, anchor)
        if identical and not aliases:
            return cls(student, anchor, identical=True, table_V=None)
        image = {id: id for id in student.strings} if identical else atomic_ids(student, anchor)
        targets = {}
        for text, target in (aliases or {}).items():
            targets[text] = _find_id(student, text, "student"), _find_id(anchor, target, "anchor")
        aliased = {id for id, _ in targets.values()}
        owners = {other: id for id, other in image.items() if id not in aliased}
        for text, (id, target_id) in targets.items():
            if target_id in owners:
                raise InputError(
                    f"aliases: {text!r} -> {(aliases or {})[text]!r} is not one to one: the student's "
                    f"{student.strings[owners[target_id]]!r} already maps to that anchor token. Remove one of the two."
                )
            owners[target_id] = id
            image[id] = target_id
        table_V = torch.full((max(student.strings) + 2,), -1, dtype=torch.int64)
        table_V[torch.tensor(list(image))] = torch.tensor(list(image.values()))
        return cls(student, anchor, identical, table_V)

    def project(self, ids: Ids) -> tuple[list[int], list[int]]:
        """Convert student tokens to anchor tokens; the first `boundaries[t]` of them are the first t student tokens.

        Projection ends at the first token without a lossless projection; later boundaries stay the same, and only
        `lossless_prefix` of them are valid.
        """
        if self.identical:
            return _to_list(ids), list(range(len(ids) + 1))
        projected: list[int] = []
        boundaries = [0]
        for id in _to_list(ids):
            pieces = self._pieces_of(id)
            if pieces is None:
                break
            projected.extend(pieces)
            boundaries.append(len(projected))
        return projected, boundaries + [len(projected)] * (len(ids) + 1 - len(boundaries))

    def lossless_prefix(self, ids: Ids) -> int:
        """Count the leading tokens that project losslessly: decisions beyond it are invalid."""
        if self.identical:
            return len(ids)
        return next((t for t, id in enumerate(_to_list(ids)) if self._pieces_of(id) is None), len(ids))

    def candidate_map(self, ids_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Map each candidate to its anchor token (0 if it has none), and return which are mapped."""
        if self.table_V is None:
            return ids_TC, torch.ones_like(ids_TC, dtype=torch.bool)
        # An id outside the vocabulary reads the last entry, which is unmapped.
        anchor_ids_TC = self.table_V.to(ids_TC.device)[ids_TC.clamp(-1, len(self.table_V) - 1).long()]
        return anchor_ids_TC.clamp(min=0).to(ids_TC.dtype), anchor_ids_TC >= 0

    def candidates(self, ids_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Map candidates; a position is valid only if every one of them is a single anchor token."""
        anchor_ids_TC, mapped_TC = self.candidate_map(ids_TC)
        return anchor_ids_TC, mapped_TC.all(dim=-1)

    def _pieces_of(self, id: int) -> tuple[int, ...] | None:
        """Find the anchor tokens that spell a student token, or None if there are none."""
        if id not in self._pieces:
            pieces: tuple[int, ...] | None = None
            if id in self.student.bytes_of:
                same = counterparts(self.student, self.anchor, id)
                pieces = (same[0],) if same else self.anchor.cut(self.student.bytes_of[id])
            self._pieces[id] = pieces
        return self._pieces[id]


def counterparts(student: Spelling, anchor: Spelling, id: int) -> list[int]:
    """List the anchor tokens equal to a student token, the one preferred by the anchor's tokenizer first.

    They have the same bytes, but a control token never equals ordinary text that looks like it.
    """
    same_bytes = anchor.ids_of.get(student.bytes_of[id], [])
    origin = student.origins[id]
    if origin == Origin.CONTROL:
        return [other for other in same_bytes if anchor.origins[other] <= Origin.ADDED]
    return [other for other in same_bytes if anchor.origins[other] != Origin.CONTROL or origin == Origin.ADDED]


def atomic_ids(student: Spelling, anchor: Spelling) -> dict[int, int]:
    """Map each student token to its anchor token, if it has one (phi in cross-tokenizer-shift).

    Of several student tokens with the same bytes, the one that the tokenizer prefers is mapped first; another is mapped
    only if the anchor has a second token with these bytes.
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
    """Check whether every id is the same token on both sides."""
    return student is anchor or (student.strings == anchor.strings and student.script == anchor.script)


def _find_id(spelling: Spelling, text: str, whose: str) -> int:
    """Find a token by its text or by its string in the vocabulary."""
    id = spelling.backend.token_to_id(text)
    ids = [id] if id is not None else spelling.ids_of.get(text.encode(), [])
    if ids:
        return ids[0]
    added = [string for id, string in spelling.strings.items() if spelling.origins[id] <= Origin.ADDED]
    near = difflib.get_close_matches(text, added or spelling.strings.values(), n=1, cutoff=0.0)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InputError(f"aliases: {text!r} is not a token of the {whose}'s tokenizer.{hint}")


def _to_list(ids: Ids) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray | Tensor) else list(ids)


def same_tokenizer(one: Any, other: Any) -> bool:
    """Check whether every id is the same token in both tokenizers."""
    return same_spelling(Spelling.from_tokenizer(one), Spelling.from_tokenizer(other))


def atomic_share(tokens: TokenMap) -> float:
    """Compute the share of the student's vocabulary that is a single anchor token."""
    return 1 - len(_unmapped(tokens)) / len(tokens.student.strings)


def unmapped_added_tokens(tokens: TokenMap) -> list[str]:
    """List the student's special and other added tokens without an anchor token."""
    origins = tokens.student.origins
    return [tokens.student.strings[id] for id in _unmapped(tokens) if origins[id] <= Origin.ADDED]


def unmapped_candidates(tokens: TokenMap, ids_TC: Tensor, most: int = 10) -> list[tuple[str, int]]:
    """List the unmapped candidates that mask the most positions, with the number of positions of each."""
    _, mapped_TC = tokens.candidate_map(ids_TC)
    ids, counts = torch.unique(ids_TC[~mapped_TC], return_counts=True)
    order = torch.argsort(counts, descending=True, stable=True)[:most]
    return [(tokens.student.text(int(ids[n])), int(counts[n])) for n in order]


def suggest_alias(student_tokenizer: Any, anchor_tokenizer: Any, stop_ids: Sequence[int]) -> tuple[str, str] | None:
    """Find the alias that maps the student's end of turn to the anchor's end of sequence.

    The first of `stop_ids` without an anchor token is aliased. None if all have one, or if the anchor has no end of
    sequence that is free.
    """
    tokens = TokenMap.between(student_tokenizer, anchor_tokenizer)
    end = getattr(anchor_tokenizer, "eos_token_id", None)
    unmapped = set(_unmapped(tokens))
    stops = [id for id in stop_ids if id in unmapped]
    if not stops or end is None or tokens.table_V is None or bool((tokens.table_V == end).any()):
        return None
    return tokens.student.strings[stops[0]], tokens.anchor.strings[end]


def _unmapped(tokens: TokenMap) -> list[int]:
    ids = torch.tensor(sorted(tokens.student.strings))
    _, mapped = tokens.candidate_map(ids)
    return ids[~mapped].tolist()
