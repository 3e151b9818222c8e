"""The commands: parse, check the recipe, then import what is heavy and call it. In the order of their use."""

import json
import re
import shlex
import sys
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from lightning_weave.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from lightning_weave.api import Run
    from lightning_weave.config import Recipe
    from lightning_weave.run import Run as BaseRun

app = typer.Typer()
recipe_app = typer.Typer(help="Print a recipe, or list the keys of recipes.", no_args_is_help=True)

Files = Annotated[list[str], Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")]
Runs = Annotated[list[str], Argument(metavar="RECIPE", help="recipe files (TOML), merged into one; or run directories")]
OtherRuns = Annotated[
    list[str] | None, Option("--run", metavar="RECIPE", help="another run, by recipe or directory; may be repeated")
]
Sets = Annotated[
    list[str] | None, Option("--set", metavar="KEY=VALUE", help="override one key of the recipe; may be repeated")
]
Only = Annotated[
    list[str] | None,
    Option("--only", metavar="NAME", help="only this composition, policy or scored model; may be repeated"),
]
Cluster = Annotated[Literal["ray"] | None, Option(metavar="ray", help="compute on a Ray cluster")]
Address = Annotated[
    str | None,
    Option(metavar="ADDRESS", help="address of the cluster; default: $RAY_ADDRESS, else a new cluster on this machine"),
]
Trust = Annotated[
    bool, Option("--trust", help="allow the code and the programs that the recipe names; read them first")
]
Json = Annotated[bool, Option("--json", help="print JSON")]
VariedAnchor = Annotated[str | None, Option(metavar="NAME", help="anchor whose share varies; default: the last one")]
VariedTag = Annotated[str | None, Option(metavar="TAG", help="vary only the weights of this tag")]


def load_run(files: list[str], sets: list[str] | None = None, **options: Any) -> "Run":
    """Check the recipe, then import what is heavy; `options` are those of `lw.Run`."""
    from lightning_weave.config import load_recipe

    words = [*files, *(word for value in sets or () for word in ("--set", value))]
    recipe = load_recipe(files, sets or ())
    _check_demo(recipe)
    return as_command(recipe, shlex.join(words), **options)


def _check_demo(recipe: "Recipe") -> None:
    """Explain why nothing of the demo is there. Its files may be gone once it has run."""
    world = Path("runs/demo-world")
    needs = recipe.student.model.startswith(f"{world}/")
    if needs and not world.exists() and not (Path(recipe.runs) / recipe.name).exists():
        raise InputError(f"student.model = {recipe.student.model!r}: no such directory. `lweave demo` makes {world}")


def as_command(recipe: "Recipe", arguments: str, **options: Any) -> "Run":
    """Open a run whose messages and log name the command and these arguments."""
    from lightning_weave.api import Run

    run = Run(recipe, **options)
    run.arguments = arguments
    run.typed = shlex.join(["lweave", *sys.argv[1:]])
    return run


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


def open_console(stderr: bool = False) -> "Console":
    """Open a console; tables in a pipe need more than the default 80 columns."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr) if stream.isatty() else Console(width=140, stderr=stderr)


def writing(run: "BaseRun", keep_recipe: bool = False) -> AbstractContextManager[None]:
    """Lock the run directory, and log the command and its output."""
    from lightning_weave import directory

    return directory.writing(run, shlex.join(["lweave", *sys.argv[1:]]), keep_recipe)


@app.command()
def init(
    out: Annotated[str, Argument(metavar="RECIPE", help="recipe file to write, such as mine.toml")],
    student: Annotated[str, Option(metavar="MODEL", help="checkpoint directory or hub name")],
    prompts: Annotated[str, Option(metavar="DATA", help="JSONL or Parquet file, dataset directory or hub name")],
    anchor: Annotated[
        list[str] | None,
        Option(
            metavar="NAME=POST,PRE",
            help="a specialist and what it was trained from; NAME=ADAPTER for LoRA; or a prompt that works, "
            'NAME=student+system:"Be brief." (also +prefix:, +template:); may be repeated',
        ),
    ] = None,
    bench: Annotated[
        list[str] | None, Option(metavar="NAME", help="aime-2024, ... or a file of problems; may be repeated")
    ] = None,
    gpu: Annotated[
        str | None, Option(metavar="NAME", help="fit it to this GPU (H100, RTX4090, ...) instead of this machine")
    ] = None,
    gpus: Annotated[int, Option(min=1, metavar="N", help="number of these GPUs")] = 1,
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


@recipe_app.command()
def show(recipe: Files, set_: Sets = None) -> None:
    """Print the resolved recipe and where each value comes from."""
    from lightning_weave.views import keys as stage

    print(stage.show(recipe, set_ or ()), end="")


@recipe_app.command()
def keys(
    under: Annotated[str | None, Argument(metavar="KEY", help="only this key or section, such as train.lora")] = None,
    markdown: Annotated[bool, Option("--markdown", help="print all keys as a page of tables")] = False,
    schema: Annotated[bool, Option("--schema", help="print a JSON schema for editors")] = False,
) -> None:
    """List the keys of a recipe: type, default, meaning, example."""
    from lightning_weave.views import keys as stage

    if schema:
        print(stage.schema())
    else:
        print(stage.markdown() if markdown else stage.run(under), end="" if markdown else "\n")


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
    gpus: Annotated[int, Option(min=1, metavar="N", help="number of GPUs")] = 8,
    gpu: Annotated[str, Option(metavar="NAME", help="kind of GPU: H100, A100, RTX4090, ...")] = "H100",
    prompt_tokens: Annotated[float | None, Option(min=1, metavar="TOKENS", help="mean length of a prompt")] = None,
    utilisation: Annotated[
        float | None, Option(min=0.01, max=1, metavar="SHARE", help="share of a GPU's peak speed in forward passes")
    ] = None,
    rate: Annotated[float | None, Option(min=1, metavar="N", help="tokens per second that one GPU samples")] = None,
    json: Json = False,
) -> None:
    """Predict GPU hours, memory and disk space."""
    from lightning_weave.config import load_recipe

    loaded = load_recipe(recipe, set_ or ())
    _check_demo(loaded)
    if any(anchor.cache is not None for anchor in loaded.anchors.values()):
        from lightning_weave.run import Run

        loaded = Run(loaded).recipe
    from lightning_weave.plan import plan as stage
    from lightning_weave.plan.architecture import find_gpu
    from lightning_weave.plan.costs import PlannedMachine

    stage.run(loaded, PlannedMachine(find_gpu(gpu), gpus, utilisation, rate), prompt_tokens, json, open_console())


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
def run(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    dry_run: Annotated[bool, Option("--dry-run", help="only list what would be computed, and what is wrong")] = False,
    until: Annotated[
        Literal["prompts", "rollout", "reference", "score", "train", "eval"],
        Option(metavar="STAGE", help="stop after prompts, rollout, reference, score, train or eval"),
    ] = "eval",
    force: Annotated[bool, Option("--force", help="continue where a check would stop the run")] = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Compute everything that is missing, in order."""
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    run.check_data()
    from lightning_weave.stages import run as stage

    chosen = run.derive(recipe=stage.narrow(run, only)) if only else run
    if dry_run:
        stage.dry_run(chosen, open_console(), until)
        return
    run.run(force, until, only or ())
    if until != "eval":
        return
    _show_results(run)
    stage.show_next(chosen, open_console())


@app.command("eval")
def evaluate(
    recipe: Annotated[
        list[str] | None, Argument(metavar="RECIPE", help="recipe files (TOML); a later one overrides")
    ] = None,
    set_: Sets = None,
    only: Only = None,
    model: Annotated[
        str | None, Option(metavar="MODEL", help="checkpoint directory or hub name, instead of a recipe")
    ] = None,
    bench: Annotated[
        list[str] | None, Option(metavar="NAME", help="with --model: aime-2024, ... or a file; may be repeated")
    ] = None,
    lm_eval: Annotated[str | None, Option(metavar="DIR", help="also write lm-evaluation-harness files")] = None,
    harness: Annotated[
        Literal["lm-eval"] | None, Option(metavar="lm-eval", help="run only the tasks of lm-evaluation-harness")
    ] = None,
    tasks: Annotated[
        str | None, Option(metavar="A,B", help="with --harness: these tasks instead of harness.tasks")
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


def _show_results(run: "Run", base: str = "base") -> None:
    """Print the table, and log it."""
    from lightning_weave.progress import keep_log
    from lightning_weave.report.results import show_results

    with keep_log(run.directory / "log.txt"):
        show_results(run, open_console(), base)


@app.command()
def forecast(
    recipe: Files,
    shares: Annotated[str | None, Option(metavar="S,S,...", help="also shares of one anchor, from 0 to 1")] = None,
    anchor: VariedAnchor = None,
    grid: Annotated[int | None, Option(metavar="N", help="also all weights of all anchors in steps of 1/N")] = None,
    alphas: Annotated[str | None, Option(metavar="A,A,...", help="vary alpha over these values")] = None,
    kl_budgets: Annotated[str | None, Option(metavar="K,K,...", help="vary kl_budget over these values")] = None,
    tag: VariedTag = None,
    temperature: Annotated[
        float | None, Option(min=0, metavar="T", help="of sampling; default: eval.temperature")
    ] = None,
    top_p: Annotated[float | None, Option(metavar="P", help="of sampling; default: eval.top_p")] = None,
    goal: Annotated[
        list[str] | None,
        Option(
            metavar="GOAL",
            help='choose a composition: aes, "tokens <= 0.6" (of the base), "accuracy >= base", joined by and; '
            "may be repeated",
        ),
    ] = None,
    levels: Annotated[
        int | None,
        Option(min=2, max=5, metavar="N", help="choose N effort levels, evenly spaced in tokens on the frontier"),
    ] = None,
    write: Annotated[bool, Option("--write", help="add the chosen composition to the recipe file")] = False,
    compute: Annotated[
        bool, Option("--compute", help="make rollout, reference and scores if they are missing")
    ] = False,
    realised: Annotated[
        bool, typer.Option("--realised", help="after training: how much of the target's shift was learned, and where")
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
    if write and not goal and not levels:
        raise InputError('--write needs --levels 3 or a goal to choose by, such as --goal "tokens <= 0.6"')
    if goal and levels:
        raise InputError("--goal chooses one composition and --levels several: give one of them")
    if realised and (goal or levels):
        raise InputError("--realised looks at trained students, --goal and --levels choose what to train: give one")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError(f"--top-p {top_p:g}: must be greater than 0 and at most 1")
    varied = {"shares": shares, "alphas": alphas, "kl_budgets": kl_budgets}
    numbers: Any = {
        key: _numbers(f"--{key.replace('_', '-')}", text) for key, text in varied.items() if text is not None
    }
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    from lightning_weave.views import forecast as stage

    if realised:
        stage.show_realised(run, run.realised(), open_console(), json)
        return
    goals = stage.parse_goals(goal or ())
    if levels:
        from lightning_weave.stages.forecast import usual_grid

        grid, numbers["alphas"] = usual_grid(run.recipe, numbers.get("shares"), grid, numbers.get("alphas"))
    sampled: Any = {"temperature": temperature, "top_p": top_p}
    points = run.forecast(anchor=anchor, tag=tag, grid=grid, compute=compute, **numbers, **sampled)
    stage.show(run, points, open_console(), json)
    if levels:
        chosen = stage.choose_levels(points, levels)
        stage.show_levels(run, chosen, recipe[-1] if write else None, open_console(stderr=json))
    if goals:
        stage.choose(run, points, goals, recipe[-1] if write else None, open_console(stderr=json))


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: must be numbers separated by commas, for example 0.25,0.5,0.75") from None


@app.command()
def sweep(
    recipe: Files,
    shares: Annotated[
        str | None, Option(metavar="S,S,...", help="shares of one anchor, from 0 to 1; needed without --forecast")
    ] = None,
    forecast: Annotated[
        int | None, Option(min=1, metavar="N", help="train only the N points that the cache forecasts as best")
    ] = None,
    anchor: VariedAnchor = None,
    alphas: Annotated[str | None, Option(metavar="A,A,...", help="also vary alpha over these values")] = None,
    tag: VariedTag = None,
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
def compare(
    recipe: Files,
    composition: Annotated[str, Option(metavar="NAME", help="which composition")],
    also: Annotated[
        list[str] | None, Option("--also", metavar="NAME", help="another policy of the recipe; may be repeated")
    ] = None,
    only: Annotated[
        list[str] | None, Option("--only", metavar="NAME", help="only this alternative; may be repeated")
    ] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="only list what would be computed, and what is left out")
    ] = False,
    set_: Sets = None,
    json: Json = False,
    trust: Trust = False,
    cluster: Cluster = None,
    address: Address = None,
) -> None:
    """Compare a composition with the alternatives to it.

    Makes and evaluates those that apply to the recipe (merged weights, system prompts, a token cap, decoding from the
    target, baselines, placebos), and compares each with the composition's frontier at the same number of tokens.
    """
    run = load_run(recipe, set_, trust=trust, cluster=cluster, address=address)
    run.check_data()
    from lightning_weave.stages.compare import plan_compare
    from lightning_weave.views import compare as stage

    plan = plan_compare(run, composition, also or (), only)
    if dry_run:
        stage.show_plan(plan, open_console())
        return
    found = run.compare(composition, *also or (), only=only, console=open_console(stderr=json))
    if json:
        stage.print_json(found)


@app.command()
def preview(
    recipe: Files,
    set_: Sets = None,
    only: Only = None,
    problems: Annotated[int, Option(min=1, metavar="N", help="problems of each benchmark")] = 20,
    trust: Trust = False,
) -> None:
    """Sample from the targets of compositions before training."""
    run = load_run(recipe, set_, trust=trust)
    from lightning_weave.stages.preview import preview as preview_targets

    with writing(run, keep_recipe=True):
        preview_targets(run, run.progress, open_console(), problems, only)


@app.command()
def status(
    recipe: Annotated[
        list[str] | None,
        Argument(metavar="RECIPE", help="recipe files (TOML), run directories, or a directory of runs"),
    ] = None,
    set_: Sets = None,
    cost: Annotated[bool, Option("--cost", help="print what every stage cost; compares several runs")] = False,
    verify: Annotated[bool, Option("--verify", help="check every stored file against its checksum")] = False,
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
            raise InputError(f"{place}: no run here (looked in {Path.cwd()}). Start with lweave init or lweave demo")
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
def report(
    recipe: Runs,
    set_: Sets = None,
    run: OtherRuns = None,
    out: Annotated[
        str | None, Option(metavar="DIR", help="default: report/ in the run directory, or next to several")
    ] = None,
    benchmark: Annotated[
        str | None, Option(metavar="NAME", help="draw the frontier of this benchmark instead of the average")
    ] = None,
    only: Annotated[
        list[str] | None,
        Option(
            "--only",
            metavar="NAMES",
            help="only these policies (A,B), those that they are built from, and the base",
        ),
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


@app.command()
def inspect(
    directory: Annotated[str, Argument(metavar="RUN", help="a run directory or a recipe")],
    row: Annotated[int, Option(metavar="N", help="which trajectory, from 0")],
    position: Annotated[int, Option(metavar="N", help="which of its response tokens, from 0")],
    set_: Sets = None,
    json: Json = False,
    trust: Trust = False,
) -> None:
    """Show one position: candidates, shifts and targets."""
    (run,) = _load_runs([directory], None, set_, trust)
    from lightning_weave.views import inspect as stage

    stage.run(run, row, position, open_console(), json)


@app.command()
def export(
    recipe: Files,
    composition: Annotated[str, Option(metavar="NAME", help="which composition")],
    kind: Annotated[
        Literal["targets", "student"] | None,
        Option("--as", metavar="KIND", help="targets (default): a Parquet data set; student: a directory for the hub"),
    ] = None,
    out: Annotated[
        str | None, Option(metavar="DIR", help="default: targets/NAME or publish/NAME in the run directory")
    ] = None,
    push: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="also upload the student to this repository of the hub")
    ] = None,
    public: Annotated[bool, Option("--public", help="with --push: a public repository; default: private")] = False,
    set_: Sets = None,
    trust: Trust = False,
) -> None:
    """Write targets for other trainers, or a student for the hub.

    Targets are rows that Hugging Face datasets reads; rerun to resume. A student comes with its card, which has the
    evaluation, with its recipe and with the report.
    """
    if push and kind == "targets":
        raise InputError(f"--push {push}: uploads a student; remove --as targets")
    run = load_run(recipe, set_, trust=trust)
    from lightning_weave.views import export as stage

    if push:
        stage.publish(run, composition, Path(out) if out else None, push, public, run.progress)
    elif kind == "student":
        stage.card(run, composition, Path(out) if out else None, run.progress)
    else:
        run.export(composition, out or run.directory / "targets" / composition)


@app.command()
def push(
    recipe: Files,
    url: Annotated[str, Argument(metavar="URL", help="s3://, gs://, hf://datasets/OWNER/NAME, file://")],
    everything: Annotated[bool, Option("--all", help="the whole run, to continue it elsewhere")] = False,
    public: Annotated[bool, Option("--public", help="a public repository on the hub; default: private")] = False,
    set_: Sets = None,
    trust: Trust = False,
) -> None:
    """Publish rollouts, reference and scores, for others to compose.

    Only what is missing there is copied; rerun to resume.
    """
    load_run(recipe, set_, trust=trust).push(url, everything, public)


@app.command()
def pull(
    url: Annotated[str, Argument(metavar="URL", help="where it was pushed to")],
    runs: Annotated[str, Option(metavar="DIR", help="directory of runs")] = "runs",
) -> None:
    """Fetch what was pushed, into ./runs.

    Every file is checked on arrival; rerun to resume.
    """
    from lightning_weave.progress import Progress
    from lightning_weave.published import pull as fetch

    fetch(url, runs, Progress())


@app.command()
def clean(
    recipe: Runs,
    set_: Sets = None,
    policy: Annotated[
        str | None, Option(metavar="NAME", help="remove the training and evaluations of this policy instead")
    ] = None,
    also: Annotated[
        list[str] | None, Option("--also", metavar="RECIPE", help="another recipe of this run to keep; may be repeated")
    ] = None,
    yes: Annotated[bool, Option("--yes", help="remove without asking")] = False,
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


@app.command()
def demo(set_: Sets = None, trust: Trust = False) -> None:
    """Run the whole method on a toy task, in minutes."""
    from lightning_weave.progress import Progress
    from lightning_weave.world import demo as stage
    from lightning_weave.world.layout import lay_out_world

    lay_out_world()
    run = stage.load_demo(set_ or (), trust)
    with writing(run):
        stage.run(run, Progress(), open_console())


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
            raise InputError(f"--only {only[0]}: {verb} serves all anchors and compositions; remove --only")
        getattr(load_run(recipe, set_, trust=trust, cluster=cluster, address=address), verb)(*only or ())

    app.command(verb, help=summary, hidden=True)(stage)


_add_stage("rollout", "Sample the student's own trajectories.")
_add_stage("reference", "Find the student's candidates on its own trajectories.")
_add_stage("score", "Score the cached candidates under every anchor model.")
_add_stage("train", "Fit the student to every composition of the cached shifts.")
