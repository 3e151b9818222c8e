"""Does what is to be made fit on the disk?"""

import shutil
from collections.abc import Sequence
from pathlib import Path

from lightning_weave.checks.findings import Finding, Level, size
from lightning_weave.errors import InputError
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.gpus import CALIBRATED
from lightning_weave.plan.recipe import make_plan
from lightning_weave.runs.steps import Steps


def check_disk(steps: Steps, prompts: int, mean_length: float | None = None, trainings: Sequence[str] = ()) -> Finding:
    """Compare what the cache (bytes per position x positions) and these trainings need with what is free.

    Once something is sampled the mean length of a response is known; before, each may be as long as it is allowed.
    """
    recipe = steps.recipe
    candidates = recipe.reference.candidates
    models = len(steps.score_names)
    each = bytes_per_position(candidates, models)
    positions = _positions(steps, prompts, mean_length)
    most = "about" if mean_length is not None else "at most"
    if mean_length is not None and (count := _reference_positions(steps)) is not None:
        positions = count
        most = "exactly"
    needed = positions * each
    free = shutil.disk_usage(_existing(steps.store.run_dir)).free
    cached = (file for stage in ("rollout", "reference", "score") for file in (steps.store.run_dir / stage).rglob("*"))
    written = sum(file.stat().st_size for file in cached if file.suffix == ".safetensors")
    text = (
        f"{most} {size(needed)}: {positions:,} positions of {each} bytes ({candidates} candidates, {models} models); "
    )
    students = _student_bytes(steps, trainings)
    if students:
        text += f"{size(students)} for checkpoints and students of {len(trainings)} compositions; "
    text += f"{size(written)} are written, {size(free)} are free"
    figures = {
        "bytes": needed,
        "free": free,
        "positions": positions,
        "bytes_per_position": each,
        "written": written,
        "prompts": prompts,
        "students": students,
    }
    verdict: Level = "ok"
    if needed + students - written > free:
        verdict = "warning" if most == "at most" and students <= free else "error"
        text += ". Free some, or set runs to a directory on another disk"
    return Finding("run", "disk", verdict, text, figures, judged=True)


def _student_bytes(steps: Steps, trainings: Sequence[str]) -> float:
    try:
        plan = make_plan(steps.recipe, PlannedMachine(CALIBRATED, 1)) if trainings else None
    except InputError:  # an architecture that nobody has described
        plan = None
    return sum(row.disk for row in plan.stages if row.stage == "train" and row.what in trainings) if plan else 0.0


def _positions(steps: Steps, prompts: int, mean_length: float | None) -> int:
    section = steps.recipe.rollout
    longest = min(section.max_tokens, steps.student.context_limit or section.max_tokens)
    return round(prompts * section.responses * (longest if mean_length is None else mean_length))


def _reference_positions(steps: Steps) -> int | None:
    stage = steps.store.stage(steps.reference)
    return int(stage.require()["positions"]) if stage.state() == "done" else None


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
