"""Small runs below a composition's folder, for methods that sample again while they train, with the ordinary stages."""

from collections.abc import Sequence
from pathlib import Path

from lightning_weave.runs.prompts import keep_prompts
from lightning_weave.runs.steps import Steps
from lightning_weave.store import append_line, write_atomic
from lightning_weave.store.ledger import LEDGER, read_ledger
from lightning_weave.train.training import TrainContext
from lightning_weave.types import Prompt


def make_inner_cache(steps: Steps, inner: Steps, prompts: Sequence[Prompt], context: TrainContext) -> None:
    """Sample and score these prompts of the run in a run of their own."""
    if context.ranks.first:
        machine = steps.store.run_dir / "machine.json"
        if machine.exists():
            write_atomic(inner.store.run_dir / machine.name, machine.read_bytes())
        if inner.store.stage(inner.prompts).state() != "done":
            keep_prompts(inner, prompts, {})
    context.ranks.wait()
    context.make_cache(inner)
    context.ranks.wait()


def book(steps: Steps, name: str, method: str, folders: Sequence[Path]) -> None:
    """Put what inner runs cost on the ledger of the run, as training of this composition; each row once."""
    booked = read_ledger(steps.store.run_dir)
    for folder in folders:
        for row in read_ledger(folder):
            own = {"stage": "train", "name": name, "method": method, "fingerprint": steps.train(name).fingerprint}
            if (spent := {**row, **own}) not in booked:
                append_line(steps.store.run_dir / LEDGER, spent)
