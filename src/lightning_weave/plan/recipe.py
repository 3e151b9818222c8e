"""Predict the cost of every stage of a recipe."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lightning_weave.bench.definitions import KNOWN, MAX_TOKENS, SAMPLES, BenchmarkKind
from lightning_weave.config import Composition, Dtype, Joint, Online, Recipe, Sequential
from lightning_weave.plan.architecture import Shape
from lightning_weave.plan.calibration import calibrate
from lightning_weave.plan.costs import (
    HOUR,
    Constants,
    Hours,
    PlannedMachine,
    StageProducts,
    Workload,
    live_hours,
    live_sampling_hours,
    offline_hours,
    sampling_hours,
)
from lightning_weave.plan.find import find_shape
from lightning_weave.plan.gpus import Products
from lightning_weave.plan.memory import (
    Memory,
    cache_bytes,
    checkpoint_bytes,
    lora_parameters,
    online_memory,
    sampling_memory,
    scoring_memory,
    training_bytes,
    training_memory,
)

ROLES: tuple[Literal["post"], Literal["pre"]] = ("post", "pre")
PROMPT_SHARE = 0.15  # mean length of a prompt, as a share of prompts.max_tokens
USABLE = 0.9  # of a GPU's memory: the rest goes to the allocator and the driver
MOST_SEQUENCES = 256  # vLLM's default for one batch
ANSWER_SHARE = 0.5  # mean length of an answer in evaluation, as a share of eval.max_tokens


@dataclass(frozen=True)
class StagePlan:
    """One line: a stage, or one model of it."""

    stage: str
    what: str
    operations: float
    gpu_hours: float
    disk: float = 0.0


@dataclass(frozen=True)
class MemoryPlan:
    """What one GPU holds in one stage."""

    stage: str
    what: str
    weights: float
    working: float
    loading: float  # most, until the model stands ready
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
    checkpoint: float  # bytes of one of the trainer's, which it copies to the host
    constants: Constants


def make_plan(
    recipe: Recipe,
    machine: PlannedMachine,
    prompt_tokens: float | None = None,
    response_tokens: float | None = None,
) -> Plan:
    """Predict work, bytes, memory and GPU hours of every stage; mean lengths may be known."""
    constants = calibrate()
    student = find_shape(recipe.student.model, recipe.student.revision, not recipe.rehearsal)
    models = _scored_models(recipe)
    load = _workload(recipe, prompt_tokens, response_tokens)
    hours = offline_hours(student, list(models.values()), load, constants, machine, products=_products(recipe, student))
    sampling = hours.rollout if recipe.rollout.engine != "hf" else _live_sampling(recipe, student, load, machine)
    trainings = {
        name: _training_hours(recipe, section, hours, models, load, sampling=sampling)
        for name, section in recipe.compositions.items()
    }
    benchmarks = {
        name: sampling_hours(student, _benchmark_tokens(recipe, name), constants, machine)
        for name in recipe.eval.benchmarks
    }
    offline = {name: cost for name, cost in trainings.items() if recipe.compositions[name].method != "online"}
    return Plan(
        name=recipe.name,
        gpu=machine.gpu.name,
        gpus=machine.gpus,
        prompt_tokens=load.prompt_tokens,
        response_tokens=load.response_tokens,
        trajectories=load.trajectories,
        stages=_stage_plans(recipe, student, models, load, hours, trainings=trainings),
        memory=_memory_plans(recipe, student, models, machine),
        cache_hours=hours.cache,
        one_composition=hours.total,
        compositions=len(offline),
        all_compositions=hours.cache + sum(offline.values()),
        online=live_hours(hours, load, sampling),
        evaluation=sum(benchmarks.values()),
        benchmarks=benchmarks,
        checkpoint=checkpoint_bytes(student, _trained(recipe, student)),
        constants=constants,
    )


def _scored_models(recipe: Recipe) -> dict[str, Shape]:
    """List everything to score, once: a checkpoint, or a checkpoint in a context."""
    shapes = {}
    for anchor in recipe.anchors:
        for role in ROLES:
            side = recipe.side(anchor, role)
            if side.model is None:  # the base of an adapter, which has its shape
                side = recipe.side(anchor, "post")
            assert side.model is not None, "an anchor has a post"
            shapes[scored_name(recipe, anchor, role)] = find_shape(side.model, side.revision, not recipe.rehearsal)
    return shapes


def scored_name(recipe: Recipe, anchor: str, role: Literal["post", "pre"]) -> str:
    """Name one side of an anchor, as the rows of a plan do."""
    side = recipe.side(anchor, role)
    model = side.model or f"base of {recipe.anchors[anchor].post}"
    return f"{model} with {side.context}" if side.context else model


def _prompts(recipe: Recipe) -> int:
    """Count the prompts: what is taken, or what a file has if that is less; how many are left out is not known yet."""
    count = recipe.prompts.take or 3200
    rows = None if recipe.prompts.source is None else _rows(Path(recipe.prompts.source).expanduser())
    return count if rows is None else max(1, min(rows, recipe.prompts.take or rows))


def _rows(path: Path) -> int | None:
    """Count the rows of a file without reading them as data; None where that is not possible."""
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


def _workload(recipe: Recipe, prompt_tokens: float | None, response_tokens: float | None) -> Workload:
    prompts = _prompts(recipe)
    per_round = recipe.train.prompts_per_round
    return Workload(
        trajectories=prompts * recipe.rollout.responses,
        prompt_tokens=prompt_tokens or round(PROMPT_SHARE * recipe.prompts.max_tokens),
        response_tokens=response_tokens or recipe.rollout.max_tokens,
        epochs=recipe.train.epochs,
        rounds=prompts * recipe.train.epochs // per_round,
        trajectories_per_round=per_round * recipe.rollout.responses,
    )


def _products(recipe: Recipe, student: Shape) -> StageProducts:
    """What the products of each stage are computed in."""
    full: Products = "tf32" if recipe.machine.tf32 else "float32"
    return StageProducts(
        reference=full if _bytes(recipe.reference.dtype, student) == 4 else "bfloat16",
        score=full if recipe.score.dtype == "float32" else "bfloat16",
        train=full if recipe.train.dtype == "float32" else "bfloat16",
    )


def _live_sampling(recipe: Recipe, student: Shape, load: Workload, machine: PlannedMachine) -> float:
    """GPU hours of sampling all trajectories with the model that is being trained, as online training does."""
    if machine.tokens_per_second is not None:
        return load.trajectories * load.response_tokens / machine.tokens_per_second / HOUR
    return live_sampling_hours(student, load, recipe.rollout.batch_size, _trained_bytes(recipe), machine)


def _trained_bytes(recipe: Recipe) -> int:
    return 4 if recipe.train.dtype == "float32" else 2


def _composition_load(load: Workload, composition: Composition) -> Workload:
    """The workload of a composition that may have its own number of epochs."""
    epochs = composition.epochs or load.epochs
    return replace(load, epochs=epochs, rounds=load.rounds * epochs // load.epochs)


def _training_hours(
    recipe: Recipe,
    composition: Composition,
    hours: Hours,
    models: dict[str, Shape],
    load: Workload,
    sampling: float,
) -> float:
    """GPU hours of one composition beyond the shared cache."""
    costs = dict(zip(models, hours.score, strict=True))

    def scoring(anchors: Iterable[str]) -> tuple[float, ...]:
        names = {scored_name(recipe, anchor, role) for anchor in anchors for role in ROLES}
        return tuple(costs[name] for name in names)

    composition_load = _composition_load(load, composition)
    training = hours.train * composition_load.epochs / load.epochs
    match composition:
        case Online():
            live = Hours(hours.rollout, hours.reference, scoring(composition.used), training)
            return live_hours(live, composition_load, sampling)
        case Sequential(resample=True):
            # Every later leg samples, and scores under its own anchor, its share of the trajectories.
            legs = len(composition.sequence)
            resampling = [hours.rollout + hours.reference + sum(scoring([name])) for name in composition.sequence[1:]]
            return training + sum(resampling) / legs
        case Joint(refresh=parts) if parts > 1:
            # A later part samples the prompts that its updates use; two models read them before the anchors do.
            again = hours.rollout + 2 * hours.reference + sum(scoring(composition.used))
            return training + (parts - 1) * min(1.0, composition_load.epochs / parts) * again
        case _:
            return training


def _benchmark_tokens(recipe: Recipe, name: str) -> float:
    benchmark = KNOWN.get(name)
    kind: BenchmarkKind = benchmark.kind if benchmark is not None else "math"
    path = Path(name.removeprefix("file:"))
    count = benchmark.count if benchmark is not None else path.read_bytes().count(b"\n") if path.is_file() else 0
    longest = recipe.eval.max_tokens or MAX_TOKENS[kind]
    samples = recipe.eval.samples or SAMPLES[kind]
    return count * samples * ANSWER_SHARE * longest


def _trained(recipe: Recipe, student: Shape) -> int | None:
    """Count the trained parameters; None: all."""
    return None if recipe.train.lora is None else lora_parameters(student, recipe.train.lora.rank)


def _stage_plans(
    recipe: Recipe,
    student: Shape,
    models: dict[str, Shape],
    load: Workload,
    hours: Hours,
    trainings: dict[str, float],
) -> list[StagePlan]:
    disk = cache_bytes(load.prompt_tokens, load.response_tokens, load.trajectories, recipe.reference.candidates)
    forward = load.forward_work(student)
    rows = [
        StagePlan("rollout", recipe.student.model, forward, hours.rollout, disk["rollout"]),
        StagePlan("reference", recipe.student.model, forward, hours.reference, disk["reference"]),
    ]
    for (model, shape), cost in zip(models.items(), hours.score, strict=True):
        rows.append(StagePlan("score", model, load.forward_work(shape), cost, disk["score"]))
    stored = training_bytes(student, recipe.train.keep, _trained(recipe, student))
    # Forward and backward are three forward passes of work, checkpointing a fourth.
    passes = 4 if recipe.train.gradient_checkpointing else 3
    for name, cost in trainings.items():
        epochs = _composition_load(load, recipe.compositions[name]).epochs
        rows.append(StagePlan("train", name, epochs * passes * forward, cost, stored))
    return rows


def _memory_plans(
    recipe: Recipe, student: Shape, models: dict[str, Shape], machine: PlannedMachine
) -> list[MemoryPlan]:
    lora = recipe.train.lora
    sequences = _sequences(recipe, student, machine)
    longest = recipe.prompts.max_tokens + recipe.rollout.max_tokens
    sizes = {model: _bytes(recipe.score.dtype, shape) for model, shape in models.items()}
    budget = recipe.score.token_budget
    training = training_memory(
        student,
        max(recipe.train.token_budget, longest),
        min(machine.gpus, recipe.train.shard_ranks or machine.gpus),
        recipe.train.gradient_checkpointing,
        _trained(recipe, student),
        bytes_per_number=_trained_bytes(recipe),
        base="own" if lora is None else lora.base,
    )
    gpus = f"{machine.gpus} GPU{'s' * (machine.gpus > 1)}"
    plans = {
        ("rollout", f"{sequences} sequences at once"): sampling_memory(
            student, longest, sequences, _bytes(recipe.rollout.dtype, student)
        ),
        ("reference", recipe.student.model): scoring_memory(
            student, max(recipe.reference.token_budget, longest), _bytes(recipe.reference.dtype, student), found=True
        ),
        **{
            ("score", model): scoring_memory(shape, max(budget, longest), sizes[model])
            for model, shape in models.items()
        },
        ("train", f"{'LoRA' if lora else 'all weights'}, {gpus}"): training,
    }
    for name, composition in recipe.compositions.items():
        if isinstance(composition, Online):
            used = {scored_name(recipe, anchor, role) for anchor in composition.used for role in ROLES}
            anchors = [models[name].parameters * sizes[name] for name in sorted(used)]
            plans["train", f"{name} online, {gpus}"] = online_memory(
                student,
                training,
                sum(anchors) if recipe.train.keep_anchors else max(anchors),
                sampling_memory(student, longest, recipe.rollout.batch_size, _trained_bytes(recipe)),
            )
    return [
        MemoryPlan(stage, what, memory.weights, memory.working, memory.loading, fits=_fits(memory, machine))
        for (stage, what), memory in plans.items()
    ]


def _sequences(recipe: Recipe, student: Shape, machine: PlannedMachine) -> int:
    """Count the sequences sampled together: the recipe's batch, or as many as vLLM can fit."""
    if recipe.rollout.engine != "vllm":
        return recipe.rollout.batch_size
    longest = recipe.prompts.max_tokens + recipe.rollout.max_tokens
    single = sampling_memory(student, longest, 1, _bytes(recipe.rollout.dtype, student))
    return max(1, min(MOST_SEQUENCES, int((USABLE * machine.gpu.memory - single.weights) // single.working)))


def _bytes(dtype: Dtype, shape: Shape) -> int:
    return shape.bytes_per_weight if dtype == "auto" else 4 if dtype == "float32" else 2


def _fits(memory: Memory, machine: PlannedMachine) -> bool:
    return max(memory.total, memory.loading) <= USABLE * machine.gpu.memory
