"""Options that commands share, and how they load a run. Nothing heavy is imported before the recipe is checked."""

import shlex
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_weave.api import Run
    from lightning_weave.config import Recipe
    from lightning_weave.run import Run as BaseRun

Files = Annotated[list[str], typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key of the recipe; may be repeated")
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="only this name; may be repeated")]
Cluster = Annotated[Literal["ray"] | None, typer.Option(metavar="ray", help="compute on a Ray cluster")]
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="address of the cluster; default: $RAY_ADDRESS, else a new cluster on this machine"
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="allow the code and the programs that the recipe names; read them first")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def load_run(files: list[str], sets: list[str] | None = None, **options: Any) -> "Run":
    """Check the recipe, then import what is heavy; `options` are those of `lw.Run`."""
    from lightning_weave.config import load_recipe

    words = [*files, *(word for value in sets or () for word in ("--set", value))]
    return as_command(load_recipe(files, sets or ()), shlex.join(words), **options)


def as_command(recipe: "Recipe", arguments: str, **options: Any) -> "Run":
    """Open a run whose messages and log name the command and these arguments."""
    from lightning_weave.api import Run

    run = Run(recipe, **options)
    run.arguments = arguments
    run.typed = shlex.join(["lweave", *sys.argv[1:]])
    return run


def open_console(stderr: bool = False) -> "Console":
    """Open a console; tables in a pipe need more than the default 80 columns."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr) if stream.isatty() else Console(width=140, stderr=stderr)


def writing(run: "BaseRun", keep_recipe: bool = False) -> AbstractContextManager[None]:
    """Lock the run directory, and log the command and its output."""
    from lightning_weave import directory

    return directory.writing(run, shlex.join(["lweave", *sys.argv[1:]]), keep_recipe)
