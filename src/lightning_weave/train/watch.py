"""What training reports: rows in metrics.jsonl, a progress line, and optional trackers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_weave.errors import InputError
from lightning_weave.store import append_line, read_lines, write_atomic


class Tracker(Protocol):
    """Something that draws curves."""

    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def close(self) -> None: ...


class Metrics:
    """metrics.jsonl, and whatever trackers the recipe switches on."""

    def __init__(self, folder: Path, start: int, trackers: Sequence[str], name: str, fingerprint: str) -> None:
        self.path = folder / "metrics.jsonl"
        # After a kill the log may be ahead of the checkpoint: those steps are taken again.
        kept = [row for row in read_lines(self.path) if row["step"] <= start] if start else []
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept).encode())
        self.last: dict[str, float] = {key: value for row in kept for key, value in row.items() if key != "step"}
        self.trackers = [_open_tracker(tracker, folder, start, name, fingerprint) for tracker in trackers]

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Write one step."""
        row = {name: float(f"{value:.6g}") for name, value in figures.items()}
        self.last |= row  # as written: a resumed run has no other digits to go by
        append_line(self.path, {"step": step, **row})
        for tracker in self.trackers:
            tracker.log(step, figures)

    def at(self, step: int) -> dict[str, float] | None:
        """What was written of a step, if anything was."""
        return next((row for row in read_lines(self.path) if row["step"] == step), None)

    def close(self) -> None:
        """Flush the trackers."""
        for tracker in self.trackers:
            tracker.close()


def line(figures: dict[str, float]) -> str:
    """One step for people."""
    return (
        f"loss {figures['loss']:.4f}  KL {figures['reverse_kl']:.4f}  kept {100 * figures['kept']:.1f}%  "
        f"|g| {figures['grad_norm']:.2f}  {figures['tokens_per_s']:,.0f} tok/s"
    )


def _open_tracker(tracker: str, folder: Path, start: int, name: str, fingerprint: str) -> Tracker:
    """Start a tracker, or say how to install it."""
    try:
        return TensorBoard(folder, start) if tracker == "tensorboard" else WandB(name, fingerprint)
    except ImportError as error:
        raise InputError(f"train.trackers: {tracker} is not installed ({error}). pip install {tracker}") from None


class TensorBoard:
    """Curves in the composition's own folder."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(f"train/{name}", value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB:
    """Curves on a server; a run that is trained on is found again by its fingerprint."""

    def __init__(self, name: str, fingerprint: str) -> None:
        import wandb

        self.run: Any = wandb.init(project="lightning-weave", name=name, id=fingerprint, resume="allow")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def close(self) -> None:
        self.run.finish()
