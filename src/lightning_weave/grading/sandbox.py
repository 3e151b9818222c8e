"""Run untrusted programs.

A program gets its own process, network, IPC and host-name namespaces; a read-only view of /usr and of the interpreter;
a small private /tmp; an empty environment; limits on time, memory, processes, open files and output; a filter on
system calls; and a unique user id if the grader is root, otherwise a user namespace. The clock, the comparison and the
expected outputs stay outside.

Each slot keeps a warm interpreter that is forked for every test, which is much cheaper than starting one; it runs no
program itself. If a test has to be killed, or leaves a process or any trace in /tmp behind, its whole sandbox is
discarded.

Programs run on the interpreter of this package, from its base prefix, with the standard library and numpy only.
"""

import functools
import importlib.util
import itertools
import json
import os
import queue
import shutil
import signal
import socket
import struct
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from lightning_weave.errors import InputError, WeaveError

# seccomp
_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000  # plus the errno
# classic BPF
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
# clone flags
_NAMESPACES = 0x7E020000
_THREAD = 0x00010000
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Memory outside RLIMIT_AS, namespaces, mounts, sockets, keys, other processes: contest programs need none of these.
_REFUSED = {
    "x86_64": (
        *(319, 29, 30, 31, 64, 68, 240),  # memfd_create, shm*, semget, msgget, mq_open
        *(272, 308, 165, 166, 155, 161),  # unshare, setns, mount, umount2, pivot_root, chroot
        *(41, 248, 249, 250, 303, 304),  # socket, keys, file handles
        *(101, 310, 311, 312, 256, 279),  # ptrace, process_vm_*, kcmp, migrate_pages, move_pages
        *(141, 142, 144, 203, 314, 251),  # setpriority, sched_set*, ioprio_set
        *(298, 321, 323),  # perf_event_open, bpf, userfaultfd
    ),
    "aarch64": (
        *(279, 194, 195, 196, 190, 186, 180),
        *(97, 268, 40, 39, 41, 51),
        *(198, 217, 218, 219, 264, 265),
        *(117, 270, 271, 272, 238, 239),
        *(140, 118, 119, 122, 274, 30),
        *(241, 280, 282),
    ),
}
# io_uring_setup, the new mount calls, pidfd_getfd, process_madvise, memfd_secret, process_mrelease
_REFUSED_EVERYWHERE = (425, 428, 429, 430, 432, 433, 438, 440, 442, 447, 448)
_PRLIMIT = {"x86_64": 302, "aarch64": 261}  # of itself only
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_ALONE = {"x86_64": (57, 58, 62), "aarch64": (129,)}  # fork, vfork, kill: without a process namespace


def syscall_filter(machine: str, alone: bool) -> bytes:
    """Assemble the filter; empty for other architectures. `alone` also refuses new processes."""
    if machine not in _ARCHITECTURES:
        return b""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, value)

    refuse = step(_RETURN, _REFUSE + 1)  # EPERM
    numbers = _REFUSED[machine] + _REFUSED_EVERYWHERE + (_ALONE[machine] if alone else ())
    steps = [
        *(step(_LOAD, 4), step(_EQUAL, _ARCHITECTURES[machine], 1), refuse),  # no other calling convention
        *(step(_LOAD, 0), step(_AT_LEAST, 0x40000000, 0, 1), refuse),
        *(step(_EQUAL, _CLONE3, 0, 1), step(_RETURN, _REFUSE + 38)),  # ENOSYS: libc falls back to clone
    ]
    for number in numbers:
        steps += [step(_EQUAL, number, 0, 1), refuse]
    steps += [step(_EQUAL, _PRLIMIT[machine], 0, 4), step(_LOAD, 16), step(_EQUAL, 0, 1), refuse, step(_LOAD, 0)]
    steps += [step(_EQUAL, _CLONE[machine], 1), step(_RETURN, _ALLOW), step(_LOAD, 16)]
    steps += [step(_ANY_BIT, _THREAD, 1), refuse] if alone else [step(_ANY_BIT, _NAMESPACES, 0, 1), refuse]
    return b"".join([*steps, step(_RETURN, _ALLOW)])


_DRIVER = Path(__file__).with_name("driver.py")
_BASE = Path(sys.base_prefix, "bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
_PYTHON = str((_BASE if _BASE.exists() else Path(sys.executable)).resolve())
_FLAGS = ("-s", "-P", "-S", "-B", "-X", "utf8")  # no site packages, no bytecode files
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}  # reproducible verdicts
PATIENCE = 60.0  # seconds for a sandbox to start or stop on a busy machine
_ERRORS_KEPT = 4096  # bytes of a program's standard error
_HARMLESS = "print(input())"
_slot_numbers = itertools.count()  # across all sandboxes of this process


