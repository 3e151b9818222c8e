"""A new recipe, and what one could become: a preview of its targets, mixed weights, a sweep of weights."""

from pathlib import Path
from typing import Annotated

import typer

from lightning_weave.cli.options import (
    Address,
    Cluster,
    Files,
    Only,
    Sets,
    Trust,
    Yes,
    load_run,
    load_steps,
    open_console,
    open_progress,
    writing,
)
from lightning_weave.errors import InputError

app = typer.Typer()


@app.command()
def init(
    out: Annotated[str, typer.Argument(metavar="RECIPE", help="recipe file to write, such as mine.toml")],
    student: Annotated[str, typer.Option(metavar="MODEL", help="checkpoint directory or hub name")],
    prompts: Annotated[str, typer.Option(metavar="DATA", help="JSONL or Parquet file, dataset directory or hub name")],
    anchor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=POST,PRE",
            help="a specialist and what it was trained from, or a LoRA adapter alone; may be repeated",
        ),
    ] = None,
    bench: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="aime-2024, ... or a file of problems; may be repeated")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="fit it to this GPU (H100, RTX4090, ...), not to this machine")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="how many of them")] = 1,
    set_: Sets = None,
) -> None:
    """Write a recipe from a few names, with a reason beside each value.

    Reads configurations, tokenizers and data; no weights.
    """
    pairs = dict(_pair(text) for text in anchor or ())
    from lightning_weave.plan.costs import PlannedMachine
    from lightning_weave.plan.gpus import find_gpu
    from lightning_weave.views import init as stage

    machine = PlannedMachine(find_gpu(gpu), gpus) if gpu else None
    stage.run(
        Path(out), student, pairs, prompts, bench or [], overrides=set_ or (), machine=machine, console=open_console()
    )


def _pair(text: str) -> tuple[str, tuple[str, str | None]]:
    name, equals, models = text.partition("=")
    post, comma, pre = models.partition(",")
    if not (name and equals and post.strip()) or (comma and not pre.strip()):
        raise InputError(
            f"--anchor {text}: must look like NAME=POST,PRE: a name, the specialist, what it came from. A LoRA adapter "
            "needs no PRE"
        )
    return name.strip(), (post.strip(), pre.strip() or None)


@app.command()
def preview(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    problems: Annotated[int, typer.Option(min=1, metavar="N", help="problems of each benchmark")] = 20,
    yes: Yes = False,
    trust: Trust = False,
) -> None:
    """Sample from the targets, before anything is trained.

    With live anchors: what each composition aims at.
    """
    steps = load_steps(recipe, set_, trust)
    from lightning_weave.pipeline import preview as stage

    with writing(steps):
        stage.run(steps, open_progress(), open_console(), problems, only, yes=yes)


@app.command()
def interpolate(
    first: Annotated[str, typer.Argument(metavar="A", help="checkpoint at 0")],
    second: Annotated[str, typer.Argument(metavar="B", help="checkpoint at 1, of the same shape")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="directory to make")],
    share: Annotated[float, typer.Option("--lambda", metavar="SHARE", help="how far to go from A (0) to B (1)")] = 0.5,
) -> None:
    """Mix the weights of two checkpoints.

    Name OUT among a recipe's policies to evaluate it.
    """
    from lightning_weave.models.hub import resolve_model
    from lightning_weave.models.interpolate import interpolate as mix

    differing = mix(resolve_model(first), resolve_model(second), share, Path(out))
    progress = open_progress()
    if differing:
        progress.say(f"note: config.json differs in {', '.join(differing)}; {out} has that of {first}")
    progress.say(f"{out}: {1 - share:g} x {first} + {share:g} x {second}")


@app.command()
def sweep(
    recipe: Files,
    shares: Annotated[str, typer.Option(metavar="S,S,...", help="shares of one anchor, from 0 to 1")],
    anchor: Annotated[
        str | None, typer.Option(metavar="NAME", help="the anchor whose share varies; default: the last one")
    ] = None,
    alphas: Annotated[str | None, typer.Option(metavar="A,A,...", help="every share at each of these alphas")] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="vary only the weights of this tag, where they differ by tag")
    ] = None,
    set_: Sets = None,
    yes: Yes = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Train and evaluate a range of weights from one cache.

    The frontier is printed as it grows.
    """
    grid = _numbers("--shares", shares), _numbers("--alphas", alphas) if alphas else None
    run = load_run(recipe, set_, yes=yes, trust=trust, cluster=cluster, address=address)
    run.sweep(grid[0], anchor, grid[1], tag, console=open_console())


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} {text}: must be numbers with commas between, for example 0.25,0.5,0.75") from None
