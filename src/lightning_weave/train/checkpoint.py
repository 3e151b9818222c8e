"""Checkpoints: a folder per update, whole or not there, the last few kept; written while training continues."""

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self

from lightning_weave.errors import CorruptData, WeaveError, first_line
from lightning_weave.store import read_json, whole_directory, write_json

if TYPE_CHECKING:
    from torch import nn, optim

    from lightning_weave.train.parallel import Ranks

LATE = 120.0  # seconds that a disk may hide from one machine what another has written


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

    def latest(self) -> int | None:
        """The update of the newest checkpoint that this recipe wrote."""
        return max((int(path.name) for path in self._complete()), default=None)

    def wait_for(self, update: int) -> None:
        """Wait until a checkpoint that rank 0 has seen is seen here: a shared disk may show it late."""
        folder = self.folder / f"{update:06d}"
        wait_until_seen(folder, lambda: folder in self._complete())

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

    def drop_oldest(self) -> None:
        """Remove all but the last few."""
        for old in self._complete()[: -self.keep]:
            shutil.rmtree(old)


def wait_until_seen(folder: Path, seen: Callable[[], bool]) -> None:
    """Wait for a checkpoint that rank 0 has written, or say that this rank never sees it."""
    until = time.monotonic() + LATE
    while not seen():
        if time.monotonic() > until:
            raise WeaveError(
                f"{folder}: rank 0 sees this checkpoint, and this rank does not. Do all machines share the run "
                "directory?"
            )
        time.sleep(0.1)


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread: training waits only for its numbers to be copied to the host.

    A kill on the way leaves the one before, and nothing else that counts. Leaving the block waits for the last one.
    """

    def __init__(self, checkpoints: TrainingCheckpoints, ranks: "Ranks") -> None:
        self.checkpoints = checkpoints
        self.ranks = ranks
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is None:
            self.wait()
            self.ranks.wait()
        elif self._thread:
            self._thread.join()

    def save(self, update: int, module: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """Copy what there is, and begin to write it under a temporary name; all ranks together."""
        from lightning_weave.train.parallel import copied_state

        self.wait()
        state = copied_state(module, optimizer)
        folder = self.checkpoints.folder
        final = folder / f"{update:06d}"
        whole = ExitStack()
        if self.ranks.first:
            for leftover in folder.glob(".tmp-*"):  # of writers that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            with _said_if_unwritable(final):
                whole.enter_context(whole_directory(final))
        self.ranks.wait()  # for the folder to be there
        self._thread = Thread(target=self._write, args=(final, state, whole), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last one is written, and raise what went wrong with it."""
        if self._thread:
            self._thread.join()
        self._thread = None
        if self._error:
            raise self._error

    def _write(self, final: Path, state: dict[str, Any], whole: ExitStack) -> None:
        """Write this rank's shards; rank 0, when all ranks have, says which update it is, syncs and renames."""
        from lightning_weave.train.parallel import save_state

        unfinished = final.with_name(f".tmp-{final.name}")
        try:
            with _said_if_unwritable(final):
                with whole:
                    save_state(unfinished, state, self.ranks)
                    if self.ranks.first:
                        position = Position(int(final.name), self.checkpoints.fingerprint)
                        write_json(unfinished / "position.json", asdict(position))
                if self.ranks.first:
                    self.checkpoints.drop_oldest()
        except BaseException as error:  # raised where it is waited for
            self._error = error


@contextmanager
def _said_if_unwritable(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeaveError(f"{final}: the checkpoint cannot be written ({error}). The one before is kept") from error
