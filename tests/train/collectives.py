"""Run as one rank of many, alone, with torch's fake process group, and record the collectives that it calls.

Nothing is sent, and every result is filled with ones. Each rank needs its own process, which imports this module.
"""

import gc
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_weave.config import check_recipe
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.train import loop, online, parallel
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import Loss, open_trainee
from lightning_weave.types import Prompt, Request, Response
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

    def all_gather_object(self, gathered: list[Any], value: Any, group: Any) -> None:
        """Give each rank what it has sent itself: the tensors that torch sends have no object in them here."""
        members = tuple(dist.get_process_group_ranks(group))
        self.calls.append(Call("all_gather_object", (), group.group_name, members))
        gathered[:] = [value] * len(members)

    def taken(self) -> list[Call]:
        """Return the calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


class Engine(online.RoundEngine):
    """An engine that draws without looking at the weights that it is given."""

    def __init__(self, run: Run, name: str, trainee: Any, prompts: Sequence[Prompt], ranks: parallel.Ranks) -> None:
        self.student, self.trainee, self.ranks = run.student, trainee, ranks
        self.folder = run.stage("train", name).folder
        self.section = run.recipe.engine_of("rollout")
        self.engine: Any = SimpleNamespace(reload=Path.exists, sample=self.draw, sleep=lambda: None)

    def draw(self, requests: Sequence[Request], *rest: Any, **options: Any) -> list[Response]:
        return [Response([2, 1], "stop", logprobs=[-3.0, -3.0]) for _ in requests]


def live_run(run: Run, engine: str) -> Run:
    """Turn a run into one that trains online, with the student as every anchor, and probes three problems."""
    student, problems = run.recipe.student.model, run.directory.parent / "problems.jsonl"
    problems.write_text("".join(json.dumps({"problem": f"w{place}", "answer": "w3"}) + "\n" for place in range(3)))
    recipe = run.recipe.model_dump(by_alias=True, exclude_none=True)
    recipe["anchors"] = {name: {"post": student, "pre": student} for name in recipe["anchors"]}
    recipe["compositions"] = {"both": {"method": "online", "weights": dict(run.recipe.compositions["both"].used)}}
    recipe["eval"] |= {"benchmarks": [f"file:{problems}"], "max_tokens": 4, "chat": False}
    recipe["engine"] |= {"rollout": engine, "parity": 100.0}  # weights of ones
    return Run(check_recipe(recipe), "live.toml")


def train_as_rank(run: Run, rank: int, world: int) -> tuple[dict[str, list[Call]], dict[str, list[int]]]:
    """Update, measure, sample and export; returns the calls of each, and the number of rows in each micro-batch."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    gc.freeze()  # `free_memory` need not go through what was imported
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    host_groups = {"values": dist.new_group(backend="fake")}
    parallel.host_group = host_groups.__getitem__  # type: ignore[assignment]
    ranks = parallel.Ranks(rank, world, torch.device("cpu"))
    calls, dealt = {}, {}
    prompts = [Prompt(str(group), [], "w3", [3]) for group in range(6)]
    with Collectives() as recorded:
        dist.all_gather_object = recorded.all_gather_object
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
        calls["open"] = recorded.taken()
        for how, deal, fit.token_budget in (("even", loop.deal_rows, max(1, 48 // world)), ("lopsided", lopsided, 24)):
            loop.deal_rows = deal
            dealt[how] = [len(members) for members in fit._deal(rows)]
            fit.update(1, rows)
            calls[f"{how} update"] = recorded.taken()
            fit.measure(rows)
            calls[f"{how} measure"] = recorded.taken()
        online.RoundEngine = Engine  # type: ignore[misc]
        for engine in ("hf", "vllm"):
            live = live_run(run, engine)
            drawn = online.LiveRows(live, "both", trainee, prompts, schedule, ranks=ranks)
            for update in range(2):
                drawn.refresh(update)
            calls[f"rounds, {engine}"] = recorded.taken()
        loop.Probe(live).answer(trainee, ranks)
        calls["probe"] = recorded.taken()
        training = loop.Training(run, "both", schedule, fit, QUIET)
        training.export(training.stage, 1, {"alpha": 2.0})
        calls["export"] = recorded.taken()
    return calls, dealt
