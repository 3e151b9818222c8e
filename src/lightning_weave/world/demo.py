"""`lweave demo`: the whole method on a tiny world, with the same stages as a 4B run."""

import shutil
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from lightning_weave.bench.summary import combine
from lightning_weave.config import check_recipe, merge_overrides, merge_tables
from lightning_weave.pipeline.flow import make_everything
from lightning_weave.progress import Progress, duration
from lightning_weave.report.costs import variants_table
from lightning_weave.report.results import PolicySummaries, show_results, summaries
from lightning_weave.runs.costs import read_spent, summary
from lightning_weave.runs.discard import discards, listing
from lightning_weave.runs.steps import Steps
from lightning_weave.store import whole_directory, write_atomic
from lightning_weave.train.refreshed import parts_of, schedule_of
from lightning_weave.world.build import build_world
from lightning_weave.world.claims import (
    REFRESH_CLAIMS,
    Policies,
    check,
    check_difference,
    claims_table,
    pooled,
    results_table,
)
from lightning_weave.world.layout import shipped_world

Preview = Callable[[Steps, Progress, Console, int, Sequence[str]], PolicySummaries]
WORLD = "runs/demo-world"  # the folder that the recipes name
FULL = "demo-full.toml"
REFRESH = "demo-refresh.toml"
PREVIEWED = ("accuracy-only", "weave-50", "brevity-only")


@dataclass(frozen=True)
class World:
    """A world for the demo: the one that comes with the package, or one built from a seed."""

    seed: int | None = None

    @property
    def folder(self) -> str:
        return WORLD if self.seed is None else f"{WORLD}-{self.seed}"

    @property
    def label(self) -> str:
        return "shipped world" if self.seed is None else f"world of seed {self.seed}"

    def lay_out(self, progress: Progress) -> None:
        """Put the checkpoints where the recipe expects them, building them unless they come with the package."""
        folder = Path(self.folder)
        if self.seed is not None:
            build_world(folder, self.seed, progress)
        elif not folder.exists():
            with whole_directory(folder) as unfinished:
                shutil.copytree(shipped_world(), unfinished, dirs_exist_ok=True)


def load_demo(world: World, over: str | None, number: int, sets: list[str]) -> Steps:
    """Load the demo's recipe, with another over it, for one world and one training seed."""
    data = _read("demo.toml", world)
    if over == REFRESH:  # it has all its compositions itself
        data = {section: value for section, value in data.items() if section not in ("compositions", "report")}
    if over:
        data = merge_tables(data, _read(over, world))
    for section, seed in (("rollout", 42), ("train", 1234), ("eval", 42)):
        data[section]["seed"] = seed + number
    data = merge_overrides(data, sets)
    data["name"] += (f"-world-{world.seed}" if world.seed is not None else "") + (f"-{number}" if number else "")
    recipe = check_recipe(data, "demo")
    return Steps(recipe, str(Path(recipe.runs) / recipe.name / "recipe.toml"))  # there with or without a clone


def _read(name: str, world: World) -> dict:
    text = (files("lightning_weave.recipes") / name).read_text(encoding="utf-8")
    return tomllib.loads(text.replace(WORLD, world.folder))


def run(steps: Steps, progress: Progress, out: Console, write_report: Callable[[list[Steps], Progress], Path]) -> None:
    """Bring the demo up to date and print its results, how much was reused, the cost, and what to do next."""
    started = time.monotonic()
    reused = sum(steps.store.stage(step).state() == "done" for step in steps.everything())
    if replaced := discards(steps, steps.everything()):  # it is only a demo: said, not asked
        lines = ["The demo has changed. Made again:", *listing(replaced, steps.store.run_dir)]
        out.print("\n".join(lines), soft_wrap=True, markup=False)
    make_everything(steps, progress)
    page = write_report([steps], progress)
    show_results(steps, out)
    out.print(f"\nDone in {duration(time.monotonic() - started)}; {reused} finished stages were reused.")
    ledger = read_spent(steps.store.run_dir).kept
    if any(composition.method != "joint" for composition in steps.recipe.compositions.values()):
        out.print(variants_table(steps, ledger))
    for line in summary(steps, ledger):
        out.print(line)
    out.print(f"\nReport:    {page}", soft_wrap=True)
    out.print(f"Frontier:  {page.parent / 'figures' / 'frontier.png'}", soft_wrap=True)
    out.print(f"Your own:  copy {steps.arguments}, name your models and prompts, then  lweave doctor RECIPE")
    out.print("           What its keys mean:  lweave keys")


