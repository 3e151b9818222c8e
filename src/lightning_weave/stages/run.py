"""`lweave run`: check what can be known, then compute every missing stage, in order."""

from collections.abc import Sequence

from rich.console import Console
from rich.filesize import decimal as file_size
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.findings import Finding
from lightning_weave.checks.preflight import forecast, preflight
from lightning_weave.checks.watch import Watch, say, stop, warn
from lightning_weave.config import Recipe
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress, duration
from lightning_weave.published import fetchable
from lightning_weave.run import Run, explain_missing, is_wanted
from lightning_weave.stages.eval import evaluate
from lightning_weave.stages.prompts import build_prompts
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.train import train as make_students
from lightning_weave.stages.work import LOCAL, Executor
from lightning_weave.store import Stage


def make_everything(
    run: Run, progress: Progress, executor: Executor = LOCAL, watch: Watch = warn, until: str = "eval"
) -> None:
    """Compute every stage up to this one; what is complete is not touched."""
    if until == "prompts":
        build_prompts(run, progress)
        return
    ends_in_cache = until in ("rollout", "reference", "score")
    if ends_in_cache or (run.recipe.compositions and run.needs_cache):
        last = until if ends_in_cache else "score"
        make_cache(run, progress, executor, watch, evaluates=until == "eval", until=last)
    if run.recipe.compositions and not ends_in_cache:
        make_students(run, progress, watch=watch, executor=executor)
    if until == "eval" and (run.recipe.eval.benchmarks or run.recipe.harness.tasks):
        evaluate(run, progress, executor=executor, watch=watch)


def run_all(run: Run, progress: Progress, executor: Executor = LOCAL, force: bool = False, until: str = "eval") -> None:
    """Compute what is missing, unless something is known to be wrong with it; `force` overrides judgements."""
    findings = preflight(run)
    if executor is not LOCAL:  # this machine's memory and GPUs say nothing about theirs
        findings = [finding for finding in findings if finding.check not in ("memory", "idle GPUs")]
    refuse(findings, force)
    say(findings, progress)
    done = all(stage.complete for stage in run.everything())
    if done:
        progress.say(f"{run.directory}: everything is up to date, nothing to run")
    make_everything(run, progress, executor, warn if force or done else stop, until)


def show_next(run: Run, out: Console) -> None:
    """Print what to type once everything is made."""
    lines = [f"Report:  lweave report {run.arguments}"]
    if run.recipe.compositions:
        name = next(iter(run.recipe.compositions))
        lines.append(f"Export:  lweave export {run.arguments} --composition {name} --as student")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def narrow(run: Run, only: Sequence[str]) -> Recipe:
    """Keep these compositions and policies, the student itself, and the anchors and cases that they need."""
    recipe = run.recipe
    if unknown := [name for name in only if name not in run.policies]:
        raise InputError(f"--only {unknown[0]}: no such policy; this recipe has {', '.join(run.policies)}")
    compositions = {
        name: one
        for name, one in recipe.compositions.items()
        if is_wanted(name, [one.partition("@")[0] for one in only])
    }
    policies = {name: one for name, one in recipe.policies.items() if is_wanted(name, only)}
    named = {part for one in policies.values() for part in (*one.weights, one.decode)}
    compositions |= {name: one for name, one in recipe.compositions.items() if name in named}
    used = named | {anchor for one in compositions.values() for anchor in one.used}
    kept = recipe.model_copy(
        update={
            "compositions": compositions,
            "policies": policies | {name: one for name, one in recipe.policies.items() if name in named},
            "anchors": {name: one for name, one in recipe.anchors.items() if name in used},
        }
    )
    cases = recipe.report.cases.items()
    shown = {name: case for name, case in cases if {*case.right, *case.wrong} <= set(kept.policy_names)}
    students = (
        None if recipe.report.students is None else [one for one in recipe.report.students if one in compositions]
    )
    report = recipe.report.model_copy(update={"cases": shown, "students": students})
    return kept.model_copy(update={"report": report})


