"""Checkpoints: a folder per update, whole or not there, the last few kept."""

import shutil
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_weave.errors import CorruptData, WeaveError, first_line
from lightning_weave.store import read_json, whole_directory, write_json

if TYPE_CHECKING:
    from torch import nn, optim

    from lightning_weave.train.parallel import Ranks


@dataclass(frozen=True)
class Position:
    """Where training stands. Which rows are next, and all that is random about them, follows from the update."""

    update: int
    fingerprint: str


@dataclass(frozen=True)
class TrainingCheckpoints:
    """The checkpoints of one composition."""

    folder: Path
    fingerprint: str
    keep: int

    def save(self, update: int, module: "nn.Module", optimizer: "optim.Optimizer", ranks: "Ranks") -> None:
        """Write under a temporary name, sync, rename; then drop the oldest."""
        from lightning_weave.train.parallel import save_state

        final = self.folder / f"{update:06d}"
        unfinished = self.folder / f".tmp-{update:06d}"
        try:
            if ranks.first:
                for leftover in self.folder.glob(".tmp-*"):  # of writers that were killed
                    shutil.rmtree(leftover, ignore_errors=True)
            with whole_directory(final) if ranks.first else nullcontext():
                ranks.wait()
                save_state(unfinished, module, optimizer)
                ranks.wait()
                if ranks.first:
                    write_json(unfinished / "position.json", asdict(Position(update, self.fingerprint)))
            if ranks.first:
                for old in self._complete()[: -self.keep]:
                    shutil.rmtree(old)
        except OSError as error:
            raise WeaveError(f"{final}: the checkpoint cannot be written ({error}). The one before is kept") from error
        ranks.wait()

    def latest(self) -> int | None:
        """The update of the newest checkpoint that this recipe wrote."""
        return max((int(path.name) for path in self._complete()), default=None)

    def restore(self, update: int, module: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """Load one checkpoint, by whatever number of ranks it was written."""
        from lightning_weave.train.parallel import load_state

        folder = self.folder / f"{update:06d}"
        try:
            load_state(folder, module, optimizer)
        except Exception as error:  # unpickling what is damaged can raise anything
            raise CorruptData(
                f"{folder}: this checkpoint cannot be read ({first_line(error)}). Remove it "
                f"(rm -r {folder}) and train again: it resumes from the one before"
            ) from error

    def clear(self) -> None:
        """Remove all checkpoints, finished or not: those of another recipe."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _complete(self) -> list[Path]:
        paths = [path for path in self.folder.glob("[0-9]*") if (path / "position.json").exists()]
        return sorted(path for path in paths if read_json(path / "position.json")["fingerprint"] == self.fingerprint)
