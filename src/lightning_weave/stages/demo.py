"""`lweave demo`: the whole method on a tiny world, with the same stages that a 4B run uses."""

import shutil
import time
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from lightning_weave.config import load_recipe
from lightning_weave.progress import Progress, duration
from lightning_weave.stages import report as report_stage
from lightning_weave.stages import run as run_stage
from lightning_weave.stages.cost import summary
from lightning_weave.stages.results import show_results
from lightning_weave.stages.steps import Steps
from lightning_weave.store.ledger import read_ledger
from lightning_weave.world.build import build_world
from lightning_weave.world.layout import shipped_world

WORLD = Path("runs/demo-world")


def load_demo(sets: list[str]) -> Steps:
    """The demo's recipe, as the package brings it."""
    recipe = files("lightning_weave.recipes") / "demo.toml"
    return Steps(load_recipe([str(recipe)], sets), "recipes/demo.toml")


def lay_out_world(fresh: bool, seed: int, progress: Progress) -> None:
    """Put the shipped checkpoints where the recipe looks for them, or build a world from nothing."""
    if fresh:
        build_world(WORLD, seed, progress)
    elif not WORLD.exists():
        unfinished = WORLD.with_name(f".tmp-{WORLD.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(shipped_world(), unfinished)
        unfinished.rename(WORLD)


def run(steps: Steps, progress: Progress, out: Console) -> None:
    """Bring the demo up to date and say what came out, what was reused, what it cost, and what to do next."""
    started = time.monotonic()
    reused = [step.path for step in steps.everything() if steps.store.stage(step).state() == "done"]
    run_stage.run(steps, progress)
    page = report_stage.run([steps], progress)
    show_results(steps, out)
    out.print(f"\nDone in {duration(time.monotonic() - started)}; {len(reused)} finished stages were reused.")
    for line in summary(read_ledger(steps.store.run_dir)):
        out.print(line)
    out.print(f"\nReport:    {page}", soft_wrap=True)
    out.print(f"Frontier:  {page.parent / 'figures' / 'frontier.png'}", soft_wrap=True)
    out.print("Your own:  copy recipes/demo.toml, name your models and prompts, then  lweave doctor RECIPE")
