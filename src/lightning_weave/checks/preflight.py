"""Everything that must hold before a run: what every stage checks of itself, and the resources of the machine.

`lweave run` refuses on an error, `lweave doctor` and `lweave run --dry-run` print them. No weights are loaded, and a
complete stage needs nothing: its models and data may be gone.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

import torch
from rich.filesize import decimal as file_size

from lightning_weave.checks.findings import (
    Finding,
    Level,
    is_pending,
    needs_prompts,
    pending_anchors,
    pending_compositions,
)
from lightning_weave.checks.models import known_fault, open_benchmarks
from lightning_weave.checks.pairs import align_sample, take_sample
from lightning_weave.config import EngineStage, Recipe, benchmark_folder
from lightning_weave.devices import device_name, matmul_flops, memory_of, most_processes
from lightning_weave.errors import InputError
from lightning_weave.plan.architecture import CALIBRATED, recognise
from lightning_weave.plan.costs import HOUR, PlannedMachine
from lightning_weave.plan.memory import TOKEN_BUDGETS
from lightning_weave.plan.plan import make_plan, scored_name
from lightning_weave.ranks import local_world_size, world_size
from lightning_weave.run import ROLES, Run
from lightning_weave.stages import eval, harness, prompts, reference, rollout, score, train
from lightning_weave.stages.costs import cost_of
from lightning_weave.stages.engines import gpus_of
from lightning_weave.stages.prompts import planned_prompts
from lightning_weave.stages.work import choose_device
from lightning_weave.store import Stage
from lightning_weave.store.ledger import hardware, read_ledger

SAVES = {
    "rollout": "Lower rollout.batch_size or rollout.max_tokens",
    "reference": "Lower score.token_budget",
    "score": "Lower score.token_budget",
    "train": "Set train.gradient_checkpointing = true or [train.lora], or lower train.token_budget",
}
STAGES = (prompts, rollout, reference, score, train, eval, harness)
MORE_MEMORY = "use a machine with more memory, more GPUs (lweave plan tells how many) or a smaller model"


def preflight(run: Run) -> list[Finding]:
    """Validate every pending stage, and the machine for them. Nothing is repeated that two stages report."""
    run.check_trust()
    for known in (known_fault, open_benchmarks, planned_prompts, take_sample, align_sample):
        known.cache_clear()
    found = [finding for stage in STAGES for finding in stage.validate(run)]
    findings = list({(finding.about, finding.check, finding.text): finding for finding in found}.values())
    if any(finding.about == "student" and finding.check == "checkpoint" for finding in findings):
        return findings
    compositions = pending_compositions(run)
    with suppress(InputError):  # prompts or models that cannot be read are reported by their stages
        if needs_prompts(run):
            findings.append(check_disk(run, len(planned_prompts(run)[0]), compositions))
    anchors = pending_anchors(run)
    sampling = run.needs_cache and is_pending(run, "rollout")
    pending = {"rollout": sampling, "reference": sampling, "score": anchors, "train": compositions}
    evaluates = any(is_pending(run, "eval", one, name) for one in run.policies for name in run.recipe.eval.benchmarks)
    if any(pending.values()) or evaluates:
        findings += check_memory(run, {stage for stage, is_one in pending.items() if is_one}, anchors)
        findings += check_idle_gpus(run.recipe)
    return findings


def check_disk(run: Run, prompts: int | None = None, trainings: Sequence[str] = ()) -> Finding:
    """Compare what the cache and these trainings need with what is free.

    `prompts` is how many have still to be sampled from; each response may have rollout.max_tokens. None: all are
    sampled, and their length is known.
    """
    section = run.recipe.rollout
    candidates = run.recipe.reference.candidates
    models = len(run.score_names)
    # Of one decision: its token, the ids and log-probabilities of the reference, and those of each model.
    each = 4 + (8 * candidates + 8) + models * (5 * candidates + 4)
    if prompts is None:
        reference = run.stage("reference")
        how = "exactly" if reference.complete else "about"
        positions = int((reference if reference.complete else run.stage("rollout")).require()["positions"])
    else:
        how = "at most"
        longest = min(section.max_tokens, run.student.context_limit or section.max_tokens)
        positions = prompts * section.responses * longest
    needed = positions * each
    folder = next(place for place in (run.directory, *run.directory.absolute().parents) if place.exists())
    free = shutil.disk_usage(folder).free
    cache = [run.stage("rollout"), run.stage("reference"), *run.stages("score")]
    written = sum(file.stat().st_size for stage in cache for file in stage.folder.glob("*.safetensors"))
    students = 0.0
    if trainings:
        with suppress(InputError):  # an unknown architecture
            rows = make_plan(run.recipe, PlannedMachine(CALIBRATED, 1)).stages
            students = sum(row.disk for row in rows if row.stage == "train" and row.what in trainings)
    text = (
        f"{how} {file_size(needed)}: {positions:,} positions x {each} bytes ({candidates} candidates, {models} models)"
    )
    if students:
        text += f"; {file_size(round(students))} for checkpoints and students of {len(trainings)} compositions"
    text += f"; {file_size(written)} are written, {file_size(free)} are free"
    verdict: Level = "ok"
    if needed + students - written > free:
        verdict = "warning" if how == "at most" and students <= free else "error"
        text += ". Free some, or set runs to a directory on another disk"
    figures = {"bytes": needed, "free": free, "positions": positions, "written": written, "students": students}
    return Finding("run", "disk", verdict, text, figures, judged=True)


def this_machine(recipe: Recipe) -> PlannedMachine:
    """Describe this machine to `plan`: its memory, and its speed if the GPU is a known one."""
    device = choose_device(recipe)
    memory = memory_of(device)
    gpu = recognise(device_name() or "", memory)
    return PlannedMachine(gpu or replace(CALIBRATED, name=f"this {device.type}", memory=memory), world_size())


def as_computed(recipe: Recipe) -> Recipe:
    """Resolve "auto" as on a CPU: dtypes are float32, and activations are kept; elsewhere `plan` resolves it."""
    if choose_device(recipe).type != "cpu":
        return recipe
    stages: tuple[EngineStage, ...] = ("rollout", "reference", "score")
    chosen = {stage: recipe.engine_of(stage).dtype for stage in stages}
    dtypes = {stage: "float32" if dtype == "auto" else dtype for stage, dtype in chosen.items()}
    train = {"gradient_checkpointing": False, "token_budget": TOKEN_BUDGETS[0]}
    given = {key: getattr(recipe.train, key) for key in train if getattr(recipe.train, key) != "auto"}
    return recipe.model_copy(
        update={
            "engine": recipe.engine.model_copy(update={"dtype": dtypes}),
            "train": recipe.train.model_copy(update={**train, **given}),
        }
    )


def check_memory(run: Run, stages: set[str], anchors: Sequence[str]) -> Iterator[Finding]:
    """Compare what these stages hold, and scoring these anchors, with the memory of device and host."""
    try:
        machine = this_machine(run.recipe)
        recipe = as_computed(run.recipe)
        plan = make_plan(recipe, machine)
    except InputError as error:
        yield Finding("run", "memory", "note", f"not checked: {error}")
        return
    memory = machine.gpu.memory
    sides = [(anchor, role) for anchor in anchors for role in ROLES if recipe.scored_by(anchor, role) == "hf"]
    scored = {scored_name(recipe, anchor, role) for anchor, role in sides}
    engines = {"rollout": recipe.engine.rollout, "reference": recipe.engine.reference}
    for row in plan.memory:
        elsewhere = engines.get(row.stage, "hf") != "hf"  # such an engine fits itself into memory
        if row.fits or row.stage not in stages or elsewhere or (row.stage == "score" and row.what not in scored):
            continue
        needed = max(row.weights + row.working, row.loading)
        what = row.what if row.stage == "score" else row.stage
        text = (
            f"{what} needs about {file_size(round(needed))} of memory ({file_size(round(row.weights))} for weights); "
        )
        text += f"{file_size(round(memory))} are available"
        if max(row.weights, row.loading) > memory:
            advice = f"Set [train.lora], or {MORE_MEMORY}" if row.stage == "train" else MORE_MEMORY.capitalize()
            yield Finding(row.stage, "memory", "error", f"{text}. {advice}", {"bytes": needed}, judged=True)
        else:
            yield Finding(row.stage, "memory", "warning", f"{text}. {SAVES[row.stage]}", {"bytes": needed})
    if "train" in stages:  # every rank copies its part of a checkpoint to the host before it is written
        copied = plan.checkpoint * min(local_world_size() / plan.gpus, 1)
        host = memory_of(torch.device("cpu"))
        if choose_device(recipe).type == "cpu":  # which holds the model too
            copied += max(row.weights + row.working for row in plan.memory if row.stage == "train")
        if copied > host:
            text = f"a checkpoint is copied to the host first, which takes {file_size(round(copied))} of its "
            text += f"{file_size(round(host))}. Set [train.lora], or {MORE_MEMORY}"
            yield Finding("train", "host memory", "warning", text, {"bytes": copied})


def check_idle_gpus(recipe: Recipe) -> Iterator[Finding]:
    """Warn of GPUs that no process uses: each takes one, or as many as its engine."""
    each = max(gpus_of(recipe.engine_of(stage)) for stage in get_args(EngineStage))
    most = most_processes(choose_device(recipe), each)
    if most > local_world_size():
        text = (
            f"this machine has GPUs for {most} processes, but {local_world_size()} was started. To use all of them: "
            f"torchrun --nproc-per-node {most} -m lightning_weave.cli ... (docs/clusters.md)"
        )
        yield Finding("machine", "idle GPUs", "warning", text)


@dataclass(frozen=True)
class Forecast:
    """What one stage will take; None: unknown."""

    seconds: float | None = None
    measured: bool = False  # by stages of the same kind in this run; else predicted for this GPU
    size: float | None = None  # bytes on disk
    rough: bool = False  # its matrix products alone, at the speed of one that was just measured


def forecast(run: Run, stages: Sequence[Stage]) -> dict[str, Forecast]:
    """Predict every stage by its path."""

    def kind(path: str) -> tuple[str, ...]:
        """What takes about as long as another: trainings by one method, evaluations on one benchmark."""
        stage, _, name = path.partition("/")
        if stage == "train":
            composition = run.recipe.compositions[name]
            return stage, composition.method, str(composition.epochs)
        return (stage, name.partition("/")[2]) if stage == "eval" else (path,)

    planned: dict[str, Forecast] = {}
    with suppress(InputError):  # models that are missing, or of an unknown architecture
        planned = _planned(run)
    rows = [row for row in read_ledger(run.directory) if row.get("device") == hardware()["device"]]
    measured: dict[tuple[str, ...], list[float]] = {}
    for stage in stages:
        if stage.complete and (cost := cost_of(stage.folder, run.directory, rows)) is not None:
            measured.setdefault(kind(stage.path), []).append(cost.seconds)
    forecasts = {}
    for stage in stages:
        forecasts[stage.path] = planned.get(stage.path, Forecast())
        if seconds := measured.get(kind(stage.path)):
            size = forecasts[stage.path].size
            forecasts[stage.path] = Forecast(sum(seconds) / len(seconds), measured=True, size=size)
    return forecasts


def _planned(run: Run) -> dict[str, Forecast]:
    """Predict from the models' configurations: hours for a GPU that `plan` knows, else a rough figure."""
    recipe = as_computed(run.recipe)
    machine = this_machine(recipe)
    is_known = not machine.gpu.name.startswith("this ")
    limit = run.student.context_limit or recipe.rollout.max_tokens
    length: float | None = limit if limit < recipe.rollout.max_tokens else None
    rollout = run.stage("rollout")
    prompts = recipe.prompts.take
    if run.needs_cache and rollout.complete:
        manifest = rollout.require()
        prompts = manifest["rows"] // recipe.rollout.responses
        length = manifest["positions"] / max(manifest["rows"], 1)
    elif needs_prompts(run):
        with suppress(InputError):  # reported by their stage
            prompts = len(planned_prompts(run)[0])
    recipe = recipe.model_copy(update={"prompts": recipe.prompts.model_copy(update={"take": prompts})})
    plan = make_plan(recipe, machine, response_tokens=length)
    folders = {
        scored_name(recipe, anchor, role): f"score/{run.score_names[run.side(anchor, role)]}"
        for anchor in recipe.anchors
        for role in ROLES
    }
    speed = 0.0 if is_known else matmul_flops(choose_device(recipe))
    forecasts: dict[str, Forecast] = {}
    for row in plan.stages:
        path = {"train": f"train/{row.what}", "score": folders.get(row.what, "")}.get(row.stage, row.stage)
        seconds = row.gpu_hours * HOUR if is_known else row.operations / speed
        estimate = seconds if is_known or seconds >= 1 or not row.operations else None
        forecasts[path] = Forecast(estimate, size=row.disk, rough=not is_known and estimate is not None)
    if is_known:
        for policy in run.policies:
            for name, hours in plan.benchmarks.items():
                forecasts[f"eval/{policy}/{benchmark_folder(name)}"] = Forecast(hours * HOUR)
    return forecasts
