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


class PeerStopped(WeaveError):
    """Another rank has stopped, which says why itself if it still can."""


class StartAgain(WeaveError):
    """This start cannot go on; the same command can, since word was left for its next start."""

    def __init__(self, what: str, then: str) -> None:
        super().__init__(what, then)
        self.what = what
        self.then = then

    def __str__(self) -> str:
        return f"{self.what}. Run the same command again: {self.then} (torchrun --max-restarts 3 does it by itself)"


def logits_not_finite(where: str, model: str) -> WeaveError:
    """The error for a model that gives NaN or infinite logits; `where` names the prompt or row, if one is to blame."""
    place = f"{where}: the model's logits are not finite" if where else f"{model}: the model's logits are never finite"
    named = f" ({model})" if where and model else ""
    return WeaveError(f"{place}{named}. Try float32, or check the checkpoint")


def first_line(error: Exception) -> str:
    """Give what another library's error says first, for use inside a message of ours."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
