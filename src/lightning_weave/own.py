"""Functions of the user's own: a grader or an objective from a Python file. They run only if the command says so."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError


def check_trust(named: str, trusted: bool) -> None:
    """Refuse code that only a recipe vouches for: recipes are passed on, and cannot trust themselves."""
    if not trusted:
        raise InputError(
            f"{named} is Python that would run here with your full permissions. If you wrote it, or have read it, add "
            "--trust to the command; from Python: Run(..., trust=True)"
        )


def load_function(named: str, trusted: bool) -> Callable[..., Any]:
    """Load `my.py:grade`. Its file runs here, with all the user's rights."""
    check_trust(named, trusted)
    file, _, name = named.rpartition(":")
    path = Path(file).expanduser()
    spec = importlib.util.spec_from_file_location(f"own_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, name)
    except Exception as error:  # it is the user's file: anything may happen in it
        raise InputError(f"{named} cannot be loaded ({type(error).__name__}: {error}). Correct the file") from error
    return function
