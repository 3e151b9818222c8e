"""Run as one rank of many, alone, with torch's fake process group, and record the collectives that it calls.

Nothing is sent, and every result is filled with ones. Each rank needs its own process, which imports this module.
"""

import gc
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.train import loop, parallel
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import Loss, open_trainee
from train.cached import QUIET, context
from train.launch import lopsided


class Call(NamedTuple):
    """One collective."""

    operation: str
    tensors: tuple[str, ...]  # shapes and dtypes
    group: str
    members: tuple[int, ...]


class Collectives(TorchDispatchMode):
    """Records every collective of FSDP2, DTensor and `Ranks`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with the local parts
        result = func(*args, **(kwargs or {}))
        if func.namespace not in ("c10d", "_c10d_functional"):
            return result
        given = tree_leaves((args, kwargs))
        boxed = [each for each in given if isinstance(each, torch.ScriptObject)]
        names = [each for each in given if isinstance(each, str)]
        if not boxed and not names:  # waits for a result, or wraps it
            return result
        group = dist.ProcessGroup.unbox(boxed[0]) if boxed else dist.distributed_c10d._resolve_process_group(names[-1])
        tensors = tuple(f"{[*each.shape]} {each.dtype}" for each in given if isinstance(each, Tensor))
        members = tuple(dist.get_process_group_ranks(group))
        self.calls.append(Call(func._opname, tensors, group.group_name, members))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                each.fill_(1)
        return result


def train_as_rank(run: Run, rank: int, world: int) -> tuple[dict[str, list[Call]], dict[str, list[int]]]:
    """Update, measure and export; returns the calls of each, and the number of rows in each micro-batch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gc.freeze()  # `free_memory` need not go through what was imported
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    host_groups = {"values": dist.new_group(backend="fake")}
    parallel.host_group = host_groups.__getitem__  # type: ignore[assignment]
    ranks = parallel.Ranks(rank, world, torch.device("cpu"))
    calls, dealt = {}, {}
    with Collectives() as recorded:
        trainee = open_trainee(run, context(ranks, torch.bfloat16))
        fit = loop.Fit(
            trainee=trainee,
            optimizer=loop.adam(trainee, 1e-3, (0.9, 0.999), 0.01),
            cache=open_cache(run, "both"),
            loss=Loss("tilted", 2.0),
            clip=1.0,
            token_budget=1,
            seed=0,
            ranks=ranks,
            folder=Path(),
        )
        schedule = make_schedule(run.recipe, groups=range(6))
        rows = schedule.rows(0)
        calls["open"], recorded.calls = recorded.calls, []
        for how, deal, fit.token_budget in (("even", loop.deal_rows, max(1, 48 // world)), ("lopsided", lopsided, 24)):
            loop.deal_rows = deal
            dealt[how] = [len(members) for members in fit._deal(rows)]
            fit.update(1, rows)
            calls[f"{how} update"], recorded.calls = recorded.calls, []
            fit.measure(rows)
            calls[f"{how} measure"], recorded.calls = recorded.calls, []
        training = loop.Training(run, "both", schedule, fit, QUIET)
        training.export(training.stage, 1, {"alpha": 2.0})
        calls["export"] = recorded.calls
    return calls, dealt