class SandboxError(WeaveError):
    """The sandbox itself failed, so there is no verdict."""


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


class Slot:
    """A place for one program at a time: a warm interpreter (`driver`) that forks for every test.

    It runs one test after another as long as each leaves it unchanged; otherwise a new one is started.
    """

    def __init__(self, limits: Limits, bubblewrap: str | None) -> None:
        self._limits = limits
        self._bubblewrap = bubblewrap  # without it, only limits apply
        self._uid: int | None = None  # unique to this slot, if this process may change its own: limits count by user
        if bubblewrap and os.geteuid() == 0:
            slot = next(_slot_numbers)
            mapped = int(Path("/proc/self/uid_map").read_text().split()[2])
            if mapped > 1 << 31:
                self._uid = 1_000_000_000 + (os.getpid() << 8) + slot % 256
            elif mapped >= 1 << 16:
                self._uid = mapped - 1024 - slot % 512
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._first: int | None = None  # pidfd of process 1 inside

    def run(self, program: Program, stdin: bytes) -> RunResult:
        """Run one test. If the sandbox fails twice, raise unless the program is to blame."""
        result = self._attempt(program, stdin) or self._attempt(program, stdin)
        if result is not None:
            return result
        self.check()
        return RunResult("broken")

    def check(self) -> None:
        """Raise unless a harmless program runs correctly, however long a busy machine takes for it."""
        result = self._attempt(Program(_HARMLESS), b"ready\n", PATIENCE)
        if result is None:
            raise SandboxError("the sandbox fails with any program; is the machine out of memory?")
        if result.output != b"ready\n":
            raise SandboxError(f"a harmless program failed in the sandbox: {result}")

    def _start(self) -> None:
        """Start the driver and wait until it is ready for a test."""
        bubblewrap = self._bubblewrap
        with ExitStack() as cleanup:
            self._control, inner_end = socket.socketpair()
            cleanup.callback(inner_end.close)
            status, status_end = os.pipe()
            log = os.memfd_create("log")
            for file in (status, status_end, log):
                cleanup.callback(os.close, file)
            settings = {
                "control": inner_end.fileno(),
                "limits": asdict(self._limits),
                "uid": self._uid,
                "packages": ["/packages"] if bubblewrap else _package_parents(),
                "refusals": syscall_filter(os.uname().machine, alone=not bubblewrap).hex(),
            }
            driver = "/driver.py" if bubblewrap else str(_DRIVER)
            try:
                outer = _bubblewrap_command(bubblewrap, self._limits, self._uid, status_end) if bubblewrap else []
                self._process = subprocess.Popen(
                    [*outer, _PYTHON, *_FLAGS, driver, json.dumps(settings)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env=_ENVIRONMENT,
                    pass_fds=(inner_end.fileno(), status_end),
                    start_new_session=True,  # no controlling terminal
                )
            except OSError as error:
                self._control.close()
                raise SandboxError(f"the sandbox cannot be started: {error}") from error
            inner_end.close()  # otherwise an early exit of the driver would go unnoticed
            try:
                if self._read_line(PATIENCE) != b"ready\n":
                    raise OSError("it ended before it was ready")
                pid = json.loads(os.read(status, 4096))["child-pid"] if bubblewrap else self._process.pid
                self._first = os.pidfd_open(pid)
            except (OSError, ValueError, LookupError) as error:
                self.close()
                log_text = _tail(log, 2000).decode(errors="replace").strip()
                raise SandboxError(f"the sandbox did not start: {log_text or error}") from error

    def _read_line(self, seconds: float) -> bytes:
        """Read the next line from the driver, or what it has sent so far if it has exited."""
        assert self._control is not None
        self._control.settimeout(seconds)
        line = b""
        while not line.endswith(b"\n") and (part := self._control.recv(4096)):
            line += part
        return line

    def _attempt(self, program: Program, stdin: bytes, seconds: float | None = None) -> RunResult | None:
        """Run one test, or return None if the sandbox failed; `seconds` replaces the clock of the limits."""
        if self._process is None:
            try:
                self._start()
            except SandboxError:
                self._start()
        assert self._control is not None
        output, errors = os.memfd_create("output"), os.memfd_create("errors")
        files = [_memory_file(stdin), output, errors, _memory_file(json.dumps(asdict(program)).encode())]
        result: RunResult | None = None
        reusable = False
        try:
            socket.send_fds(self._control, [b"t"], files)
            report = json.loads(self._read_line(self._limits.seconds if seconds is None else seconds))
            kept = _tail(errors, _ERRORS_KEPT)
            too_long = max(os.fstat(file).st_size for file in (output, errors)) >= self._limits.output
            if report["begun"]:  # else the test could not be set up
                reusable = not (report["stale"] or report["memory"])
                if report["memory"]:
                    result = RunResult("memory", errors=kept)
                elif too_long:
                    result = RunResult("output", errors=kept)
                else:
                    result = RunResult("exited", int(report["exit"]), _tail(output, self._limits.output), kept)
        except TimeoutError:
            result = RunResult("timeout", errors=_tail(errors, _ERRORS_KEPT))
        except (OSError, ValueError, LookupError, TypeError):  # it died, or sent an invalid reply
            result = None
        finally:
            for file in files:
                os.close(file)
        if result is None or not reusable:
            self.close()
        return result

    def close(self) -> None:
        """Kill process 1 of the sandbox, and everything in it; its parent outside then reaps it and exits."""
        if self._process is None or self._control is None:
            return
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
        self._process = self._control = self._first = None


class Sandbox(AbstractContextManager["Sandbox"]):
    """Slots in which programs run at the same time. Safe to use from several threads."""

    def __init__(self, limits: Limits, slots: int, bubblewrap: str | None) -> None:
        self.slots = slots
        self._all = [Slot(limits, bubblewrap) for _ in range(slots)]
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._all:
            self._free.put(slot)
        weakref.finalize(self, _close_all, self._all)  # when collected, and at exit

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all idle sandboxes; more work starts new ones."""
        _close_all(self._all)

    @contextmanager
    def slot(self) -> Iterator[Slot]:
        """Take a slot, waiting for a free one."""
        slot = self._free.get()
        try:
            yield slot
        finally:
            self._free.put(slot)


def _close_all(slots: list[Slot]) -> None:
    for slot in slots:
        slot.close()


def open_sandbox(unsafe_local: bool = False, slots: int | None = None, limits: Limits | None = None) -> Sandbox:
    """Open a sandbox and test it; refuse if there is no safe one, unless the user accepts the risk.

    The default is one slot per core, or fewer if their memory limits would exceed the machine's memory.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise InputError(f"code can be graded on Linux only, and this is {sys.platform}. Run eval on a Linux machine.")
    bubblewrap = None if unsafe_local else shutil.which("bwrap")
    if unsafe_local:
        warnings.warn("programs run WITHOUT a sandbox: they can read and change your files", stacklevel=2)
    elif bubblewrap is None:
        raise InputError(
            "grading code needs bubblewrap (bwrap), which is not installed. Install it with: "
            "apt-get install bubblewrap (or dnf, pacman); "
            "or accept the risk with --set eval.unsafe_local=true --trust, which limits programs but does not contain "
            "them."
        )
    if slots is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        slots = max(1, min(len(os.sched_getaffinity(0)), memory // limits.memory))
    sandbox = Sandbox(limits, slots, bubblewrap)
    try:
        with sandbox.slot() as slot:
            slot.check()
    except SandboxError as error:
        raise InputError(
            f"programs cannot be run here: {error}. Containers need --cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined, users other than root need user namespaces; or accept the risk with --set "
            "eval.unsafe_local=true --trust."
        ) from error
    return sandbox


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


@functools.cache
def _package_parents() -> list[str]:
    """Find where numpy is installed, the only package available besides the standard library."""
    spec = importlib.util.find_spec("numpy")
    return [str(Path(spec.origin).parents[1])] if spec and spec.origin else []


def _bubblewrap_command(bubblewrap: str, limits: Limits, uid: int | None, status: int) -> list[str]:
    """Build the bubblewrap command: only what is listed here is visible to a program, and nothing can be written."""
    options = subprocess.run([bubblewrap, "--help"], capture_output=True, text=True, check=False).stdout
    command = [bubblewrap, "--as-pid-1", "--json-status-fd", str(status)]
    command += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if uid is None:
        command += ["--unshare-user", *(["--disable-userns"] if "--disable-userns" in options else [])]
    else:  # needed to change to `uid`, which drops them
        command += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--hostname", "sandbox", "--proc", "/proc", "--dev", "/dev", "--ro-bind", "/usr", "/usr"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    prefix = Path(sys.base_prefix).resolve()
    mounts = [] if Path("/usr") in (prefix, *prefix.parents) else [(prefix, prefix)]
    for parent, name in itertools.product(_package_parents(), ("numpy", "numpy.libs")):
        if Path(parent, name).is_dir():
            mounts.append((Path(parent, name), Path("/packages", name)))
    for source, target in mounts:
        for above in reversed(target.parents):
            command += ["--perms", "0755", "--dir", str(above)] if above.name else []  # every user may enter it
        command += ["--ro-bind", str(source), str(target)]
    command += ["--ro-bind", str(_DRIVER), "/driver.py", "--dir", "/tmp"]
    if "--size" in options:  # older versions cannot limit it, so /tmp stays read-only
        command += ["--perms", "1777", "--size", str(limits.scratch), "--tmpfs", "/tmp"]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"]
