"""The bytes of every token of a tokenizer, and how the tokenizer splits bytes into tokens.

A spelling (a token's bytes) does not depend on its position: a space that a tokenizer puts before every text is part of
the first token's spelling.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer

from lightning_weave.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NOT_TEXT = re.compile("([\udc80-\udcff])")  # how `surrogateescape` decodes an invalid byte


def _byte_alphabet() -> dict[int, str]:
    """Map each byte to its character in byte-level vocabularies: itself if printable, else from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
_FROM_LATIN = {byte: ord(char) for byte, char in _ALPHABET.items()}
# Characters outside the alphabet are mapped outside latin-1, so that encoding them fails.
_TO_LATIN = dict.fromkeys(_ALPHABET, 65535) | {ord(char): byte for byte, char in _ALPHABET.items()}


@dataclass(frozen=True)
class Script:
    """A way of writing bytes as strings.

    >>> Script(byte_level=True).read("ĠÃ©")
    b' \\xc3\\xa9'
    >>> metaspace = Script(byte_fallback=True, replacements=(("▁", " "),))
    >>> metaspace.read("▁▁the"), metaspace.read("<0x0A>")
    (b'  the', b'\\n')
    >>> list(metaspace.write(b" the\\xe6"))
    ['▁the', b'\\xe6']
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()  # (in the vocabulary, in text)

    def is_byte(self, token: str) -> bool:
        return self.byte_fallback and _BYTE_TOKEN.fullmatch(token) is not None

    def read(self, token: str) -> bytes:
        """Convert a vocabulary string to bytes."""
        if self.is_byte(token):
            return bytes([int(token[3:5], 16)])
        for written, meant in self.replacements:
            token = token.replace(written, meant)
        if self.byte_level:
            try:
                return token.translate(_TO_LATIN).encode("latin-1")
            except UnicodeEncodeError:  # outside the alphabet, a string is itself
                return token.encode()
        return token.encode()

    def write(self, spelling: bytes) -> Iterator[str | bytes]:
        """Yield strings for the model to split, and single bytes that no string can represent."""
        if self.byte_level:
            yield spelling.decode("latin-1").translate(_FROM_LATIN)
            return
        for part in _NOT_TEXT.split(spelling.decode(errors="surrogateescape")):
            if _NOT_TEXT.fullmatch(part):
                yield part.encode(errors="surrogateescape")
            elif part:
                for written, meant in self.replacements:
                    part = part.replace(meant, written)
                yield part


def _read_script(backend: Tokenizer) -> Script:
    """Read the script from the decoder or, if there is none, from the pre-tokenizer."""
    steps = list(_steps(backend.decoder))
    if not steps:
        steps = [step for step in _steps(backend.pre_tokenizer) if step["type"] in ("ByteLevel", "Metaspace")]
    replacements: list[tuple[str, str]] = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": written}, "content": meant}:
                replacements.append((written, meant))
            case {"type": "Metaspace", "replacement": written}:
                replacements.append((written, " "))
            case {"type": "ByteLevel" | "ByteFallback" | "Fuse" | "Strip"}:  # the last two apply to whole texts
                pass
            case _:
                raise _unreadable(f"decodes with a {step['type']} step")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if getattr(backend.model, affix, None):
            raise _unreadable(f"marks parts of words with {getattr(backend.model, affix)!r}")
    types = {step["type"] for step in steps}
    return Script("ByteLevel" in types, "ByteFallback" in types, tuple(replacements))


def _unreadable(why: str) -> InputError:
    return InputError(
        f"The tokenizer {why}, so the bytes of a single token are unknown. "
        "Use a model whose tokenizer is byte-level or SentencePiece."
    )


def _steps(component: Any) -> list[dict[str, Any]]:
    """Flatten a decoder or pre-tokenizer into its steps."""

    def flat(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if state["type"] != "Sequence":
            yield state
        for nested in state.get("decoders", state.get("pretokenizers", [])):
            yield from flat(nested)

    return [] if component is None else list(flat(json.loads(component.__getstate__())))


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
    def from_tokenizer(cls, tokenizer: Any) -> "Spelling":
        """Read a tokenizer; results are cached until tokens are added to it."""
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        if not isinstance(backend, Tokenizer):
            raise InputError(
                f"The tokenizer is a {type(tokenizer).__name__}, whose vocabulary cannot be read. "
                "Use a fast tokenizer: a model directory that holds a tokenizer.json."
            )
        size = backend.get_vocab_size(with_added_tokens=True)
        known = _known.get(tokenizer)
        if known is not None and known.size == size:
            return known
        script = _read_script(backend)
        added = backend.get_added_tokens_decoder()
        strings = {id: string for string, id in backend.get_vocab(with_added_tokens=True).items()}
        strings |= {id: token.content for id, token in added.items()}
        origins = {id: Origin.BYTE if script.is_byte(string) else Origin.PIECE for id, string in strings.items()}
        origins |= {id: Origin.CONTROL if token.special else Origin.ADDED for id, token in added.items()}
        bytes_of = {id: content for id, string in strings.items() if (content := script.read(string))}
        spelling = cls(backend, size, script, strings=strings, origins=origins, bytes_of=bytes_of)
        lossy = {id for id in added if not spelling._round_trips(id)}
        spelling = replace(spelling, bytes_of={id: bytes_of[id] for id in bytes_of if id not in lossy})
        _known[tokenizer] = spelling
        return spelling

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
            is_text = all(id in self.bytes_of and self.origins[id] != Origin.CONTROL for id in ids)
            if is_text and b"".join(self.bytes_of[id] for id in ids) == spelling:
                return tuple(ids)
        return None

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
        spelling = Spelling.from_tokenizer(tokenizer)
    if id not in spelling.bytes_of:
        what = f"token {id}, {spelling.strings[id]!r}," if id in spelling.strings else f"id {id}"
        raise InputError(f"The tokenizer's {what} has no lossless spelling. Remove it from the ids.")
    return spelling.bytes_of[id]
