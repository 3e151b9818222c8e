"""Programs that stand in for others."""

import shlex
from pathlib import Path


def write_program(path: Path, *words: object) -> Path:
    """Write a program that runs these words and what it is given, wherever the words lie: a path may have a space."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, words))} "$@"\n')
    path.chmod(0o755)
    return path
