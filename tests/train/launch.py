"""Train in processes of their own: alone or as ranks of a group, and killed without warning where a test says so."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from lightning_weave.config import dump_recipe
from lightning_weave.errors import WeaveError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.run import make_students
from lightning_weave.store import files
from lightning_weave.train import checkpoint, export, loop, schedule
from ports import held_port

# One server imports everything once; its children are forked from it before they have any threads.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["lightning_weave.stages.train", "transformers.models.qwen3.modeling_qwen3", "peft"])


@dataclass(frozen=True)
class Plan:
    """What a process does: train these runs, with rows dealt unevenly, or until it is killed."""

    runs: Sequence[Run]
    lopsided: bool = False
    kill: str | None = None  # one of the places below ...
    after: int = 0  # ... when it has been passed so often
    compiler: str | None = None  # instead of inductor, which takes its time: layers are traced and cut alike
    too_much: str | None = None  # where the last rank runs out of memory: forward, backward or step ...
    least: int = 2  # ... with micro-batches of so many tokens


def train_all(plan: Plan) -> None:
    if plan.lopsided:
        loop.deal_rows = lopsided
    if plan.compiler:
        nn.Module.compile = partialmethod(nn.Module.compile, backend=plan.compiler)  # type: ignore[assignment]
    if plan.kill:
        KILLS[plan.kill](plan.after)
    if plan.too_much and os.environ.get("RANK", "1") == "1":
        run_out_of_memory(plan.too_much, plan.least)
    for run in plan.runs:
        make_students(run, Progress(quiet=True))


def lopsided(lengths: Sequence[int], world: int, token_budget: int, **how: Any) -> list[list[list[int]]]:
    """Deal the longest row to rank 0 and all the others to the last rank."""
    longest = max(range(len(lengths)), key=lambda index: lengths[index])
    others = [index for index in range(len(lengths)) if index != longest]
    (batches,) = schedule.deal_rows([lengths[index] for index in others], 1, token_budget, **how)
    own = [[others[index] for index in batch] for batch in batches]
    nothing: list[list[int]] = [[]] * len(own)
    return [[[longest], *nothing[1:]], *[nothing] * (world - 2), own][:world]


def run_out_of_memory(where: str, least: int = 2) -> None:
    """Fail to allocate, as torch itself does, at the first step or where a micro-batch has so many tokens at least."""
    if where == "step":
        torch.optim.AdamW._init_group = lambda *_: torch.empty(2**55)  # type: ignore[method-assign]
        return
    forward = Qwen3MLP.forward

    def failing(module: Qwen3MLP, states: torch.Tensor) -> torch.Tensor:
        out = forward(module, states)
        if states.shape[:2].numel() < least or not torch.is_grad_enabled():
            return out
        if where == "forward":
            torch.empty(2**55)
        out.register_hook(lambda gradient: torch.empty(2**55))
        return out

    Qwen3MLP.forward = failing  # type: ignore[method-assign]


def start(plan: Plan, ranks: int = 1) -> list[int]:
    """Run a plan to its end, as one process or as a group; returns the exit codes."""
    return on_ranks(ranks, _train_or_say_why, plan)


def on_ranks(ranks: int, work: Callable[..., None], *args: Any, machines: int = 1) -> list[int]:
    """Do any work in processes that find each other as torchrun's do on so many machines; returns the exit codes."""
    local = ranks // machines
    with held_port() as port:
        members = [
            SERVER.Process(target=_as_rank, args=(rank, ranks, local, port, work, args)) for rank in range(ranks)
        ]
        for member in members:
            member.start()
        try:
            for member in members:
                member.join()
        finally:  # a test that hangs is stopped here, and what it waits for must not outlive it
            for member in members:
                member.kill()
    return [member.exitcode or 0 for member in members]


def torchrun(run: Run, ranks: int, *options: str, program: Sequence[str] = ("-m", "lightning_weave.cli")) -> None:
    """Train a run as a user does: the command line, under torchrun."""
    recipe = run.directory / "again.toml"
    recipe.write_text(dump_recipe(run.recipe))
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]
    command = [sys.executable, "-m", *launcher, *program, "train", str(recipe)]
    paths = os.pathsep.join(sys.path)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths})


def _as_rank(rank: int, ranks: int, local: int, port: int, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    if ranks > 1:
        names = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        names |= {"LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in names.items()}}
    work(*args)


def _train_or_say_why(plan: Plan) -> None:
    try:
        train_all(plan)
    except WeaveError as error:
        (plan.runs[0].directory / f"rank-{os.environ.get('RANK', '0')}.txt").write_text(str(error))
        raise


def train_where_files_come_late(plan: Plan) -> None:
    """Train while the last rank does not see any checkpoint the first few times that it looks."""
    complete, looks = schedule.complete_checkpoints, []

    def late(folder: Path, fingerprint: str) -> list[Path]:
        looks.append(folder)
        return complete(folder, fingerprint) if len(looks) > 3 else []

    if os.environ["RANK"] == "1":
        checkpoint.complete_checkpoints = late
    train_all(plan)


def train_and_count(plan: Plan) -> None:
    """Train, and write down how many ranks shared the gradients that were added over all copies of the student."""
    all_reduce, sizes = torch.distributed.all_reduce, []

    def counting(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        if tensor.dtype != torch.float64:  # not the figures of Ranks.all_reduce
            sizes.append(torch.distributed.get_world_size(group))
        return all_reduce(tensor, *args, group=group, **kwargs)

    torch.distributed.all_reduce = counting
    train_all(plan)
    (plan.runs[0].directory / f"all-reduced-{os.environ['RANK']}.json").write_text(json.dumps(sizes))


def _kill_on(module: Any, name: str) -> Callable[[int], None]:
    """Die when `module.name` is called for the nth time, just before it does anything."""

    def arm(after: int) -> None:
        original, calls = getattr(module, name), []

        def dying(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(module, name, dying)

    return arm


def _kill_in_state(after: int) -> None:
    """Die in the middle of a checkpoint: its tensors are there, cut short, and nothing that says what they are."""
    original, calls = checkpoint.save_state, []

    def dying(folder: Any, *args: Any) -> None:
        calls.append(folder)
        original(folder, *args)
        if len(calls) > after:
            for file in folder.iterdir():
                os.truncate(file, file.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save_state = dying


KILLS: dict[str, Callable[[int], None]] = {
    "update": _kill_on(loop, "clip_gradients"),  # gradients are there, no weight has moved
    "state": _kill_in_state,
    "position": _kill_on(checkpoint, "write_json"),
    "sync": _kill_on(files.os, "rename"),  # before a checkpoint gets its name
    "export": _kill_on(export.shutil, "copyfile"),  # in the middle of final/
}
