"""What each stage cost, as measured: device seconds, tokens, bytes, peak memory, hardware, versions.

A row is appended when a model is loaded, at most every ten seconds, and when a stage ends, however it ends: a killed
run still knows what it spent.
"""

import platform
import resource
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_weave.devices import device_name, peak_bytes
from lightning_weave.ranks import rank
from lightning_weave.store.files import append_line, read_lines

FLUSH_EVERY = 10.0  # seconds
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
    """Counts what a stage does in one session. Every row has all of it so far: the last one of a session counts."""

    path: Path
    stage: str
    name: str
    devices: float = 1.0
    tokens: int = 0
    written: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    session: str = field(default_factory=lambda: secrets.token_hex(6))
    _since: float = field(default_factory=lambda: time.monotonic())
    _flushed: float = -FLUSH_EVERY
    _elsewhere: float = 0.0
    _engines: EngineClock = field(default_factory=EngineClock)  # device seconds of engines elsewhere
    _clock: EngineClock = field(default_factory=lambda: replace(engine_clock))

    def add(self, tokens: int = 0, written: int = 0) -> None:
        """Count tokens processed and bytes written."""
        self.tokens += tokens
        self.written += written
        if time.monotonic() - self._flushed >= FLUSH_EVERY:
            self.flush()

    def spend(self, device_seconds: float) -> None:
        """Count what devices of other processes took, in addition to those of this one."""
        self._elsewhere += device_seconds

    def spend_engine(self, clock: EngineClock, devices: float) -> None:
        """Count what engines took of it."""
        self._engines.starting += clock.starting * devices
        self._engines.busy += clock.busy * devices

    def flush(self) -> None:
        """Append what has been counted so far."""
        self._flushed = time.monotonic()
        own = engine_clock.since(self._clock)
        engines = {
            "starting": round(self._engines.starting + own.starting * self.devices, 3),
            "busy": round(self._engines.busy + own.busy * self.devices, 3),
        }
        row = {
            "stage": self.stage,
            "name": self.name,
            "session": self.session,
            "device_seconds": round((self._flushed - self._since) * self.devices + self._elsewhere, 3),
            "tokens": self.tokens,
            "bytes": self.written,
            "peak_memory": peak_memory(),
            "rank": rank(),
            "time": round(time.time(), 1),
            **self.extra,
            **({"engine": engines} if any(engines.values()) else {}),
            **hardware(),
        }
        append_line(self.path, row)


@contextmanager
def measure(run_dir: Path, stage: str, name: str = "", **extra: Any) -> Iterator[Meter]:
    """Meter a stage and write its rows to the run's ledger."""
    meter = Meter(run_dir / LEDGER, stage, name, extra=extra)
    try:
        yield meter
    finally:
        meter.flush()


def read_ledger(run_dir: Path) -> list[dict[str, Any]]:
    """Read one row for each session that has worked on a stage."""
    counts = dict.fromkeys(("tokens", "bytes", "peak_memory"), int)
    rows = read_lines(run_dir / LEDGER, stage=str, name=str, device_seconds=float | int, **counts)
    whole = [row for row in rows if isinstance(row.get("engine", {}), dict)]
    return list({str(row.get("session", number)): row for number, row in enumerate(whole)}.values())


def peak_memory() -> int:
    """Peak bytes on the accelerator if one is in use, else of this process."""
    peak = peak_bytes()
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hardware() -> dict[str, Any]:
    """Name the device and the versions that a figure was measured on."""
    torch = sys.modules.get("torch")
    device = device_name()
    if device is None:
        device = platform.machine()
        with suppress(OSError, StopIteration):
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            device = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    versions = dict.fromkeys(("lightning-weave", "torch", "transformers"), "unknown")
    for name in versions:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"device": device, "threads": torch.get_num_threads() if torch is not None else 1, "versions": versions}
