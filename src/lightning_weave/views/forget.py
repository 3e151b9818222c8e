"""`lweave forget`: remove one policy from a run directory: its training, its evaluations, its previews."""

from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.runs import known
from lightning_weave.runs.costs import cost_of
from lightning_weave.runs.discard import Doomed, agree, listing
from lightning_weave.runs.steps import Steps
from lightning_weave.store import lock_run, remove
from lightning_weave.store.ledger import read_ledger

STAGES = ("train", "eval", "preview")


def run(steps: Steps, policy: str, console: Console, yes: bool) -> None:
    """Remove what was made of one policy, by any protocol, after asking. The recipe may still name it."""
    run_dir = steps.store.run_dir
    folders = [run_dir / stage / policy for stage in STAGES if policy and (run_dir / stage / policy).is_dir()]
    if not folders:
        names = sorted({path.name for stage in STAGES for path in (run_dir / stage).glob("[!.]*") if path.is_dir()})
        raise InputError(f"--policy {policy}: nothing of it is in {run_dir}, which has {', '.join(names) or 'none'}")
    with lock_run(run_dir):
        ledger = read_ledger(run_dir)
        doomed = [Doomed(folder, "made here", cost_of(folder, run_dir, ledger)) for folder in folders]
        agree([f"This removes from {run_dir}:", *listing(doomed, run_dir)], yes, "Nothing was removed. To do so: --yes")
        known.forget(run_dir, policy)
        for folder in folders:
            remove(folder)
    console.print(f"{run_dir}: {policy} is removed.", soft_wrap=True, markup=False)
