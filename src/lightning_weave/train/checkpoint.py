"""Checkpoints: a folder per update, whole or not there, the last few kept."""

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_weave.store import read_json, write_json
from lightning_weave.store.files import sync_directory
from lightning_weave.train.parallel import Ranks, load_state, save_state


@dataclass(frozen=True)
class Position:
    """Where training stands. The schedule follows from the recipe, so the update's number says which rows are next."""

    update: int
    fingerprint: str


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one composition."""

    folder: Path
    fingerprint: str
    keep: int

    def save(self, update: int, module: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        """Write under a temporary name, sync, rename; then drop the oldest."""
        unfinished, final = self.folder / f".tmp-{update:06d}", self.folder / f"{update:06d}"
        if ranks.first:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.rmtree(final, ignore_errors=True)
            unfinished.mkdir(parents=True)
        ranks.wait()
        save_state(unfinished, module, optimizer)
        ranks.wait()
        if ranks.first:
            write_json(unfinished / "position.json", asdict(Position(update, self.fingerprint)))
            _sync_files(unfinished)
            os.rename(unfinished, final)
            sync_directory(self.folder)
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(old)
        ranks.wait()

    def latest(self) -> int | None:
        """The update of the newest checkpoint that this recipe wrote."""
        found = [int(path.name) for path in self._complete() if self._is_ours(path)]
        return max(found, default=None)

    def restore(self, update: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load one checkpoint."""
        load_state(self.folder / f"{update:06d}", module, optimizer)

    def clear(self) -> None:
        """Remove all checkpoints, finished or not: those of another recipe, or after the final export."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("[0-9]*") if (path / "position.json").exists())

    def _is_ours(self, path: Path) -> bool:
        return bool(read_json(path / "position.json")["fingerprint"] == self.fingerprint)


def _sync_files(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    sync_directory(folder)
