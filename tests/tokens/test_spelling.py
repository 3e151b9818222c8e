"""Spellings against what the tokenizers themselves decode."""

import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer

from lightning_weave.errors import InputError
from lightning_weave.tokens import spell
from lightning_weave.tokens.spelling import Origin, Spelling
from tokens.samples import BROKEN, TEXT, byte_level, fast, sentencepiece


def test_every_token_is_spelt_as_it_decodes(tokenizer: Any) -> None:
    # A letter first: some decoders take a space away from the beginning of a text.
    backend, letter = tokenizer.backend_tokenizer, tokenizer.convert_tokens_to_ids("a")
    ids = sorted(backend.get_vocab().values())
    decoded = backend.decode_batch([[letter, id] for id in ids], skip_special_tokens=False)
    for id, text in zip(ids, decoded, strict=True):
        assert "a" + spell(tokenizer, id).decode(errors="replace") == text


def test_a_text_is_the_sum_of_its_tokens(tokenizer: Any) -> None:
    # Left out: what normalisers rewrite, and what makes a tokenizer with a dummy space put more of them.
    text = re.sub("[\u0301\u212b▁]|</?s>", "", TEXT)
    spelt = b"".join(spell(tokenizer, id) for id in tokenizer.encode(text, add_special_tokens=False))
    assert spelt.removeprefix(b" ") == text.encode()


def test_bytes_are_cut_without_loss(tokenizer: Any) -> None:
    spelling = Spelling.from_tokenizer(tokenizer)
    for wanted in [*BROKEN, TEXT.encode(), *(bytes([byte]) for byte in range(256))]:
        cut = spelling.cut(wanted)
        assert cut is not None
        assert b"".join(spell(tokenizer, id) for id in cut) == wanted
        assert not [id for id in cut if spelling.origins[id] == Origin.CONTROL]


def test_text_is_cut_as_the_tokenizer_cuts_it(qwen3: Any, deepseek: Any) -> None:
    for tokenizer in (qwen3, deepseek):
        for word in (
            "<|im_middle|>assistant",
            "x\n\n\n  y",
            "การเรียนรู้",
            ");\n\n\n",
            "123456",
            "你好世界",
            " 👩‍👩‍👧",
            "\\frac{1}{2}",
        ):
            assert list(Spelling.from_tokenizer(tokenizer).cut(word.encode()) or []) == tokenizer.encode(word)


def test_added_strings_are_spelt_as_they_are_meant(small_pieces: Any) -> None:
    for text in ("\n\n", "  ", "<tag>", "</s>"):
        (id,) = small_pieces.encode(text, add_special_tokens=False)
        assert spell(small_pieces, id) == text.encode()


def test_added_tokens_that_do_not_come_back_have_no_spelling() -> None:
    # The decoder reads the raw "é" as the byte E9; and "x y" comes back as pieces, not as the added "x▁y".
    for tokenizer in (byte_level([], added=("é!",)), sentencepiece([*"▁xy"], added=("x▁y",))):
        id = len(tokenizer) - 1
        with pytest.raises(InputError, match=f"token {id}, .* has no lossless spelling"):
            spell(tokenizer, id)


def test_state_left_by_padding_and_truncation_does_not_matter() -> None:
    tokenizer = byte_level([], added=("<think>",), special=("<pad>",))
    tokenizer.backend_tokenizer.enable_padding(length=8)
    tokenizer.backend_tokenizer.enable_truncation(1)
    assert spell(tokenizer, tokenizer.convert_tokens_to_ids("<think>")) == b"<think>"


def test_text_is_never_cut_into_a_control_token() -> None:
    backend = Tokenizer(models.BPE(vocab={"<": 0, "s": 1, ">": 2, "<s>": 3}, merges=[], ignore_merges=True))
    backend.decoder = decoders.ByteLevel()
    assert Spelling.from_tokenizer(backend).cut(b"<s>") == (3,)
    backend.add_special_tokens(["<s>", "<end>"])
    assert Spelling.from_tokenizer(backend).cut(b"<s>") == (0, 1, 2)


def test_tokens_added_later_are_seen() -> None:
    tokenizer = byte_level([])
    with pytest.raises(InputError, match="id 256"):
        spell(tokenizer, 256)
    tokenizer.add_tokens(["<late>"])
    assert spell(tokenizer, 256) == b"<late>"


def test_a_tokenizer_without_decoder_is_read_from_its_pre_tokenizer() -> None:
    backend = Tokenizer(models.BPE(vocab={"Ġ": 0, "é": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert [spell(fast(backend), id) for id in (0, 1)] == [b" ", b"\xe9"]


def test_a_metaspace_decoder_is_read() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("n", -2.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    assert [spell(backend, id) for id in (1, 2)] == [b" the", b"n"]
    assert Spelling.from_tokenizer(backend).cut(b" the") == (1,)
    assert Spelling.from_tokenizer(backend).cut(b"then") is None  # "t" would be unknown, and there are no byte tokens


def test_unreadable_tokenizers_are_refused() -> None:
    wordpiece = Tokenizer(models.WordPiece(vocab={"a": 0, "##b": 1}, unk_token="a"))
    with pytest.raises(InputError, match="marks parts of words with '##'"):
        spell(wordpiece, 0)
    wordpiece.decoder = decoders.WordPiece()
    with pytest.raises(InputError, match="decodes with a WordPiece step"):
        spell(wordpiece, 0)
    with pytest.raises(InputError, match=r"ByT5Tokenizer,.*tokenizer\.json"):
        spell(ByT5Tokenizer(), 0)


def test_an_added_token_that_swallows_spaces_is_spelt_without_them() -> None:
    mask = AddedToken("<mask>", lstrip=True, rstrip=True)
    assert spell(byte_level([], added=(mask,)), 256) == b"<mask>"
