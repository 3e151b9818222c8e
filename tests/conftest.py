"""What holds for every test."""

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from forked import Forked, serve
from lightning_weave.grading import math as grading_math
from lightning_weave.store import files

# How long an example takes says something about the machine, not about the code.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
THREADS = torch.get_num_threads()  # before any test has changed it
# A shell starts what runs in the background with SIGINT ignored, which programs that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to repeat what failed; with -q no header has said it."""
    seed = config.getoption("randomly_seed", None)
    if seed is not None and terminalreporter.stats.keys() & {"failed", "error"}:
        terminalreporter.line(f"the same order and seeds: --randomly-seed={seed}")


@pytest.fixture(autouse=True, scope="session")
def place_at_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Path]]:
    """Keep the hashes of tests' files out of the home of whoever runs them; give what says the usual place."""
    usual, file = files._cache_file, tmp_path_factory.mktemp("identities") / "identities.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_cache_file", lambda: file)
        yield usual


@pytest.fixture(autouse=True, scope="session")
def _patient_algebra() -> Iterator[None]:
    """Let no clock decide what math-verify reads: five seconds are little for its first answer on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grading_math, "TIMEOUT", 600)
        yield


@pytest.fixture(autouse=True)
def short_memory(place_at_home: Callable[[], Path]) -> Iterator[None]:
    """Forget them after each test: the memory of a thousand tests is slow to write."""
    yield
    files._cache_file().unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def _torch_as_new() -> Iterator[None]:
    """Seed torch for this test, as pytest-randomly seeds the others, and undo what it does to the number of threads."""
    torch.manual_seed(random.getrandbits(32))
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """Let the collector pass over what is imported: the commands collect after every model, half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Run commands in processes that may be killed."""
    with serve() as program:
        yield program


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The Python of the environment with vLLM, for tests that are marked vllm."""
    python = os.environ.get("LWEAVE_VLLM_PYTHON")
    if not python:
        pytest.fail("LWEAVE_VLLM_PYTHON does not name the Python of an environment with vLLM: make test-vllm")
    return python
