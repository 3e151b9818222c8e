"""Functions of the user's own: a grader or an objective from a Python file that the recipe trusts explicitly."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError


def load_function(named: str) -> Callable[..., Any]:
    """Load `my.py:grade`. Its file runs here, with all the user's rights."""
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
