"""Checkpoints: one folder per update, complete or absent, the last few kept; written while training continues.

torch.distributed.checkpoint writes them in any case, so that a run can be resumed with another number of ranks.
"""

import io
import pickle
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from lightning_weave.config import KEPT_CHECKPOINTS
from lightning_weave.devices import set_device
from lightning_weave.errors import CorruptData, WeaveError, first_line
from lightning_weave.store import whole_directory, write_json
from lightning_weave.train.parallel import Ranks, host_group
from lightning_weave.train.schedule import POSITION, complete_checkpoints

LATE = 120.0  # seconds that a shared disk may hide from one machine what another has written
# The classes in the index of a checkpoint. The index is a pickle: any other class in it could run code.
INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class CheckpointWriter:
    """Writes one checkpoint at a time in a thread: training waits only for the copy to the host.

    A kill leaves the checkpoint before, and nothing else that counts. Leaving the block waits for the last one.
    """

    def __init__(self, folder: Path, fingerprint: str, ranks: Ranks) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
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

    def save(self, update: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Copy the state, and begin to write it under a temporary name; all ranks together."""
        self.wait()
        state = stage_state(module, optimizer)
        final = self.folder / f"{update:06d}"
        unfinished = final.with_name(f".tmp-{final.name}")
        directory = ExitStack()
        if self.ranks.is_main_process:
            for leftover in self.folder.glob(".tmp-*"):  # of writers that were killed
                shutil.rmtree(leftover, ignore_errors=True)
            with _explain_unwritable(final):
                directory.enter_context(whole_directory(final))
        self.ranks.barrier()  # until the directory exists

        def write() -> None:
            """Write this rank's shards; when all ranks have, rank 0 adds the position, syncs and renames."""
            with _explain_unwritable(final):
                with directory:
                    save_state(unfinished, state, self.ranks)
                    if self.ranks.is_main_process:
                        write_json(unfinished / POSITION, {"update": update, "fingerprint": self.fingerprint})
                if self.ranks.is_main_process:
                    for old in complete_checkpoints(self.folder, self.fingerprint)[:-KEPT_CHECKPOINTS]:
                        shutil.rmtree(old)

        self._pending = self._thread.submit(write)


@contextmanager
def _explain_unwritable(final: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WeaveError(f"{final}: the checkpoint cannot be written ({error}). The one before is kept") from error


def restore_checkpoint(
    folder: Path, fingerprint: str, update: int, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Load the checkpoint that rank 0 has found, written by any number of ranks."""
    path = folder / f"{update:06d}"
    wait_until_seen(path, lambda: path in complete_checkpoints(folder, fingerprint))
    try:
        load_state(path, module, optimizer)
    except Exception as error:  # unpickling a damaged file can raise anything
        raise CorruptData(
            f"{path}: this checkpoint cannot be read ({first_line(error)}). Remove it "
            f"(rm -r {path}) and train again: it resumes from the one before"
        ) from error


def wait_until_seen(folder: Path, seen: Callable[[], bool]) -> None:
    """Wait for a folder that rank 0 has written: a shared disk may show it late."""
    until = time.monotonic() + LATE
    while not seen():
        if time.monotonic() > until:
            raise WeaveError(
                f"{folder}: rank 0 sees this checkpoint, and this rank does not. Do all machines share the run "
                "directory?"
            )
        time.sleep(0.1)


def stage_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy this rank's shards of model and optimizer to the host: later updates do not change the copy."""
    staged = DefaultStager(StagingOptions(False, False, False, False)).stage(_state(module, optimizer)[0])
    assert isinstance(staged, dict), "asynchronous staging is off"
    return staged


def save_state(folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Write staged shards, from any thread."""
    group = host_group("checkpoints") if ranks.world_size > 1 else None
    with _plain_errors():
        dcp.save(state, checkpoint_id=folder, process_group=group, no_dist=ranks.world_size == 1)


def load_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read model and optimizer, written by any number of ranks."""
    state, options = _state(module, optimizer)
    with open(folder / ".metadata", "rb") as index:
        _IndexReader(index).load()  # refuses before torch unpickles it
    with _plain_errors():
        dcp.load(state, checkpoint_id=folder, planner=_DataOnly(), no_dist=not dist.is_initialized())
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(module, optimizer, **states, options=options)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], StateDictOptions]:
    """Give the state of what is trained, and the options to load it with."""
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    options = StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)
    model_state, optimizer_state = get_state_dict(module, optimizer, options=options)
    return {"model": model_state, "optimizer": optimizer_state}, options


class _IndexReader(pickle.Unpickler):
    """Read the index of a checkpoint, and refuse classes that are not part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which our checkpoints never contain")
        return super().find_class(module, name)


class _DataOnly(dcp.DefaultLoadPlanner):
    """Let torch unpickle the non-tensor entries of a checkpoint only if they are plain data."""

    def load_bytes(self, read_item: dcp.ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of the rank itself: torch wraps it into a BaseException, which `except Exception` lets pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # in a single process
        try:
            yield
        except dcp.CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            while reason.__context__ is not None:  # torch's writer fails again as it closes: the first is the cause
                reason = reason.__context__
            raise OSError(f"{type(reason).__name__}: {reason}") from error
