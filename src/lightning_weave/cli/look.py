"""What a run is, what came of it, and what it costs."""

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_weave.cli.options import Files, Json, Sets, Trust, load_run, load_steps, open_console, open_progress
from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from lightning_weave.runs.steps import Steps

app = typer.Typer()
Runs = Annotated[
    list[str], typer.Argument(metavar="RECIPE", help="recipe files (TOML), merged into one; or run directories")
]
OtherRuns = Annotated[
    list[str] | None,
    typer.Option("--run", metavar="RECIPE", help="another run, by recipe or directory; may be repeated"),
]


@app.command()
def report(
    recipe: Runs,
    set_: Sets = None,
    run: OtherRuns = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="default: report/ in the run directory, or beside several"),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help="draw the frontier on this one instead of the average")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAMES", help="only these policies, with commas between, and the base"),
    ] = None,
) -> None:
    """Draw what happened and why: one page that opens from disk.

    Several run directories make one report: domains of a student join, students become blocks of a table.
    """
    runs = _load_runs(recipe, run, set_)
    from lightning_weave.report import report as stage

    names = [name for one in only for name in one.split(",")] if only else None
    stage.run(runs, open_progress(), Path(out) if out else None, benchmark, names)


def _load_runs(recipe: list[str], others: list[str] | None, sets: list[str] | None) -> "list[Steps]":
    """Take each directory as a run of its own, and files together as one recipe."""
    directories = [name for name in recipe if Path(name).is_dir()]
    if directories and len(directories) < len(recipe):
        raise InputError(f"{directories[0]} is a directory: give run directories, or recipe files that merge into one")
    named = [[name] for name in directories] or [recipe]
    loaded = []
    for files in (*named, *([other] for other in others or ())):
        if len(files) == 1 and Path(files[0]).is_dir():
            from lightning_weave.api import Run

            loaded.append(replace(Run.open(files[0], sets or ()).steps, arguments=files[0]))
        else:
            loaded.append(load_steps(files, sets))
    return loaded


@app.command()
def card(
    recipe: Files,
    composition: Annotated[str, typer.Option(metavar="NAME", help="which trained student")],
    out: Annotated[str | None, typer.Option(metavar="DIR", help="default: publish/ in the run directory")] = None,
    set_: Sets = None,
) -> None:
    """Make a directory that is ready for the hub.

    It holds the student, its card with evaluation, and its recipe.
    """
    steps = load_steps(recipe, set_)
    from lightning_weave.views import card as stage

    stage.run(steps, composition, Path(out) if out else None, open_progress())


@app.command()
def export(
    recipe: Files,
    composition: Annotated[str, typer.Option(metavar="NAME", help="whose targets")],
    out: Annotated[str, typer.Option(metavar="DIR", help="directory of the data set")],
    set_: Sets = None,
) -> None:
    """Write targets as a Parquet data set, for other trainers.

    Hugging Face datasets reads it; rerun to resume.
    """
    load_run(recipe, set_).export(composition, out)


