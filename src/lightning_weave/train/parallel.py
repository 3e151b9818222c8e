"""Everything that knows of ranks: process groups, FSDP2, sums over ranks, sharded checkpoints.

One process without a GPU runs none of it. Checkpoints are written by torch's distributed checkpointing in any case,
so that a run started on two ranks resumes on one and the other way round.
"""

import atexit
import io
import pickle
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_weave.devices import collective_backend
from lightning_weave.errors import PeerStopped
from lightning_weave.ranks import rank, world_size

# All that the index of a checkpoint consists of. It is a pickle: anything else in it could run code.
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
T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # of one pass with another
WAITING = timedelta(days=7)  # for rank 0 to write and hash a large export, while no device counts the time


@dataclass(frozen=True)
class Ranks:
    """Who this process is among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def total(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add numbers over all ranks."""
        if self.world == 1:
            return dict(values)
        summed = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(summed, group=_hosts())
        return dict(zip(values, summed.tolist(), strict=True))

    def most(self, value: int) -> int:
        """The largest of one number per rank."""
        if self.world == 1:
            return value
        largest = torch.tensor(value)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=_hosts())
        return int(largest)

    def gathered(self, values: list[Any]) -> list[Any]:
        """Join one list per rank."""
        if self.world == 1:
            return values
        lists: list[Any] = [None] * self.world
        dist.all_gather_object(lists, values, group=_hosts())
        return [value for one in lists for value in one]

    def told(self, value: T) -> T:
        """Give every rank what rank 0 has."""
        return self.gathered([value] if self.first else [])[0]

    def wait(self) -> None:
        """Let every rank come to this point."""
        if self.world > 1:
            dist.barrier(group=_hosts())


@cache
def _hosts() -> Any:
    """The ranks once more, as a group that talks without their devices: nothing waits for a GPU or by its clock."""
    return dist.new_group(backend="gloo", timeout=WAITING)


@cache
def _writers() -> Any:
    """The ranks as those who write checkpoints know each other: what they say never gets between what others say."""
    return dist.new_group(backend="gloo", timeout=WAITING)


@contextmanager
def join(device: torch.device, sharded: bool) -> Iterator[Ranks]:
    """Join the process group that torchrun describes; alone, make one only where sharding needs it."""
    world = world_size()
    backend = collective_backend(device)
    if world > 1:
        # Once per process: a second group would meet the keys of the first in torchrun's store, and hang.
        if not _grouped():
            store, number, _ = next(dist.rendezvous("env://", timeout=PATIENCE))
            fresh = fresh_store(store, number, world)
            dist.init_process_group(backend, store=fresh, rank=number, world_size=world, timeout=PATIENCE)
            atexit.register(dist.destroy_process_group)
            _hosts()
            _writers()
        try:
            yield Ranks(rank(), world, device)
        except BaseException as error:
            # On GPUs that would wait for passes that nobody finishes any more; without it they are broken off.
            atexit.unregister(dist.destroy_process_group)
            if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error)):
                raise PeerStopped(f"rank {rank()}: another rank has stopped; its own message says why") from error
            raise
        return
    if sharded:
        dist.init_process_group(backend, rank=0, world_size=1, store=HashStore())
    try:
        yield Ranks(0, 1, device)
    finally:
        if sharded:
            dist.destroy_process_group()


def fresh_store(store: Any, number: int, world: int) -> Any:
    """Give the ranks of this start a part of the store that no earlier start has used.

    When torchrun starts ranks again it keeps its store, and whoever finds an address of the time before there waits for
    ever. So rank 0 makes up a name, and tells it to those who say hello with a name of their own.
    """
    own = uuid4().hex
    if number > 0:
        store.set(f"hello/{number}", own)
        name = store.get(f"welcome/{own}").decode()
        store.set(f"{name}/heard/{number}", "")
        return dist.PrefixStore(name, store)
    deaf = set(range(1, world))
    while deaf:
        for other in sorted(deaf):
            if store.check([f"hello/{other}"]):  # perhaps of an earlier start: then nobody hears the answer
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", own)
        deaf = {other for other in deaf if not store.check([f"{own}/heard/{other}"])}
        time.sleep(0.02)
    return dist.PrefixStore(own, store)


