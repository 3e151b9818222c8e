"""`lweave demo`: the whole method on a tiny world, with the same stages that a 4B run uses."""

import shutil
import time
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from lightning_weave.bench.summary import Summary, combine
from lightning_weave.config import check_recipe, merge_overrides, merge_tables
from lightning_weave.pipeline import preview
from lightning_weave.pipeline import run as run_stage
from lightning_weave.progress import Progress, duration
from lightning_weave.report import report as report_stage
from lightning_weave.report.results import show_results, summaries
from lightning_weave.runs.costs import summary
from lightning_weave.runs.steps import Steps
from lightning_weave.store import whole_directory, write_atomic
from lightning_weave.store.ledger import read_ledger
from lightning_weave.views.cost import variants_table
from lightning_weave.world.build import build_world
from lightning_weave.world.claims import check, claims_table, pooled, results_table
from lightning_weave.world.layout import shipped_world

WORLD = "runs/demo-world"  # as the recipes call it
PREVIEWED = ("accuracy-only", "weave-50", "brevity-only")


@dataclass(frozen=True)
class World:
    """A world to weave in: the one that comes with the package, or one built from a seed."""

    seed: int | None = None

    @property
    def folder(self) -> str:
        return WORLD if self.seed is None else f"{WORLD}-{self.seed}"

    @property
    def label(self) -> str:
        return "shipped world" if self.seed is None else f"world of seed {self.seed}"

    def lay_out(self, progress: Progress) -> None:
        """Put the checkpoints where the recipe looks for them, building them if they do not come with the package."""
        folder = Path(self.folder)
        if self.seed is not None:
            build_world(folder, self.seed, progress)
        elif not folder.exists():
            with whole_directory(folder) as unfinished:
                shutil.copytree(shipped_world(), unfinished, dirs_exist_ok=True)


def load_demo(world: World, full: bool, number: int, sets: list[str]) -> Steps:
    """The demo's recipe as the package brings it, for one world and one training seed."""
    data: dict = {}
    for name in ["demo.toml", "demo-full.toml"] if full else ["demo.toml"]:
        text = (files("lightning_weave.recipes") / name).read_text(encoding="utf-8")
        data = merge_tables(data, tomllib.loads(text.replace(WORLD, world.folder)))
    for section, seed in (("rollout", 42), ("train", 1234), ("eval", 42)):
        data[section]["seed"] = seed + number
    data = merge_overrides(data, sets)
    data["name"] += (f"-world-{world.seed}" if world.seed is not None else "") + (f"-{number}" if number else "")
    recipe = check_recipe(data, "demo")
    arguments = "recipes/demo.toml" + (" recipes/demo-full.toml" if full else "")
    return Steps(recipe, arguments)


def run(steps: Steps, progress: Progress, out: Console) -> None:
    """Bring the demo up to date and say what came out, what was reused, what it cost, and what to do next."""
    started = time.monotonic()
    reused = [step.path for step in steps.everything() if steps.store.stage(step).state() == "done"]
    run_stage.run(steps, progress)
    page = report_stage.run([steps], progress)
    show_results(steps, out)
    out.print(f"\nDone in {duration(time.monotonic() - started)}; {len(reused)} finished stages were reused.")
    ledger = read_ledger(steps.store.run_dir)
    if any(composition.method != "joint" for composition in steps.recipe.compositions.values()):
        out.print(variants_table(steps, ledger))
    for line in summary(steps, ledger):
        out.print(line)
    out.print(f"\nReport:    {page}", soft_wrap=True)
    out.print(f"Frontier:  {page.parent / 'figures' / 'frontier.png'}", soft_wrap=True)
    out.print("Your own:  copy recipes/demo.toml, name your models and prompts, then  lweave doctor RECIPE")


def write_claims(worlds: dict[World, list[Steps]], progress: Progress, command: str) -> Path:
    """Hold the paper's claims against every world, with previews of three targets, and write it all down."""
    findings, parts = {}, []
    for world, runs in worlds.items():
        found = [summaries(steps) for steps in runs]
        policies, seeds = pooled(found), [pooled([one]) for one in found]
        findings[f"{world.label}, {len(runs)} seed{'s' * (len(runs) > 1)}"] = check(policies, seeds)
        aims = preview.run(runs[0], progress, Console(quiet=True), problems=50, only=PREVIEWED)
        parts.append(
            f"## The {world.label}\n\nMeans over {len(runs)} training seeds.\n\n{results_table(policies, seeds)}\n\n"
            "Sampled from the targets themselves, with live anchors and no training, 50 problems of each benchmark:\n\n"
            f"{_preview_table(aims)}\n"
        )
    text = f"Made by `{command}`.\n\n{claims_table(findings)}\n\n" + "\n".join(parts)
    path = next(iter(worlds.values()))[0].store.run_dir / "report" / "claims.md"
    write_atomic(path, text.encode())
    return path


def _preview_table(aims: dict[str, list[Summary]]) -> str:
    lines = ["| target | accuracy | tokens |", "| --- | --- | --- |"]
    for name, found in aims.items():
        overall = combine(found)
        lines.append(f"| {name} | {overall.accuracy:.1f} | {overall.tokens:.1f} |")
    return "\n".join(lines)
