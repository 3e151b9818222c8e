"""What training tells: rows for machines, a line for people, a tracker by a switch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_weave.errors import InputError
from lightning_weave.store import append_line, read_lines, write_atomic


class Tracker(Protocol):
    """Something that draws curves."""

    def log(self, step: int, figures: dict[str, float]) -> None: ...


class Metrics:
    """metrics.jsonl, and whatever trackers the recipe switches on."""

    def __init__(self, folder: Path, start: int, trackers: Sequence[str], name: str, active: bool) -> None:
        self.path = folder / "metrics.jsonl"
        self.active = active
        if active:
            # After a kill the log may be ahead of the checkpoint: those steps are taken again.
            kept = [row for row in read_lines(self.path) if row["step"] <= start]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self.trackers = [open_tracker(tracker, folder, name) for tracker in trackers] if active else []

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write one step."""
        if not self.active:
            return
        append_line(self.path, {"step": step, **{name: _rounded(value) for name, value in figures.items()}})
        for tracker in self.trackers:
            tracker.log(step, figures)


def line(step: int, total: int, figures: dict[str, float]) -> str:
    """One step for people."""
    rate = figures["tokens"] / figures["seconds"]
    return (
        f"loss {figures['loss']:.4f}  KL {figures['reverse_kl']:.4f}  kept {100 * figures['kept']:.1f}%  "
        f"|g| {figures['grad_norm']:.2f}  {rate:,.0f} tok/s"
    )


def open_tracker(name: str, folder: Path, run: str) -> Tracker:
    """Start a tracker, or say how to install it."""
    try:
        return TensorBoard(folder) if name == "tensorboard" else WandB(run)
    except ImportError as error:
        raise InputError(f"train.trackers: {name} is not installed ({error}). pip install {name}") from None


class TensorBoard:
    """Curves in the run's own folder."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"train/{name}", value, step)
        self.writer.flush()


class WandB:
    """Curves on a server."""

    def __init__(self, run: str) -> None:
        import wandb

        self.run: Any = wandb.init(project="lightning-weave", name=run, id=run.replace("/", "-"), resume="allow")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
