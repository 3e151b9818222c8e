"""Programs that the official LiveCodeBench runner is known to judge differently from a real process."""

import re

# The official runner replaces standard input and output with objects and wraps a script in a function.
_FAILS_OFFICIALLY = (
    (re.compile(r"\bin\s+(?:sys\.)?stdin\b(?!\s*\.)"), "iterating over sys.stdin"),
    (re.compile(r"\bstdin\.buffer\.readline\b"), "sys.stdin.buffer.readline, which returns the first line every time"),
    (re.compile(r"\bopen\(\s*0\s*[,)]"), "open(0)"),
    (re.compile(r"\bstdout\.buffer\b"), "sys.stdout.buffer"),
    (re.compile(r"\bquit\("), "quit()"),
    (re.compile(r"^\s*global\s", re.MULTILINE), "a global statement"),
)


def official_failure(source: str) -> str | None:
    """Name what makes the official runner fail a script that passes here, as far as its text shows.

    >>> official_failure("import sys; print(sum(int(line) for line in sys.stdin))")
    'iterating over sys.stdin'
    """
    reasons = [reason for pattern, reason in _FAILS_OFFICIALLY if pattern.search(source)]
    return "; ".join(reasons) or None
