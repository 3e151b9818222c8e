"""`lweave status`: what is done, what is stale and why, what is missing, and what to type next."""

import json as json_format
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.errors import WeaveError, first_line
from lightning_weave.runs.changes import why_stale
from lightning_weave.runs.discard import file_size
from lightning_weave.runs.known import as_it_stands, neighbours, with_known
from lightning_weave.runs.settings import ENGINES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, State, Step
from lightning_weave.train.checkpoint import TrainingCheckpoints
from lightning_weave.train.schedule import make_schedule


@dataclass(frozen=True)
class Status:
    """Where one step stands."""

    step: Step
    state: State
    why: str


def run(steps: Steps, console: Console, json: bool = False) -> list[Status]:
    """Print where every step stands."""
    statuses = look(steps)
    others = _others(steps)
    waiting = [status for status in statuses if status.state != "done"]
    if json:
        stages, also = (
            [{"stage": one.step.path, "state": one.state, "why": one.why} for one in part]
            for part in (statuses, others)
        )
        following = waiting[0].step.command if waiting else None
        engines = {name: getattr(steps.recipe, name).engine for name in ENGINES}
        run = {"run": str(steps.store.run_dir), "engines": engines}
        document = {**run, "stages": stages, "others": also, "next": following}
        print(json_format.dumps(document, indent=2))
        return statuses
    table = Table("stage", "state", "", title=Text(str(steps.store.run_dir)), title_justify="left", box=None)
    for status in (*statuses, *others):
        table.add_row(status.step.path, status.state, Text(status.why))
    console.print(table)
    if outside := [name for name in ENGINES if getattr(steps.recipe, name).engine == "vllm"]:
        console.print(f"vLLM does {', '.join(outside)}, transformers the rest.", markup=False)
    if waiting:
        console.print(
            f"{len(waiting)} of {len(statuses)} to do. Next: {waiting[0].step.command}", soft_wrap=True, markup=False
        )
        console.print(f"Everything: {steps.command('run')}", soft_wrap=True, markup=False)
    else:
        console.print("Everything is up to date.")
    return statuses


def overview(runs: Sequence[Steps], console: Console, json: bool = False) -> None:
    """Print a line for each of several runs: how far it is, by the last recipe of its directory."""
    lines = [_overview(steps) for steps in runs]
    if json:
        print(json_format.dumps(lines, indent=2))
        return
    table = Table(*lines[0], box=None)
    for line in lines:
        table.add_row(*map(Text, line.values()))
    console.print(table)
    console.print("One of them: lweave status RUN. Its page: lweave report RUN", markup=False, highlight=False)


def _overview(steps: Steps) -> dict[str, str]:
    run_dir = steps.store.run_dir
    try:
        states = Counter(status.state for status in look(steps))
        stages = ", ".join(f"{count} {state}" for state, count in states.items())
    except WeaveError as error:  # a model or a file is gone, and with it what tells whether a stage is stale
        stages = first_line(error)
    last = max((path.stat().st_mtime for path in run_dir.iterdir()), default=0.0)
    return {
        "run": os.path.relpath(run_dir),
        "student": steps.recipe.student.model,
        "stages": stages,
        "last written": datetime.fromtimestamp(last).strftime("%Y-%m-%d %H:%M"),
    }


def look(steps: Steps) -> list[Status]:
    """Find out where every step stands."""
    return [_look(step, steps) for step in steps.everything()]


def _others(steps: Steps) -> list[Status]:
    """What other commands made here: policies that this recipe does not name, and evaluations by other protocols."""
    all_steps = as_it_stands(with_known(steps))
    own = set(steps.policies)
    others = [all_steps.train(name) for name in all_steps.recipe.compositions if name not in own]
    others += [step for step in all_steps.made_by("eval") if step.path.split("/")[1] not in own]
    statuses = [
        Status(step, state, "not in this recipe") for step in others if (state := all_steps.store.stage(step).state())
    ]
    for step in all_steps.made_by("eval"):
        stage = all_steps.store.stage(step)
        for other, protocol in neighbours(stage):
            path = str(other.folder.relative_to(all_steps.store.run_dir))
            statuses.append(Status(replace(step, path=path), "done", protocol))
    return statuses


def _look(step: Step, steps: Steps) -> Status:
    stage = steps.store.stage(step)
    state = stage.state()
    so_far = _so_far(stage, steps, state)
    if so_far and state in ("missing", "stale"):  # under way, for the recipe as it is now
        state = "partial"
    unfinished = [inner.path for inner in step.inputs if steps.store.stage(inner).state() != "done"]
    match state:
        case "done":
            return Status(step, state, _size(stage.manifest() or {}))
        case "stale":
            return Status(step, state, why_stale(stage))
        case _:
            waits = f"waits for {', '.join(unfinished)}" if unfinished else ""
            return Status(step, state, "; ".join(filter(None, [so_far, waits])))


def _so_far(stage: Stage, steps: Steps, state: State) -> str:
    """Say what an unfinished stage has by now: shards, updates of training, legs of a sequence, evaluated blocks."""
    if state == "partial" and stage.manifest() is not None:
        return _deleted(stage)
    if updates := TrainingCheckpoints(stage.folder / "checkpoints", stage.step.fingerprint, keep=0).latest():
        return f"{updates} of {_all_updates(stage.step, steps)} updates"
    if blocks := len(list((stage.folder / f"blocks-{stage.step.fingerprint}").glob("[0-9]*.jsonl"))):
        return f"{_count(blocks, 'block')} so far"
    if state == "stale":  # what else is there is of an earlier recipe
        return ""
    if shards := len(list(stage.folder.glob("*.safetensors"))):
        return f"{_count(shards, 'shard')} so far"
    legs = len(list(stage.folder.glob("leg-*")))
    return f"in leg {legs}" if legs else ""


def _deleted(stage: Stage) -> str:
    """Say what a finished stage has lost since."""
    entries = (stage.manifest() or {})["shards"]
    lost = [entry["file"] for entry in entries if not (stage.folder / entry["file"]).exists()]
    folders = {name.split("/")[0] for name in lost if "/" in name}
    gone = [f"{folder}/" for folder in sorted(folders) if not (stage.folder / folder).exists()]
    if gone:
        return f"was finished, but {', '.join(gone)} has been deleted"
    if lost:
        return (
            f"was finished, but {len(lost)} of {_count(len(entries), 'file')} have been deleted, {lost[0]} among them"
        )
    return "was finished, but a file has been cut off since"


def _all_updates(step: Step, steps: Steps) -> str:
    name = step.path.removeprefix("train/")
    try:
        groups = steps.store.stage(steps.prompts).require()["rows"]
        return str(len(make_schedule(steps.recipe, groups, epochs=steps.recipe.compositions[name].epochs)))
    except WeaveError:  # the prompts are not there any more
        return "?"


def _size(manifest: dict) -> str:
    parts = [f"{manifest[name]:,} {name}" for name in ("rows", "positions") if name in manifest]
    size = sum(entry["bytes"] for entry in manifest.get("shards", []))
    engines = manifest.get("engines", [])
    mixed = [f"made with {' and with '.join(engines)}"] if len(engines) > 1 else []
    return "; ".join([", ".join([*parts, file_size(size)]), *mixed])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
