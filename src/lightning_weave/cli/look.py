"""Commands that prepare a recipe, and that look at a run."""

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lightning_weave.cli.options import (
    Address,
    Cluster,
    Files,
    Json,
    Only,
    Sets,
    Trust,
    load_run,
    open_console,
    writing,
)
from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from lightning_weave.api import Run

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
            help="a specialist and what it was trained from; NAME=ADAPTER for LoRA; or a prompt that works, "
            'NAME=student+system:"Be brief." (also +prefix:, +template:); may be repeated',
        ),
    ] = None,
    bench: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="aime-2024, ... or a file of problems; may be repeated")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="fit it to this GPU (H100, RTX4090, ...) instead of this machine")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="number of these GPUs")] = 1,
    set_: Sets = None,
    trust: Trust = False,
) -> None:
    """Write a recipe from a few names, with a reason for each value.

    Reads configurations, tokenizers and data, but no weights.
    """
    anchors = dict(map(_parse_anchor, anchor or ()))
    from lightning_weave.plan.architecture import find_gpu
    from lightning_weave.plan.costs import PlannedMachine
    from lightning_weave.views import init as stage

    machine = PlannedMachine(find_gpu(gpu), gpus) if gpu else None
    stage.run(
        Path(out),
        student,
        anchors,
        prompts,
        bench or [],
        overrides=set_ or (),
        machine=machine,
        trust=trust,
        console=open_console(),
    )


def _parse_anchor(text: str) -> tuple[str, dict[str, Any]]:
    """Read an anchor of `init` as a table of the recipe."""
    name, _, models = text.partition("=")
    name = name.strip()
    if context := re.fullmatch(r"\s*(.*?)\s*\+(system|prefix|template):(.*)", models, re.DOTALL):
        model, kind, words = context.groups()
        quoted = len(words) > 2 and words[0] == words[-1] and words[0] in "'\""
        table: dict[str, Any] = {"model": model, "post_prompt": {kind: words[1:-1] if quoted else words}}
    else:
        post, comma, pre = (part.strip() for part in models.partition(","))
        table = {"post": post, **({"pre": pre} if comma else {})}
    if not name or not all(table.values()) or (context and not context[3]):
        raise InputError(
            f"--anchor {text}: must look like NAME=POST,PRE (a name, the specialist, what it was trained from), "
            'NAME=ADAPTER for a LoRA adapter, or NAME=student+system:"Be brief." for a prompt'
        )
    return name, table


@app.command()
def preview(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    problems: Annotated[int, typer.Option(min=1, metavar="N", help="problems of each benchmark")] = 20,
    trust: Trust = False,
) -> None:
    """Sample from the targets of compositions before training."""
    run = load_run(recipe, set_, trust=trust)
    from lightning_weave.stages.preview import preview as preview_targets

    with writing(run, keep_recipe=True):
        preview_targets(run, run.progress, open_console(), problems, only)


@app.command(hidden=True)
def interpolate(
    first: Annotated[str, typer.Argument(metavar="A", help="checkpoint at 0")],
    second: Annotated[str, typer.Argument(metavar="B", help="checkpoint at 1, of the same shape")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="directory to write")],
    share: Annotated[float, typer.Option("--lambda", metavar="SHARE", help="share of B, from 0 to 1")] = 0.5,
) -> None:
    """Interpolate the weights of two checkpoints; name OUT in [policies] to evaluate it."""
    from lightning_weave.models.hub import resolve_model
    from lightning_weave.models.weights import interpolate as mix
    from lightning_weave.progress import Progress

    differing = mix(resolve_model(first), resolve_model(second), share, Path(out))
    progress = Progress()
    if differing:
        progress.say(f"note: config.json differs in {', '.join(differing)}; {out} uses that of {first}")
    progress.say(f"{out}: {1 - share:g} x {first} + {share:g} x {second}")


