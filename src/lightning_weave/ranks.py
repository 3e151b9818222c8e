"""Which of the processes that torchrun or Ray started this one is. No other file knows these variables."""

import os
import re
from collections.abc import Mapping

from lightning_weave.errors import InputError

_OF_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_\w+|(TORCH_)?NCCL_ASYNC_\w+"
)


def rank() -> int:
    """This process's number among all ranks; 0 where it runs alone."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """How many ranks there are."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def become(rank: int, world: int, local_rank: int, local_world: int, address: str, port: int) -> None:
    """Make this process one of several ranks that meet at an address, as torchrun does."""
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**place, **meeting}.items()})


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Leave out what torchrun sets: a program with ranks of its own would wait for ours."""
    return {name: value for name, value in environment.items() if not _OF_TORCHRUN.fullmatch(name)}


def is_first() -> bool:
    """Whether this rank does what only one may do."""
    return rank() == 0


def is_alone() -> bool:
    """Whether no other rank writes beside this one."""
    return world_size() == 1


def can_meet() -> bool:
    """Whether the ranks were told where to meet, as torchrun tells them; jobs of an array only share a disk."""
    return not is_alone() and "MASTER_ADDR" in os.environ


def check_ranks() -> None:
    """Refuse a rank that no shard belongs to."""
    number = os.environ.get("RANK", "0")
    world = os.environ.get("WORLD_SIZE", "1")
    if not (number.isdecimal() and world.isdecimal() and int(number) < int(world)):
        raise InputError(f"RANK={number} WORLD_SIZE={world}: ranks are numbers from 0 to WORLD_SIZE - 1")
