"""`lweave rehearse`: run the whole recipe with small random doubles of its models."""

import json
import os
import time
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import get_args

from rich.console import Console

from lightning_weave.checks.models import find_fault
from lightning_weave.checks.pairs import STOP, rollout_rows
from lightning_weave.checks.preflight import check_disk
from lightning_weave.checks.watch import check_scores
from lightning_weave.config import EngineStage, Recipe, check_recipe, slug
from lightning_weave.errors import WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.double import has_double, make_double
from lightning_weave.models.hub import check_trainable
from lightning_weave.plan import plan
from lightning_weave.plan.architecture import CALIBRATED
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_main_process
from lightning_weave.report import report
from lightning_weave.run import DUMP, ROLES, Run
from lightning_weave.stages.prompts import own_trajectories, prompt_line
from lightning_weave.stages.run import run_all
from lightning_weave.stages.score import validate_anchor
from lightning_weave.stages.work import Executor
from lightning_weave.store import write_atomic
from lightning_weave.views.export import card

SUFFIX = "-rehearsal"
ROUNDS = 2  # of training, with what rehearsal.toml says
FEW = 4  # prompts of a user's own trajectories
ALL = 1 << 20  # rows
SHORT = 256  # tokens of each of them


def rehearsed(run: Run) -> Run:
    """The run of a rehearsal: a smaller recipe, with doubles, in its own directory."""
    recipe = small_recipe(run)
    return Run(recipe, str(Path(recipe.runs) / recipe.name / "recipe.toml"), run.trust)


def run(run: Run, small: Run, executor: Executor, progress: Progress, console: Console) -> None:
    """Run everything with doubles; report what worked and what that proves, and end with the plan of the real run.

    `run` is the real run, `small` its rehearsal. A rehearsal that was stopped resumes.
    """
    recipe = run.recipe
    try:
        check_trainable(run.student.config_path)  # a double is never quantised
        folders = double_folders(run)
        for one, line in sorted(doubles_of(run).items(), key=lambda pair: pair[0].base is not None):  # bases first
            if is_main_process():
                make_double(line, folders[one], heads_needed(recipe), folders[one.base] if one.base else None)
                progress.say(f"double of {one}: {folders[one]}")
            while not has_double(line, folders[one]):
                time.sleep(0.2)
        os.environ.setdefault("WANDB_MODE", "offline")
        run_all(small, progress, executor)
        if not is_main_process():
            return
        proofs = [*_proofs(small), f"report: {report.run([small], progress)}"]
        if recipe.compositions:
            folder = card(small, next(iter(recipe.compositions)), None, progress)
            proofs.append(f"export: {folder}, with a model card")
    except WeaveError as error:
        try:
            waiting = [stage.path for stage in small.everything() if not stage.complete]
            place = f"before {waiting[0]} was made" if waiting else "after the last stage"
        except WeaveError:  # stages have no fingerprint without models and data
            place = "before the first stage"
        stopped = WeaveError(
            f"{error}\nThe rehearsal stopped {place}, and so would the real run. Nothing of the real run was started"
        )
        stopped.code = error.code
        raise stopped from error
    lines = ["", f"What worked ({small.directory}, a {small.recipe.mark}):", *(f"  {proof}" for proof in proofs)]

    # What doubles cannot show, or do not stop at: weights, disk, the end of a turn.
    found = [("score", finding) for name in recipe.anchors for finding in validate_anchor(small, name)]
    found.append(("disk", check_disk(run, recipe.prompts.take or 0, list(recipe.compositions))))
    wrong = [f"{stage}: {finding.line}" for stage, finding in found if finding.verdict in ("warning", "error")]
    wrong += [f"weights: {fault}" for one in doubles_of(run) if (fault := find_fault(one))]
    if wrong:
        lines += ["", "To look at before the real run:", *(f"  {text}" for text in wrong)]
    for text in (*lines, "", f"Next: {run.command('run')}"):
        progress.say(text)
    plan.run(recipe, PlannedMachine(CALIBRATED, 8), None, False, console)


def small_recipe(run: Run) -> Recipe:
    """Replace the models of a recipe by doubles, and make everything smaller."""
    recipe = run.recipe
    data = {**recipe.model_dump(**DUMP), "name": recipe.name + SUFFIX, "rehearsal": True}
    text = (files("lightning_weave.recipes") / "rehearsal.toml").read_text(encoding="utf-8")
    for section, limits in tomllib.loads(text).items():
        for key, limit in limits.items():
            own = data[section].get(key, limit)
            if isinstance(limit, dict):
                data[section][key] = {**own, **limit}
            else:
                data[section][key] = min(own, limit) if isinstance(limit, int) and limit is not False else limit
    if recipe.rollout.from_ is not None:
        data["rollout"] |= {"responses": recipe.rollout.responses, "from": str(_trajectories(run))}
    if data["train"]["prompts_per_round"] * data["rollout"]["responses"] % data["train"]["updates_per_round"]:
        data["train"]["updates_per_round"] = 1
    for composition in data["compositions"].values():
        composition.pop("epochs", None)
        parts = "refresh_budget" if composition.get("refresh") == "auto" else "refresh"
        composition |= {parts: min(composition[parts], ROUNDS)} if parts in composition else {}
    folders = {one: str(folder) for one, folder in double_folders(run).items()}
    data["student"] |= {"model": folders[run.student]}
    for name, policy in data["policies"].items():
        policy |= {"model": folders[run.asked_model(name)]} if "model" in policy else {}
    for name, anchor in data["anchors"].items():
        anchor.pop("cache", None)
        for role in ROLES:
            if role in anchor:
                anchor[role] = folders[run.anchor(name, role)]
        if anchor.get("model") not in (None, "student"):
            anchor["model"] = folders[run.anchor(name, "post")]
    return check_recipe(data, f"the rehearsal of {run.arguments}")