def write_claims(worlds: dict[World, list[Steps]], progress: Progress, command: str, preview: Preview) -> Path:
    """Test the paper's claims on every world, with previews of three targets, and write the results as Markdown."""
    findings = {}
    parts = []
    for world, runs in worlds.items():
        evaluated = [summaries(steps) for steps in runs]
        policies, seeds = _pooled(evaluated)
        findings[_column(world, runs)] = check(policies, seeds, evaluated, [_kept(steps) for steps in runs])
        targets = preview(runs[0], progress, Console(quiet=True), 50, PREVIEWED)
        parts.append(
            f"## The {world.label}\n\nMeans over {len(runs)} training seeds.\n\n{results_table(policies, seeds)}\n\n"
            "Sampled from the targets themselves, with live anchors and no training, 50 problems of each benchmark:\n\n"
            f"{_preview_table(targets)}\n"
        )
    text = f"Made by `{command}`.\n\n{claims_table(findings)}\n\n" + "\n".join(parts)
    return _write(worlds, "claims.md", text)


def write_refresh(worlds: dict[World, list[Steps]], command: str) -> Path:
    """Test on every world what refreshed states bring, and write it as Markdown with what it took."""
    findings = {}
    parts = []
    for world, runs in worlds.items():
        policies, seeds = _pooled([summaries(steps) for steps in runs])
        findings[_column(world, runs)] = [check_difference(claim, policies, seeds) for claim in REFRESH_CLAIMS]
        parts.append(f"### Refreshed states in the {world.label}\n\n{results_table(policies, seeds)}\n")
    work = _work_table(next(iter(worlds.values()))[0])
    text = f"Made by `{command}`.\n\n{claims_table(findings)}\n\n{work}\n\n" + "\n".join(parts)
    return _write(worlds, "refresh.md", text)


def _pooled(evaluated: Sequence[PolicySummaries]) -> tuple[Policies, list[Policies]]:
    """Pool the results of all seeds, and those of each seed alone."""
    return pooled(evaluated), [pooled([seed]) for seed in evaluated]


def _column(world: World, runs: Sequence[Steps]) -> str:
    return f"{world.label}, {len(runs)} seed{'s' * (len(runs) > 1)}"


def _write(worlds: dict[World, list[Steps]], name: str, text: str) -> Path:
    path = next(iter(worlds.values()))[0].store.run_dir / "report" / name
    write_atomic(path, text.encode())
    return path


def _work_table(steps: Steps) -> str:
    """Markdown of the updates of every composition, and of the trajectories that it samples and scores."""
    lines = ["| composition | updates | trajectories sampled and scored |", "| --- | ---: | ---: |"]
    for name, composition in steps.recipe.compositions.items():
        schedule = schedule_of(steps, name)
        if composition.method == "online":
            drawn = sum(len(schedule.rows(update)) for update in range(len(schedule)))
        else:
            drawn = sum(len(part.groups) for part in parts_of(steps, name)) * schedule.responses
        lines.append(f"| {name} | {len(schedule):,} | {drawn:,} |")
    return "\n".join(lines)


def _kept(steps: Steps) -> float:
    """The share of positions where both anchors of the even composition have a shift, at its last update."""
    return float(steps.store.stage(steps.train("weave-50")).require()["kept"])


def _preview_table(targets: PolicySummaries) -> str:
    lines = ["| target | accuracy | tokens |", "| --- | --- | --- |"]
    for name, results in targets.items():
        overall = combine(results)
        lines.append(f"| {name} | {overall.accuracy:.1f} | {overall.tokens:.1f} |")
    return "\n".join(lines)
