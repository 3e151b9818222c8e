"""The process inside the sandbox: warm up an interpreter once, then fork it for every test.

Standard library only; started as a script with its settings as one JSON argument. A test arrives as one byte with four
file descriptors (input, output, errors, program); the reply is one line of JSON about how it ended. No program runs in
this process, which is process 1 of its namespace: programs cannot signal it, inspect it, or change its limits or
priority. Expected outputs never enter the sandbox, so no program can find them.
"""

import _sitebuiltins
import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import types
from typing import Any, cast

# The imports of the official runner, in its order: all names of the first, then the modules themselves.
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_MODULES = tuple(name for name in _STARRED if name not in ("builtins", "typing"))
_RECURSION = 50_000

# prctl
_NO_NEW_PRIVILEGES = 38
_SECCOMP = 22
_FILTER = 2
_DEATH_SIGNAL = 1
_DUMPABLE = 4


def to_plain(value: object, top: bool = True) -> Any:
    """Convert a result to JSON that keeps what `==` with JSON can see, by its real type and never by its methods."""
    kind = type(value)
    untyped = cast(Any, value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return to_plain(untyped.item(), top)
    for base, convert in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if issubclass(kind, base):
            return convert(untyped)
    if issubclass(kind, list):
        return [to_plain(item, False) for item in list.__iter__(untyped)]
    if issubclass(kind, tuple):
        items = [to_plain(item, False) for item in tuple.__iter__(untyped)]
        return items if top else {"tuple": items}
    if issubclass(kind, dict):
        return {"dict": [[to_plain(key, False), to_plain(item, False)] for key, item in dict.items(untyped)]}
    return {"object": kind.__name__}


def _prctl(*arguments: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


def _set_limits(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 2  # the clock outside ends a test; this is the fallback
    for what, amount in (
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, limits["output"]),
        (resource.RLIMIT_NOFILE, limits["files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        resource.setrlimit(what, (most, most))
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = limits["memory"] if hard == resource.RLIM_INFINITY else min(hard, limits["memory"])
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))  # deep recursion in C needs more than the default 8 MB


def _prelude() -> dict[str, Any]:
    """Collect the names that the official runner defines for every program."""
    for name in ("exit", "quit"):  # as `site` does, which is not imported because it would run .pth files
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, _STARRED):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names.update({name: getattr(module, name) for name in public})
    names.update({name: importlib.import_module(name) for name in _MODULES})
    return names


def _scratch_state() -> int:
    """Return a value that any change in /tmp alters, even one that is undone."""
    return os.stat("/tmp").st_ctime_ns if os.getpid() == 1 else 0


def _memory(pid: str) -> int:
    """Read how many KiB a process holds, without files; what processes share counts for each of them."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = [line.split() for line in file if line.startswith(("RssAnon:", "RssShmem:"))]
    except OSError:  # it has just ended
        return 0
    return sum(int(fields[1]) for fields in lines)


def _watch(child: int, control: socket.socket, memory: int) -> dict[str, Any]:
    """Wait for a test to end; kill it when all its processes together use too much memory."""
    over = False
    poller = select.poll()
    pidfd = os.pidfd_open(child)
    poller.register(pidfd, select.POLLIN)
    poller.register(control, select.POLLIN)
    while not (events := poller.poll(100)):
        if os.getpid() != 1 or over:
            continue
        used = {pid: _memory(pid) for pid in ("self", *filter(str.isdigit, os.listdir("/proc")))}
        inherited = used.pop("self")  # a fork shares this with this process
        if sum(max(0, kib - inherited) for pid, kib in used.items() if pid != "1") << 10 > memory:
            over = True
            os.kill(-1, signal.SIGKILL)  # everything in this namespace except process 1, which is this one
    os.close(pidfd)
    if any(fd == control.fileno() for fd, _ in events):
        os._exit(0)  # the grader is gone; everything here ends with process 1
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"exit": status, "memory": over}


def _serve(control: socket.socket, limits: dict[str, Any], reusable: bool) -> list[int]:
    """Fork for every test that arrives. Returns only in the fork, with the test's descriptors.

    The last one is written to just before the program starts: a failure before that is the sandbox's fault.
    """
    pristine = _scratch_state()
    control.sendall(b"ready\n")
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1, 4)
        if not request:
            os._exit(0)
        begun, mark = os.pipe()
        child = os.fork()
        if child == 0:
            control.detach()
            return [*descriptors, mark]
        for descriptor in (*descriptors, mark):
            os.close(descriptor)
        report = _watch(child, control, limits["memory"])
        report["begun"] = os.read(begun, 1) != b""
        os.close(begun)
        left = True  # whether the program has left processes behind
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            left = False
        report["stale"] = not reusable or left or _scratch_state() != pristine
        control.sendall(json.dumps(report).encode() + b"\n")


def _run(source: str, method: str | None, names: dict[str, Any]) -> None:
    """Run a script, or call a method with the arguments from standard input and write its result to standard output."""
    main = types.ModuleType("solution" if method else "__main__")
    vars(main).update(names)
    sys.modules["__main__"] = main
    if method:
        with open(0, closefd=False) as file:
            arguments = json.load(file)
        channel = os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        exec(compile(source, "<program>", "exec"), vars(main))
        namespace = vars(main)
        function = getattr(namespace["Solution"](), method) if "Solution" in namespace else namespace[method]
        result = json.dumps(to_plain(function(*arguments)))
        with open(channel, "w") as file:
            file.write(result)
        os._exit(0)
    with contextlib.suppress(SystemExit):  # with any code: exiting is not a failure in the official runner either
        exec(compile(source, "<program>", "exec"), vars(main))
    # Shut down as an interpreter does (threads, exit functions, buffers), but keep what the fork shares.
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    vars(main).clear()  # closes and flushes files that only the program refers to
    gc.collect()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(0)


def main() -> None:
    """Give up all privileges, then run one program per request."""
    settings = json.loads(sys.argv[1])
    os.dup2(settings["control"], 3, inheritable=False)
    for other in map(int, os.listdir("/proc/self/fd")):  # keep nothing else open
        if other > 3:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
                os.close(other)
    control = socket.socket(fileno=3)
    sys.path[:] = [*(path for path in sys.path if path), *settings["packages"]]
    sys.argv[:] = ["program"]
    names = _prelude()
    gc.collect()
    gc.freeze()  # forks then copy fewer memory pages
    sys.setrecursionlimit(_RECURSION)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 receives only signals that it handles
    refusals = bytes.fromhex(settings["refusals"])
    if (uid := settings["uid"]) is not None:  # give up root permanently
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)  # no program may inspect this process

    *streams, program_file, mark = _serve(control, settings["limits"], reusable=bool(refusals))

    with open(program_file, encoding="utf-8") as file:
        file.seek(0)  # the forks share its position
        program = json.load(file)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)  # needed where no namespace ends with its process 1
    _set_limits(settings["limits"])
    if refusals:  # filter the system calls of this process and its children, permanently
        buffer = ctypes.create_string_buffer(refusals, len(refusals))
        header = struct.pack("HxxxxxxP", len(refusals) // 8, ctypes.addressof(buffer))
        _prctl(_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0)
    os.write(mark, b"!")
    os.closerange(3, 64)
    _run(program["source"], program["method"], names)


if __name__ == "__main__":
    main()
