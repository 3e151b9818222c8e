"""How well an anchor's tokenizer covers a student's, for `lweave doctor`."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_weave.tokens.align import TokenMap, same_spelling
from lightning_weave.tokens.spelling import Origin, Spelling


def same_tokenizer(one: Any, other: Any) -> bool:
    """Check whether every id is the same token in both tokenizers."""
    return same_spelling(Spelling.of(one), Spelling.of(other))


def atomic_share(tokens: TokenMap) -> float:
    """Compute the share of the student's vocabulary that is a single anchor token."""
    return 1 - len(_unmapped(tokens)) / len(tokens.student.strings)


def added_without_counterpart(tokens: TokenMap) -> list[str]:
    """List the student's special and other added tokens without an anchor token."""
    origins = tokens.student.origins
    return [tokens.student.strings[id] for id in _unmapped(tokens) if origins[id] <= Origin.ADDED]


def breaking_tokens(tokens: TokenMap, ids_TC: Tensor, most: int = 10) -> list[tuple[str, int]]:
    """List the unmapped candidates that mask the most positions, with the number of positions of each."""
    _, mapped_TC = tokens.candidate_map(ids_TC)
    ids, counts = torch.unique(ids_TC[~mapped_TC], return_counts=True)
    order = torch.argsort(counts, descending=True, stable=True)[:most]
    return [(tokens.student.text(int(ids[n])), int(counts[n])) for n in order]


def suggest_alias(student_tokenizer: Any, anchor_tokenizer: Any, stop_ids: Sequence[int]) -> str | None:
    """Write the recipe line that maps the student's end of turn to the anchor's end of sequence.

    The first of `stop_ids` without an anchor token is aliased. None if all have one, or if the anchor has no end of
    sequence that is free.
    """
    tokens = TokenMap.between(student_tokenizer, anchor_tokenizer)
    end = getattr(anchor_tokenizer, "eos_token_id", None)
    unmapped = set(_unmapped(tokens))
    stops = [id for id in stop_ids if id in unmapped]
    if not stops or end is None or tokens.table_V is None or bool((tokens.table_V == end).any()):
        return None
    texts = (tokens.student.strings[stops[0]], tokens.anchor.strings[end])
    return "aliases = {{ {} = {} }}".format(*(json.dumps(text, ensure_ascii=False) for text in texts))


def _unmapped(tokens: TokenMap) -> list[int]:
    ids = torch.tensor(sorted(tokens.student.strings))
    _, mapped = tokens.candidate_map(ids)
    return ids[~mapped].tolist()
