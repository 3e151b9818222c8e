"""Errors that a user can act on.

Each message is one or two lines: what is wrong with its value, where (dotted key or path), what to do. The command
line prints the message and exits with `code`; anything else that escapes is a bug.
"""


class WeaveError(Exception):
    """Something failed that the user can act on."""

    code = 1


class InputError(WeaveError):
    """The user's input is wrong: a recipe, a file, an option."""

    code = 2


class StaleInput(InputError):
    """A stage's input was made with other settings than the recipe now says; the message names the fixing command."""


class CorruptData(WeaveError):
    """Stored bytes are not the bytes that were written."""


class Mismatch(WeaveError):
    """Two things that must agree do not: an engine and the reference, two caches of one trajectory, two ranks."""
