"""The stages of a recipe, one command each, and all of them in their order."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_weave.cli.options import (
    Address,
    Ahead,
    Cluster,
    Files,
    Only,
    Sets,
    Trust,
    Yes,
    as_run,
    load_run,
    load_steps,
    open_console,
    writing,
)
from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from lightning_weave.runs.steps import Steps

app = typer.Typer()


@app.command()
def rollout(
    recipe: Files,
    set_: Sets = None,
    check: Ahead = False,
    yes: Yes = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Sample the student's own trajectories."""
    load_run(recipe, set_, yes=yes, cluster=cluster, address=address).rollout(check=check)


@app.command()
def reference(
    recipe: Files,
    set_: Sets = None,
    check: Ahead = False,
    yes: Yes = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Find the student's candidates on its own trajectories."""
    load_run(recipe, set_, yes=yes, cluster=cluster, address=address).reference(check=check)


@app.command()
def score(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    check: Ahead = False,
    yes: Yes = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Score the cached candidates under every anchor model."""
    load_run(recipe, set_, yes=yes, cluster=cluster, address=address).score(*only or (), check=check)


@app.command()
def train(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    check: Ahead = False,
    yes: Yes = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Fit the student to every composition of the cached shifts."""
    load_run(recipe, set_, yes=yes, trust=trust, cluster=cluster, address=address).train(*only or (), check=check)


@app.command("eval")
def evaluate(
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")
    ] = None,
    set_: Sets = None,
    only: Only = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="instead of a recipe: a checkpoint directory or hub name")
    ] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="with --model: aime-2024, ... or file:PATH; may be repeated"),
    ] = None,
    lm_eval: Annotated[str | None, typer.Option(metavar="DIR", help="also write lm-evaluation-harness files")] = None,
    harness: Annotated[
        Literal["lm-eval"] | None, typer.Option(metavar="lm-eval", help="run only tasks of lm-evaluation-harness")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="with --harness: which; default: harness.tasks of the recipe")
    ] = None,
    yes: Yes = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Sample, grade and summarise policies on benchmarks."""
    if recipe and (model or bench):
        raise InputError(
            f"eval {recipe[0]}: a recipe names its own checkpoints ([policies]) and benchmarks (eval.benchmarks); "
            "leave out --model and --bench, or the recipe"
        )
    set_ = [*(set_ or ()), *_as_setting(harness, tasks)]
    steps = load_steps(recipe, set_, trust) if recipe else _load_model_only(model, bench, set_, trust)
    if harness and not steps.recipe.harness.tasks:
        raise InputError("--harness lm-eval: which tasks? Add --tasks A,B, or harness.tasks to the recipe")
    from lightning_weave.pipeline.eval import export_lm_eval
    from lightning_weave.store import make_directory

    if lm_eval:  # before anything is sampled
        make_directory(Path(lm_eval), f"--lm-eval {lm_eval}")
    run = as_run(steps, yes=yes, cluster=cluster, address=address)
    (run.harness if harness else run.eval)(*only or ())
    if lm_eval:
        export_lm_eval(steps, Path(lm_eval), datetime.now())
    _show_results(steps)


def _show_results(steps: "Steps") -> None:
    """Print the table, and put it into the run's log."""
    from lightning_weave.progress import keep_log
    from lightning_weave.report.results import show_results

    with keep_log(steps.store.run_dir / "log.txt"):
        show_results(steps, open_console())


def _as_setting(harness: str | None, tasks: str | None) -> list[str]:
    """Take --tasks as the recipe's key, so that it is remembered and said like one."""
    if tasks is None:
        return []
    if harness is None:
        raise InputError(f"--tasks {tasks}: of which harness? Add --harness lm-eval")
    return [f"harness.tasks={json.dumps([task.strip() for task in tasks.split(',') if task.strip()])}"]


def _load_model_only(model: str | None, benchmarks: list[str] | None, sets: list[str] | None, trust: bool) -> "Steps":
    from lightning_weave.config import check_recipe, merge_overrides

    if model is None:
        raise InputError("eval needs a RECIPE, or --model DIR with --bench NAME")
    data = {"name": _run_name(model), "student": {"model": model}}
    data |= {"eval": {"benchmarks": benchmarks}} if benchmarks else {}
    recipe = check_recipe(merge_overrides(data, sets or ()), "--model")
    _check_same_model(Path(recipe.runs) / recipe.name, model)
    from lightning_weave.runs.steps import Steps

    return Steps(recipe, f"--model {model}", trust)


def _run_name(model: str) -> str:
    """Name an evaluation by its checkpoint; every student that was trained here is called `final`."""
    from lightning_weave.config import slug

    parts = ("", "", "", "", *Path(model).parts)[-4:]  # RUN/train/COMPOSITION/final
    return slug(f"{parts[0]}-{parts[2]}") if parts[1::2] == ("train", "final") else slug(model)


def _check_same_model(run_dir: Path, model: str) -> None:
    """Refuse to put one checkpoint's results over another's of the same name."""
    from lightning_weave.config import load_recipe

    path = run_dir / "recipe.toml"
    other = load_recipe([str(path)]).student.model if path.exists() else model
    if Path(other).expanduser().resolve() != Path(model).expanduser().resolve():
        raise InputError(
            f"--model {model}: {run_dir} is the run of another checkpoint ({other}). Give this one a name of its own: "
            "--set name=NAME"
        )


@app.command()
def run(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what would be made, and what is wrong")] = False,
    force: Annotated[bool, typer.Option("--force", help="continue where a check would stop the run")] = False,
    yes: Yes = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Make all that is missing or stale, in order."""
    steps = load_steps(recipe, set_, trust)
    from lightning_weave.pipeline import run as stage

    steps = stage.narrowed(steps, only) if only else steps
    if dry_run:
        stage.dry_run(steps, open_console())
        return
    run = as_run(steps, yes=yes, cluster=cluster, address=address)
    run.run(force)
    _show_results(steps)
    stage.show_next(steps, open_console())


@app.command()
def rehearse(
    recipe: Files, set_: Sets = None, trust: Trust = False, cluster: Cluster = None, address: Address = None
) -> None:
    """Run all of it with small random doubles of the models first.

    It needs configurations and tokenizers, no weights, and says what the real run can count on.
    """
    loaded = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    from lightning_weave.pipeline import run as running
    from lightning_weave.plan import plan
    from lightning_weave.plan.costs import PlannedMachine
    from lightning_weave.plan.gpus import CALIBRATED
    from lightning_weave.rehearsal import rehearse as stage
    from lightning_weave.report import report
    from lightning_weave.views import card

    steps = loaded.steps
    progress = loaded.progress
    workers = loaded.workers()
    commands = stage.Commands(
        run=lambda small: running.run(small, progress, workers, yes=True),
        report=lambda small: report.run([small], progress),
        card=lambda small, name: card.run(small, name, None, progress),
        plan=lambda: plan.run(steps.recipe, PlannedMachine(CALIBRATED, 8), None, False, open_console()),
    )
    small = stage.rehearsed(steps)
    with writing(small):
        stage.run(steps, small, commands, progress)
