"""The normal form in which prompts are compared. It is never used as a prompt."""

import re
import unicodedata

_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts in which every character counts as a word
# Numbers keep their decimal point. Punctuation of prose is dropped; operators of arithmetic and code are words of their
# own: 3 - 2 is not 3 + 2, and 9! is not 9.
_WORD = re.compile(rf"\d+(?:\.\d+)*|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|[^\w\s.,;:?\"'`$]|_")
_FOREIGN = re.compile(r"[^\x00-\x7f]")
_DASHES = {ord(dash): "-" for dash in "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"}
# NFKC flattens these (10² would become 102), so they are written out first.
_SPELLED_OUT = {"<super>": "^", "<sub>": "_", "<fraction>": " "}


def words(text: str) -> list[str]:
    """Split a text into comparable words, without case, spacing, prose punctuation and Unicode variants.

    >>> words("What is  $x\u00b2 \u2212 3.5$?")
    ['what', 'is', 'x', '^', '2', '-', '3.5']
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    text = unicodedata.normalize("NFKC", _FOREIGN.sub(_spell_out, text).translate(_DASHES))
    return [word for word in _WORD.findall(text.casefold()) if word.isascii() or not _is_punctuation(word)]


def normalise(text: str) -> str:
    """Join a text's words: texts with the same normal form count as equal.

    A text of punctuation alone is its own normal form, so that "?" and "!?" differ.
    """
    return " ".join(words(text)) or " ".join(text.split())


def _spell_out(match: re.Match[str]) -> str:
    character = match.group()
    return _SPELLED_OUT.get(unicodedata.decomposition(character).partition(" ")[0], "") + character


def _is_punctuation(word: str) -> bool:
    return len(word) == 1 and unicodedata.category(word)[0] == "P"
