"""Run programs that nobody has read.

A program gets its own process, network, IPC and host-name namespaces; a read-only view of /usr and of the interpreter;
a small /tmp of its own; an empty environment; limits on time, memory, processes, open files and output; a filter on
system calls; and, when the grader is root, a user id that nothing else has (otherwise a user namespace). The clock, the
comparison and the expected outputs stay outside.

Each slot keeps a warm interpreter that is forked for every test, which costs a fraction of starting one; it runs no
program itself. A test that ends otherwise than by itself, or leaves a process or any trace in /tmp behind, has its
sandbox thrown away with everything in it.

The interpreter is the one this package runs on, from its base prefix: the standard library and numpy, nothing else.
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
from lightning_weave.grading.jail import BrokenError, Jail, Limits, Program, RunResult, SandboxError

__all__ = ["Limits", "Program", "RunResult", "Sandbox", "SandboxError", "Slot", "open_sandbox"]

_HARMLESS = Program("print(input())")
_slot_numbers = itertools.count()  # across all sandboxes of this process


class Slot:
    """A place for one program at a time, with its sandbox kept between tests while nothing has touched it."""

    def __init__(self, limits: Limits, bubblewrap: str | None) -> None:
        self._start = functools.partial(Jail, limits, next(_slot_numbers), bubblewrap)
        self._jail: Jail | None = None

    def run(self, program: Program, stdin: bytes) -> RunResult:
        """Run one test. Trouble with the sandbox is tried again once, then raised unless the program is to blame."""
        outcome = self._attempt(program, stdin) or self._attempt(program, stdin)
        if outcome is not None:
            return outcome
        self.check()
        return RunResult("broken")

    def check(self) -> None:
        """Raise unless a harmless program runs as it should."""
        outcome = self._attempt(_HARMLESS, b"ready\n")
        if outcome is None:
            raise SandboxError("a sandbox breaks down under any program; is the machine out of memory?")
        if outcome.output != b"ready\n":
            raise SandboxError(f"a harmless program failed in a sandbox: {outcome}")

    def _attempt(self, program: Program, stdin: bytes) -> RunResult | None:
        """Run one test, or return nothing if the sandbox broke down under it."""
        self._jail = self._jail or self._started()
        try:
            outcome, pristine = self._jail.run(program, stdin)
        except BrokenError:
            self.close()
            return None
        if not pristine:
            self.close()
        return outcome

    def _started(self) -> Jail:
        try:
            return self._start()
        except SandboxError:
            return self._start()

    def close(self) -> None:
        """End everything that runs in the slot."""
        if self._jail is not None:
            self._jail.close()
            self._jail = None


class Sandbox:
    """A number of slots in which programs run at the same time. Safe to use from several threads."""

    def __init__(self, limits: Limits, slots: int, bubblewrap: str | None) -> None:
        self.slots = slots
        self._all = [Slot(limits, bubblewrap) for _ in range(slots)]
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in self._all:
            self._free.put(slot)
        weakref.finalize(self, _close_all, self._all)  # when forgotten, and at exit

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sandboxes that wait for work; more work starts new ones."""
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
    """Find a safe way to run programs and try it; refuse if there is none, unless the user accepts the risk.

    By default there are as many slots as cores, or fewer if their memory limits would exceed the machine's memory.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise InputError(f"programs can be graded on Linux only, and this is {sys.platform}; grade the samples there.")
    bubblewrap = None if unsafe_local else shutil.which("bwrap")
    if unsafe_local:
        warnings.warn("programs run WITHOUT a sandbox: they can read and change your files", stacklevel=2)
    elif bubblewrap is None:
        raise InputError(
            "bubblewrap (bwrap), which grading code needs, is not installed. Install it with: "
            "apt-get install bubblewrap (or dnf, pacman); "
            "or accept the risk with --unsafe-local, which limits programs but does not contain them."
        )
    sandbox = Sandbox(limits, slots or _default_slots(limits), bubblewrap)
    try:
        with sandbox.slot() as slot:
            slot.check()
    except SandboxError as error:
        raise InputError(
            f"programs cannot be run here: {error}. Containers need --cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined, users other than root need user namespaces; or accept the risk with --unsafe-local."
        ) from error
    return sandbox


def _default_slots(limits: Limits) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // limits.memory))