def doubles_of(run: Run) -> dict[Checkpoint, list[Checkpoint]]:
    """All checkpoints of a recipe, each with the line that it was post-trained along, itself last."""
    recipe = run.recipe
    before: dict[Checkpoint, Checkpoint] = {}
    checkpoints = [run.student, *map(run.asked_model, recipe.policies)]
    for name in recipe.anchors:
        post, pre = (run.anchor(name, role) for role in ROLES)
        checkpoints += [pre, post]
        if post != pre and post.base is None:
            before.setdefault(post, pre)
    checkpoints += [one.base for one in checkpoints if one.base is not None]
    lines = {}
    for one in dict.fromkeys(checkpoints):
        line = [one]
        while (earlier := before.get(line[0])) is not None and earlier not in line:
            line.insert(0, earlier)
        lines[one] = line
    return lines


def double_folders(run: Run) -> dict[Checkpoint, Path]:
    """The directory of each double: in that of the rehearsal, by the last part of its name."""
    place = run.directory.with_name(run.recipe.name + SUFFIX) / "doubles"
    folders: dict[Checkpoint, Path] = {}
    for number, one in enumerate(doubles_of(run)):
        folder = place / slug(Path(one.name).name)
        folders[one] = folder if folder not in folders.values() else folder.with_name(f"{folder.name}-{number}")
    return folders


def heads_needed(recipe: Recipe) -> int:
    """The number that a double's attention heads must be a multiple of: the most GPUs of one engine."""
    engines = [recipe.engine_of(stage).options for stage in get_args(EngineStage)]
    engines += [anchor.options for anchor in recipe.anchors.values()]
    return max(int(options.get("tensor_parallel_size", 1)) for options in engines)


def _trajectories(run: Run) -> Path:
    """Write the first few of the user's trajectories; all of them are read and checked."""
    file = run.directory.with_name(run.recipe.name + SUFFIX) / "trajectories.jsonl"
    lines = []
    for number, group in enumerate(own_trajectories(run)[:FEW]):
        for response in group.responses:
            cut = max(SHORT, (response.decided or [True]).index(True) + 1)  # something is left to learn from
            row = {
                "prompt_line": prompt_line(number, group.prompt),
                "prompt": group.prompt.text,
                "prompt_ids": group.prompt.token_ids,
                "response_ids": response.ids[:cut],
                "finish": response.finish if len(response.ids) <= cut else "length",
            }
            if response.decided is not None:
                row["mask"] = [int(one) for one in response.decided[:cut]]
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(file, "".join(lines).encode())
    return file


def _proofs(small: Run) -> Iterator[str]:
    """For every stage: what was computed, of which architecture and with which engine."""
    recipe = small.recipe
    engines = {"hf": "transformers", "vllm": "vLLM"}

    def architecture(checkpoint: Checkpoint) -> str:
        return str((getattr(checkpoint.config, "architectures", None) or [type(checkpoint.config).__name__])[0])

    student = architecture(small.student)
    if small.needs_cache:
        rows = small.stage("prompts").require()["rows"]
        yield f"prompts: {rows} prompts, read and rendered"
        ended = [bool(row.finish_R[0] == STOP) for row in rollout_rows(small, ALL)]
        sampled = f"{len(ended)} responses of {student}, sampled with {engines[recipe.engine.rollout]}"
        yield f"rollout: {sampled}; {sum(ended)} ended with a stop token"
        yield f"reference: candidates of {student}, scored with {engines[recipe.engine.reference]}"
        for side, name in small.score_names.items():
            if small.is_student(side) and not side.reads_other_prompts:
                continue  # copied from the reference
            yield f"score/{name}: {architecture(side.checkpoint)}, scored with {engines[small.scoring(side).engine]}"
        yield from (finding.line for finding in check_scores(small) if finding.check == "positions")
    for name, composition in small.recipe.compositions.items():
        updates = small.stage("train", name).require().get("updates", "all")
        yield f"train/{name}: {updates} updates of {student} ({composition.method}), saved and exported"
    for policy in small.policies:
        model = f"the exported {student}" if small.composition_of(policy) else architecture(small.policy(policy))
        count = len(recipe.eval.benchmarks)
        answered = f"{count} benchmark{'s' * (count != 1)} answered by {model}, with {engines[recipe.engine.eval]}"
        yield f"eval/{policy}: {answered}, and graded"