@app.command()
def status(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="recipe files (TOML), a run directory, or a directory of runs"),
    ] = None,
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Say what is done, stale or missing, and what to type next.

    Without a recipe: a list of the runs in ./runs.
    """
    place = Path(recipe[0] if recipe else "runs")
    listed = not recipe or (place.is_dir() and not (place / "recipe.toml").is_file())
    runs = _runs_in(place) if listed else _load_runs(recipe or [], None, set_)
    from lightning_weave.views import status as stage

    if listed:
        stage.overview(runs, open_console(), json)
    else:
        arguments = shlex.quote(str(place / "recipe.toml")) if place.is_dir() else runs[0].arguments
        stage.run(replace(runs[0], arguments=arguments), open_console(), json)


def _runs_in(directory: Path) -> "list[Steps]":
    folders = sorted(file.parent for file in directory.glob("*/recipe.toml"))
    if not folders:
        raise InputError(f"{directory}: no run here (looked in {Path.cwd()}). Begin one: lweave init, or lweave demo")
    from lightning_weave.api import Run

    return [Run.open(place).steps for place in folders]


@app.command()
def doctor(recipe: Files, set_: Sets = None, json: Json = False, trust: Trust = False) -> None:
    """Say before any GPU time whether the anchors are usable."""
    steps = load_steps(recipe, set_, trust)
    from lightning_weave.views import doctor as stage

    if any(finding.verdict == "error" for finding in stage.run(steps, open_console(), json)):
        raise typer.Exit(1)


@app.command()
def plan(
    recipe: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")
    ] = None,
    set_: Sets = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="how many GPUs")] = 8,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="which GPU: H100, A100, RTX4090, ...")] = "H100",
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, metavar="TOKENS", help="mean length of a prompt")
    ] = None,
    utilisation: Annotated[
        float | None, typer.Option(min=0.01, max=1, metavar="SHARE", help="of a GPU's peak speed, in forward passes")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1, metavar="N", help="tokens per second that one GPU samples")
    ] = None,
    calibration: Annotated[
        bool, typer.Option("--calibration", help="print predictions beside the paper's table instead")
    ] = False,
    json: Json = False,
) -> None:
    """Predict GPU hours, memory and disk from configurations."""
    if calibration:
        from lightning_weave.plan.calibration_page import calibration_page

        print(calibration_page(), end="")
        return
    from lightning_weave.config import load_recipe

    if not recipe:
        raise InputError("plan needs a RECIPE, or --calibration")
    loaded = load_recipe(recipe, set_ or ())
    from lightning_weave.plan import plan as stage
    from lightning_weave.plan.costs import PlannedMachine
    from lightning_weave.plan.gpus import find_gpu

    stage.run(loaded, PlannedMachine(find_gpu(gpu), gpus, utilisation, rate), prompt_tokens, json, open_console())


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run directory or a recipe")],
    row: Annotated[int, typer.Option(metavar="N", help="which trajectory, from 0")],
    position: Annotated[int, typer.Option(metavar="N", help="which of its response tokens, from 0")],
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Show one decision: candidates, shifts and targets."""
    (steps,) = _load_runs([run], None, set_)
    from lightning_weave.views import inspect as stage

    stage.run(steps, row, position, open_console(), json)


@app.command()
def keys(
    under: Annotated[
        str | None, typer.Argument(metavar="KEY", help="only this key or section, such as train.lora")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print all keys as a page of tables")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print a JSON schema for editors")] = False,
) -> None:
    """List the keys of a recipe: type, default, meaning, example."""
    from lightning_weave.views import keys as stage

    print(stage.schema() if schema else stage.markdown() if markdown else stage.run(under))


@app.command()
def show(recipe: Files, set_: Sets = None) -> None:
    """Print the resolved recipe, with where each value came from."""
    from lightning_weave.views import show as stage

    print(stage.run(recipe, set_ or ()), end="")


@app.command()
def verify(recipe: Files, set_: Sets = None) -> None:
    """Check every stored byte against its checksum."""
    steps = load_steps(recipe, set_)
    from lightning_weave.views import verify as stage

    stage.run(steps, open_progress(), open_console())


@app.command()
def clean(
    recipe: Files,
    set_: Sets = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="RECIPE", help="another recipe of this run to keep; may be repeated"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False,
) -> None:
    """List and remove what no recipe needs.

    Old stages that were set aside, leftovers, checkpoints of finished students, and what is in no recipe.
    """
    recipes = [load_steps(files, set_) for files in (recipe, *([file] for file in also or ()))]
    from lightning_weave.views import clean as stage

    stage.run(recipes, open_console(), yes)


@app.command()
def forget(
    recipe: Files,
    policy: Annotated[str, typer.Option(metavar="NAME", help="a composition, another policy, or base")],
    set_: Sets = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False,
) -> None:
    """Remove one policy: its training and its evaluations."""
    steps = load_steps(recipe, set_)
    from lightning_weave.views import forget as stage

    stage.run(steps, policy, open_console(), yes)


@app.command()
def cost(recipe: Runs, set_: Sets = None, run: OtherRuns = None, json: Json = False) -> None:
    """Print what every stage cost, from what was measured.

    Of several runs, the paper's table: a column for each student and set of anchors.
    """
    runs = _load_runs(recipe, run, set_)
    from lightning_weave.views import cost as stage

    stage.run(runs, open_console(), json)
