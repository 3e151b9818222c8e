"""The bytes of every token of a tokenizer, and how the tokenizer splits bytes into tokens.

A spelling (a token's bytes) does not depend on its position: a space that a tokenizer puts before every text is part of
the first token's spelling.
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
    """How a token came into the vocabulary, in the order in which a tokenizer prefers tokens with the same bytes."""

    CONTROL = 0  # special: a signal to the model, not text that looks like it
    ADDED = 1  # ordinary text registered as an added token
    PIECE = 2
    BYTE = 3  # byte fallback, <0x0A>


@dataclass(frozen=True, eq=False)
class Spelling:
    """The bytes of every token of one tokenizer."""

    backend: Tokenizer
    size: int  # of the vocabulary when read
    script: Script
    strings: dict[int, str]  # id -> string in the vocabulary
    origins: dict[int, Origin]
    bytes_of: dict[int, bytes]  # only tokens with a lossless spelling

    @classmethod
    def of(cls, tokenizer: Any) -> "Spelling":
        """Read a tokenizer; results are cached until tokens are added to it."""
        backend = _backend(tokenizer)
        spelling = _known.get(tokenizer)
        if spelling is None or spelling.size != backend.get_vocab_size(with_added_tokens=True):
            spelling = _known[tokenizer] = cls._read(backend)
        return spelling

    @classmethod
    def _read(cls, backend: Tokenizer) -> "Spelling":
        script = script_of(backend)
        added = backend.get_added_tokens_decoder()
        strings = {id: string for string, id in backend.get_vocab(with_added_tokens=True).items()}
        strings |= {id: token.content for id, token in added.items()}
        origins = {id: Origin.BYTE if script.is_byte(string) else Origin.PIECE for id, string in strings.items()}
        origins |= {id: Origin.CONTROL if token.special else Origin.ADDED for id, token in added.items()}
        bytes_of = {id: content for id, string in strings.items() if (content := script.read(string))}
        size = backend.get_vocab_size(with_added_tokens=True)
        spelling = cls(backend, size, script, strings=strings, origins=origins, bytes_of=bytes_of)
        lossy = {id for id in added if not spelling._round_trips(id)}
        return replace(spelling, bytes_of={id: bytes_of[id] for id in bytes_of if id not in lossy})

    @cached_property
    def ids_of(self) -> dict[bytes, list[int]]:
        """The tokens of each spelling, the one that the tokenizer prefers first."""
        ids_of: dict[bytes, list[int]] = {}
        for id, spelling in self.bytes_of.items():
            ids_of.setdefault(spelling, []).append(id)
        for ids in ids_of.values():
            if len(ids) > 1:
                ids.sort(key=lambda id: (self.origins[id], id))
        return ids_of

    def text(self, id: int) -> str:
        """Decode one token for people; invalid UTF-8 is escaped."""
        if id in self.bytes_of:
            return self.bytes_of[id].decode(errors="backslashreplace")
        return self.strings.get(id, f"<id {id}>")

    def cut(self, spelling: bytes) -> tuple[int, ...] | None:
        """Split bytes into the tokenizer's own pieces, never into control tokens; None if that is impossible."""
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
        """Split as the tokenizer does, words first; a normaliser or an added space may change the text."""
        text = spelling.decode(errors="replace")
        if self.backend.normalizer is not None:
            text = self.backend.normalizer.normalize_str(text)
        if self.backend.pre_tokenizer is None:
            return self._model_ids([text])
        return self._model_ids(word for word, _ in self.backend.pre_tokenizer.pre_tokenize_str(text))

    def _cut_written(self, spelling: bytes) -> list[int]:
        """Split with the model alone, for bytes that are not valid text."""
        ids: list[int] = []
        for part in self.script.write(spelling):
            ids += self._model_ids([part]) if isinstance(part, str) else self._cut_bytes(part)
        return ids

    def _cut_bytes(self, spelling: bytes) -> list[int]:
        choices = (self.ids_of.get(bytes([byte]), []) for byte in spelling)
        ordinary = ([id for id in ids if self.origins[id] != Origin.CONTROL] for ids in choices)
        return [ids[0] for ids in ordinary if ids]

    def _model_ids(self, words: Iterable[str]) -> list[int]:
        model = self.backend.model
        return [token.id for word in words for token in model.tokenize(word)]

    def _round_trips(self, id: int) -> bool:
        """Check whether an added token's text encodes to that token."""
        spelling = self.bytes_of.get(id, b"")
        encoded = self.backend.encode(spelling.decode(errors="replace"), add_special_tokens=False)
        unpadded = [token for token, real in zip(encoded.ids, encoded.attention_mask, strict=True) if real]
        if unpadded != [id]:
            # A tokenizer that puts a space before every text hides its own pieces: use the model alone.
            unpadded = self._cut_written(spelling)
        return unpadded == [id]


_known: WeakKeyDictionary[Any, Spelling] = WeakKeyDictionary()


def spell(tokenizer: Any, id: int) -> bytes:
    """Return the bytes of one token, which may end within a character.

    Refuses ids without a lossless spelling: ids outside the vocabulary, and added tokens whose text does not encode to
    that token.
    """
    spelling = _known.get(tokenizer)
    if spelling is None or id not in spelling.bytes_of:
        spelling = Spelling.of(tokenizer)
    if id not in spelling.bytes_of:
        what = f"token {id}, {spelling.strings[id]!r}," if id in spelling.strings else f"id {id}"
        raise InputError(f"The tokenizer's {what} has no text of its own. Remove it from the ids.")
    return spelling.bytes_of[id]


def _backend(tokenizer: Any) -> Tokenizer:
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(backend, Tokenizer):
        raise InputError(
            f"The tokenizer is a {type(tokenizer).__name__}, whose vocabulary cannot be read. "
            "Use a fast tokenizer: a model directory that holds a tokenizer.json."
        )
    return backend
