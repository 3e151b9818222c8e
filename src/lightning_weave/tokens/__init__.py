"""Tokens across tokenizers: bytes of each token, projected contexts, one-to-one maps of candidates."""

from lightning_weave.tokens.align import TokenMap
from lightning_weave.tokens.coverage import (
    added_without_counterpart,
    atomic_share,
    breaking_tokens,
    same_tokenizer,
    suggest_alias,
)
from lightning_weave.tokens.spelling import spell
