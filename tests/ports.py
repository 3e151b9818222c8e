"""Ports for programs that bind one later, and vLLM's server on one."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def vllm_server(python: str, model: Path, log: Path, *options: str) -> Iterator[str]:
    """Start vLLM's OpenAI-compatible server with a model in float32, and give its URL once it answers."""
    # What `vllm serve` calls; that word itself is missing from builds for a CPU.
    program = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options]
    with held_port() as port, open(log, "w") as output:
        more = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
        url = f"http://127.0.0.1:{port}"
        server = subprocess.Popen([*program, *more], stdout=output, stderr=output)
        try:
            while not _is_healthy(url):
                assert server.poll() is None, log.read_text()[-2000:]
                time.sleep(0.5)
            yield url
        finally:
            server.terminate()
            server.wait()


def _is_healthy(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=60).status == 200
    except OSError:
        return False
