"""`lweave status`: what is done, what is stale and why, what is missing, and what to type next."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, State, Step, Store
from lightning_weave.train.checkpoint import TrainingCheckpoints


@dataclass(frozen=True)
class Status:
    """Where one step stands."""

    step: Step
    state: State
    why: str


def run(steps: Steps, console: Console) -> list[Status]:
    """Print where every step stands."""
    found = [_look(step, steps.store) for step in steps.everything()]
    table = Table("stage", "state", "", title=Text(str(steps.store.run_dir)), title_justify="left", box=None)
    for status in found:
        table.add_row(status.step.path, status.state, Text(status.why))
    console.print(table)
    waiting = [status for status in found if status.state != "done"]
    if waiting:
        console.print(
            f"{len(waiting)} of {len(found)} to do. Next: {waiting[0].step.command}", soft_wrap=True, markup=False
        )
        console.print(f"Everything: lweave run {steps.arguments}", soft_wrap=True, markup=False)
    else:
        console.print("Everything is up to date.")
    return found


def _look(step: Step, store: Store) -> Status:
    stage = store.stage(step)
    state = stage.state()
    so_far = _so_far(stage)
    if state == "missing" and so_far:
        state = "partial"
    stale_inputs = [inner.path for inner in step.inputs if store.stage(inner).state() != "done"]
    match state:
        case "stale":
            why = "; ".join(stage.changed_settings())
        case "partial":
            why = so_far or "0 shards so far"
        case "done":
            why = _size(stage.manifest() or {})
        case _:
            why = ""
    if state != "done" and stale_inputs:
        why = f"{why}; " * bool(why) + f"waits for {', '.join(stale_inputs)}"
    return Status(step, state, why)


def _so_far(stage: Stage) -> str:
    """Say what an unfinished stage has by now: shards, updates of training, legs of a sequence, evaluated blocks."""
    if shards := len(list(stage.folder.glob("*.safetensors"))):
        return f"{shards} shards so far"
    if updates := TrainingCheckpoints(stage.folder / "checkpoints", stage.step.fingerprint, keep=0).latest():
        return f"{updates} updates so far"
    if legs := len(list(stage.folder.glob("leg-*"))):
        return f"in leg {legs}"
    blocks = len(list((stage.folder / f"blocks-{stage.step.fingerprint}").glob("*.jsonl")))
    return f"{blocks} blocks so far" if blocks else ""


def _size(manifest: dict) -> str:
    parts = [f"{manifest[name]:,} {name}" for name in ("rows", "positions") if name in manifest]
    size = sum(entry["bytes"] for entry in manifest.get("shards", []))
    return ", ".join([*parts, f"{size / 1e6:,.1f} MB"])
