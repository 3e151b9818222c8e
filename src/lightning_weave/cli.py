"""The `lweave` program: parse, import the stage, call it. A wrong recipe is answered before torch is imported."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lightning_weave.errors import WeaveError

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_weave.progress import Progress
    from lightning_weave.stages.steps import Steps
    from lightning_weave.stages.work import Do

app = typer.Typer(
    help="Compose what independently post-trained models have learned into one student.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
DEBUG = False
INTERRUPTED = 130

Files = Annotated[list[str], typer.Argument(metavar="RECIPE...", help="TOML files, merged left to right")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one key of the recipe")]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="NAME", help="only these, by name")]
Cluster = Annotated[Literal["ray"] | None, typer.Option(help="hand the shards to a cluster")]
Address = Annotated[str | None, typer.Option(help="of the cluster; unsaid: RAY_ADDRESS, or one on this machine")]
Json = Annotated[bool, typer.Option("--json", help="for machines")]


def main() -> None:
    """Run the program; errors for users are one or two lines, never a traceback without --debug."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        app()
    except WeaveError as error:
        if DEBUG:
            raise
        print(f"lweave: {error}", file=sys.stderr)
        sys.exit(error.code)
    except (KeyboardInterrupt, _Stopped):
        print("lweave: stopped. What was finished is kept; the same command goes on from there.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


class _Stopped(BaseException):
    """SIGTERM arrived."""


def _stop(signum: int, frame: FrameType | None) -> None:
    raise _Stopped


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False) -> None:
    global DEBUG
    DEBUG = debug
    level = logging.DEBUG if debug else logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("lightning_weave").setLevel(level)


def _load(files: list[str], sets: list[str] | None) -> "Steps":
    """Check the recipe first, import what is heavy after."""
    from lightning_weave.config import load_recipe

    recipe = load_recipe(files, sets or ())
    import shlex

    from lightning_weave.stages.steps import Steps

    words = [*files, *(word for value in sets or () for word in ("--set", value))]
    return Steps(recipe, shlex.join(words))


def _console() -> "Console":
    """Tables want room: a pipe has no width of its own, and 80 columns would cut them."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=140)


def _progress() -> "Progress":
    from lightning_weave.progress import Progress

    return Progress()


def _crew(cluster: str | None, address: str | None) -> "Do":
    """Say who makes the shards."""
    if cluster is None:
        from lightning_weave.stages.work import do_here

        return do_here
    from lightning_weave.stages.cluster import connect

    return connect(address)


@contextmanager
def _writing(steps: "Steps") -> Iterator[None]:
    """Hold the run directory and write the resolved recipe before anything else."""
    from lightning_weave.config import dump_recipe
    from lightning_weave.store import lock_run, write_atomic

    with lock_run(steps.store.run_dir):
        write_atomic(steps.store.run_dir / "recipe.toml", dump_recipe(steps.recipe).encode())
        yield


@app.command()
def rollout(recipe: Files, set_: Sets = None, cluster: Cluster = None, address: Address = None) -> None:
    """Sample the student's own trajectories."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import rollout as stage

    with _writing(steps):
        stage.run(steps, _progress(), _crew(cluster, address))


@app.command()
def reference(recipe: Files, set_: Sets = None, cluster: Cluster = None, address: Address = None) -> None:
    """Find the student's candidates on its own trajectories."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import reference as stage

    with _writing(steps):
        stage.run(steps, _progress(), _crew(cluster, address))


@app.command()
def score(
    recipe: Files, set_: Sets = None, only: Only = None, cluster: Cluster = None, address: Address = None
) -> None:
    """Score the cached candidates under every anchor model."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import score as stage

    with _writing(steps):
        stage.run(steps, _progress(), only, _crew(cluster, address))


@app.command()
def train(recipe: Files, set_: Sets = None, only: Only = None) -> None:
    """Fit the student to every composition of the cached shifts."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import train as stage

    with _writing(steps):
        stage.run(steps, _progress(), only)


@app.command("eval")
def evaluate(
    recipe: Annotated[list[str] | None, typer.Argument(metavar="RECIPE...", help="TOML files")] = None,
    set_: Sets = None,
    only: Only = None,
    model: Annotated[str | None, typer.Option(help="any checkpoint, without a recipe")] = None,
    bench: Annotated[list[str] | None, typer.Option(help="with --model: aime-2024, ..., file:PATH")] = None,
    lm_eval: Annotated[str | None, typer.Option(metavar="DIR", help="also write lm-evaluation-harness files")] = None,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Sample, grade and summarise policies on benchmarks."""
    steps = _load(recipe, set_) if recipe else _load_model_only(model, bench, set_)
    from datetime import datetime
    from pathlib import Path

    from lightning_weave.stages import eval as stage
    from lightning_weave.stages.results import show_results

    with _writing(steps):
        stage.run(steps, _progress(), only, _crew(cluster, address))
        if lm_eval:
            stage.export_lm_eval(steps, Path(lm_eval), datetime.now())
    show_results(steps, _console())


