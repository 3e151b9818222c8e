"""`lweave plan`: predict the cost of every stage of a recipe from the architectures alone."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.filesize import decimal as file_size
from rich.table import Table

from lightning_weave.bench.definitions import KNOWN, MAX_TOKENS, OWN_SAMPLES, SAMPLES
from lightning_weave.config import (
    HELD_OUT,
    KEPT_CHECKPOINTS,
    Composition,
    Dtype,
    Joint,
    Online,
    Recipe,
    Sequential,
    benchmark_folder,
)
from lightning_weave.errors import InputError, printable
from lightning_weave.plan.architecture import CALIBRATED, MatmulDtype, Shape, find_base, find_shape
from lightning_weave.plan.costs import (
    CONSTANTS,
    HOUR,
    Constants,
    Hours,
    PlannedMachine,
    Workload,
    live_hours,
    live_sampling_hours,
    offline_hours,
    sampling_hours,
    sequences_at_once,
)
from lightning_weave.plan.memory import (
    MASTER,
    OPTIMIZER,
    USABLE,
    Memory,
    cache_bytes,
    fit_training,
    lora_parameters,
    online_memory,
    sampling_memory,
    scoring_memory,
)
from lightning_weave.prompts.build import count_held_out

ROLES: tuple[Literal["post"], Literal["pre"]] = ("post", "pre")
PROMPT_SHARE = 0.15  # mean length of a prompt, as a share of prompts.max_tokens
NODE_GPUS = 8  # of one machine, which by default share one copy of the student
ANSWER_SHARE = 0.5  # mean length of an answer in evaluation, as a share of eval.max_tokens


@dataclass(frozen=True)
class StagePlan:
    """One line: a stage, or one model of it."""

    stage: str
    what: str
    operations: float
    gpu_hours: float  # the most, where that is decided in training
    disk: float = 0.0
    least_gpu_hours: float | None = None  # with refresh = "auto": if it never samples again


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one stage on one GPU."""

    stage: str
    what: str
    weights: float
    working: float
    loading: float  # peak while the model is loaded
    fits: bool


@dataclass(frozen=True)
class Plan:
    """The predictions for one recipe."""

    name: str
    gpu: str
    gpus: int
    prompt_tokens: float
    response_tokens: float
    trajectories: int
    stages: list[StagePlan]
    memory: list[MemoryPlan]
    cache_hours: float
    one_composition: float
    compositions: int  # that share the cache
    all_compositions: float
    online: float  # one composition with all anchors, trained online
    evaluation: float  # per policy
    benchmarks: dict[str, float]  # the same by benchmark
    checkpoint: float  # bytes of one training checkpoint, which is copied to the host
    constants: Constants


def scored_name(recipe: Recipe, anchor: str, role: Literal["post", "pre"]) -> str:
    """Name one side of an anchor as in the rows of a plan."""
    named = recipe.anchor_model(anchor, role)
    model = named[0] if named else find_base(*recipe.anchor_model(anchor, "post") or ("",))
    student = recipe.student.name
    if Path(model).is_dir() and Path(model).resolve() == Path(student).expanduser().resolve():
        model = student
    context = recipe.anchors[anchor].context(role)
    return f"{model} with {context}" if context else model


def is_student(recipe: Recipe, anchor: str, role: Literal["post", "pre"]) -> bool:
    """Whether a side is the student with the prompts that it answers: the reference has its scores."""
    same = recipe.scored_by(anchor, role) == recipe.engine.reference
    same = same and recipe.engine_of("score").dtype == recipe.engine_of("reference").dtype
    plain = recipe.anchors[anchor].reads_as_student(role)
    return same and plain and scored_name(recipe, anchor, role) == recipe.student.name


