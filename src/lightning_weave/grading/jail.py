"""One running sandbox: bubblewrap around a warm interpreter (`driver`) that forks for every test."""

import functools
import importlib.util
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lightning_weave.errors import WeaveError
from lightning_weave.grading.syscalls import syscall_filter

_DRIVER = Path(__file__).with_name("driver.py")
_FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")  # no site packages, no bytecode files
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # reproducible verdicts
PATIENCE = 60.0  # seconds for a sandbox to start or stop on a busy machine
_ERRORS_KEPT = 4096  # bytes of a program's standard error


class SandboxError(WeaveError):
    """The sandbox itself failed, so there is no verdict."""


class BrokenError(Exception):
    """A sandbox died or sent an invalid reply while a program was running in it."""


@dataclass(frozen=True)
class Limits:
    """What one test may use."""

    seconds: float = 6.0
    memory: int = 4 << 30  # as in the official runner
    processes: int = 64  # threads count too
    files: int = 64  # open at once
    output: int = 64 << 20  # in any one file, standard output included
    scratch: int = 64 << 20  # in all of /tmp


@dataclass(frozen=True)
class Program:
    """Source code, and the method to call unless it is a script."""

    source: str
    method: str | None = None


@dataclass(frozen=True)
class RunResult:
    """How one test ended. `broken`: the program destroyed its own sandbox."""

    ending: Literal["exited", "timeout", "memory", "output", "broken"]
    exit_code: int = 0
    output: bytes = b""
    errors: bytes = b""


class Jail:
    """A sandbox that runs one test after another, as long as each leaves it unchanged."""

    def __init__(self, limits: Limits, slot: int, bubblewrap: str | None) -> None:
        """Start it and wait until it is ready for a test. Without bubblewrap, only limits apply."""
        self._limits = limits
        self._first: int | None = None  # pidfd of process 1 inside
        uid = _uid(slot) if bubblewrap else None
        with ExitStack() as cleanup:
            self._control, inner_end = socket.socketpair()
            cleanup.callback(inner_end.close)
            status, status_end = os.pipe()
            log = os.memfd_create("log")
            for file in (status, status_end, log):
                cleanup.callback(os.close, file)
            command = _driver_command(inner_end.fileno(), limits, uid, boxed=bool(bubblewrap))
            try:
                outer = _bubblewrap(bubblewrap, limits, uid, status_end) if bubblewrap else []
                self._process = _spawned([*outer, *command], log, (inner_end.fileno(), status_end))
            except OSError as error:
                self._control.close()
                raise SandboxError(f"the sandbox cannot be started: {error}") from error
            inner_end.close()  # otherwise an early exit of the driver would go unnoticed
            try:
                self._await_ready(status if bubblewrap else None)
            except (OSError, ValueError, LookupError) as error:
                self.close()
                log_text = _tail(log, 2000).decode(errors="replace").strip()
                raise SandboxError(f"the sandbox did not start: {log_text or error}") from error

    def _await_ready(self, status: int | None) -> None:
        if self._line(PATIENCE) != b"ready\n":
            raise OSError("it ended before it was ready")
        pid = self._process.pid if status is None else json.loads(os.read(status, 4096))["child-pid"]
        self._first = os.pidfd_open(pid)

    def _line(self, seconds: float) -> bytes:
        """Read the next line from the driver, or what it has sent so far if it has exited."""
        self._control.settimeout(seconds)
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(4096)):
            line += part
        return line

    def run(self, program: Program, stdin: bytes, seconds: float | None = None) -> tuple[RunResult, bool]:
        """Run one test, perhaps by another clock than that of the limits; return whether this sandbox can be reused."""
        files = [_memory_file(stdin), os.memfd_create("output"), os.memfd_create("errors")]
        files.append(_memory_file(json.dumps(asdict(program)).encode()))
        try:
            socket.send_fds(self._control, [b"t"], files)
            report = json.loads(self._line(self._limits.seconds if seconds is None else seconds))
            if not report["begun"]:
                raise BrokenError(f"a test could not begin: {_tail(files[2], _ERRORS_KEPT)!r}")
            return self._result(report, files), not (report["stale"] or report["memory"])
        except TimeoutError:
            return RunResult("timeout", errors=_tail(files[2], _ERRORS_KEPT)), False
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BrokenError from error
        finally:
            for file in files:
                os.close(file)

    def _result(self, report: dict[str, int], files: list[int]) -> RunResult:
        errors = _tail(files[2], _ERRORS_KEPT)
        if report["memory"]:
            return RunResult("memory", errors=errors)
        if max(os.fstat(file).st_size for file in files[1:3]) >= self._limits.output:
            return RunResult("output", errors=errors)
        return RunResult("exited", int(report["exit"]), _tail(files[1], self._limits.output), errors)

    def close(self) -> None:
        """Kill process 1 of the sandbox, and everything in it; its parent outside then reaps it and exits."""
        with suppress(ProcessLookupError):
            if self._first is None:
                self._process.kill()
            else:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._control.close()
        if self._first is not None:
            os.close(self._first)