def _load_model_only(model: str | None, benchmarks: list[str] | None, sets: list[str] | None) -> "Steps":
    from lightning_weave.config import check_recipe, merge_overrides, slug
    from lightning_weave.errors import InputError

    if model is None:
        raise InputError("eval needs a RECIPE, or --model DIR with --bench NAME")
    data = {"name": slug(model), "student": {"model": model}, "eval": {"benchmarks": benchmarks} if benchmarks else {}}
    recipe = check_recipe(merge_overrides(data, sets or ()), "--model")
    from lightning_weave.stages.steps import Steps

    return Steps(recipe, f"--model {model}")


@app.command()
def run(recipe: Files, set_: Sets = None, cluster: Cluster = None, address: Address = None) -> None:
    """Bring every stale stage up to date: the whole recipe, or what is left of it."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import run as stage
    from lightning_weave.stages.results import show_results

    with _writing(steps):
        stage.run(steps, _progress(), _crew(cluster, address))
    show_results(steps, _console())


@app.command()
def demo(
    set_: Sets = None,
    full: Annotated[bool, typer.Option("--full", help="a third anchor, the sweep and every baseline")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="with --full: training seeds per world")] = 1,
    world: Annotated[list[int] | None, typer.Option(help="also build and use the world of this seed")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="use no shipped checkpoint: build a world first")] = False,
) -> None:
    """Weave two capabilities into a student on a tiny world, in minutes."""
    from lightning_weave.stages import demo as stage

    progress, out = _progress(), _console()
    worlds = [] if fresh else [stage.World()]
    worlds += [stage.World(seed) for seed in (world or ([1] if fresh else []))]
    runs: dict[stage.World, list[Steps]] = {}
    for each in worlds:
        each.lay_out(progress)
        runs[each] = [stage.load_demo(each, full, number, set_ or []) for number in range(seeds)]
        for steps in runs[each]:
            with _writing(steps):
                stage.run(steps, progress, out)
    if full:
        command = " ".join(["lweave", *sys.argv[1:]])
        out.print(f"Claims:    {stage.write_claims(runs, progress, command)}", soft_wrap=True)


world_app = typer.Typer(help="The tiny world of the demo.", no_args_is_help=True)
app.add_typer(world_app, name="world")


@world_app.command("build")
def world_build(
    directory: Annotated[str, typer.Argument(metavar="DIR")],
    seed: Annotated[int, typer.Option(help="another seed is another world")] = 0,
    size: Annotated[Literal["full", "miniature"], typer.Option(help="miniature goes through the motions")] = "full",
) -> None:
    """Make every checkpoint, prompt and benchmark of a world from nothing."""
    from pathlib import Path

    from lightning_weave.world.build import build_world

    build_world(Path(directory), seed, _progress(), size)


@app.command()
def preview(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    problems: Annotated[int, typer.Option(min=1, help="of each benchmark")] = 20,
) -> None:
    """Sample from the tilted targets themselves, with live anchors: what a composition aims at, before training."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import preview as stage

    with _writing(steps):
        stage.run(steps, _progress(), _console(), problems, only)


@app.command()
def interpolate(
    first: Annotated[str, typer.Argument(metavar="A", help="checkpoint at 0")],
    second: Annotated[str, typer.Argument(metavar="B", help="checkpoint at 1, of the same shape")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="directory to make")],
    share: Annotated[float, typer.Option("--lambda", help="how far to go from A to B")] = 0.5,
) -> None:
    """Mix the weights of two checkpoints; list OUT under [policies] to evaluate it."""
    from pathlib import Path

    from lightning_weave.models.interpolate import interpolate as mix
    from lightning_weave.models.load import resolve_model

    mix(resolve_model(first), resolve_model(second), share, Path(out))


@app.command()
def sweep(
    recipe: Files,
    shares: Annotated[str, typer.Option(metavar="S,S,...", help="shares of one anchor, from 0 to 1")],
    anchor: Annotated[str | None, typer.Option(help="whose share; unsaid: the last anchor's")] = None,
    alphas: Annotated[str | None, typer.Option(metavar="A,A,...", help="every share at each of these alphas")] = None,
    set_: Sets = None,
) -> None:
    """Train and evaluate a row of weights from one cache, and print their frontier as it grows."""
    wanted = _numbers("--shares", shares), _numbers("--alphas", alphas) if alphas else None
    steps = _load(recipe, set_)
    from lightning_weave.stages.sweep_plan import plan_sweep

    plan = plan_sweep(steps.recipe, wanted[0], anchor, wanted[1])
    from lightning_weave.stages import sweep as stage

    with _writing(steps):
        stage.run(steps, plan, _progress(), _console())


