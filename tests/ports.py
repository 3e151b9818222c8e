"""Ports for programs that bind one later."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """Give a port of this machine that nobody else gets meanwhile, and at which nobody answers.

    Who binds it with SO_REUSEADDR, as servers and torch's stores do, may listen there: a socket that is only bound is
    no obstacle to that, but one to everybody who asks for any free port.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
