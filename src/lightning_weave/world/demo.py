"""`lweave demo`: the whole method on a tiny world, with the same stages as a 4B run."""

import time
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from lightning_weave.config import check_recipe, merge_overrides
from lightning_weave.progress import Progress, duration
from lightning_weave.report import report
from lightning_weave.report.results import show_results
from lightning_weave.run import Run
from lightning_weave.stages.costs import read_spent, summary
from lightning_weave.stages.run import make_everything


def load_demo(overrides: Sequence[str] = (), trust: bool = False) -> Run:
    """Load the recipe of the demo from the package, so that no clone is needed."""
    text = (files("lightning_weave.recipes") / "demo.toml").read_text(encoding="utf-8")
    recipe = check_recipe(merge_overrides(tomllib.loads(text), list(overrides)), "demo")
    return Run(recipe, str(Path(recipe.runs) / recipe.name / "recipe.toml"), trust)


def run(run: Run, progress: Progress, out: Console) -> None:
    """Run what is missing and print the results, how much was reused, the cost, and what to do next."""
    started = time.monotonic()
    reused = sum(step.complete for step in run.everything())
    make_everything(run, progress)
    page = report.run([run], progress)
    show_results(run, out)
    out.print(f"\nDone in {duration(time.monotonic() - started)}; {reused} finished stages were reused.")
    for line in summary(run, read_spent(run.directory).kept):
        out.print(line)
    out.print(f"\nReport:    {page}", soft_wrap=True)
    out.print(f"Frontier:  {page.parent / 'figures' / 'frontier.png'}", soft_wrap=True)
    out.print("The task:  from left to right, modulo 10; 7+9*3 is 8", highlight=False)
    out.print("Next:      your own models:  lweave init --help")
