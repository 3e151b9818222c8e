"""User-defined functions: a grader or an objective from a Python file. They run only with --trust."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError


def load_function(named: str, trusted: bool) -> Callable[..., Any]:
    """Load `my.py:grade`. Its file runs in this process, with the user's permissions."""
    if not trusted:  # recipes are shared, and cannot trust themselves
        raise InputError(
            f"{named} is Python that would run here with your full permissions. If you wrote it, or have read it, add "
            "--trust to the command; from Python: Run(..., trust=True)"
        )
    file, _, name = named.rpartition(":")
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location(f"plugin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # a user's file can raise anything
        raise InputError(f"{named} cannot be loaded ({type(error).__name__}: {error}). Correct the file") from error
    return function
