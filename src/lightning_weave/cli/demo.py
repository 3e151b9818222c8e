"""The demo, and the tiny world that it runs on."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_weave.cli.options import Sets, open_console, open_progress, writing

if TYPE_CHECKING:
    from lightning_weave.runs.steps import Steps

app = typer.Typer()
world_app = typer.Typer(help="The tiny world of the demo.", no_args_is_help=True)


@app.command()
def demo(
    set_: Sets = None,
    full: Annotated[bool, typer.Option("--full", help="a third anchor, the sweep and every baseline")] = False,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="instead: refreshed states between offline and online training")
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, metavar="N", help="training seeds per world")] = 1,
    world: Annotated[
        list[int] | None,
        typer.Option(metavar="SEED", help="also build and use the world of this seed; may be repeated"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="build a world first, without the shipped checkpoints")
    ] = False,
) -> None:
    """Run the whole method on a tiny world, in minutes."""
    from lightning_weave.pipeline import preview
    from lightning_weave.report import report
    from lightning_weave.world import demo as stage

    progress = open_progress()
    out = open_console()
    worlds = [] if fresh else [stage.World()]
    worlds += [stage.World(seed) for seed in (world or ([1] if fresh else []))]
    over = stage.FULL if full else stage.REFRESH if refresh else None
    runs: dict[stage.World, list[Steps]] = {}
    for each in worlds:
        each.lay_out(progress)
        runs[each] = [stage.load_demo(each, over, number, set_ or []) for number in range(seeds)]
        for steps in runs[each]:
            with writing(steps):
                stage.run(steps, progress, out, report.run)
    command = " ".join(["lweave", *sys.argv[1:]])
    if over == stage.REFRESH:
        out.print(f"Refreshed: {stage.write_refresh(runs, command)}", soft_wrap=True)
    if over == stage.FULL:
        claims = stage.write_claims(runs, progress, command, partial(preview.run, yes=True))
        out.print(f"Claims:    {claims}", soft_wrap=True)


@world_app.command("build")
def world_build(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="directory to make")],
    seed: Annotated[int, typer.Option(metavar="SEED", help="another seed is another world")] = 0,
    size: Annotated[
        Literal["full", "miniature"], typer.Option(metavar="SIZE", help="full, or miniature: untrained, for tests")
    ] = "full",
) -> None:
    """Make every checkpoint, prompt and benchmark of a world from nothing."""
    from lightning_weave.world.build import build_world

    build_world(Path(directory), seed, open_progress(), size)
