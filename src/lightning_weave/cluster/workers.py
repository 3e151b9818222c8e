"""What fits into a Ray cluster: how many workers for the shards of a job, and how many ranks to train with."""

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_weave.config import Machine, Recipe
from lightning_weave.errors import InputError, WeaveError


def enter(folder: str) -> None:
    """Work where the command was typed: the recipe's paths are relative to it."""
    if not Path(folder).is_dir():
        raise InputError(
            f"{folder} is not on node {socket.gethostname()}: start the command in a folder that all nodes share"
        )
    os.chdir(folder)


def own_error(error: Any) -> Exception:
    """What a call elsewhere raised, as it would be raised here."""
    return error.cause if isinstance(error.cause, WeaveError) else error


Node = Mapping[str, float]  # what one machine has, as Ray names it: CPU, GPU, ...


@dataclass(frozen=True)
class WorkerPlan:
    """How many workers, and what each of them takes from one node of the cluster."""

    workers: int
    cpus: float
    gpus: float

    @property
    def devices_each(self) -> float:
        """How many devices one of them takes, for the ledger."""
        return self.gpus or 1.0


def live_nodes() -> list[Node]:
    """What the machines of the cluster have that this process is connected to."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def plan_workers(machine: Machine, nodes: Sequence[Node], shards: int, devices: int = 1) -> WorkerPlan:
    """Choose the number of workers by the recipe, or by what the nodes have room for.

    A worker whose engine takes several devices gets them all on one node.
    """
    cpus = float(machine.threads or 1)
    gpus = max(machine.gpus_per_worker, devices if devices > 1 else 0.0) if _uses_gpus(machine, nodes) else 0.0
    room = sum(_rooms(nodes, cpus, gpus))
    return WorkerPlan(min(machine.workers or room, shards), cpus, gpus)


def plan_ranks(recipe: Recipe, nodes: Sequence[Node]) -> WorkerPlan:
    """Choose the number of ranks: one per GPU of the workers, or per node where there are no GPUs."""
    machine = recipe.machine
    cpus = float(machine.threads or 1)
    gpus = 1.0 if _uses_gpus(machine, nodes) else 0.0
    rooms = _rooms(nodes, cpus, gpus)
    ranks = sum(rooms) if gpus or machine.workers else sum(room > 0 for room in rooms)
    if machine.workers:
        ranks = min(ranks, max(1, round(machine.workers * (machine.gpus_per_worker if gpus else 1.0))))
    if recipe.train.lora is not None and recipe.train.lora.base != "own":
        ranks = 1  # quantised weights are not sharded
    among = recipe.train.shard_ranks or 1
    if ranks < among:
        raise InputError(
            f"train.shard_ranks = {among}: the cluster has room for {ranks} ranks only ({_has(nodes)}). Lower it, or "
            "add nodes"
        )
    return WorkerPlan(ranks // among * among, cpus, gpus)


def _uses_gpus(machine: Machine, nodes: Sequence[Node]) -> bool:
    return machine.device != "cpu" and machine.gpus_per_worker > 0 and any(node.get("GPU") for node in nodes)


def _rooms(nodes: Sequence[Node], cpus: float, gpus: float) -> list[int]:
    """Count the workers that fit onto each node; refuse if none does."""
    little = 1e-6  # of a fraction: ten workers of 0.1 fit
    rooms = []
    for node in nodes:
        room = node.get("CPU", 0.0) / cpus
        rooms.append(int(min(room, node.get("GPU", 0.0) / gpus) + little if gpus else room + little))
    if not any(rooms):
        raise InputError(
            f"no worker of {cpus:g} CPUs and {gpus:g} GPUs fits onto one node of the cluster ({_has(nodes)}). Lower "
            "machine.threads, machine.gpus_per_worker or tensor_parallel_size, or add nodes"
        )
    return rooms


def _has(nodes: Sequence[Node]) -> str:
    """List the CPUs and GPUs of the nodes for a message."""
    each = [f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes]
    return "; ".join(f"{each.count(text)} x {text}" for text in dict.fromkeys(each)) or "no node is alive"
