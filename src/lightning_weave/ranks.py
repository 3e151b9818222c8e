"""The rank of this process among those that torchrun or Ray started. No other file reads these variables."""

import os
import re
from collections.abc import Mapping

from lightning_weave.errors import InputError

_TORCHRUN_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_\w+|(TORCH_)?NCCL_ASYNC_\w+"
)


def rank() -> int:
    """Give the number of this process among all ranks; 0 in a single process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Count the ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """Give the number of this process among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Count the ranks of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def set_rank_env(rank: int, world: int, local_rank: int, local_world: int, address: str, port: int) -> None:
    """Set the variables of one rank, as torchrun does."""
    ranks = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    variables = {**ranks, "MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out torchrun's variables: a program that starts ranks itself would wait for ours."""
    return {name: value for name, value in environment.items() if not _TORCHRUN_VARIABLES.fullmatch(name)}


def is_main_process() -> bool:
    """Whether this is rank 0, which does what only one may do."""
    return rank() == 0


def is_single_process() -> bool:
    """Whether this is the only rank."""
    return world_size() == 1


def is_distributed() -> bool:
    """Whether the ranks can form a process group, as under torchrun; jobs of an array only share a disk."""
    return not is_single_process() and "MASTER_ADDR" in os.environ


def check_ranks() -> None:
    """Refuse a rank that no shard belongs to."""
    number = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    if not (number.isdecimal() and world.isdecimal() and int(number) < int(world)):
        raise InputError(f"RANK={number} WORLD_SIZE={world}: ranks are numbers from 0 to WORLD_SIZE - 1")
