"""What each stage cost, as measured: device seconds, tokens, bytes, peak memory, hardware, versions.

A row is appended every minute and when a stage ends, however it ends, so a killed run still knows what it spent.
"""

import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_weave.devices import device_name, peak_bytes
from lightning_weave.ranks import rank
from lightning_weave.store.files import append_line, read_lines

FLUSH_EVERY = 60.0  # seconds
LEDGER = "ledger.jsonl"


@dataclass
class EngineClock:
    """Seconds that the engines of this process have taken to start, and have had a request to work on."""

    starting: float = 0.0
    busy: float = 0.0

    def since(self, before: "EngineClock") -> "EngineClock":
        """What has been added to an earlier state of this clock."""
        return EngineClock(self.starting - before.starting, self.busy - before.busy)


engine_clock = EngineClock()


@dataclass
class Meter:
    """Counts what a stage does between two rows of the ledger."""

    path: Path
    stage: str
    name: str
    devices: float = 1.0
    tokens: int = 0
    written: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    _since: float = field(default_factory=lambda: time.monotonic())
    _elsewhere: float = 0.0
    _engines: EngineClock = field(default_factory=EngineClock)  # their device seconds since the last row
    _clock: EngineClock = field(default_factory=lambda: replace(engine_clock))

    def add(self, tokens: int = 0, written: int = 0) -> None:
        """Count tokens processed and bytes written."""
        self.tokens += tokens
        self.written += written
        if time.monotonic() - self._since >= FLUSH_EVERY:
            self.flush()

    def spend(self, device_seconds: float) -> None:
        """Count what devices of other processes took, beside those of this one."""
        self._elsewhere += device_seconds

    def spend_engine(self, clock: EngineClock, devices: float) -> None:
        """Count what engines took of it."""
        self._engines.starting += clock.starting * devices
        self._engines.busy += clock.busy * devices

    def flush(self) -> None:
        """Append what has been counted since the last row."""
        now = time.monotonic()
        seconds = now - self._since
        self._since = now
        row = {
            "stage": self.stage,
            "name": self.name,
            "device_seconds": round(seconds * self.devices + self._elsewhere, 3),
            "tokens": self.tokens,
            "bytes": self.written,
            "peak_memory": peak_memory(),
            "rank": rank(),
            "time": round(time.time(), 1),
            **self.extra,
            **self._engine(),
            **hardware(),
        }
        self.tokens = self.written = 0
        self._elsewhere = 0.0
        append_line(self.path, row)

    def _engine(self) -> dict[str, Any]:
        """Device seconds of engines since the last row, where there was one."""
        self.spend_engine(engine_clock.since(self._clock), self.devices)
        self._clock = replace(engine_clock)
        seconds = {"starting": round(self._engines.starting, 3), "busy": round(self._engines.busy, 3)}
        self._engines = EngineClock()
        return {"engine": seconds} if any(seconds.values()) else {}


@contextmanager
def measure(run_dir: Path, stage: str, name: str = "", **extra: Any) -> Iterator[Meter]:
    """Meter a stage and write its rows to the run's ledger."""
    meter = Meter(run_dir / LEDGER, stage, name, extra=extra)
    try:
        yield meter
    finally:
        meter.flush()


def read_ledger(run_dir: Path) -> list[dict[str, Any]]:
    """All rows that the run has written so far."""
    return list(read_lines(run_dir / LEDGER))


def peak_memory() -> int:
    """Peak bytes on the accelerator if one is in use, else of this process."""
    peak = peak_bytes()
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hardware() -> dict[str, Any]:
    """Name the device and the versions that a figure was measured on."""
    torch = sys.modules.get("torch")
    return {
        "device": device_name() or _cpu_name(),
        "threads": torch.get_num_threads() if torch is not None else 1,
        "versions": {name: _version(name) for name in ("lightning-weave", "torch", "transformers")},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
