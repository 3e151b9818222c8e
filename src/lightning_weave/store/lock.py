"""One writer per run directory. The kernel drops the lock when its holder dies, however it dies."""

import fcntl
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.ranks import is_alone, is_first
from lightning_weave.store.files import remove_temporaries


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold the run directory for this process, or say who does. Ranks other than 0 work under rank 0's lock."""
    if not is_first():
        yield
        return
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise WeaveError(f"{run_dir}: the run directory cannot be written ({error.strerror})") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 400, 0).decode(errors="replace").strip() or "another process"
            raise InputError(f"{run_dir} is in use by {holder}. Wait for it or stop it, then try again") from None
        if is_alone():
            remove_temporaries(run_dir, "")  # of killed holders
        os.ftruncate(descriptor, 0)
        command = " ".join(["lweave", *sys.argv[1:]])
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()} ({command})\n".encode()[:400], 0)
        yield
    finally:
        os.close(descriptor)
