"""Is the Hugging Face hub in reach? Asked once per process, and answered within five seconds.

Its client would try again and again, for half a minute per file; a name server that is silent, for longer.
"""

import socket
import sys
from functools import cache
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

from lightning_weave.errors import first_line

SECONDS = 4.0
SILENT: set[str] = set()  # hubs that did not answer


def use_hub() -> None:
    """Call this before asking the hub: where it does not answer, all go on offline, with what was downloaded before."""
    from huggingface_hub import constants

    if not constants.HF_HUB_OFFLINE and not _answers(constants.ENDPOINT):
        SILENT.add(constants.ENDPOINT)
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # which has read it already
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def why_not(error: Exception) -> str:
    """Say in one line why the hub did not give something."""
    from huggingface_hub import constants

    if constants.ENDPOINT in SILENT:
        return f"{constants.ENDPOINT} does not answer, and it was not downloaded before"
    return first_line(error)


@cache
def _answers(endpoint: str) -> bool:
    """Try to connect, in a thread: looking a name up knows no timeout. Behind a proxy nobody can tell."""
    address = urlsplit(endpoint)
    if address.scheme in getproxies():
        return True
    answers: list[bool] = []

    def connect() -> None:
        try:
            port = address.port or {"http": 80, "https": 443}[address.scheme]
            socket.create_connection((address.hostname or "", port), timeout=SECONDS).close()
            answers.append(True)
        except (OSError, KeyError):
            answers.append(False)

    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answers == [True]
