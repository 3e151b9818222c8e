"""One writer per run directory. The kernel drops the lock when its holder dies, however it dies.

Some shared disks have no such lock (ENOSYS). There, a file that only one process can create is the lock; its holder
touches it every now and then, so that the lock of one that was killed can be told from one that is held.
"""

import errno
import fcntl
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_weave.errors import InputError, WeaveError
from lightning_weave.ranks import is_alone, is_first
from lightning_weave.store.files import remove_temporaries, temporary_name

NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
TOUCH_EVERY = 30.0  # seconds
SILENT = 300.0  # seconds without a touch after which the holder is dead
log = logging.getLogger(__name__)


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
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise WeaveError(f"{run_dir}: the run directory cannot be locked ({error.strerror})") from None
            with _hold_file(run_dir / ".lock-held"):
                yield
            return
        if is_alone():
            remove_temporaries(run_dir, "")  # of killed holders
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _own_name(), 0)
        yield
    finally:
        os.close(descriptor)


def _own_name() -> bytes:
    command = " ".join(["lweave", *sys.argv[1:]])
    return f"process {os.getpid()} on {socket.gethostname()} ({command})\n".encode()[:400]


@contextmanager
def _hold_file(path: Path) -> Iterator[None]:
    """Hold a lock that is a file."""
    log.warning("warning: %s: this file system has no flock; %s is the lock instead", path.parent, path.name)
    own = temporary_name(path)
    own.write_bytes(_own_name())
    try:
        if path.exists() and own.stat().st_mtime - path.stat().st_mtime > SILENT:  # both by the file system's clock
            path.unlink(missing_ok=True)
        os.link(own, path)  # fails where the name exists, on NFS too
    except FileExistsError:
        raise InputError(
            f"{path.parent} is in use by {path.read_text(errors='replace').strip()}. Wait for it or stop it; if it no "
            f"longer runs, remove {path}. Then try again"
        ) from None
    finally:
        own.unlink(missing_ok=True)
    ended = threading.Event()
    touching = threading.Thread(target=_touch, args=(path, ended), daemon=True)
    touching.start()
    try:
        if is_alone():
            remove_temporaries(path.parent, "")
        yield
    finally:
        ended.set()
        touching.join()
        path.unlink(missing_ok=True)


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_EVERY):
        try:
            os.utime(path)
        except OSError:  # out of reach for a moment
            continue
