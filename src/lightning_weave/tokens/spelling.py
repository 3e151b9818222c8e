"""What bytes every token of a tokenizer stands for, and how the tokenizer cuts bytes into tokens.

A spelling does not depend on the token's position: a dummy space that a tokenizer puts before a text is part of the
first token's spelling, as the token itself has it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from lightning_weave.errors import InputError
from lightning_weave.tokens.script import Script, script_of


class Origin(IntEnum):
    """How a token came into its vocabulary, in the order in which a tokenizer prefers them for one spelling."""

    CONTROL = 0  # special: a sign to the model, not a text that happens to look like it
    ADDED = 1  # an ordinary string registered as added
    PIECE = 2
    BYTE = 3  # byte fallback, <0x0A>


@dataclass(frozen=True, eq=False)
class Spelling:
    """Every token of one tokenizer in bytes."""

    backend: Tokenizer
    size: int  # of the vocabulary when it was read
    script: Script
    strings: dict[int, str]  # id -> as the vocabulary writes it
    origins: dict[int, Origin]
    bytes_of: dict[int, bytes]  # only tokens with a lossless spelling

    @classmethod
    def of(cls, tokenizer: Any) -> "Spelling":
        """Read a tokenizer; the same one is read again only when tokens were added to it."""
        backend = _backend(tokenizer)
        known = _known.get(tokenizer)
        if known is None or known.size != backend.get_vocab_size(with_added_tokens=True):
            known = _known[tokenizer] = cls._read(backend)
        return known

    @classmethod
    def _read(cls, backend: Tokenizer) -> "Spelling":
        script, added = script_of(backend), backend.get_added_tokens_decoder()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        strings = {id: string for string, id in vocabulary.items()} | {id: token.content for id, token in added.items()}
        origins = {id: Origin.BYTE if script.is_byte(string) else Origin.PIECE for id, string in strings.items()}
        origins |= {id: Origin.CONTROL if token.special else Origin.ADDED for id, token in added.items()}
        bytes_of = {id: script.read(string) for id, string in strings.items()}
        size = backend.get_vocab_size(with_added_tokens=True)
        whole = cls(backend, size, script, strings, origins, {id: spelt for id, spelt in bytes_of.items() if spelt})
        lossy = {id for id in added if not whole._round_trips(id)}
        return replace(whole, bytes_of={id: spelt for id, spelt in whole.bytes_of.items() if id not in lossy})

    @cached_property
    def ids_of(self) -> dict[bytes, list[int]]:
        """The tokens of each spelling, the one that the tokenizer itself prefers first."""
        found: dict[bytes, list[int]] = {}
        for id, spelling in self.bytes_of.items():
            found.setdefault(spelling, []).append(id)
        for twins in found.values():
            if len(twins) > 1:
                twins.sort(key=lambda id: (self.origins[id], id))
        return found

    def cut(self, spelling: bytes) -> tuple[int, ...] | None:
        """Cut bytes into the tokenizer's own pieces, never into control tokens; None if it cannot spell them."""
        for attempt in (self._cut_text, self._cut_written, self._cut_bytes):
            ids = attempt(spelling)
            if self._spells(ids, spelling):
                return tuple(ids)
        return None

    def _spells(self, ids: list[int], spelling: bytes) -> bool:
        if any(id not in self.bytes_of or self.origins[id] == Origin.CONTROL for id in ids):
            return False
        return b"".join(self.bytes_of[id] for id in ids) == spelling

    def _cut_text(self, spelling: bytes) -> list[int]:
        """Cut as the tokenizer does, words first; a normaliser or a dummy space may make this another text."""
        text = spelling.decode(errors="replace")
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is None:
            return self._model_ids([text])
        return self._model_ids(word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text))

    def _cut_written(self, spelling: bytes) -> list[int]:
        """Let the model alone cut what is not a text by itself."""
        ids: list[int] = []
        for part in self.script.write(spelling):
            ids += self._model_ids([part]) if isinstance(part, str) else self._cut_bytes(part)
        return ids

    def _cut_bytes(self, spelling: bytes) -> list[int]:
        choices = (self.ids_of.get(bytes([byte]), []) for byte in spelling)
        texts = ([id for id in ids if self.origins[id] != Origin.CONTROL] for ids in choices)
        return [ids[0] for ids in texts if ids]

    def _model_ids(self, words: Iterable[str]) -> list[int]:
        model = self.backend.model
        return [token.id for word in words for token in model.tokenize(word)]

    def _round_trips(self, id: int) -> bool:
        """Say whether an added token's text comes back as that one token."""
        spelling = self.bytes_of.get(id, b"")
        encoded = self.backend.encode(spelling.decode(errors="replace"), add_special_tokens=False)
        unpadded = [one for one, real in zip(encoded.ids, encoded.attention_mask, strict=True) if real]
        if unpadded != [id]:
            # A tokenizer that puts a space before every text hides its own pieces: ask the model alone.
            unpadded = self._cut_written(spelling)
        return unpadded == [id]


_known: WeakKeyDictionary[Any, Spelling] = WeakKeyDictionary()


def spell(tokenizer: Any, id: int) -> bytes:
    """Spell one token in bytes, which need not be whole characters.

    An id without a lossless spelling is refused: one outside the vocabulary, or an added token whose text does not
    come back as that one token.
    """
    spelling = _known.get(tokenizer)
    if spelling is None or id not in spelling.bytes_of:
        spelling = Spelling.of(tokenizer)
    if id not in spelling.bytes_of:
        what = f"token {id}, {spelling.strings[id]!r}," if id in spelling.strings else f"id {id}"
        raise InputError(f"The tokenizer's {what} has no text of its own. Leave it out of what is spelled.")
    return spelling.bytes_of[id]


def _backend(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise InputError(
            f"The tokenizer is a {type(tokenizer).__name__}, whose vocabulary cannot be read. "
            "Use a fast tokenizer: a model directory that holds a tokenizer.json."
        )
    return backend
