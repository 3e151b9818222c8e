"""What all actors of a Ray cluster share: where they work, and what their errors mean here."""

import os
import socket
from pathlib import Path
from typing import Any

from lightning_weave.errors import InputError, WeaveError


def enter(folder: str) -> None:
    """Work where the command was typed: the recipe's paths are relative to it."""
    if not Path(folder).is_dir():
        raise InputError(
            f"{folder} is not on node {socket.gethostname()}: start the command in a folder that all nodes share"
        )
    os.chdir(folder)


def own_error(error: Any) -> Exception:
    """What a call elsewhere raised, as it would be raised here."""
    return error.cause if isinstance(error.cause, WeaveError) else error
