"""Ranks: process groups and FSDP2. A single process without a GPU needs none of it."""

import atexit
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lightning_weave.devices import collective_backend
from lightning_weave.errors import InputError, PeerStopped
from lightning_weave.ranks import local_world_size, rank, world_size

T = TypeVar("T")
DEVICE_TIMEOUT = timedelta(hours=2)  # of one collective on the devices
HOST_TIMEOUT = timedelta(days=7)  # while rank 0 writes and hashes a large export


@dataclass(frozen=True)
class Ranks:
    """This process among its peers. Collectives on Python values go through the hosts, not through the devices."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    def all_reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add numbers over all ranks."""
        if self.world_size == 1:
            return dict(values)
        summed = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(summed, group=host_group("values"))
        return dict(zip(values, summed.tolist(), strict=True))

    def all_gather(self, values: list[Any]) -> list[Any]:
        """Join one list per rank."""
        if self.world_size == 1:
            return values
        lists: list[Any] = [None] * self.world_size
        dist.all_gather_object(lists, values, group=host_group("values"))
        return [value for one in lists for value in one]

    def broadcast(self, value: T) -> T:
        """Give every rank the value of rank 0."""
        return self.all_gather([value] if self.is_main_process else [])[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world_size > 1:
            dist.barrier(group=host_group("values"))


@cache
def host_group(purpose: str) -> Any:
    """Make a gloo group of all ranks, one for each purpose: threads that use different groups never mix messages."""
    return dist.new_group(backend="gloo", timeout=HOST_TIMEOUT)


@contextmanager
def join(device: torch.device, sharded: bool) -> Iterator[Ranks]:
    """Join the process group that torchrun describes; a single process makes one only where sharding needs it."""
    world = world_size()
    backend = collective_backend(device)
    if world > 1:
        # Once per process: a second group would meet the keys of the first in torchrun's store, and hang.
        if not dist.is_initialized():
            store, number, _ = next(dist.rendezvous("env://", timeout=DEVICE_TIMEOUT))
            fresh = fresh_store(store, number, world)
            dist.init_process_group(backend, store=fresh, rank=number, world_size=world, timeout=DEVICE_TIMEOUT)
            atexit.register(dist.destroy_process_group)
            host_group("values")
            host_group("checkpoints")
        try:
            yield Ranks(rank(), world, device)
        except BaseException as error:
            # On GPUs, to destroy the group is to wait for collectives that nobody finishes any more.
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
    """Give the ranks of this start a prefix of the store that no earlier start has used.

    torchrun keeps its store when it restarts ranks, and a rank that finds an address from before the restart waits
    forever. So rank 0 chooses a name, and sends it to each rank that says hello with a fresh name.
    """
    own = uuid4().hex
    if number > 0:
        store.set(f"hello/{number}", own)
        name = store.get(f"welcome/{own}").decode()
        store.set(f"{name}/heard/{number}", "")
        return dist.PrefixStore(name, store)
    pending_ranks = set(range(1, world))
    while pending_ranks:
        for other in sorted(pending_ranks):
            if store.check([f"hello/{other}"]):  # perhaps from an earlier start: then nobody reads the answer
                store.set(f"welcome/{store.get(f'hello/{other}').decode()}", own)
        pending_ranks = {other for other in pending_ranks if not store.check([f"{own}/heard/{other}"])}
        time.sleep(0.02)
    return dist.PrefixStore(own, store)


def shard(module: nn.Module, blocks: list[nn.Module], ranks: Ranks, dtype: torch.dtype, among: int) -> None:
    """Shard a module with FSDP2: float32 masters, compute in `dtype`, gradients reduced in float32.

    Each `among` consecutive ranks hold one copy; all copies take the same step. The weights may still be on the meta
    device. The module's method `look` may be called like its forward.
    """
    copies = ranks.world_size // among
    shape, names = ((copies, among), ("copy", "shard")) if copies > 1 else ((among,), ("shard",))
    mesh = init_device_mesh(ranks.device.type, shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*blocks, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(module, "look")


def materialize(module: nn.Module, device: torch.device) -> None:
    """Move a module to its device and allocate the weights that are on meta: only this rank's shard of them."""
    moved: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay one
    for owner in module.modules():
        for name, weight in owner.named_parameters(recurse=False):
            if weight not in moved:
                tensor = torch.empty_like(weight, device=device) if weight.is_meta else weight.detach().to(device)
                moved[weight] = nn.Parameter(tensor, weight.requires_grad)
            owner.register_parameter(name, moved[weight])
        for name, buffer in owner.named_buffers(recurse=False):
            owner._buffers[name] = buffer.to(device)


def ranks_per_copy(setting: int | None, ranks: Ranks) -> int:
    """Choose how many ranks share a copy of the student: by default those of one machine.

    All ranks, where machines have one rank each or different numbers of them.
    """
    if setting is not None:
        if ranks.world_size % setting:
            raise InputError(
                f"train.shard_ranks = {setting} does not divide the {ranks.world_size} ranks. Set one that does"
            )
        return setting
    sizes = set(ranks.all_gather([local_world_size()]))
    local = sizes.pop() if len(sizes) == 1 else 1
    return local if local > 1 and ranks.world_size % local == 0 else ranks.world_size


def reshard(module: nn.Module) -> None:
    """Free the unsharded weights that a pass has left, before the shards are read or written."""
    if isinstance(module, FSDPModule):
        module.reshard()


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Hold all weights unsharded on every rank, so that submodules can be run without the root's forward."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module._get_fsdp_state()._lazy_init()  # or the first submodule to run would become the root
    parts: list[Any] = [part for part in module.modules() if isinstance(part, FSDPModule)]
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


def recover(module: nn.Module) -> None:
    """Make a module usable after a pass that raised, without gradients."""
    module.zero_grad(set_to_none=True)
    if isinstance(module, FSDPModule):
        module.reset_iter_state()
        for part in module.modules():
            if isinstance(part, FSDPModule):  # torch leaves gradients on its unsharded weights, and would add to them
                part.unshard()
                part.zero_grad(set_to_none=True)
                part.reshard()


def local_shard(tensor: Tensor) -> tuple[Tensor, slice]:
    """Give this rank's shard of a weight, and which rows of the weight it holds."""
    if not isinstance(tensor, DTensor):
        return tensor, slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), slice(offset[0], offset[0] + shape[0])


def full_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather one weight in a dtype on the CPU; a collective."""
    rounded = tensor.to(dtype)
    return (rounded.full_tensor() if isinstance(rounded, DTensor) else rounded).cpu()


def clip_gradients(module: nn.Module, largest: float) -> float:
    """Clip the gradient to a norm over all ranks' shards; returns the norm before."""
    norm = nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], largest)
    return float(norm.full_tensor()) if isinstance(norm, DTensor) else float(norm)
