"""The kind of text that a token holds, and how to display a token."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_weave.tokens.spelling import Origin, Spelling

TokenKind = Literal["digits", "words", "punctuation", "whitespace", "end of thinking", "end of sequence", "special"]
KINDS: tuple[TokenKind, ...] = get_args(TokenKind)
END_OF_THINKING = "</think>"


@dataclass(frozen=True)
class Vocabulary:
    """The student's tokens as text."""

    spelling: Spelling
    stop_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, stop_ids: Iterable[int]) -> "Vocabulary":
        return cls(Spelling.of(tokenizer), frozenset(stop_ids))

    @property
    def size(self) -> int:
        return max(self.spelling.strings, default=-1) + 1

    def text(self, id: int) -> str:
        """The token's own text, invalid UTF-8 escaped."""
        return self.spelling.text(id)

    def kind(self, id: int) -> TokenKind:
        """Classify a token."""
        if id in self.stop_ids:
            return "end of sequence"
        text = self.text(id)
        if text.strip() == END_OF_THINKING:
            return "end of thinking"
        if self.spelling.origins.get(id) == Origin.CONTROL:
            return "special"
        return kind_of_text(text)


def kind_of_text(text: str) -> TokenKind:
    """Classify ordinary text.

    >>> [kind_of_text(text) for text in (" 42", "the", "x1", "+", "  ")]
    ['digits', 'words', 'words', 'punctuation', 'whitespace']
    """
    bare = text.strip()
    if not bare:
        return "whitespace"
    if any(char.isalpha() for char in bare):
        return "words"
    return "digits" if any(char.isdigit() for char in bare) else "punctuation"
