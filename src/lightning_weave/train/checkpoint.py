"""Checkpoints: one folder per update, complete or absent, the last few kept; written while training continues."""

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from lightning_weave.config import KEPT_CHECKPOINTS
from lightning_weave.devices import set_device
from lightning_weave.errors import CorruptData, WeaveError, first_line
from lightning_weave.store import read_json, whole_directory, write_json

if TYPE_CHECKING:
    from torch import nn, optim

    from lightning_weave.train.parallel import Ranks

LATE = 120.0  # seconds that a shared disk may hide from one machine what another has written
POSITION = "position.json"


@dataclass(frozen=True)
class TrainingCheckpoints:
    """The checkpoints of one composition. The update says which rows and random numbers come next."""

    folder: Path
    fingerprint: str

    def complete(self) -> list[Path]:
        """List the checkpoints that this recipe wrote, oldest first."""
        paths = [path for path in self.folder.glob("[0-9]*") if (path / POSITION).exists()]
        return sorted(path for path in paths if read_json(path / POSITION)["fingerprint"] == self.fingerprint)

    def latest(self) -> int | None:
        """Give the update of the newest checkpoint."""
        return max((int(path.name) for path in self.complete()), default=None)

    def restore(self, update: int, module: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """Load the checkpoint that rank 0 has found, written by any number of ranks."""
        from lightning_weave.train.parallel import load_state

        folder = self.folder / f"{update:06d}"
        wait_until_seen(folder, lambda: folder in self.complete())
        try:
            load_state(folder, module, optimizer)
        except Exception as error:  # unpickling a damaged file can raise anything
            raise CorruptData(
                f"{folder}: this checkpoint cannot be read ({first_line(error)}). Remove it "
                f"(rm -r {folder}) and train again: it resumes from the one before"
            ) from error


def wait_until_seen(folder: Path, seen: Callable[[], bool]) -> None:
    """Wait for a checkpoint that rank 0 has written: a shared disk may show it late."""
    until = time.monotonic() + LATE
    while not seen():
        if time.monotonic() > until:
            raise WeaveError(
                f"{folder}: rank 0 sees this checkpoint, and this rank does not. Do all machines share the run "
                "directory?"
            )
        time.sleep(0.1)


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread: training waits only for the copy to the host.

    A kill leaves the checkpoint before, and nothing else that counts. Leaving the block waits for the last one.
    """

    def __init__(self, checkpoints: TrainingCheckpoints, ranks: "Ranks") -> None:
        self.checkpoints = checkpoints
        self.ranks = ranks
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=set_device, initargs=(ranks.device,))
        self._pending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._thread.shutdown()
        if kind is None:
            self.wait()
            self.ranks.barrier()

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raises its error."""
        if self._pending:
            self._pending.result()

    def save(self, update: int, module: "nn.Module", optimizer: "optim.Optimizer") -> None:
        """Copy the state, and begin to write it under a temporary name; all ranks together."""
        from lightning_weave.train.parallel import stage_state

        self.wait()
        state = stage_state(module, optimizer)
        folder = self.checkpoints.folder
        final = folder / f"{update:06d}"
        directory = ExitStack()
        if self.ranks.is_main_process:
            for leftover in folder.glob(".tmp-*"):  # of writers that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            with _explain_unwritable(final):
                directory.enter_context(whole_directory(final))
        self.ranks.barrier()  # until the directory exists
        self._pending = self._thread.submit(self._write, final, state, directory)

    def _write(self, final: Path, state: dict[str, Any], directory: ExitStack) -> None:
        """Write this rank's shards; when all ranks have, rank 0 adds the position, syncs and renames the directory."""
        from lightning_weave.train.parallel import save_state

        unfinished = final.with_name(f".tmp-{final.name}")
        with _explain_unwritable(final):
            with directory:
                save_state(unfinished, state, self.ranks)
                if self.ranks.is_main_process:
                    position = {"update": int(final.name), "fingerprint": self.checkpoints.fingerprint}
                    write_json(unfinished / POSITION, position)
            if self.ranks.is_main_process:
                for old in self.checkpoints.complete()[:-KEPT_CHECKPOINTS]:
                    shutil.rmtree(old)


@contextmanager
def _explain_unwritable(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeaveError(f"{final}: the checkpoint cannot be written ({error}). The one before is kept") from error
