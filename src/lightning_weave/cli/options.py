"""What the commands share: their options, and what those open. Nothing heavy is imported before a recipe is checked."""

import shlex
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_weave.progress import Progress
    from lightning_weave.runs.steps import Steps
    from lightning_weave.runs.work import Workers

Files = Annotated[list[str], typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key of the recipe; may be repeated")
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="only this one, by name; may be repeated")
]
Cluster = Annotated[Literal["ray"] | None, typer.Option(metavar="ray", help="do the work on a Ray cluster")]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="of the cluster; default: $RAY_ADDRESS, or a new one on this machine"),
]
Yes = Annotated[bool, typer.Option("--yes", help="discard what a changed recipe makes stale, without asking")]
Ahead = Annotated[
    bool, typer.Option("--check", help="first check all that this and later stages need, as `lweave run` does")
]
Trust = Annotated[
    bool, typer.Option("--trust", help="run the Python files that the recipe names: objectives, graders, tasks")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def load_steps(files: list[str], sets: list[str] | None, trust: bool = False) -> "Steps":
    """Check the recipe first, import what is heavy after."""
    from lightning_weave.config import load_recipe

    recipe = load_recipe(files, sets or ())
    from lightning_weave.runs.steps import Steps

    words = [*files, *(word for value in sets or () for word in ("--set", value))]
    return Steps(recipe, shlex.join(words), trust)


def open_console() -> "Console":
    """Tables want room: a pipe has no width of its own, and 80 columns would cut them."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def open_progress() -> "Progress":
    from lightning_weave.progress import Progress

    return Progress()


def choose_workers(cluster: str | None, address: str | None) -> "Workers":
    """Say who does the work."""
    if cluster is None:
        from lightning_weave.runs.work import HERE

        return HERE
    from lightning_weave.cluster.connect import connect

    return connect(address)


def writing(steps: "Steps") -> AbstractContextManager[None]:
    """Hold the run directory and log what is said, after the command."""
    from lightning_weave.runs import directory

    return directory.writing(steps, shlex.join(["lweave", *sys.argv[1:]]))
