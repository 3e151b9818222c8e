"""Measure time and memory. Variants run in turn, so that other load on the machine affects all of them."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Variant = Callable[[], Any]
Clock = Callable[[], float]


def choose_clock(processor_time: bool) -> Clock:
    """Choose CPU time of this process, for one thread on a busy machine, or wall-clock time."""
    return time.process_time if processor_time else time.perf_counter


def time_in_turn(variants: Mapping[str, Variant], repeat: int, clock: Clock) -> dict[str, list[float]]:
    """Run the variants in turn `repeat` times, after one warm-up, and return the seconds of each run."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeat + 1):
        for name, variant in variants.items():
            started = clock()
            variant()
            taken[name].append(clock() - started)
    return {name: times[1:] for name, times in taken.items()}


def process_memory(entry: str) -> int:
    """Read a size in bytes from /proc/self/status (VmRSS, VmHWM, RssAnon). Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(entry)).split()[1]) * 1024


def reset_peak_memory() -> int:
    """Reset the peak (VmHWM) and return the resident size. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return process_memory("VmRSS")
