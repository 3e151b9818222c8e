r"""Grade maths as the paper does: the last balanced `\boxed{...}`, without formatting, compared exactly.

Every step takes linear time: each pattern either has a fixed length or stops at the next brace or space, and nested
wrappers are removed a fixed number of times.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_weave.errors import InputError

TIMEOUT = 5  # seconds for math-verify to read or to compare one answer
# `\boxed` with its brace, or a brace with all the backslashes before it (an odd number escapes it).
_BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed(?![A-Za-z])\s*\{)|(?<!\\)(?P<slashes>\\*+)(?P<brace>[{}])")


def extract_boxed(text: str) -> str | None:
    r"""Find the content of the last `\boxed{...}` with balanced braces; the innermost of nested ones.

    >>> extract_boxed(r"so \boxed{1}, or \boxed{\frac{1}{2}}, or \boxed{3")
    '\\frac{1}{2}'
    """
    last: tuple[int, int] | None = None
    open_groups: list[int] = []  # where a box's content starts, or -1 for any other group
    for match in _BOX_OR_BRACE.finditer(text):
        if match["box"]:
            open_groups.append(match.end())
        elif len(match["slashes"]) % 2:
            continue
        elif match["brace"] == "{":
            open_groups.append(-1)
        elif open_groups:
            start = open_groups.pop()
            if start >= 0 and (last is None or start > last[0]):
                last = (start, match.start("brace"))
    return None if last is None else text[last[0] : last[1]]


def grade(response: str, reference: object) -> bool:
    r"""Check whether the last box equals the reference (evaluation-prompts). Unboxed answers never count.

    >>> grade(r"Thus \boxed{1{,}024\text{ cm}}.", 1024), grade("1024", 1024)
    (True, False)
    """
    answer = extract_boxed(response)
    if answer is None:
        return False
    tokens = canonical(answer)
    return bool(tokens) and tokens == canonical(str(reference))


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the time is up; only in the main thread, which alone gets alarms."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} seconds")

    handler = signal.signal(signal.SIGALRM, expire)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def verify_answer(response: str, reference: str) -> tuple[str | None, bool]:
    """Find the answer, boxed or not, and compare it by computer algebra (math-verify, as the authors' release)."""
    try:
        import math_verify
    except ImportError as error:
        raise InputError(
            "the grader 'math-verify' needs the package math-verify, which is not installed. "
            "Install it with: pip install math-verify, or set eval.profile = 'paper'"
        ) from error
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would print whole responses that it cannot parse
    # Its timeout is an alarm signal, which only the main thread can handle.
    seconds = TIMEOUT if threading.current_thread() is threading.main_thread() else None
    parsed = math_verify.parse(response, parsing_timeout=seconds)
    expected = math_verify.parse(f"${reference}$", parsing_timeout=seconds)
    boxed = extract_boxed(response)
    answer = boxed if boxed is not None or not parsed else str(parsed[-1])
    return answer, bool(math_verify.verify(expected, parsed, timeout_seconds=seconds))


_PLAIN = str.maketrans({"−": "-", "–": "-", "°": " ", "$": " ", "~": " "})
_BLANK = re.compile(  # delimiters, spacing, sizes, styles, percent and degree signs
    r"\\[,;:> ()\[\]]|\\?%|\\(?=\$)"
    r"|\\(?:q?quad|left|right|[bB]igg?[lrm]?|(?:display|text|script)style|degree)(?![A-Za-z])"
    r"|\^ ?(?:\\circ(?![A-Za-z])|\{ ?\\circ ?\})"
)
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_WORDS = "text|textrm|textnormal|mathrm|mbox|hbox"
_FONTS = f"{_WORDS}|textbf|textit|textsf|texttt|emph|mathbf|mathit|mathsf|mathtt|mathnormal|boldsymbol|bm"
_WRAPPER = re.compile(rf"\\(?:{_FONTS}) ?\{{([^{{}}]*)\}}")
_LONE = re.compile(r"(?<!\\)\{ ?(\\[A-Za-z]+|[^{}\\]) ?\}")  # one token in braces
# Text words at the very end of an answer are its unit, except a single letter that is a variable, i or e.
_UNIT = re.compile(
    r"(?<![_^({,=])(?<![_^({,=] ) ?(?:/ ?|\\cdot ?)?"
    rf"\\(?:{_WORDS}) ?\{{ ?(?![abeijknxyz] ?\}})[A-Za-z][A-Za-z. ]*\}}"
    r"(?: ?\^ ?(?:[23]|\{ ?[23] ?\}))? ?\.?$"
)
_BARE_UNIT = re.compile(
    r"(?<=[0-9)}]) ?(?:(?:square|cubic) )?"
    r"(?:degree|radian|unit|dollar|cent|inche?|foot|feet|meter|metre|mile|second|minute|hour|day)s? ?\.?$"
)
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})++(?![0-9,])")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\?\S")
_INTEGER = re.compile(r"([+-]?)([0-9]++)")
_NESTING = 4  # wrappers inside wrappers, or units after units, that are still only formatting


def canonical(answer: str) -> tuple[str, ...]:
    r"""Reduce an answer to its meaningful LaTeX tokens, with one form for each integer.

    >>> canonical(r"$\dfrac{1}{2}\,\text{cm}^2$"), canonical("+007.")
    (('\\frac', '1', '2'), ('7',))
    """
    # Spaces are collapsed after every step, so that the patterns need to allow only one.
    text = " ".join(answer.replace(r"\!", "").replace("{,}", ",").split())
    text = " ".join(_BLANK.sub(" ", text).translate(_PLAIN).split())
    text = _FRACTION.sub(r"\\frac", text)
    for _ in range(_NESTING):
        text = _UNIT.sub("", text) or text  # a unit alone is an answer
    for _ in range(_NESTING):
        text = _LONE.sub(r" \1 ", _WRAPPER.sub(r" \1 ", text))  # the space separates it from a macro before it
        text = " ".join(text.split())
    text = _BARE_UNIT.sub("", text)
    if not re.search(r"[(\[]|\\\{", text):  # in a pair or a set a comma separates
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    tokens = _TOKEN.findall(text)
    if tokens and tokens[-1] == ".":
        tokens = tokens[:-1]
    if tokens[:1] == ["{"] and tokens[-1] == "}" and "{" not in tokens[1:]:
        tokens = tokens[1:-1]
    integer = _INTEGER.fullmatch("".join(tokens))
    if integer is None:
        return tuple(tokens)
    digits = integer[2].lstrip("0") or "0"  # no plus sign, leading zeros or negative zero
    return ("-", digits) if integer[1] == "-" and digits != "0" else (digits,)