def dry_run(run: Run, out: Console, until: str = "eval") -> None:
    """Print what would be computed up to a stage, and what is wrong with it; nothing is written."""
    order = ("prompts", "rollout", "proposal", "reference", "score", "train", "merge", "eval")
    findings = preflight(run)
    try:
        stages = [one for one in run.everything() if order.index(one.path.split("/")[0]) <= order.index(until)]
    except InputError:  # some stage has no fingerprint without its models and data, which the findings name
        stages = []
    if stages:
        _show_stages(run, stages, out)
    for finding in findings:
        if finding.verdict == "warning":
            out.print(f"warning: {finding.line}", markup=False, highlight=False, soft_wrap=True)
    refuse(findings, force=False)


def _show_stages(run: Run, stages: Sequence[Stage], out: Console) -> None:
    """Print what is there and what is not, with what that will take, and add it up."""
    forecasts = forecast(run, stages)
    published = fetchable(run)
    fetched = sum(stage.path in published for stage in stages)
    table = Table(title=Text(str(run.directory)), title_justify="left", box=None)
    for name in ("stage", "state", "time", "bytes", ""):
        table.add_column(name, justify="right" if name in ("time", "bytes") else "left")
    costly = []
    missing = 0
    for stage in stages:
        cost = forecasts[stage.path]
        time = size = why = ""
        if anchor := published.get(stage.path):
            why = f"to be fetched with anchors.{anchor}"
        if (state := stage.state()) != "complete" and not anchor:
            missing += 1
            why = explain_missing(stage)
            if stage.path != "prompts":
                costly.append(cost)
                time = "?" if cost.seconds is None else "~ " * cost.rough + duration(cost.seconds) + "*" * cost.measured
                size = "" if cost.size is None else file_size(round(cost.size))
        table.add_row(stage.path, state, time, size, Text(why))
    out.print(table)
    known = [one.seconds for one in costly if one.seconds is not None]
    unknown = len(costly) - len(known)
    rough = any(one.rough for one in costly)
    lines = [f"{missing} of {len(stages)} would be made{f', {fetched} fetched' * bool(fetched)}"]
    if costly:
        about = "very roughly" if rough else "about"
        total = f"{about} {duration(sum(known))} of device time" if known else "time unknown"
        more = f" and {unknown} stages of unknown time" if known and unknown else ""
        sizes = [one.size for one in costly if one.size is not None]
        lines[0] += f": {total}{more}, {file_size(round(sum(sizes))) if sizes else 'bytes unknown'} on disk"
    lines[0] += "."
    if any(one.measured for one in costly):
        lines.append("* measured: as fast as the same kind of stage was in this run")
    if rough:
        lines.append("~ rough: its matrix products only, at the speed just measured on this machine")
    if unknown:
        lines.append("? unknown: no such stage has run here yet, and lweave plan does not know this device")
    if any(stage.path == "rollout" and not stage.complete for stage in stages):
        lines.append("Sizes and times assume that every response has rollout.max_tokens tokens.")
    out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def refuse(findings: list[Finding], force: bool) -> None:
    """Raise where something cannot work, or is judged to be a waste and not forced."""
    errors = [finding for finding in findings if finding.verdict == "error" and not (finding.judged and force)]
    if errors:
        same: dict[str, list[str]] = {}  # a model that is missing is missed in several places
        for finding in errors:
            same.setdefault(finding.text, []).append(finding.about)
        text = "\n".join(
            one if one.startswith(abouts[0]) else f"{', '.join(dict.fromkeys(abouts))}: {one}"
            for one, abouts in same.items()
        )
        forced = all(finding.judged for finding in errors)
        raise InputError(
            f"{text}\nNothing was run." + (" To continue anyway: --force (in Python: force=True)" if forced else "")
        )
