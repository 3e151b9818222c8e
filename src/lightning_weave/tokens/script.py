"""How a vocabulary writes bytes as strings, read from the decoder of a fast tokenizer."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


def script_of(backend: Tokenizer) -> Script:
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
