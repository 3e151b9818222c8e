"""The figures about a pair of tokenizers that doctor prints."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_weave.tokens import (
    TokenMap,
    atomic_share,
    same_tokenizer,
    spell,
    suggest_alias,
    unmapped_added_tokens,
    unmapped_candidates,
)
from tokens.samples import byte_level

pytestmark = pytest.mark.slow

Align = Callable[[Any, Any], TokenMap]


@pytest.mark.slow
def test_the_atomic_share_is_counted_over_the_vocabulary(qwen3: Any, qwen2: Any, deepseek: Any, align: Align) -> None:
    assert atomic_share(align(qwen3, qwen3)) == 1
    assert atomic_share(align(qwen2, qwen3)) == 1
    assert atomic_share(align(qwen3, qwen2)) == pytest.approx(1 - 4 / 151669)
    words = {spell(deepseek, id) for id in deepseek.get_vocab().values()}
    shared = sum(spell(qwen3, id) in words for id in qwen3.get_vocab().values())
    assert atomic_share(align(qwen3, deepseek)) == pytest.approx(shared / 151669)


@pytest.mark.slow
def test_added_tokens_without_counterpart_are_named(qwen3: Any, qwen2: Any, align: Align) -> None:
    alone = unmapped_added_tokens(align(qwen3, qwen2))
    assert alone == ["<tool_response>", "</tool_response>", "<think>", "</think>"]
    assert unmapped_added_tokens(align(qwen2, qwen3)) == []


def test_the_suggested_alias_works(qwen3: Any, deepseek: Any) -> None:
    stops = qwen3.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    alias = suggest_alias(qwen3, deepseek, stops)
    assert alias == ("<|im_end|>", "<｜end▁of▁sentence｜>")
    tokens = TokenMap.between(qwen3, deepseek, dict([alias]))
    assert tokens.candidate_map(torch.tensor(stops[:1]))[0].tolist() == [deepseek.eos_token_id]


@pytest.mark.slow
def test_no_alias_is_suggested_where_none_helps_or_none_is_allowed(qwen3: Any, qwen2: Any, deepseek: Any) -> None:
    end = qwen3.convert_tokens_to_ids("<|im_end|>")
    assert suggest_alias(qwen3, qwen3, [end]) is None
    assert suggest_alias(qwen3, qwen2, [end]) is None  # has the same token
    assert suggest_alias(qwen3, qwen2, [151668]) is None  # the anchor's end is the student's <|endoftext|>
    assert suggest_alias(qwen3, byte_level(["a b"]), [end]) is None  # the anchor has no end of sequence
    assert suggest_alias(qwen3, deepseek, []) is None


def test_the_tokens_that_break_most_positions_come_first(qwen3: Any, qwen2: Any, align: Align) -> None:
    think, call = qwen3.convert_tokens_to_ids(["<think>", "<tool_response>"])
    ids_TC = torch.tensor([[1, think], [2, call], [call, 3], [4, 5], [call, think]])
    tokens = align(qwen3, qwen2)
    assert unmapped_candidates(tokens, ids_TC) == [("<tool_response>", 3), ("<think>", 2)]
    assert unmapped_candidates(tokens, ids_TC, most=1) == [("<tool_response>", 3)]
    assert unmapped_candidates(tokens, torch.tensor([[200000, 1]])) == [("<id 200000>", 1)]


def test_tokenizers_are_the_same_by_content(qwen3: Any, qwen2: Any) -> None:
    assert same_tokenizer(qwen3, qwen3)
    assert not same_tokenizer(qwen3, qwen2)
    assert same_tokenizer(byte_level(["a b"]), byte_level(["a b"]))
    assert not same_tokenizer(byte_level(["a b"]), byte_level(["b a"]))
