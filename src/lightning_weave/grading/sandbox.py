"""Run programs that nobody has read.

A program gets its own process, network, IPC and host-name namespaces; a read-only view of /usr and of the interpreter;
a small /tmp of its own; an empty environment; limits on time, memory, processes, open files and output; a filter on
system calls; and, when the grader is root, a user id that nothing else has (otherwise a user namespace). One sandbox
serves one program: the interpreter is warmed up once and forked for every test, which costs a fraction of starting one
per test. A test that leaves a process or a file behind gets its successor a fresh sandbox. The clock, the comparison and
the expected outputs stay outside.

The interpreter is the one this package runs on, from its base prefix: the standard library and numpy, nothing else.
"""

import itertools
import os
import queue
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_weave.errors import InputError
from lightning_weave.grading.jail import BrokenError, Jail, Limits, Outcome, Program, SandboxError

__all__ = ["Limits", "Outcome", "Program", "Runner", "Sandbox", "SandboxError", "open_sandbox"]

_HARMLESS = Program("print(input())")
_slot_numbers = itertools.count()  # across all sandboxes of this process


class Sandbox:
    """A number of slots in which programs run at the same time. Safe to use from several threads."""

    def __init__(self, limits: Limits, slots: int, bubblewrap: str | None) -> None:
        self.limits = limits
        self.slots = slots
        self._bubblewrap = bubblewrap
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(next(_slot_numbers))

    @contextmanager
    def load(self, program: Program) -> Iterator["Runner"]:
        """Take a slot for one program, waiting for a free one."""
        slot = self._free.get()
        runner = Runner(self, slot, program)
        try:
            yield runner
        finally:
            runner.close()
            self._free.put(slot)

    def start(self, program: Program, slot: int) -> Jail:
        """Start a program's sandbox; what fails is tried once more."""
        try:
            return Jail(program, self.limits, slot, self._bubblewrap)
        except SandboxError:
            return Jail(program, self.limits, slot, self._bubblewrap)

    def check(self, slot: int) -> None:
        """Raise unless a harmless program runs as it should."""
        jail = self.start(_HARMLESS, slot)
        try:
            outcome, _ = jail.run(b"ready\n")
        except BrokenError as error:
            raise SandboxError("a sandbox breaks down under any program; is the machine out of memory?") from error
        finally:
            jail.close()
        if outcome.output != b"ready\n":
            raise SandboxError(f"a harmless program failed in a sandbox: {outcome}")


class Runner:
    """One program in one slot; every `run` is one test in a new process."""

    def __init__(self, sandbox: Sandbox, slot: int, program: Program) -> None:
        self._sandbox, self._slot, self._program = sandbox, slot, program
        self._jail: Jail | None = None

    def run(self, stdin: bytes) -> Outcome:
        """Run one test. Trouble with the sandbox is tried again once, then raised unless the program is to blame."""
        for _ in range(2):
            self._jail = self._jail or self._sandbox.start(self._program, self._slot)
            try:
                outcome, reusable = self._jail.run(stdin)
            except BrokenError:
                self.close()
                continue
            if not reusable:
                self.close()
            return outcome
        self._sandbox.check(self._slot)
        return Outcome("broken")

    def close(self) -> None:
        """End everything that runs in the slot."""
        if self._jail is not None:
            self._jail.close()
            self._jail = None


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
            "apt-get install bubblewrap (or dnf, pacman); or accept the risk with --unsafe-local, which limits programs but does not contain them."
        )
    sandbox = Sandbox(limits, slots or _default_slots(limits), bubblewrap)
    try:
        sandbox.check(slot=next(_slot_numbers))
    except SandboxError as error:
        raise InputError(
            f"programs cannot be run here: {error}. Containers need --cap-add SYS_ADMIN --security-opt "
            "seccomp=unconfined, users other than root need user namespaces; or accept the risk with --unsafe-local."
        ) from error
    return sandbox


def _default_slots(limits: Limits) -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // limits.memory))