def make_plan(
    recipe: Recipe,
    machine: PlannedMachine,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Plan:
    """Predict FLOPs, bytes, memory and GPU hours of every stage; mean lengths may be given."""
    student = find_shape(recipe.student.name, recipe.student.revision, not recipe.rehearsal)
    models = {}  # every scored model once
    known = set()  # those that the reference has scored
    published = set()  # those that have been scored elsewhere
    resamples = any(composition.samples for composition in recipe.compositions.values())
    for anchor, section in recipe.anchors.items():
        for role in ROLES:
            if is_student(recipe, anchor, role):
                known.add(recipe.student.name)
            # The base of an adapter has the same shape.
            model = recipe.anchor_model(anchor, role) or recipe.anchor_model(anchor, "post")
            assert model is not None, "an anchor has a post"
            name = scored_name(recipe, anchor, role)
            published |= {name} if section.cache is not None else set()
            try:
                models[name] = find_shape(*model, not recipe.rehearsal)
            except InputError:
                if section.cache is None or resamples:
                    raise

    rows = _count_rows(recipe)
    held_out = count_held_out(rows or 3200) if HELD_OUT in recipe.eval.benchmarks else 0
    prompts = recipe.prompts.take or 3200
    if rows is not None:  # filters are not known yet
        prompts = max(1, min(rows - held_out, recipe.prompts.take or rows))
    load = Workload(
        trajectories=prompts * recipe.rollout.responses,
        prompt_tokens=prompt_tokens or round(PROMPT_SHARE * recipe.prompts.max_tokens),
        response_tokens=response_tokens or recipe.rollout.max_tokens,
        epochs=recipe.train.epochs,
        rounds=prompts * recipe.train.epochs // recipe.train.prompts_per_round,
        trajectories_per_round=recipe.train.prompts_per_round * recipe.rollout.responses,
    )
    full: MatmulDtype = "tf32" if recipe.machine.tf32 else "float32"
    dtypes: dict[str, MatmulDtype] = {
        "reference": full if _dtype_bytes(recipe.engine_of("reference").dtype, student) == 4 else "bfloat16",
        "score": full if recipe.engine_of("score").dtype == "float32" else "bfloat16",
        "train": full if recipe.train.dtype == "float32" else "bfloat16",
    }
    train_bytes = 4 if recipe.train.dtype == "float32" else 2
    gpus = min(machine.gpus, recipe.train.shard_ranks or NODE_GPUS)
    checkpointing, token_budget, training = fit_training(recipe, student, gpus, machine.gpu.memory, train_bytes)
    live = offline_hours(
        student,
        list(models.values()),
        load,
        machine,
        dtypes=dtypes,
        sampled_bytes=_dtype_bytes(recipe.engine_of("rollout").dtype, student),
        checkpointing=checkpointing,
        rows_per_update=recipe.train.prompts_per_round * recipe.rollout.responses / recipe.train.updates_per_round,
        token_budget=token_budget,
        score_tokens=recipe.score.token_budget,
    )
    live_scores = dict(zip(models, live.score, strict=True))
    score_hours = {name: 0.0 if name in known else cost for name, cost in live_scores.items()}
    hours = replace(live, score=tuple(score_hours.values()))
    sampling = hours.rollout
    if recipe.engine.rollout == "hf":
        sampling = live_sampling_hours(student, load, recipe.rollout.batch_size, train_bytes, machine)
    trainings = {
        name: _training_hours(
            recipe,
            composition,
            hours,
            live_scores if isinstance(composition, Online) else score_hours,
            load,
            sampling=sampling,
        )
        for name, composition in recipe.compositions.items()
    }
    offline = {name: cost for name, cost in trainings.items() if recipe.compositions[name].method != "online"}

    made = load.forward_flops(student)
    if published:  # their responses come with them
        made = 0.0
        scored = tuple(0.0 if name in published else cost for name, cost in score_hours.items())
        hours = replace(hours, rollout=0.0, reference=0.0, score=scored)
    disk = cache_bytes(load.prompt_tokens, load.response_tokens, load.trajectories, recipe.reference.candidates)
    forward = load.forward_flops(student)
    stages = [
        StagePlan("rollout", recipe.student.model, made, hours.rollout, disk["rollout"]),
        StagePlan("reference", recipe.student.model, made, hours.reference, disk["reference"]),
    ]
    for (name, shape), cost in zip(models.items(), hours.score, strict=True):
        flops = 0.0 if name in known | published else load.forward_flops(shape)
        stages.append(StagePlan("score", name, flops, cost, disk["score"]))
    lora = None if recipe.train.lora is None else lora_parameters(student, recipe.train.lora.rank)
    checkpoint = float((MASTER + OPTIMIZER) * (student.parameters if lora is None else lora))
    exported = student.bytes_per_weight * student.parameters + MASTER * (lora or 0)
    # Forward and backward cost three forward passes, activation checkpointing a fourth.
    passes = 4 if checkpointing else 3
    for name, cost in trainings.items():
        flops = (recipe.compositions[name].epochs or load.epochs) * passes * forward
        composition = recipe.compositions[name]
        is_auto = isinstance(composition, Joint) and composition.refresh == "auto"
        least = hours.train * (composition.epochs or load.epochs) / load.epochs if is_auto else None
        stages.append(StagePlan("train", name, flops, cost, KEPT_CHECKPOINTS * checkpoint + exported, least))

    benchmarks = {}
    for name in recipe.eval.benchmarks:
        path = Path(name.removeprefix("file:"))
        benchmark = KNOWN.get(name)
        kind = benchmark.kind if benchmark is not None else "math"
        problems = benchmark.count if benchmark is not None else held_out
        if name.startswith("file:") and path.is_file():
            problems = path.read_bytes().count(b"\n")
        samples = recipe.eval.samples or (OWN_SAMPLES if benchmark is None else SAMPLES[kind])
        answer = ANSWER_SHARE * (recipe.eval.max_tokens or MAX_TOKENS[kind])
        eval_bytes = _dtype_bytes(recipe.engine_of("eval").dtype, student)
        benchmarks[name] = sampling_hours(student, problems * samples, load.prompt_tokens, answer, machine, eval_bytes)
    return Plan(
        name=recipe.name,
        gpu=machine.gpu.name,
        gpus=machine.gpus,
        prompt_tokens=load.prompt_tokens,
        response_tokens=load.response_tokens,
        trajectories=load.trajectories,
        stages=stages,
        memory=_plan_memory(recipe, student, models, machine, training),
        cache_hours=hours.cache,
        one_composition=hours.total,
        compositions=len(offline),
        all_compositions=hours.cache + sum(offline.values()),
        online=live_hours(live, load, sampling),
        evaluation=sum(benchmarks.values()),
        benchmarks=benchmarks,
        checkpoint=checkpoint,
        constants=CONSTANTS,
    )


def _count_rows(recipe: Recipe) -> int | None:
    """Count the rows of the file that prompts are taken from; None if it is not a file."""
    path = Path(recipe.prompts.source or "").expanduser()
    if path.is_file() and path.suffix == ".jsonl":
        return sum(bool(line.strip()) for line in path.read_bytes().splitlines())
    if path.is_file() and path.suffix == ".parquet":
        from pyarrow import ArrowException
        from pyarrow.parquet import read_metadata

        try:
            return int(read_metadata(path).num_rows)
        except (ArrowException, OSError):
            return None
    return None


def _dtype_bytes(dtype: Dtype, shape: Shape) -> int:
    return shape.bytes_per_weight if dtype == "auto" else 4 if dtype == "float32" else 2


def _training_hours(
    recipe: Recipe,
    composition: Composition,
    hours: Hours,
    score_hours: Mapping[str, float],
    load: Workload,
    sampling: float,
) -> float:
    """GPU hours of one composition beyond the shared cache."""

    def scoring(anchors: Iterable[str]) -> tuple[float, ...]:
        names = {scored_name(recipe, anchor, role) for anchor in anchors for role in ROLES}
        return tuple(score_hours[name] for name in sorted(names))

    epochs = composition.epochs or load.epochs
    training = hours.train * epochs / load.epochs
    match composition:
        case Online():
            live = Hours(hours.rollout, hours.reference, scoring(composition.used), training)
            rounds = load.rounds * epochs // load.epochs
            return live_hours(live, replace(load, epochs=epochs, rounds=rounds), sampling)
        case Sequential(resample=True):
            # Every later leg samples its share of the trajectories, and scores them under its own anchor.
            legs = len(composition.sequence)
            resampling = [hours.rollout + hours.reference + sum(scoring([name])) for name in composition.sequence[1:]]
            return training + sum(resampling) / legs
        case Joint(parts=parts) if parts > 1:
            # A later part samples the prompts of its updates; the current and the initial student score them, too.
            again = hours.rollout + 2 * hours.reference + sum(scoring(composition.used))
            return training + (parts - 1) * min(1.0, epochs / parts) * again
        case _:
            return training


def _plan_memory(
    recipe: Recipe, student: Shape, models: Mapping[str, Shape], machine: PlannedMachine, training: Memory
) -> list[MemoryPlan]:
    """Predict the memory of every stage on one GPU."""
    lora = recipe.train.lora
    longest = recipe.prompts.max_tokens + recipe.rollout.max_tokens
    rollout_bytes = _dtype_bytes(recipe.engine_of("rollout").dtype, student)
    train_bytes = 4 if recipe.train.dtype == "float32" else 2
    score_bytes = {name: _dtype_bytes(recipe.engine_of("score").dtype, shape) for name, shape in models.items()}
    sequences = recipe.rollout.batch_size
    if recipe.engine.rollout == "vllm":  # as many as fit
        sequences = sequences_at_once(student, longest, machine.gpu, rollout_bytes)
    reference_bytes = _dtype_bytes(recipe.engine_of("reference").dtype, student)
    score_tokens = max(recipe.score.token_budget, longest)
    gpus = f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}"
    plans = {
        ("rollout", f"{sequences} sequences at once"): sampling_memory(student, longest, sequences, rollout_bytes),
        ("reference", recipe.student.model): scoring_memory(student, score_tokens, reference_bytes, found=True),
    }
    for name, shape in models.items():
        plans["score", name] = scoring_memory(shape, score_tokens, score_bytes[name])
    plans["train", f"{'LoRA' if lora else 'all weights'}, {gpus}"] = training
    for name, composition in recipe.compositions.items():
        if isinstance(composition, Online):
            used = {scored_name(recipe, anchor, role) for anchor in composition.used for role in ROLES}
            anchors = [models[model].parameters * score_bytes[model] for model in used]
            plans["train", f"{name} online, {gpus}"] = online_memory(
                student,
                training,
                sum(anchors) if recipe.train.keep_anchors else max(anchors),
                sampling_memory(student, longest, recipe.rollout.batch_size, train_bytes),
            )
    usable = USABLE * machine.gpu.memory
    return [
        MemoryPlan(
            stage,
            what,
            memory.weights,
            memory.working,
            memory.loading,
            fits=max(memory.total, memory.loading) <= usable,
        )
        for (stage, what), memory in plans.items()
    ]


