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
import itertools
import os
import queue
import shutil
import sys
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_weave.errors import InputError
from lightning_weave.grading.jail import PATIENCE, BrokenError, Jail, Limits, Program, RunResult, SandboxError

__all__ = ["Limits", "Program", "RunResult", "Sandbox", "SandboxError", "Slot", "open_sandbox"]

_HARMLESS = Program("print(input())")
_slot_numbers = itertools.count()  # across all sandboxes of this process


class Slot:
    """A place for one program at a time; its sandbox is reused until a test changes it."""

    def __init__(self, limits: Limits, bubblewrap: str | None) -> None:
        self._start = functools.partial(Jail, limits, next(_slot_numbers), bubblewrap)
        self._jail: Jail | None = None

    def run(self, program: Program, stdin: bytes) -> RunResult:
        """Run one test. If the sandbox fails twice, raise unless the program is to blame."""
        result = self._attempt(program, stdin) or self._attempt(program, stdin)
        if result is not None:
            return result
        self.check()
        return RunResult("broken")

    def check(self) -> None:
        """Raise unless a harmless program runs correctly, however long a busy machine takes for it."""
        result = self._attempt(_HARMLESS, b"ready\n", PATIENCE)
        if result is None:
            raise SandboxError("the sandbox fails with any program; is the machine out of memory?")
        if result.output != b"ready\n":
            raise SandboxError(f"a harmless program failed in the sandbox: {result}")

    def _attempt(self, program: Program, stdin: bytes, seconds: float | None = None) -> RunResult | None:
        """Run one test, or return None if the sandbox failed."""
        self._jail = self._jail or self._started()
        try:
            result, reusable = self._jail.run(program, stdin, seconds)
        except BrokenError:
            self.close()
            return None
        if not reusable:
            self.close()
        return result

    def _started(self) -> Jail:
        try:
            return self._start()
        except SandboxError:
            return self._start()

    def close(self) -> None:
        """Stop everything that runs in the slot."""
        if self._jail is not None:
            self._jail.close()
            self._jail = None


class Sandbox:
    """Slots in which programs run at the same time. Safe to use from several threads."""

    def __init__(self, limits: Limits, slots: int, bubblewrap: str | None) -> None:
        self.slots = slots
        self._all = [Slot(limits, bubblewrap) for _ in range(slots)]
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._all:
            self._free.put(slot)
        weakref.finalize(self, _close_all, self._all)  # when collected, and at exit

    def __enter__(self) -> "Sandbox":
        return self

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
            "or accept the risk with --set eval.unsafe_local=true, which limits programs but does not contain them."
        )
    sandbox = Sandbox(limits, slots or _default_slots(limits), bubblewrap)
    try:
        with sandbox.slot() as slot:
            slot.check()
    except SandboxError as error:
        raise InputError(
            f"programs cannot be run here: {error}. Containers need --cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined, users other than root need user namespaces; or accept the risk with --set "
            "eval.unsafe_local=true."
        ) from error
    return sandbox


def _default_slots(limits: Limits) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // limits.memory))