def _spawned(command: list[str], log: int, passed: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Start a process that inherits only the passed descriptors."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=log,
        env=_ENVIRONMENT,
        pass_fds=passed,
        start_new_session=True,  # no controlling terminal
    )


def _driver_command(control: int, limits: Limits, uid: int | None, boxed: bool) -> list[str]:
    packages = ["/packages"] if boxed else _package_parents()
    refusals = syscall_filter(os.uname().machine, alone=not boxed)
    settings = {
        "control": control,
        "limits": asdict(limits),
        "uid": uid,
        "packages": packages,
        "refusals": refusals.hex(),
    }
    return [_interpreter(), *_FLAGS, "/driver.py" if boxed else str(_DRIVER), json.dumps(settings)]


def _memory_file(content: bytes) -> int:
    """Write bytes to an anonymous file and rewind it."""
    file = os.memfd_create("input")
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _tail(file: int, most: int) -> bytes:
    """Read at most the last `most` bytes of a file."""
    return os.pread(file, most, max(0, os.fstat(file).st_size - most))


def _uid(slot: int) -> int | None:
    """Choose a user id for this slot alone, if this process may change its own: limits count by user."""
    if os.geteuid() != 0:
        return None
    mapped = int(Path("/proc/self/uid_map").read_text().split()[2])
    if mapped > 1 << 31:
        return 1_000_000_000 + (os.getpid() << 8) + slot % 256
    return mapped - 1024 - slot % 512 if mapped >= 1 << 16 else None


@functools.cache
def _interpreter() -> str:
    base = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    return str((base if base.exists() else Path(sys.executable)).resolve())


@functools.cache
def _package_parents() -> list[str]:
    """Find where numpy is installed, the only package available besides the standard library."""
    spec = importlib.util.find_spec("numpy")
    return [str(Path(spec.origin).parents[1])] if spec and spec.origin else []


@functools.cache
def _options(bubblewrap: str) -> str:
    """Read the options of the installed version of bubblewrap."""
    return subprocess.run([bubblewrap, "--help"], capture_output=True, text=True, check=False).stdout


def _bubblewrap(bubblewrap: str, limits: Limits, uid: int | None, status: int) -> list[str]:
    """Build the bubblewrap command: only what is listed here is visible to a program."""
    command = [bubblewrap, "--as-pid-1", "--json-status-fd", str(status)]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if uid is None:
        command += ["--unshare-user", *(["--disable-userns"] if "--disable-userns" in _options(bubblewrap) else [])]
    else:  # needed to become `uid`, which drops them
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev", *_system(), "--dir", "/tmp"]
    if "--size" in _options(bubblewrap):  # older versions cannot limit it, so /tmp stays read-only
        command += ["--perms", "1777", "--size", str(limits.scratch), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]


@functools.cache
def _system() -> tuple[str, ...]:
    """List what an interpreter needs, all read-only."""
    arguments = ["--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"):
        if os.path.islink(name):
            arguments += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            arguments += ["--ro-bind", name, name]
    prefix = Path(sys.base_prefix).resolve()
    if Path("/usr") not in (prefix, *prefix.parents):
        arguments += _bound(prefix, prefix)
    for parent, name in itertools.product(_package_parents(), ("numpy", "numpy.libs")):
        if Path(parent, name).is_dir():
            arguments += _bound(Path(parent, name), Path("/packages", name))
    return (*arguments, "--ro-bind", str(_DRIVER), "/driver.py")


def _bound(source: Path, target: Path) -> list[str]:
    """Mount a directory read-only, with parent directories that every user may enter."""
    above = [("--perms", "0755", "--dir", str(parent)) for parent in reversed(target.parents) if parent.name]
    return [*itertools.chain.from_iterable(above), "--ro-bind", str(source), str(target)]
