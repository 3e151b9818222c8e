"""What training reports: rows in metrics.jsonl, a progress line, and optional trackers."""

import json
from pathlib import Path

from lightning_weave.config import Recipe
from lightning_weave.store import append_line, read_lines, write_atomic
from lightning_weave.trackers import Tracked, open_trackers


class Metrics:
    """metrics.jsonl, and whatever trackers the recipe switches on."""

    def __init__(self, recipe: Recipe, name: str, folder: Path, start: int, fingerprint: str) -> None:
        self.path = folder / "metrics.jsonl"
        # After a kill the log may be ahead of the checkpoint: those steps are taken again.
        rows = [row for row in read_lines(self.path) if row["step"] <= start] if start else []
        write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in rows).encode())
        self.last: dict[str, float] = {key: value for row in rows for key, value in row.items() if key != "step"}
        self.trackers = open_trackers(recipe, Tracked(name, folder, fingerprint, start))

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