@app.command()
def sweep(
    recipe: Files,
    shares: Annotated[
        str | None, typer.Option(metavar="S,S,...", help="shares of one anchor, from 0 to 1; needed without --forecast")
    ] = None,
    forecast: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="train only the N points that the cache forecasts as best")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(metavar="NAME", help="anchor whose share varies; default: the last one")
    ] = None,
    alphas: Annotated[str | None, typer.Option(metavar="A,A,...", help="also vary alpha over these values")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="vary only the weights of this tag")] = None,
    set_: Sets = None,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Train and evaluate a range of weights from one cache."""
    if shares is None and forecast is None:
        raise InputError("sweep needs --shares, for example --shares 0,0.25,0.5,0.75,1, or --forecast 5")
    numbers = None if shares is None else _numbers("--shares", shares)
    doses = _numbers("--alphas", alphas) if alphas else None
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    run.sweep(numbers, anchor, doses, tag, forecast=forecast, console=open_console())


@app.command()
def forecast(
    recipe: Files,
    shares: Annotated[
        str | None, typer.Option(metavar="S,S,...", help="also shares of one anchor, from 0 to 1")
    ] = None,
    anchor: Annotated[
        str | None, typer.Option(metavar="NAME", help="anchor whose share varies; default: the last one")
    ] = None,
    grid: Annotated[
        int | None, typer.Option(metavar="N", help="also all weights of all anchors in steps of 1/N")
    ] = None,
    alphas: Annotated[str | None, typer.Option(metavar="A,A,...", help="vary alpha over these values")] = None,
    kl_budgets: Annotated[str | None, typer.Option(metavar="K,K,...", help="vary kl_budget over these values")] = None,
    tag: Annotated[str | None, typer.Option(metavar="TAG", help="vary only the weights of this tag")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, metavar="T", help="of sampling; default: eval.temperature")
    ] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", help="of sampling; default: eval.top_p")] = None,
    goal: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GOAL",
            help='choose a composition: aes, "tokens <= 0.6" (of the base), "accuracy >= base", joined by and; '
            "may be repeated",
        ),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="add the chosen composition to the recipe file")] = False,
    compute: Annotated[
        bool, typer.Option("--compute", help="make rollout, reference and scores if they are missing")
    ] = False,
    set_: Sets = None,
    json: Json = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Predict accuracy and tokens before training, from the cache.

    Needs rollout, reference and scores. Points with too few effective samples are shown as not trusted.
    """
    if write and not goal:
        raise InputError('--write needs a goal to choose by, such as --goal aes or --goal "tokens <= 0.6"')
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top-p {top_p:g}: must be greater than 0 and at most 1")
    varied = {"shares": shares, "alphas": alphas, "kl_budgets": kl_budgets}
    numbers: Any = {
        key: _numbers(f"--{key.replace('_', '-')}", text) for key, text in varied.items() if text is not None
    }
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    from lightning_weave.views import forecast as stage

    goals = stage.parse_goals(goal or ())
    sampled: Any = {"temperature": temperature, "top_p": top_p}
    points = run.forecast(anchor=anchor, tag=tag, grid=grid, compute=compute, **numbers, **sampled)
    stage.show(run, points, open_console(), json)
    if goals:
        stage.choose(points, goals, recipe[-1] if write else None, open_console(stderr=json))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{option} {text}: must be numbers separated by commas, for example 0.25,0.5,0.75") from None


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
        typer.Option(metavar="DIR", help="default: report/ in the run directory, or next to several"),
    ] = None,
    benchmark: Annotated[
        str | None, typer.Option(metavar="NAME", help="draw the frontier of this benchmark instead of the average")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="NAMES", help="only these policies, separated by commas, and the base"),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the results as one HTML page, with figures and tables.

    Several run directories make one report: domains of a student are joined, students become blocks of a table.
    """
    runs = _load_runs(recipe, run, set_, trust)
    from lightning_weave.report import report as stage

    names = [name for one in only for name in one.split(",")] if only else None
    stage.run(runs, runs[0].progress, Path(out) if out else None, benchmark, names)


def _load_runs(recipe: list[str], others: list[str] | None, sets: list[str] | None, trust: bool = False) -> "list[Run]":
    """Open each directory as one run, and all files together as one recipe."""
    directories = [name for name in recipe if Path(name).is_dir()]
    if directories and len(directories) < len(recipe):
        raise InputError(f"{directories[0]} is a directory: give run directories, or recipe files that merge into one")
    named = [[name] for name in directories] or [recipe]
    loaded = []
    for files in (*named, *([other] for other in others or ())):
        if len(files) == 1 and Path(files[0]).is_dir():
            from lightning_weave.api import Run

            run = Run.open(files[0], sets or (), trust=trust)
            run.arguments = files[0]
            loaded.append(run)
        else:
            loaded.append(load_run(files, sets, trust=trust))
    return loaded


@app.command()
def export(
    recipe: Files,
    composition: Annotated[str, typer.Option(metavar="NAME", help="which composition")],
    kind: Annotated[
        Literal["targets", "student"],
        typer.Option("--as", metavar="KIND", help="targets: a Parquet data set; student: a directory for the hub"),
    ] = "targets",
    out: Annotated[
        str | None, typer.Option(metavar="DIR", help="default: targets/NAME or publish/NAME in the run directory")
    ] = None,
    set_: Sets = None,
    trust: Trust = False,
) -> None:
    """Write targets for other trainers, or a student for the hub.

    Targets are rows that Hugging Face datasets reads; rerun to resume. A student comes with its card, which has the
    evaluation, and with its recipe.
    """
    run = load_run(recipe, set_, trust=trust)
    from lightning_weave.views import export as stage

    if kind == "student":
        stage.card(run, composition, Path(out) if out else None, run.progress)
    else:
        run.export(composition, out or run.directory / "targets" / composition)


@app.command()
def status(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="RECIPE", help="recipe files (TOML), run directories, or a directory of runs"),
    ] = None,
    set_: Sets = None,
    cost: Annotated[bool, typer.Option("--cost", help="print what every stage cost; compares several runs")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="check every stored file against its checksum")] = False,
    json: Json = False,
) -> None:
    """List complete and missing stages, and what to type next.

    Without a recipe: a list of the runs in ./runs.
    """
    place = Path(recipe[0] if recipe else "runs")
    is_directory_of_runs = not recipe or (place.is_dir() and not (place / "recipe.toml").is_file())
    if is_directory_of_runs:
        folders = sorted(str(file.parent) for file in place.glob("*/recipe.toml"))
        if not folders:
            raise InputError(f"{place}: no run here (looked in {Path.cwd()}). Begin one: lweave init, or lweave demo")
        runs = _load_runs(folders, None, None)
    else:
        runs = _load_runs(recipe or [], None, set_)
    from lightning_weave.views import status as stage

    if cost:
        stage.cost(runs, open_console(), json)
    if verify:
        for run in runs:
            stage.verify(run, run.progress, open_console())
    if cost or verify:
        return
    if is_directory_of_runs:
        stage.overview(runs, open_console(), json)
        return
    for run in runs:
        if place.is_dir():
            run.arguments = shlex.quote(f"{run.arguments}/recipe.toml")
        stage.run(run, open_console(), json)


@app.command()
def doctor(recipe: Files, set_: Sets = None, json: Json = False, trust: Trust = False) -> None:
    """Check models, data and anchors before any GPU time is spent."""
    run = load_run(recipe, set_, trust=trust)
    from lightning_weave.views import doctor as stage

    if any(finding.verdict == "error" for finding in stage.run(run, open_console(), json)):
        raise typer.Exit(1)


@app.command()
def plan(
    recipe: Files,
    set_: Sets = None,
    gpus: Annotated[int, typer.Option(min=1, metavar="N", help="number of GPUs")] = 8,
    gpu: Annotated[str, typer.Option(metavar="NAME", help="kind of GPU: H100, A100, RTX4090, ...")] = "H100",
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, metavar="TOKENS", help="mean length of a prompt")
    ] = None,
    utilisation: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, metavar="SHARE", help="share of a GPU's peak speed in forward passes"),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1, metavar="N", help="tokens per second that one GPU samples")
    ] = None,
    json: Json = False,
) -> None:
    """Predict GPU hours, memory and disk space."""
    from lightning_weave.config import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    from lightning_weave.plan import plan as stage
    from lightning_weave.plan.architecture import find_gpu
    from lightning_weave.plan.costs import PlannedMachine

    stage.run(loaded, PlannedMachine(find_gpu(gpu), gpus, utilisation, rate), prompt_tokens, json, open_console())


@app.command()
def inspect(
    directory: Annotated[str, typer.Argument(metavar="RUN", help="a run directory or a recipe")],
    row: Annotated[int, typer.Option(metavar="N", help="which trajectory, from 0")],
    position: Annotated[int, typer.Option(metavar="N", help="which of its response tokens, from 0")],
    set_: Sets = None,
    json: Json = False,
    trust: Trust = False,
) -> None:
    """Show one position: candidates, shifts and targets."""
    (run,) = _load_runs([directory], None, set_, trust)
    from lightning_weave.views import inspect as stage

    stage.run(run, row, position, open_console(), json)


recipe_app = typer.Typer(help="Print a recipe, or list the keys of recipes.", no_args_is_help=True)


@recipe_app.command()
def show(recipe: Files, set_: Sets = None) -> None:
    """Print the resolved recipe and where each value comes from."""
    from lightning_weave.views import keys as stage

    print(stage.show(recipe, set_ or ()), end="")


@recipe_app.command()
def keys(
    under: Annotated[
        str | None, typer.Argument(metavar="KEY", help="only this key or section, such as train.lora")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="print all keys as a page of tables")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="print a JSON schema for editors")] = False,
) -> None:
    """List the keys of a recipe: type, default, meaning, example."""
    from lightning_weave.views import keys as stage

    if schema:
        print(stage.schema())
    else:
        print(stage.markdown() if markdown else stage.run(under), end="" if markdown else "\n")


@app.command()
def clean(
    recipe: Runs,
    set_: Sets = None,
    policy: Annotated[
        str | None, typer.Option(metavar="NAME", help="remove the training and evaluations of this policy instead")
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", metavar="RECIPE", help="another recipe of this run to keep; may be repeated"),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="remove without asking")] = False,
) -> None:
    """List and remove what no recipe needs. The only command that deletes.

    Stage folders of older recipes, leftovers of killed commands, and checkpoints of finished students.
    """
    runs = _load_runs(recipe, also, set_)
    from lightning_weave.views import clean as stage

    if policy is not None:
        stage.forget(runs[0], policy, open_console(), yes)
    else:
        stage.run(runs, open_console(), yes)
