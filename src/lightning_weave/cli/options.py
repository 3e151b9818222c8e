"""What the commands share: their options, and what those open. Nothing heavy is imported before a recipe is checked."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_weave.errors import InputError
from lightning_weave.ranks import check_ranks

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_weave.progress import Progress
    from lightning_weave.runs.steps import Steps
    from lightning_weave.runs.work import Do

Files = Annotated[list[str], typer.Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key of the recipe; may be repeated")
]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="only this one, by name; may be repeated")
]
Cluster = Annotated[Literal["ray"] | None, typer.Option(metavar="ray", help="make the shards on a Ray cluster")]
Address = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="of the cluster; default: $RAY_ADDRESS, or a new one on this machine"),
]
Yes = Annotated[bool, typer.Option("--yes", help="discard what a changed recipe makes stale, without asking")]
# All that is in a run directory before its first stage.
UNTOUCHED = {".lock", "recipe.toml", "made.toml", "machine.json", "log.txt"}
Json = Annotated[bool, typer.Option("--json", help="print JSON")]


def load_steps(files: list[str], sets: list[str] | None) -> "Steps":
    """Check the recipe first, import what is heavy after."""
    from lightning_weave.config import load_recipe

    recipe = load_recipe(files, sets or ())
    from lightning_weave.runs.steps import Steps

    words = [*files, *(word for value in sets or () for word in ("--set", value))]
    return Steps(recipe, shlex.join(words))


def open_console() -> "Console":
    """Tables want room: a pipe has no width of its own, and 80 columns would cut them."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def open_progress() -> "Progress":
    from lightning_weave.progress import Progress

    return Progress()


def choose_workers(cluster: str | None, address: str | None) -> "Do":
    """Say who makes the shards."""
    if cluster is None:
        from lightning_weave.runs.work import do_here

        return do_here
    from lightning_weave.runs.cluster import connect

    return connect(address)


@contextmanager
def writing(steps: "Steps") -> Iterator[None]:
    """Hold the run directory and write the resolved recipe before anything else. Wrong input leaves no new one."""
    from lightning_weave.config import dump_recipe
    from lightning_weave.progress import keep_log
    from lightning_weave.runs.known import FILE, remember
    from lightning_weave.store import lock_run, write_atomic

    check_ranks()
    run_dir = steps.store.run_dir
    recipe = run_dir / "recipe.toml"
    is_new = not run_dir.exists()
    before = {path: path.read_bytes() for path in (recipe, run_dir / FILE) if path.exists()}
    try:
        with lock_run(run_dir), keep_log(run_dir / "log.txt", shlex.join(["lweave", *sys.argv[1:]])):
            remember(steps)
            write_atomic(recipe, dump_recipe(steps.recipe).encode())
            yield
            steps.remember()
    except InputError:
        if is_new and run_dir.is_dir() and {path.name for path in run_dir.iterdir()} <= UNTOUCHED:
            shutil.rmtree(run_dir)
        elif before:
            (run_dir / FILE).unlink(missing_ok=True)
            for path, content in before.items():
                write_atomic(path, content)
        raise
