"""`lweave run`: check what can be known, then bring every missing or stale stage up to date, in order."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.findings import Finding
from lightning_weave.checks.forecast import Forecast, forecast
from lightning_weave.checks.preflight import preflight
from lightning_weave.checks.todo import Todo
from lightning_weave.checks.watch import say, stop, warn
from lightning_weave.errors import InputError
from lightning_weave.pipeline.flow import make_everything
from lightning_weave.progress import Progress, duration
from lightning_weave.runs.changes import why_stale
from lightning_weave.runs.discard import allow_discards, discards, file_size, listing
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import HERE, Workers
from lightning_weave.store import Stage
from lightning_weave.train.export import check_lora


def run(steps: Steps, progress: Progress, workers: Workers = HERE, force: bool = False, yes: bool = False) -> None:
    """Make what is missing, unless something is known to be wrong with it.

    `force` overrides judgements, `yes` discards what another recipe has made without asking.
    """
    todo = Todo.of(steps)
    findings = look_ahead(steps, todo)
    if workers is not HERE:  # this machine's memory and GPUs say nothing about theirs
        findings = [finding for finding in findings if finding.check not in ("memory", "idle GPUs")]
    refuse(findings, force)
    say(findings, progress)
    allow_discards(steps, steps.everything() if steps.recipe.compositions else steps.made_by("eval"), yes)
    if todo.nothing:
        progress.say(f"{steps.store.run_dir}: everything is up to date, nothing to run")
    make_everything(steps, progress, workers, warn if force or todo.nothing else stop)


def show_next(steps: Steps, out: Console) -> None:
    """Print what to type once everything is made."""
    lines = [f"The page: lweave report {steps.arguments}"]
    if steps.recipe.compositions:
        name = next(iter(steps.recipe.compositions))
        lines.append(f"A student for the hub: lweave card {steps.arguments} --composition {name}")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def narrowed(steps: Steps, only: Sequence[str]) -> Steps:
    """Keep these compositions and policies, the student itself, and the anchors that they need."""
    recipe = steps.recipe
    if unknown := [name for name in only if name not in steps.policies]:
        raise InputError(f"--only {unknown[0]}: no such policy; this recipe has {', '.join(steps.policies)}")
    compositions = {name: one for name, one in recipe.compositions.items() if name in only}
    used = {anchor for one in compositions.values() for anchor in one.used}
    named = {
        "compositions": compositions,
        "policies": {name: one for name, one in recipe.policies.items() if name in only},
        "anchors": {name: one for name, one in recipe.anchors.items() if name in used},
    }
    fewer = replace(steps, recipe=recipe.model_copy(update=named))
    if fewer.score_names.items() <= steps.score_names.items():
        return fewer
    return replace(steps, recipe=recipe.model_copy(update=named | {"anchors": recipe.anchors}))  # folders keep names


def dry_run(steps: Steps, out: Console) -> None:
    """Print what would be made, and what is wrong with it; nothing is written."""
    findings = look_ahead(steps, Todo.of(steps))
    try:
        stages = [steps.store.stage(step) for step in steps.everything()]
    except InputError:  # some step has no fingerprint without its models and data, which the findings name
        stages = []
    if stages:
        prompts = [finding.figures["prompts"] for finding in findings if finding.check == "disk"]
        _show_stages(steps, stages, forecast(steps, stages, prompts[0] if prompts else None), out)
    if doomed := discards(steps, [stage.step for stage in stages]):
        lines = ["Discarded, once each is rerun:", *listing(doomed, steps.store.run_dir)]
        out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for finding in findings:
        if finding.verdict == "warning":
            out.print(f"warning: {finding.line}", markup=False, highlight=False, soft_wrap=True)
    refuse(findings, force=False)


def _show_stages(steps: Steps, stages: Sequence[Stage], forecasts: dict[str, Forecast], out: Console) -> None:
    """Print what is there and what is not, with what that will take, and add it up."""
    table = Table(title=Text(str(steps.store.run_dir)), title_justify="left", box=None)
    for name in ("stage", "state", "time", "bytes", ""):
        table.add_column(name, justify="right" if name in ("time", "bytes") else "left")
    missing = [stage for stage in stages if stage.state() != "done"]
    for stage in stages:
        state = stage.state()
        cost = forecasts[stage.step.path]
        amounts = ["", ""] if state == "done" or stage.step.path == "prompts" else _amounts(cost)
        table.add_row(stage.step.path, state, *amounts, Text(why_stale(stage) if state == "stale" else ""))
    out.print(table)
    costly = [forecasts[stage.step.path] for stage in missing if stage.step.path != "prompts"]
    unknown = sum(one.seconds is None for one in costly)
    seconds = sum(one.seconds or 0.0 for one in costly)
    rough = any(one.rough for one in costly)
    time = (
        f"{'very roughly' if rough else 'about'} {duration(seconds)} of device time"
        if unknown < len(costly)
        else "time unknown"
    )
    if 0 < unknown < len(costly):
        time += f" and {unknown} stages of unknown time"
    lines = [f"{len(missing)} of {len(stages)} would be made"]
    sizes = [one.size for one in costly if one.size is not None]
    if costly:
        lines[0] += f": {time}, {file_size(round(sum(sizes))) if sizes else 'bytes unknown'} on disk"
    lines[0] += "."
    if any(one.measured for one in costly):
        lines.append("* as the same kind of stage took in this run")
    if rough:
        lines.append(
            "~ its matrix products alone, as fast as one was just now on this machine; measured once it has run"
        )
    if unknown:
        lines.append("? not known: nothing like it was measured in this run, and lweave plan knows only some GPUs")
    if any(stage.step.path == "rollout" for stage in missing):
        lines.append("Bytes of the cache and times are for responses that are as long as they may be.")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _amounts(cost: Forecast) -> list[str]:
    time = "?" if cost.seconds is None else "~ " * cost.rough + duration(cost.seconds) + "*" * cost.measured
    return [time, "" if cost.size is None else file_size(round(cost.size))]


def look_ahead(steps: Steps, todo: Todo) -> list[Finding]:
    """Check everything that what is left of the run will need."""
    findings = preflight(steps, todo)
    broken = any(finding.about in ("student", "train.lora") for finding in findings if finding.verdict == "error")
    if steps.recipe.train.lora is not None and todo.compositions and not broken:
        try:
            check_lora(steps.student, steps.recipe.train.lora)
        except InputError as error:
            findings.append(Finding("train.lora", "targets", "error", str(error)))
    return findings


def allow(steps: Steps, verb: str, only: Sequence[str] | None, yes: bool, ahead: bool = False) -> None:
    """Ask before a command discards what another recipe has made; a recipe that cannot work is refused first.

    With `ahead` everything that later stages will need is checked too, whether something is discarded or not.
    """

    def check() -> None:
        refuse(look_ahead(steps, Todo.of(steps, verb)), force=True)

    if ahead:
        refuse(look_ahead(steps, Todo.of(steps)), force=True)
    allow_discards(steps, steps.made_by(verb, only), yes, check)


def refuse(findings: list[Finding], force: bool) -> None:
    """Raise where something cannot work, or is judged to be a waste and not forced."""
    errors = [finding for finding in findings if finding.verdict == "error" and not (finding.judged and force)]
    if errors:
        text = "\n".join(dict.fromkeys(finding.line for finding in errors))
        forced = all(finding.judged for finding in errors)
        raise InputError(
            f"{text}\nNothing was run." + (" To continue anyway: --force (in Python: force=True)" if forced else "")
        )
