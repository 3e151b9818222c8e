"""Commands that compute: all stages in their order, or one of them."""

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_weave.cli.options import (
    Address,
    Cluster,
    Files,
    Only,
    Sets,
    Trust,
    as_command,
    load_run,
    open_console,
    writing,
)
from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from lightning_weave.api import Run

app = typer.Typer()


def _add_stage(verb: str, summary: str) -> None:
    def stage(
        recipe: Files,
        set_: Sets = None,
        only: Only = None,
        trust: Trust = False,
        cluster: Cluster = None,
        address: Address = None,
    ) -> None:
        if only and verb in ("rollout", "reference"):
            raise InputError(f"--only {only[0]}: {verb} is one stage for all; remove it")
        getattr(load_run(recipe, set_, trust=trust, cluster=cluster, address=address), verb)(*only or ())

    app.command(verb, help=summary, hidden=True)(stage)


_add_stage("rollout", "Sample the student's own trajectories.")
_add_stage("reference", "Find the student's candidates on its own trajectories.")
_add_stage("score", "Score the cached candidates under every anchor model.")
_add_stage("train", "Fit the student to every composition of the cached shifts.")


@app.command("eval")
def evaluate(
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")
    ] = None,
    set_: Sets = None,
    only: Only = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="checkpoint directory or hub name, instead of a recipe")
    ] = None,
    bench: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="with --model: aime-2024, ... or a file; may be repeated"),
    ] = None,
    lm_eval: Annotated[str | None, typer.Option(metavar="DIR", help="also write lm-evaluation-harness files")] = None,
    harness: Annotated[
        Literal["lm-eval"] | None, typer.Option(metavar="lm-eval", help="run only the tasks of lm-evaluation-harness")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="A,B", help="with --harness: these tasks instead of harness.tasks")
    ] = None,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Evaluate policies on benchmarks."""
    if recipe and (model or bench):
        raise InputError(
            f"eval {recipe[0]}: a recipe names its checkpoints ([policies]) and benchmarks (eval.benchmarks); remove "
            "--model and --bench, or the recipe"
        )
    if tasks and harness is None:
        raise InputError(f"--tasks {tasks}: add --harness lm-eval")
    if tasks:
        names = [task.strip() for task in tasks.split(",") if task.strip()]
        set_ = [*(set_ or ()), f"harness.tasks={json.dumps(names)}"]
    options: dict[str, Any] = {"trust": trust, "cluster": cluster, "address": address}
    run = load_run(recipe, set_, **options) if recipe else _load_model_only(model, bench, set_, options)
    if harness and not run.recipe.harness.tasks:
        raise InputError("--harness lm-eval: no tasks. Add --tasks A,B, or harness.tasks to the recipe")
    from lightning_weave.stages.eval import export_lm_eval
    from lightning_weave.store import make_directory

    if lm_eval:  # before anything is sampled
        make_directory(Path(lm_eval), f"--lm-eval {lm_eval}")
    (run.harness if harness else run.eval)(*only or ())
    if lm_eval:
        export_lm_eval(run, Path(lm_eval), datetime.now())
    _show_results(run, "base" if recipe else run.recipe.name)


def _show_results(run: "Run", base: str = "base") -> None:
    """Print the table, and log it."""
    from lightning_weave.progress import keep_log
    from lightning_weave.report.results import show_results

    with keep_log(run.directory / "log.txt"):
        show_results(run, open_console(), base)


def _load_model_only(
    model: str | None, benchmarks: list[str] | None, sets: list[str] | None, options: dict[str, Any]
) -> "Run":
    """Create the run that evaluates one checkpoint, under the checkpoint's name."""
    from lightning_weave.bench.definitions import benchmark_name
    from lightning_weave.config import check_recipe, load_recipe, merge_overrides, slug

    if model is None:
        raise InputError("eval needs a RECIPE, or --model DIR with --bench NAME")
    parts = ("", "", "", "", *Path(model).parts)[-4:]  # RUN/train/COMPOSITION/final: all are called `final`
    name = slug(f"{parts[0]}-{parts[2]}") if parts[1::2] == ("train", "final") else slug(model)
    data: dict[str, Any] = {"name": name, "student": {"model": model}}
    data |= {"eval": {"benchmarks": [benchmark_name(one) for one in benchmarks]}} if benchmarks else {}
    recipe = check_recipe(merge_overrides(data, sets or ()), "--model")
    directory = Path(recipe.runs) / recipe.name
    before = directory / "recipe.toml"
    other = load_recipe(before).student.model if before.exists() else model
    if Path(other).expanduser().resolve() != Path(model).expanduser().resolve():
        raise InputError(
            f"--model {model}: {directory} is the run of another checkpoint ({other}). Give this one another name: "
            "--set name=NAME"
        )
    return as_command(recipe, f"--model {model}", **options)


@app.command()
def run(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only list what would be computed, and what is wrong")
    ] = False,
    until: Annotated[
        Literal["prompts", "rollout", "reference", "score", "train", "eval"],
        typer.Option(metavar="STAGE", help="stop after prompts, rollout, reference, score, train or eval"),
    ] = "eval",
    force: Annotated[bool, typer.Option("--force", help="continue where a check would stop the run")] = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Compute everything that is missing, in order."""
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    run.check_data()
    from lightning_weave.stages import run as stage

    if only:
        run.recipe = stage.narrow(run, only)
    if dry_run:
        stage.dry_run(run, open_console(), until)
        return
    run.run(force, until)
    if until != "eval":
        return
    _show_results(run)
    stage.show_next(run, open_console())


@app.command()
def rehearse(
    recipe: Files, set_: Sets = None, trust: Trust = False, cluster: Cluster = None, address: Address = None
) -> None:
    """Try the whole recipe with small random models.

    Needs configurations and tokenizers, but no weights.
    """
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    run.check_trust()
    run.check_data()
    from lightning_weave import rehearse as stage

    small = stage.rehearsed(run)
    with writing(small):
        stage.run(run, small, run.executor(), run.progress, open_console())


@app.command()
def demo(set_: Sets = None, trust: Trust = False) -> None:
    """Run the whole method on a tiny world, in minutes."""
    from lightning_weave.progress import Progress
    from lightning_weave.world import demo as stage
    from lightning_weave.world.layout import lay_out_world

    lay_out_world()
    run = stage.load_demo(set_ or (), trust)
    with writing(run):
        stage.run(run, Progress(), open_console())
