"""The half of the sandbox that lives inside it: warm up an interpreter once, then fork it for every test.

Standard library only; started as a script with its settings as one JSON argument. A test arrives as one byte with four
file descriptors (input, output, errors, program); the answer is one line of JSON about how it ended. No program runs in
this process, which is process 1 of its namespace: programs can neither signal it nor look into it nor change its limits
or priority. And no expected output ever comes here, so there is nothing to be found.
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

# What the official runner puts before every program, in its order: all names of the first, then the modules themselves.
_STARRED = (
    *("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics"),
    *("itertools", "functools", "operator", "io", "sys", "json", "builtins", "typing"),
)
_MODULES = tuple(name for name in _STARRED if name not in ("builtins", "typing"))
_RECURSION = 50_000

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER, _DEATH_SIGNAL, _DUMPABLE = 38, 22, 2, 1, 4  # prctl


def plain(value: object, top: bool = True) -> Any:
    """Turn a result into JSON that keeps what `==` against JSON can see, by its real type and never by its methods."""
    kind, held = type(value), cast(Any, value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return plain(held.item(), top)
    if issubclass(kind, int):
        return int.__int__(held)
    if issubclass(kind, float):
        return float.__float__(held)
    if issubclass(kind, str):
        return str.__str__(held)
    if issubclass(kind, list):
        return [plain(item, False) for item in list.__iter__(held)]
    if issubclass(kind, tuple):
        items = [plain(item, False) for item in tuple.__iter__(held)]
        return items if top else {"tuple": items}
    if issubclass(kind, dict):
        return {"dict": [[plain(key, False), plain(item, False)] for key, item in dict.items(held)]}
    return {"object": kind.__name__}


def _prctl(*arguments: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


def _refuse(program: bytes) -> None:
    """Put this process and its children under a filter of system calls, for good."""
    held = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    _prctl(_SECCOMP, _FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0)


def _limit(limits: dict[str, Any]) -> None:
    seconds = int(limits["seconds"]) + 2  # the clock outside ends a test; this ends one that outlives the clock
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
    resource.setrlimit(resource.RLIMIT_STACK, (stack, hard))  # deep recursion through C needs more than the usual 8 MB


def _prelude() -> dict[str, Any]:
    """Collect the names that the official runner gives to every program."""
    for name in ("exit", "quit"):  # as site does, which is not run so that no .pth file of the host is
        setattr(builtins, name, _sitebuiltins.Quitter(name, "end of file"))
    names: dict[str, Any] = {}
    for module in map(importlib.import_module, _STARRED):
        public = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        names.update({name: getattr(module, name) for name in public})
    names.update({name: importlib.import_module(name) for name in _MODULES})
    return names


def _become(uid: int | None) -> None:
    """Give up root for good, and let no program look into this process."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _prctl(_DUMPABLE, 0, 0, 0, 0)


def _added_memory() -> int:
    """Add up the memory that each process in this namespace has beyond what it shares with this one."""
    shared = _private_pages("self")
    others = [pid for pid in os.listdir("/proc") if pid.isdigit() and pid != "1"]
    return sum(max(0, _private_pages(pid) - shared) for pid in others) * resource.getpagesize()


def _private_pages(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            fields = file.read().split()
    except OSError:  # it has just ended
        return 0
    return int(fields[1]) - int(fields[2])


def _scratch_state() -> int:
    """Any change in /tmp, undone or not, changes this."""
    return os.stat("/tmp").st_ctime_ns if os.getpid() == 1 else 0


def _processes_left() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


def _watch(child: int, control: socket.socket, memory: int) -> dict[str, Any]:
    """Wait for a test to end; end it when all its processes together use too much memory."""
    over = False
    poller = select.poll()
    pidfd = os.pidfd_open(child)
    poller.register(pidfd, select.POLLIN)
    poller.register(control, select.POLLIN)
    while not (events := poller.poll(100)):
        if os.getpid() == 1 and not over and _added_memory() > memory:
            over = True
            os.kill(-1, signal.SIGKILL)  # everything in this namespace but process 1, which this is
    os.close(pidfd)
    if any(fd == control.fileno() for fd, _ in events):
        os._exit(0)  # the grader is gone, and with process 1 so is everything here
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {"exit": status, "memory": over}


def _serve(control: socket.socket, limits: dict[str, Any], reusable: bool) -> list[int]:
    """Fork for every test that arrives. Returns only in the fork, with the test's descriptors.

    The last of them is to be written to when all is ready for the program: a failure before that is ours.
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
        report["stale"] = not reusable or _processes_left() or _scratch_state() != pristine
        control.sendall(json.dumps(report).encode() + b"\n")


def _call(source: str, method: str, namespace: dict[str, Any]) -> None:
    """Call the solution with the arguments on standard input; its result goes where standard output was."""
    with open(0, closefd=False) as file:
        arguments = json.load(file)
    channel, nowhere = os.dup(1), os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    os.dup2(nowhere, 1)
    exec(compile(source, "<program>", "exec"), namespace)
    function = getattr(namespace["Solution"](), method) if "Solution" in namespace else namespace[method]
    result = json.dumps(plain(function(*arguments)))
    with open(channel, "w") as file:
        file.write(result)
    os._exit(0)


def _run(source: str, method: str | None, names: dict[str, Any]) -> None:
    main = types.ModuleType("solution" if method else "__main__")
    vars(main).update(names)
    sys.modules["__main__"] = main
    if method:
        _call(source, method, vars(main))
    with contextlib.suppress(SystemExit):  # whatever its code: leaving is not failing, in the official runner too
        exec(compile(source, "<program>", "exec"), vars(main))
    _leave(main)


def _leave(program: types.ModuleType) -> None:
    """End as an interpreter does (threads, exit functions, buffers), but do not take apart what the fork shares."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()
    vars(program).clear()  # files that only the program holds are flushed
    gc.collect()
    for stream in (sys.stdout, sys.__stdout__):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(0)


def main() -> None:
    """Give up all rights, then run a program per request."""
    settings = json.loads(sys.argv[1])
    control = _only_socket(settings["control"])
    sys.path[:] = [*(path for path in sys.path if path), *settings["packages"]]
    sys.argv[:] = ["program"]
    names = _prelude()
    gc.collect()
    gc.freeze()  # the forks need not copy what they never touch
    sys.setrecursionlimit(_RECURSION)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets from inside only what it has a handler for
    refusals = bytes.fromhex(settings["refusals"])
    _become(settings["uid"])
    *streams, program_file, mark = _serve(control, settings["limits"], reusable=bool(refusals))
    with open(program_file, encoding="utf-8") as file:
        file.seek(0)  # the forks share its position
        program = json.load(file)
    for target, descriptor in enumerate(streams):
        os.dup2(descriptor, target)
    _prctl(_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)  # where there is no namespace that ends with its process 1
    _limit(settings["limits"])
    if refusals:
        _refuse(refusals)
    os.write(mark, b"!")
    os.closerange(3, 64)
    _run(program["source"], program["method"], names)


def _only_socket(descriptor: int) -> socket.socket:
    """Move the control socket to descriptor 3 and close everything above it."""
    os.dup2(descriptor, 3, inheritable=False)
    for other in map(int, os.listdir("/proc/self/fd")):
        if other > 3:
            with contextlib.suppress(OSError):  # the listing's own is closed by now
                os.close(other)
    return socket.socket(fileno=3)


if __name__ == "__main__":
    main()
