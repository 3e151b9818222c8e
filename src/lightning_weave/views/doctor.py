"""`lweave doctor`: check models, data and anchors of a recipe before any GPU time is spent."""

import json
from contextlib import suppress
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.findings import Finding, Level, percent
from lightning_weave.checks.models import describe_student
from lightning_weave.checks.pairs import FEW_SURVIVE, align_sample, describe_pair
from lightning_weave.checks.preflight import preflight
from lightning_weave.checks.resources import check_disk
from lightning_weave.checks.sample import CheckedRows, take_sample
from lightning_weave.checks.watch import check_results, check_rollouts
from lightning_weave.errors import InputError, printable
from lightning_weave.run import Run
from lightning_weave.stages.forecast import suggest_alpha

STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def run(run: Run, console: Console, as_json: bool = False) -> list[Finding]:
    """Check student, anchors, compositions and disk, and print one line for each finding."""
    findings = examine(run)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(findings, console)
    return findings


def examine(run: Run) -> list[Finding]:
    """Collect all findings. What stops `lweave run` is an error; everything else is still checked where possible."""
    before = preflight(run)
    broken = {finding.about for finding in before if finding.check == "checkpoint"}
    if "student" in broken:
        return before
    try:
        findings = list(describe_student(run))
    except InputError as error:
        return [*before, Finding("student", "checkpoint", "warning", str(error))]
    try:
        sample = take_sample(run)
    except InputError as error:
        sample = CheckedRows("nothing", [], str(error))
    if sample.kind == "nothing" and not any(finding.check == "prompts" for finding in before):
        findings.append(Finding("prompts", "prompts", "warning", sample.description))
    valid: dict[str, NDArray[np.bool_]] = {}
    for name in run.recipe.anchors:
        if not any(about.startswith(f"anchors.{name}.") for about in broken):
            try:
                findings += describe_pair(run, name, sample)
                valid[name] = align_sample(run, name, sample).valid_P
            except InputError as error:
                findings.append(Finding(f"anchors.{name}", "aliases", "warning", str(error)))
    findings += _check_compositions(run, sample, valid)
    if sample.is_cached:  # repeat the checks of complete stages
        findings += check_rollouts(run)
        with suppress(InputError):  # a model or benchmark is gone, which preflight has reported
            findings += check_results(run)
        findings.append(check_disk(run))
        if text := suggest_alpha(run):
            findings.append(Finding("compositions", "alpha", "note", text))
    # What a stage refuses comes first, and replaces what was found out about the same thing.
    stops = {(finding.about, finding.check) for finding in before if finding.verdict == "error"}
    findings = [finding for finding in findings if (finding.about, finding.check) not in stops]
    seen = {(finding.about, finding.check) for finding in findings if finding.check != "aliases"}
    return [*(finding for finding in before if (finding.about, finding.check) not in seen), *findings]


def _check_compositions(run: Run, sample: CheckedRows, valid: dict[str, NDArray[np.bool_]]) -> list[Finding]:
    """Report what is left where all anchors of a composition, or of one of its tags, must be valid."""
    findings = []
    for name, composition in run.recipe.compositions.items():
        used = {f"{name}.weights.{tag}": [one for one in by if by[one]] for tag, by in composition.by_tag.items()}
        for key, anchors in (used or {name: list(composition.used)}).items():
            if len(anchors) < 2 or any(anchor not in valid or not len(valid[anchor]) for anchor in anchors):
                continue
            share = float(np.logical_and.reduce([valid[anchor] for anchor in anchors]).mean())
            most = "" if sample.kind == "candidates" else "at most "
            text = f"{most}{percent(share)} of positions survive in all of its {len(anchors)} anchors"
            verdict: Level = "warning" if share < FEW_SURVIVE else "ok" if share == 1 else "note"
            findings.append(Finding(f"compositions.{key}", "positions", verdict, text, {"share": share}))
    return findings


def show(findings: list[Finding], console: Console) -> None:
    """Print findings by what they concern, one line each."""
    for about in dict.fromkeys(finding.about for finding in findings):
        console.print(Text(about, style="bold"))
        for finding in findings:
            if finding.about == about:
                # Tokens may look like markup or links: nothing in the text is to be interpreted.
                verdict = Text(f"  {finding.verdict:<8} ", style=STYLES[finding.verdict])
                text = Text(printable(f"{finding.check}: {finding.text}"), overflow="fold")
                if console.is_terminal:
                    line = Table.grid()
                    line.add_row(verdict, text)
                    console.print(line)
                else:
                    console.print(verdict.append_text(text), soft_wrap=True)
    counts = [f"{sum(finding.verdict == verdict for finding in findings)} {verdict}" for verdict in STYLES]
    console.print(", ".join(counts))
