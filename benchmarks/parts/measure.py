"""Time and memory, measured so that a busy machine is busy for all."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Way = Callable[[], Any]
Clock = Callable[[], float]


def choose_clock(processor_time: bool) -> Clock:
    """Count this process alone, for one thread on a machine that others use too; else the clock on the wall."""
    return time.process_time if processor_time else time.perf_counter


def take_turns(ways: Mapping[str, Way], repeat: int, clock: Clock) -> dict[str, list[float]]:
    """Run the ways in turn, over and over; give the seconds of each, without a first one that warms up."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeat + 1):
        for name, way in ways.items():
            started = clock()
            way()
            taken[name].append(clock() - started)
    return {name: times[1:] for name, times in taken.items()}


def kernel_says(entry: str) -> int:
    """Read a size in bytes from the kernel's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(entry)).split()[1]) * 1024


def forget_peak() -> int:
    """Let the peak (VmHWM) start again from here; returns what is resident now. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return kernel_says("VmRSS")