def _numbers(option: str, text: str) -> list[float]:
    from lightning_weave.errors import InputError

    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} {text}: must be numbers with commas between, for example 0.25,0.5,0.75") from None


@app.command()
def report(
    recipe: Annotated[
        list[str], typer.Argument(metavar="RECIPE...", help="one run each; several of one student merge")
    ],
    set_: Sets = None,
) -> None:
    """Draw what happened and why: one page that opens from disk."""
    runs = [_load([file], set_) for file in recipe]
    from lightning_weave.stages import report as stage

    stage.run(runs, _progress())


@app.command()
def card(
    recipe: Files,
    composition: Annotated[str, typer.Option(help="which trained student")],
    out: Annotated[str | None, typer.Option(metavar="DIR", help="unsaid: publish/ in the run directory")] = None,
    set_: Sets = None,
) -> None:
    """Make a directory that is ready for the hub: the student, its card with evaluation, its recipe."""
    steps = _load(recipe, set_)
    from pathlib import Path

    from lightning_weave.stages import publish as stage

    stage.run(steps, composition, Path(out) if out else None, _progress())


@app.command()
def status(recipe: Files, set_: Sets = None) -> None:
    """Say what is done, stale or missing, and what to type next."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import status as stage

    stage.run(steps, _console())


@app.command()
def doctor(recipe: Files, set_: Sets = None, json: Json = False) -> None:
    """Say before any GPU time whether the anchors are usable."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import doctor as stage

    stage.run(steps, _console(), json)


@app.command()
def plan(
    recipe: Annotated[list[str] | None, typer.Argument(metavar="RECIPE...", help="TOML files")] = None,
    set_: Sets = None,
    gpus: Annotated[int, typer.Option(min=1, help="how many")] = 8,
    gpu: Annotated[str, typer.Option(help="which: H100, A100, RTX4090, ...")] = "H100",
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="mean length of a prompt")] = None,
    utilisation: Annotated[float | None, typer.Option(min=0.01, max=1, help="of the peak, in forward passes")] = None,
    rate: Annotated[float | None, typer.Option(min=1, help="tokens per second that one GPU samples")] = None,
    calibration: Annotated[bool, typer.Option("--calibration", help="predictions beside the paper's table")] = False,
    json: Json = False,
) -> None:
    """Predict work, memory, disk and GPU hours from the architectures alone."""
    if calibration:
        from lightning_weave.stages.plan_calibration import calibration_page

        print(calibration_page(), end="")
        return
    from lightning_weave.config import load_recipe
    from lightning_weave.errors import InputError

    if not recipe:
        raise InputError("plan needs a RECIPE, or --calibration")
    loaded = load_recipe(recipe, set_ or ())
    from lightning_weave.plan.costs import Machine
    from lightning_weave.plan.gpus import find_gpu
    from lightning_weave.stages import plan as stage

    stage.run(loaded, Machine(find_gpu(gpu), gpus, utilisation, rate), prompt_tokens, json, _console())


@app.command()
def inspect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run directory or a recipe")],
    row: Annotated[int, typer.Option(help="which trajectory, from 0")],
    position: Annotated[int, typer.Option(help="which of its response tokens, from 0")],
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Show one decision: candidates, behaviour, every model, every pair's shift, the targets."""
    file, here = _recipe_of_run(run)
    steps = _load([file], [*here, *(set_ or ())])
    from lightning_weave.stages import inspect as stage

    stage.run(steps, row, position, _console(), json)


def _recipe_of_run(run: str) -> tuple[str, list[str]]:
    """Take a run directory by its own recipe.toml, wherever it stands now."""
    import json
    from pathlib import Path

    from lightning_weave.errors import InputError

    folder = Path(run)
    if not folder.is_dir():
        return run, []
    if not (folder / "recipe.toml").is_file():
        raise InputError(f"{run}: no recipe.toml here, so no run directory. Give runs/NAME, or a recipe")
    place = folder.resolve()
    return str(folder / "recipe.toml"), [f"runs={json.dumps(str(place.parent))}", f"name={json.dumps(place.name)}"]


@app.command()
def verify(recipe: Files, set_: Sets = None) -> None:
    """Check every stored byte against its checksum."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import verify as stage

    stage.run(steps, _progress(), _console())


@app.command()
def cost(recipe: Files, set_: Sets = None) -> None:
    """Print what every stage cost, from what was measured."""
    steps = _load(recipe, set_)
    from lightning_weave.stages import cost as stage

    stage.run(steps, _console())


if __name__ == "__main__":
    main()
