"""Does every stage fit into the memory of this machine, by what `lweave plan` counts, and is all of it used?"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from lightning_weave.checks.findings import Finding, size
from lightning_weave.config import Recipe
from lightning_weave.devices import device_name, memory_of, most_processes
from lightning_weave.errors import InputError
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.gpus import CALIBRATED, recognise
from lightning_weave.plan.recipe import MemoryPlan, Plan, make_plan, scored_name
from lightning_weave.ranks import local_world_size, world_size
from lightning_weave.runs.engines import gpus_of
from lightning_weave.runs.machine import choose_device
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps

SAVES = {
    "rollout": "Lower rollout.batch_size or rollout.max_tokens",
    "reference": "Lower reference.token_budget",
    "score": "Lower score.token_budget",
    "train": "Set train.gradient_checkpointing = true or [train.lora], or lower train.token_budget",
}
ELSE = "take a machine with more memory, more GPUs (lweave plan says how many) or a smaller model"


def this_machine(recipe: Recipe) -> PlannedMachine:
    """Describe this machine to `plan`: its memory, and its speed where the GPU is known to it."""
    device = choose_device(recipe)
    memory = memory_of(device)
    gpu = recognise(device_name() or "", memory)
    return PlannedMachine(gpu or replace(CALIBRATED, name=f"this {device.type}", memory=memory), world_size())


def is_known(machine: PlannedMachine) -> bool:
    """Whether hours can be predicted for it."""
    return not machine.gpu.name.startswith("this ")


def as_computed(recipe: Recipe) -> Recipe:
    """Say which dtype "auto" is here: float32 on a CPU, the checkpoint's own elsewhere, which is plan's reading."""
    if choose_device(recipe).type != "cpu":
        return recipe
    sections = {"rollout": recipe.rollout, "reference": recipe.reference, "score": recipe.score}
    full = {
        name: section.model_copy(update={"dtype": "float32"})
        for name, section in sections.items()
        if section.dtype == "auto"
    }
    return recipe.model_copy(update=full)


def check_memory(steps: Steps, stages: set[str], anchors: list[str]) -> Iterator[Finding]:
    """Compare what these stages hold, and scoring these anchors, with what the device and the host have."""
    try:
        machine = this_machine(steps.recipe)
        recipe = as_computed(steps.recipe)
        plan = make_plan(recipe, machine)
    except InputError as error:
        yield Finding("run", "memory", "note", f"what it needs is not known: {error}")
        return
    sides = [(anchor, role) for anchor in anchors for role in ROLES if recipe.scored_by(anchor, role) == "hf"]
    scored = {scored_name(recipe, anchor, role) for anchor, role in sides}
    engines = {"rollout": recipe.rollout, "reference": recipe.reference}
    for row in plan.memory:
        outside = row.stage in engines and engines[row.stage].engine != "hf"  # such an engine fits itself
        if row.stage in stages and not outside and (row.stage != "score" or row.what in scored):
            yield from _check_row(row, machine.gpu.memory)
    if "train" in stages:
        yield from _check_host(plan, machine.gpu.memory, choose_device(recipe))


def check_idle_gpus(recipe: Recipe) -> Iterator[Finding]:
    """Warn of GPUs that no process uses: each takes one, or as many as its engine."""
    each = max(gpus_of(recipe.rollout), gpus_of(recipe.reference), gpus_of(recipe.score), gpus_of(recipe.eval))
    most = most_processes(choose_device(recipe), each)
    if most > local_world_size():
        text = (
            f"this machine has GPUs for {most} processes, and {local_world_size()} is started. To use all of them: "
            f"torchrun --nproc-per-node {most} -m lightning_weave.cli ... (docs/clusters.md)"
        )
        yield Finding("machine", "idle GPUs", "warning", text)


def _check_row(row: MemoryPlan, memory: float) -> Iterator[Finding]:
    if row.fits:
        return
    needed = max(row.weights + row.working, row.loading)
    what = row.what if row.stage == "score" else row.stage
    text = f"{what} needs about {size(needed)} of memory ({size(row.weights)} of it for weights), and {size(memory)} "
    if max(row.weights, row.loading) > memory:
        advice = f"Set [train.lora], or {ELSE}" if row.stage == "train" else f"{ELSE[0].upper()}{ELSE[1:]}"
        yield Finding(row.stage, "memory", "error", f"{text}are here. {advice}", {"bytes": needed}, judged=True)
    else:
        yield Finding(row.stage, "memory", "warning", f"{text}are here. {SAVES[row.stage]}", {"bytes": needed})


def _check_host(plan: Plan, memory: float, device: torch.device) -> Iterator[Finding]:
    """A checkpoint is copied to the host before it is written, every rank its part."""
    copied = plan.checkpoint * min(local_world_size() / plan.gpus, 1)
    host = memory_of(torch.device("cpu"))
    if device.type == "cpu":  # beside the model itself
        copied += max(row.weights + row.working for row in plan.memory if row.stage == "train")
    if copied > host:
        text = f"a checkpoint is copied to the host first, which takes {size(copied)} there, and {size(host)} are here"
        yield Finding("train", "host memory", "warning", f"{text}. Set [train.lora], or {ELSE}", {"bytes": copied})
