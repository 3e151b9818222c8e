"""`lweave run`: check what can be known, then bring every missing or stale stage up to date, in order."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.findings import Finding
from lightning_weave.checks.preflight import Todo, preflight
from lightning_weave.checks.watch import say, stop, warn
from lightning_weave.errors import InputError
from lightning_weave.pipeline.flow import make_everything
from lightning_weave.progress import Progress
from lightning_weave.runs.changes import why_stale
from lightning_weave.runs.discard import allow_discards, discards, listing
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, do_here
from lightning_weave.train.export import check_lora


def run(steps: Steps, progress: Progress, do: Do = do_here, force: bool = False, yes: bool = False) -> None:
    """Make what is missing, unless something is known to be wrong with it.

    `force` overrides judgements, `yes` discards what another recipe has made without asking.
    """
    todo = Todo.of(steps)
    findings = look_ahead(steps, todo)
    refuse(findings, force)
    say(findings, progress)
    allow_discards(steps, steps.everything() if steps.recipe.compositions else steps.made_by("eval"), yes)
    make_everything(steps, progress, do, warn if force or todo.nothing else stop)


def dry_run(steps: Steps, out: Console) -> None:
    """Print what would be made, and what is wrong with it; nothing is written."""
    findings = look_ahead(steps, Todo.of(steps))
    try:
        stages = [steps.store.stage(step) for step in steps.everything()]
    except InputError:  # some step has no fingerprint without its models and data, which the findings name
        stages = []
    table = Table("stage", "state", "", title=Text(str(steps.store.run_dir)), title_justify="left", box=None)
    for stage in stages:
        state = stage.state()
        table.add_row(stage.step.path, state, Text(why_stale(stage) if state == "stale" else ""))
    if stages:
        out.print(table)
        todo = sum(stage.state() != "done" for stage in stages)
        out.print(f"{todo} of {len(stages)} would be made.")
    if doomed := discards(steps, [stage.step for stage in stages]):
        lines = ["Discarded for it, once each is made again:", *listing(doomed, steps.store.run_dir)]
        out.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    for finding in findings:
        if finding.verdict == "warning":
            out.print(f"warning: {finding.line}", markup=False, highlight=False, soft_wrap=True)
    refuse(findings, force=False)


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


def allow(steps: Steps, verb: str, only: Sequence[str] | None, yes: bool) -> None:
    """Ask before a command discards what another recipe has made; a recipe that cannot work is refused first."""

    def check() -> None:
        refuse(look_ahead(steps, Todo.of(steps, verb)), force=True)

    allow_discards(steps, steps.made_by(verb, only), yes, check)


def refuse(findings: list[Finding], force: bool) -> None:
    """Raise where something cannot work, or is judged to be a waste and not forced."""
    errors = [finding for finding in findings if finding.verdict == "error" and not (finding.judged and force)]
    if errors:
        text = "\n".join(dict.fromkeys(finding.line for finding in errors))
        forced = all(finding.judged for finding in errors)
        raise InputError(f"{text}\nNothing was run." + (" To continue anyway: --force" if forced else ""))