def shard(module: nn.Module, blocks: list[nn.Module], ranks: Ranks, dtype: torch.dtype, among: int) -> None:
    """Shard a module: float32 masters, compute in `dtype`, gradients reduced in float32.

    Each `among` ranks that follow one another hold one copy; all copies take the same step. Its weights need no memory
    yet, and its method `look` can be called as its forward can.
    """
    copies = ranks.world // among
    shape, names = ((copies, among), ("copy", "shard")) if copies > 1 else ((among,), ("shard",))
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(module, "look")


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Put a module on its device, where weights without memory get some: only this rank's part, if it is sharded."""
    moved: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if weight not in moved:
                tensor = torch.empty_like(weight, device=device) if weight.is_meta else weight.detach().to(device)
                moved[weight] = nn.Parameter(tensor, weight.requires_grad)
            owner.register_parameter(name, moved[weight])
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)


def reshard(module: nn.Module) -> None:
    """Give up what a pass has left whole, before anybody takes a sharded module's weights as they are."""
    if isinstance(module, FSDPModule):
        module.reshard()


def own_part(tensor: torch.Tensor) -> tuple[torch.Tensor, slice]:
    """This rank's part of a weight, and which of its rows that is."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), slice(offset[0], offset[0] + shape[0])


def can_recover(module: nn.Module) -> bool:
    """Whether a module can be used again after a pass that an exception cut short; before 2.13 torch could not."""
    return not isinstance(module, FSDPModule) or hasattr(module, "reset_iter_state")


def recover(module: nn.Module) -> None:
    """Make a module usable again after a pass that an exception cut short, without any of its gradients."""
    module.zero_grad(set_to_none=True)
    if isinstance(module, FSDPModule):
        module.reset_iter_state()
        for part in _parts(module):  # torch leaves gradients on whole weights, and would add them to the next pass
            part.unshard()
            part.zero_grad(set_to_none=True)
            part.reshard()


def _parts(module: nn.Module) -> list[Any]:
    """The sharded modules of a sharded module, itself among them."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Hold all weights of a sharded module whole on every rank, so that its parts can be run on their own."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module._get_fsdp_state()._lazy_init()  # or the first part to run would take itself for the root
    parts = _parts(module)
    try:
        for part in parts:
            part.unshard()
            if part is not module:
                part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for part in parts:
            if part is not module:
                part.set_reshard_after_forward(True, recurse=False)
            part.reshard()


def clip_gradients(module: nn.Module, largest: float) -> float:
    """Clip to a norm over all ranks' shards; returns the norm before."""
    norm = nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], largest)
    return float(norm.full_tensor()) if hasattr(norm, "full_tensor") else float(norm)


def copied_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy model and optimizer to the host, each rank its own shards: what is trained later changes nothing there."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    copied = stager.stage(_state(module, optimizer))
    assert isinstance(copied, dict), "it was not asked to come later"
    return copied


def save_state(folder: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Write copies of model and optimizer, each rank its own shards; other threads may train meanwhile."""
    group = _writers() if ranks.world > 1 else None
    with _plain_errors():
        save(state, checkpoint_id=folder, process_group=group, no_dist=ranks.world == 1)


def load_state(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read model and optimizer as any number of ranks wrote them."""
    state = _state(module, optimizer)
    with open(folder / ".metadata", "rb") as index:
        _IndexReader(index).load()  # refuses before torch reads it in its own, trusting way
    with _plain_errors():
        load(state, checkpoint_id=folder, planner=_DataOnly(), no_dist=not _grouped())
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_only_trained(module),
    )


class _IndexReader(pickle.Unpickler):
    """Read a checkpoint's index, and nothing that is not part of one."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which our checkpoints never contain")
        return super().find_class(module, name)


class _DataOnly(DefaultLoadPlanner):
    """Let torch read the settings beside the tensors only where they are plain data: it would run anything else."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(module, optimizer, options=_only_trained(module))
    return {"model": model_state, "optimizer": optimizer_state}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on a rank itself: torch wraps it into an exception that `except Exception` lets pass."""
    with warnings.catch_warnings():
        # That there is only one process is as it should be.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise OSError(f"{type(reason).__name__}: {reason}") from error


def whole_weight(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather one weight in a dtype on the CPU; all ranks ask for it together."""
    rounded = tensor.to(dtype)
    return (rounded.full_tensor() if isinstance(rounded, DTensor) else rounded).cpu()


def _only_trained(module: nn.Module) -> StateDictOptions:
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    return StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)


def _grouped() -> bool:
    return dist.is_available() and dist.is_initialized()