def gpu_time(hours: float) -> str:
    """Format the time of one GPU in hours, or in the unit in which it is not nearly zero.

    >>> gpu_time(9.648), gpu_time(0.0512), gpu_time(0.0001)
    ('9.65 h', '3.1 min', '0.36 s')
    """
    if hours >= 0.1:
        return f"{hours:.2f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 else f"{HOUR * hours:.2g} s"


def run(recipe: Recipe, machine: PlannedMachine, prompt_tokens: float | None, as_json: bool, console: Console) -> None:
    """Print the plan of a recipe."""
    plan = make_plan(recipe, machine, prompt_tokens)
    if as_json:
        print(json.dumps(asdict(plan), indent=2))
        return
    title = f"Plan of {printable(plan.name)}"
    table = Table("stage", "what", "operations", "GPU time", "on disk", title=title, box=None)
    for stage in plan.stages:
        least = "" if stage.least_gpu_hours is None else f"{gpu_time(stage.least_gpu_hours)} to "
        cells = [f"{stage.operations:.1e}", f"{least}{gpu_time(stage.gpu_hours)}", file_size(round(stage.disk))]
        table.add_row(stage.stage, printable(stage.what), *cells)
    console.print(table)

    title = f"Memory, {plan.gpu}"
    table = Table("stage", "what", "loading", "weights", "working", "each GPU", "", title=title, box=None)
    for row in plan.memory:
        sizes = (row.loading, row.weights, row.working, row.weights + row.working)
        cells = [file_size(round(size)) for size in sizes]
        table.add_row(row.stage, printable(row.what), *cells, "fits" if row.fits else "does not fit")
    console.print(table)

    total = plan.one_composition
    lines = [
        f"{plan.trajectories:,} trajectories of {plan.prompt_tokens:g} + {plan.response_tokens:g} tokens "
        "(typical prompts, maximum-length responses: --prompt-tokens, rollout.max_tokens)",
        f"One composition: {gpu_time(total)} of GPU time "
        f"({gpu_time(plan.cache_hours)} cache + {gpu_time(total - plan.cache_hours)} training), "
        f"{gpu_time(total / plan.gpus)} on {plan.gpus} x {plan.gpu}",
    ]
    if plan.compositions > 1:
        lines.append(
            f"{plan.compositions} sharing the cache: {gpu_time(plan.all_compositions)}, "
            f"{gpu_time(plan.all_compositions / plan.compositions)} each; "
            f"online: {gpu_time(plan.compositions * plan.online)}"
        )
    names = ", ".join(printable(benchmark_folder(name)) for name in plan.benchmarks)
    policies = len(recipe.policy_names)
    everything = sum(stage.gpu_hours for stage in plan.stages) + policies * plan.evaluation
    lines += [
        f"Online: {gpu_time(plan.online)} per composition, {plan.online / total:.2f} x",
        f"Evaluation: about {gpu_time(plan.evaluation)} per policy ({names}), assuming answers half of max_tokens"
        if recipe.eval.benchmarks
        else "Evaluation: none, eval.benchmarks is empty",
        f"Total: {gpu_time(everything)} of GPU time, with the evaluation of {policies} policies",
    ]
    if plan.gpu != CALIBRATED.name:
        lines.append(f"Efficiencies are those of {CALIBRATED.name}, at the rates of {plan.gpu} (--utilisation, --rate)")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
