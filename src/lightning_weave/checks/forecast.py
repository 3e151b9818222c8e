"""What the stages of a run will take, as far as that can be known before: device time and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_weave.checks.memory import as_computed, is_known, this_machine
from lightning_weave.config import benchmark_folder
from lightning_weave.devices import products_per_second
from lightning_weave.errors import InputError
from lightning_weave.plan.costs import HOUR
from lightning_weave.plan.recipe import Plan, make_plan, scored_name
from lightning_weave.runs.costs import cost_of
from lightning_weave.runs.machine import choose_device
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import hardware, read_ledger


@dataclass(frozen=True)
class Forecast:
    """Of one stage; None is what nobody knows."""

    seconds: float | None = None
    measured: bool = False  # by stages of the same kind in this run; else predicted for this GPU
    size: float | None = None  # bytes on disk
    rough: bool = False  # what its matrix products alone would take, as fast as one was just now


def forecast(steps: Steps, stages: Sequence[Stage], prompts: int | None) -> dict[str, Forecast]:
    """Predict every stage by its path; `prompts` is how many there will be, where they were read."""
    planned = _planned(steps, prompts)
    rows = [row for row in read_ledger(steps.store.run_dir) if row.get("device") == hardware()["device"]]
    forecasts = {}
    for stage in stages:
        path = stage.step.path
        alike = [
            cost.seconds
            for other in stages
            if _kind(steps, other.step.path) == _kind(steps, path) and other.state() in ("done", "stale")
            if (cost := cost_of(other.folder, steps.store.run_dir, rows)) is not None
        ]
        forecasts[path] = planned.get(path, Forecast())
        if alike:
            forecasts[path] = Forecast(sum(alike) / len(alike), measured=True, size=forecasts[path].size)
    return forecasts


def _kind(steps: Steps, path: str) -> tuple[str, ...]:
    """What takes about as long as another: trainings by one method, evaluations on one benchmark."""
    stage, _, name = path.partition("/")
    match stage:
        case "train":
            composition = steps.recipe.compositions[name]
            return stage, composition.method, str(composition.epochs)
        case "eval":
            return stage, name.partition("/")[2]
        case _:
            return (path,)


def _planned(steps: Steps, prompts: int | None) -> dict[str, Forecast]:
    """Predict by the models' configurations: hours for a GPU that `plan` knows, else a rough figure."""
    try:
        machine = this_machine(steps.recipe)
        plan = _plan(steps, prompts)
    except InputError:  # models that are not there, or of an architecture that nobody has described
        return {}
    names = {}
    for anchor in steps.recipe.anchors:
        for role in ROLES:
            names[scored_name(steps.recipe, anchor, role)] = f"score/{steps.score_names[steps.side(anchor, role)]}"
    paths = {"rollout": "rollout", "reference": "reference"}
    known = is_known(machine)
    speed = 0.0 if known else products_per_second(choose_device(steps.recipe))
    forecasts: dict[str, Forecast] = {}
    for row in plan.stages:
        path = {**paths, "train": f"train/{row.what}", "score": names.get(row.what, "")}[row.stage]
        seconds = row.gpu_hours * HOUR if known else row.operations / speed
        estimate = seconds if known or seconds >= 1 else None
        forecasts[path] = Forecast(estimate, size=row.disk, rough=not known and estimate is not None)
    if known:
        for policy in steps.policies:
            for name, hours in plan.benchmarks.items():
                forecasts[f"eval/{policy}/{benchmark_folder(name)}"] = Forecast(hours * HOUR)
    return forecasts


def _plan(steps: Steps, prompts: int | None) -> Plan:
    recipe = as_computed(steps.recipe)
    rollout = steps.store.stage(steps.rollout)
    limit = steps.student.context_limit or recipe.rollout.max_tokens
    length: float | None = limit if limit < recipe.rollout.max_tokens else None
    if steps.needs_cache and rollout.state() == "done":
        manifest = rollout.require()
        prompts = manifest["rows"] // recipe.rollout.responses
        length = manifest["positions"] / max(manifest["rows"], 1)
    if prompts is not None:
        recipe = recipe.model_copy(update={"prompts": recipe.prompts.model_copy(update={"take": prompts})})
    return make_plan(recipe, this_machine(recipe), response_tokens=length)
