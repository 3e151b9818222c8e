"""Tokens across tokenizers: bytes of each token, projected contexts, one-to-one maps of candidates."""

from lightning_weave.tokens.align import (
    TokenMap,
    atomic_share,
    same_tokenizer,
    suggest_alias,
    unmapped_added_tokens,
    unmapped_candidates,
)
from lightning_weave.tokens.spelling import spell
