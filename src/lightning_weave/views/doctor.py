"""`lweave doctor`: say before any GPU time whether the anchors of a recipe are usable."""

import json
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_weave.checks.disk import check_disk
from lightning_weave.checks.findings import Finding, Level, percent
from lightning_weave.checks.models import check_student
from lightning_weave.checks.pairs import FEW_SURVIVE, check_pair
from lightning_weave.checks.preflight import preflight
from lightning_weave.checks.sample import CheckedRows, take_sample
from lightning_weave.checks.todo import Todo
from lightning_weave.checks.watch import check_results, check_rollouts
from lightning_weave.errors import InputError
from lightning_weave.runs.steps import Steps

STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}


def run(steps: Steps, console: Console, as_json: bool = False) -> list[Finding]:
    """Check student, anchors, compositions and disk, and print a verdict per line."""
    findings = examine(steps)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(findings, console)
    return findings


def examine(steps: Steps) -> list[Finding]:
    """Collect all findings. What stops `lweave run` is an error; the rest is still checked where that is possible."""
    before = preflight(steps, Todo.of(steps))
    broken = {finding.about for finding in before if finding.check == "checkpoint"}
    if "student" in broken:
        return before
    try:
        findings = check_student(steps)
    except InputError as error:
        return [*before, Finding("student", "checkpoint", "warning", str(error))]
    try:
        sample = take_sample(steps)
    except InputError as error:
        sample = CheckedRows("nothing", [], str(error))
    if sample.kind == "nothing" and not any(finding.check == "prompts" for finding in before):
        findings.append(Finding("prompts", "prompts", "warning", sample.description))
    valid: dict[str, NDArray[np.bool_]] = {}
    for name in steps.recipe.anchors:
        if any(about.startswith(f"anchors.{name}.") for about in broken):
            continue
        try:
            of_pair, valid[name] = check_pair(steps, name, sample)
        except InputError as error:
            of_pair = [Finding(f"anchors.{name}", "aliases", "warning", str(error))]
        findings += of_pair
    findings += [*_check_compositions(steps, sample, valid), *_check_rollouts(steps, sample)]
    seen = {(finding.about, finding.check) for finding in findings if finding.check != "aliases"}
    return [*(finding for finding in before if (finding.about, finding.check) not in seen), *findings]


def show(findings: list[Finding], console: Console) -> None:
    """Print findings by what they concern, one line each."""
    for about in dict.fromkeys(finding.about for finding in findings):
        console.print(Text(about, style="bold"))
        for finding in findings:
            if finding.about == about:
                # Tokens may look like markup or links: nothing in the text is to be interpreted.
                verdict = Text(f"  {finding.verdict:<8} ", style=STYLES[finding.verdict])
                text = Text(f"{finding.check}: {finding.text}", overflow="fold")
                if console.is_terminal:
                    line = Table.grid()
                    line.add_row(verdict, text)
                    console.print(line)
                else:
                    console.print(verdict.append_text(text), soft_wrap=True)
    counts = [f"{sum(finding.verdict == verdict for finding in findings)} {verdict}" for verdict in STYLES]
    console.print(", ".join(counts))


def _check_compositions(steps: Steps, sample: CheckedRows, valid: dict[str, NDArray[np.bool_]]) -> list[Finding]:
    """Say what is left where all anchors of a composition must be valid (mask intersection)."""
    findings = []
    for name, used in _masks(steps).items():
        if len(used) < 2 or any(anchor not in valid for anchor in used) or not sample.positions:
            continue
        share = float(np.logical_and.reduce([valid[anchor] for anchor in used]).mean())
        most = "" if sample.kind == "candidates" else "at most "
        text = f"{most}{percent(share)} of positions survive in all of its {len(used)} anchors"
        verdict: Level = "warning" if share < FEW_SURVIVE else "ok" if share == 1 else "note"
        findings.append(Finding(f"compositions.{name}", "positions", verdict, text, {"share": share}))
    return findings


def _masks(steps: Steps) -> dict[str, list[str]]:
    """The anchors that must be valid together: those of a composition, or of one of its tags."""
    masks = {}
    for name, composition in steps.recipe.compositions.items():
        for tag, weights in composition.by_tag.items():
            masks[f"{name}.weights.{tag}"] = [anchor for anchor, weight in weights.items() if weight]
        if not composition.by_tag:
            masks[name] = list(composition.used)
    return masks


def _check_rollouts(steps: Steps, sample: CheckedRows) -> list[Finding]:
    """Repeat the checks of finished stages."""
    if sample.kind not in ("candidates", "rollouts"):
        return []
    findings = check_rollouts(steps)
    count = steps.store.stage(steps.rollout).require()["rows"] // steps.recipe.rollout.responses
    disk = check_disk(steps, count, findings[0].figures["tokens"])
    try:
        return [*findings, *check_results(steps), disk]
    except InputError:  # a model or a benchmark is gone, which the checks before a run have said
        return [*findings, disk]
