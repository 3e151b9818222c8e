"""Errors that a user can act on.

Each message is one or two lines: what is wrong with its value, where (dotted key or path), what to do. The command
line prints the message and exits with `code`; anything else that escapes is a bug.
"""

import errno
import re


class WeaveError(Exception):
    """Something failed that the user can act on."""

    code = 1


class InputError(WeaveError):
    """The user's input is wrong: a recipe, a file, an option."""

    code = 2


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


def explain_error(error: Exception) -> str:
    """Describe an error of ours or of the system to a user."""
    if isinstance(error, MemoryError):
        return "out of memory. Lower batch sizes and token budgets, or raise the limit (ulimit -v)"
    if isinstance(error, ImportError):
        return f"a library cannot be loaded ({error}). Install it again, or raise the limits (ulimit -v, ulimit -n)"
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    remedy = {errno.EMFILE: ". Raise the limit: ulimit -n 4096", errno.ENOSPC: ". Free some space, then run it again"}
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror}{remedy.get(error.errno or 0, '')}"


def printable(text: str, most: int = 8000) -> str:
    """Escape what a terminal would interpret, but keep line ends, and cut what no one would read.

    >>> printable("a\\x1b[31m\\u202eb é")
    'a\\\\x1b[31m\\\\u202eb é'
    """
    text = re.sub(r"\S{400,}", lambda word: f"{word[0][:150]}...{word[0][-150:]}", text)
    text = text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error, printable and not too long, for a message of ours."""
    lines = str(error).strip().splitlines()
    text = hide_credentials(lines[0] if lines else type(error).__name__)
    return "".join(letter if letter.isprintable() else " " for letter in text[:300])


def hide_credentials(text: str) -> str:
    """Hide the password, the token or the signature in URLs.

    >>> hide_credentials("s3://me:se/cret@bucket/x https://token@host https://host/x?sig=1 hf://datasets/org/name@v1")
    's3://...@bucket/x https://...@host https://host/x?... hf://datasets/org/name@v1'
    """
    text = re.sub(r"(?<=://)[^\s'\"@]*:[^\s'\"]*@|(?<=http://)[^\s/@]+@|(?<=https://)[^\s/@]+@", "...@", text)
    return re.sub(r"(://[^\s'\"?]*\?)[^\s'\"]+", r"\1...", text)
