"""Sandboxes for all tests of this folder, on machines that can have them."""

import shutil
import subprocess

import pytest

from lightning_weave.grading.sandbox import Limits, Sandbox, open_sandbox

MB = 1 << 20
PATIENT = 60.0  # seconds for a program that ends by itself, however busy the machine and however low our priority


@pytest.fixture(scope="session")
def bubblewrap() -> str:
    """Find bubblewrap, and skip where the machine lets nobody use it: then nothing of ours is to blame."""
    path = shutil.which("bwrap")
    if path is None:
        pytest.skip("bubblewrap is not installed: run scripts/install-sandbox")
    trial = [path, "--ro-bind", "/", "/", "--unshare-pid", "--unshare-net", "--proc", "/proc", "true"]
    tried = subprocess.run(trial, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"bubblewrap cannot be used on this machine: {tried.stderr.strip()}")
    return path


@pytest.fixture(scope="session")
def sandbox(bubblewrap: str) -> Sandbox:
    """One whose clock decides nothing, for programs that end."""
    return open_sandbox(slots=1, limits=Limits(seconds=PATIENT, memory=512 * MB, output=4 * MB, scratch=4 * MB))


@pytest.fixture(scope="session")
def hasty(bubblewrap: str) -> Sandbox:
    """One with a short clock, for programs that never end."""
    return open_sandbox(slots=1, limits=Limits(seconds=1.5, memory=256 * MB, output=4 * MB, scratch=4 * MB))
