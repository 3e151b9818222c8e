"""How well an anchor's tokenizer covers a student's: the figures that doctor prints."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_weave.tokens.align import TokenMap, same_spelling
from lightning_weave.tokens.spelling import Origin, Spelling


def same_tokenizer(one: Any, other: Any) -> bool:
    """Say whether every id stands for the same token in both tokenizers."""
    return same_spelling(Spelling.of(one), Spelling.of(other))


def atomic_share(tokens: TokenMap) -> float:
    """Compute the share of the student's vocabulary that is a single anchor token."""
    return 1 - len(_unmapped(tokens)) / len(tokens.student.strings)


def added_without_counterpart(tokens: TokenMap) -> list[str]:
    """List the student's special and other added tokens that no anchor token stands for."""
    origins = tokens.student.origins
    return [tokens.student.strings[id] for id in _unmapped(tokens) if origins[id] <= Origin.ADDED]


def breaking_tokens(tokens: TokenMap, ids_TC: Tensor, most: int = 10) -> list[tuple[str, int]]:
    """Name the unmapped candidates that mask most positions, with how many positions each of them touches."""
    _, mapped_TC = tokens.candidate_map(ids_TC)
    ids, counts = torch.unique(ids_TC[~mapped_TC], return_counts=True)
    order = torch.argsort(counts, descending=True, stable=True)[:most]
    return [(_text(tokens.student, int(ids[n])), int(counts[n])) for n in order]


def suggest_alias(student_tokenizer: Any, anchor_tokenizer: Any, stop_ids: Sequence[int]) -> str | None:
    """Write the recipe line that lets the student's end of turn stand for the anchor's end of sequence.

    `stop_ids` come in order of importance: the first without a counterpart is aliased. None if every one has a
    counterpart, or if the anchor has no end of sequence that is free.
    """
    tokens = TokenMap.between(student_tokenizer, anchor_tokenizer)
    end = getattr(anchor_tokenizer, "eos_token_id", None)
    unmapped = set(_unmapped(tokens))
    alone = [id for id in stop_ids if id in unmapped]
    if not alone or end is None or tokens.table_V is None or bool((tokens.table_V == end).any()):
        return None
    texts = (
        json.dumps(one, ensure_ascii=False) for one in (tokens.student.strings[alone[0]], tokens.anchor.strings[end])
    )
    return "aliases = {{ {} = {} }}".format(*texts)


def _unmapped(tokens: TokenMap) -> list[int]:
    ids = torch.tensor(sorted(tokens.student.strings))
    _, mapped = tokens.candidate_map(ids)
    return ids[~mapped].tolist()


def _text(spelling: Spelling, id: int) -> str:
    if id in spelling.bytes_of:
        return spelling.bytes_of[id].decode(errors="backslashreplace")
    return spelling.strings.get(id, f"<id {id}>")
