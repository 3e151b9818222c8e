"""`lweave doctor`: say before any GPU time whether the anchors of a recipe are usable."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from lightning_weave.checks.findings import Finding, Level, percent, size
from lightning_weave.checks.models import check_student
from lightning_weave.checks.pairs import FEW_SURVIVE, check_pair
from lightning_weave.checks.sample import STOP, CheckedRows, rollout_rows, take_sample
from lightning_weave.errors import InputError
from lightning_weave.runs.steps import Steps

STYLES: dict[Level, str] = {"ok": "green", "note": "cyan", "warning": "yellow"}
MANY_CUT = 0.5  # share of rollouts
ROWS = 2048


def run(steps: Steps, console: Console, as_json: bool = False) -> list[Finding]:
    """Check student, anchors, compositions and disk, and print a verdict per line."""
    findings = examine(steps)
    if as_json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=1))
    else:
        show(findings, console)
    return findings


def examine(steps: Steps) -> list[Finding]:
    """Collect all findings. A model that cannot be opened is a finding too, so that the others are still checked."""
    try:
        findings = check_student(steps)
    except InputError as error:
        return [Finding("student", "checkpoint", "warning", str(error))]
    try:
        sample = take_sample(steps)
    except InputError as error:
        sample = CheckedRows("nothing", [], str(error))
    if sample.kind == "nothing":
        findings.append(Finding("prompts", "prompts", "warning", sample.description))
    valid: dict[str, NDArray[np.bool_]] = {}
    for name in steps.recipe.anchors:
        try:
            of_pair, valid[name] = check_pair(steps, name, sample)
        except InputError as error:
            of_pair = [Finding(f"anchors.{name}", "checkpoint", "warning", str(error))]
        findings += of_pair
    return [
        *findings,
        *_check_compositions(steps, sample, valid),
        *_check_rollouts(steps, sample),
        _check_disk(steps, sample),
    ]


def show(findings: list[Finding], console: Console) -> None:
    """Print findings by what they concern, one line each."""
    for about in dict.fromkeys(finding.about for finding in findings):
        console.print(Text(about, style="bold"))
        for finding in findings:
            if finding.about == about:
                line = Text(f"  {finding.verdict:<8} ", style=STYLES[finding.verdict])
                # Tokens may look like markup or links: nothing in the text is to be interpreted.
                console.print(line.append(f"{finding.check}: {finding.text}", style="default"), soft_wrap=True)
    counts = [f"{sum(finding.verdict == verdict for finding in findings)} {verdict}" for verdict in STYLES]
    console.print(", ".join(counts))


def _check_compositions(steps: Steps, sample: CheckedRows, valid: dict[str, NDArray[np.bool_]]) -> list[Finding]:
    """Say what is left where all anchors of a composition must be valid (mask intersection)."""
    findings = []
    for name, composition in steps.recipe.compositions.items():
        used = list(composition.used)
        if len(used) < 2 or any(anchor not in valid for anchor in used) or not sample.positions:
            continue
        share = float(np.logical_and.reduce([valid[anchor] for anchor in used]).mean())
        most = "" if sample.kind == "candidates" else "at most "
        text = f"{most}{percent(share)} of positions survive in all of its {len(used)} anchors"
        verdict: Level = "warning" if share < FEW_SURVIVE else "ok" if share == 1 else "note"
        findings.append(Finding(f"compositions.{name}", "positions", verdict, text, {"share": share}))
    return findings


def _check_rollouts(steps: Steps, sample: CheckedRows) -> list[Finding]:
    if sample.kind not in ("candidates", "rollouts"):
        return []
    rows = list(rollout_rows(steps, ROWS))
    share = float(np.mean([row.finish_R[0] != STOP for row in rows]))
    length = float(np.mean([len(row.response_ids[0]) for row in rows]))
    text = (
        f"{percent(share)} of {len(rows):,} rollouts are cut at their limit; the mean response has {length:,.1f} tokens"
    )
    if share > MANY_CUT:
        text += ". What comes after the cut, stopping above all, is not learned"
    return [
        Finding("rollout", "truncated", "note" if share > MANY_CUT else "ok", text, {"share": share, "tokens": length})
    ]


def _check_disk(steps: Steps, sample: CheckedRows) -> Finding:
    """Compare what the cache needs (bytes per position x positions) with what is free."""
    recipe = steps.recipe
    candidates = recipe.reference.candidates
    models = len(steps.score_names)
    each = bytes_per_position(candidates, models)
    (positions, most) = _positions(steps, sample)
    needed = positions * each
    free = shutil.disk_usage(_existing(steps.store.run_dir)).free
    cached = (file for stage in ("rollout", "reference", "score") for file in (steps.store.run_dir / stage).rglob("*"))
    written = sum(file.stat().st_size for file in cached if file.suffix == ".safetensors")
    text = (
        f"{most} {size(needed)}: {positions:,} positions of {each} bytes ({candidates} candidates, {models} models); "
    )
    text += f"{size(written)} are written, {size(free)} are free"
    figures = {"bytes": needed, "free": free, "positions": positions, "bytes_per_position": each, "written": written}
    return Finding("run", "disk", "warning" if needed - written > free else "ok", text, figures)


def _positions(steps: Steps, sample: CheckedRows) -> tuple[int, str]:
    """Count the decisions of the run, as well as they are known."""
    match sample.kind:
        case "candidates":
            return int(steps.store.stage(steps.reference).require()["positions"]), "exactly"
        case "rollouts":
            rows = int(steps.store.stage(steps.rollout).require()["rows"])
            return round(sample.positions / max(len(sample.rows), 1) * rows), "about"
        case _:
            prompts = steps.recipe.prompts.take or len(sample.rows)
            return prompts * steps.recipe.rollout.responses * steps.recipe.rollout.max_tokens, "at most"


def bytes_per_position(candidates: int, models: int) -> int:
    """Count what one decision costs: its token, the reference's numbers, and each model's.

    >>> bytes_per_position(16, 4)
    476
    """
    token = 4
    reference = 8 * candidates + 8
    score = 5 * candidates + 4
    return token + reference + models * score


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
