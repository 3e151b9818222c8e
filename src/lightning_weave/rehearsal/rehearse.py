"""`lweave rehearse`: the whole recipe with small random doubles of its models, before anything is spent on it."""

import json
import os
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_weave.checks.checkpoints import check_usable
from lightning_weave.checks.disk import check_disk
from lightning_weave.checks.findings import percent
from lightning_weave.checks.preflight import check_anchor
from lightning_weave.checks.sample import STOP, rollout_rows
from lightning_weave.checks.watch import check_scores
from lightning_weave.config import Recipe, check_recipe, slug
from lightning_weave.errors import WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.double import is_made, make_double
from lightning_weave.models.files import check_trainable
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_first
from lightning_weave.runs.prompts import own_trajectories, tag_columns
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic

SUFFIX = "-rehearsal"
ROUNDS = 2  # of training, with what rehearsal.toml says
FEW = 4  # prompts of a user's own trajectories
ALL = 1 << 20  # rows
SHORT = 256  # tokens of each of them


@dataclass(frozen=True)
class Commands:
    """The ordinary commands that a rehearsal calls, each with the steps of the rehearsal, and the plan of the real."""

    run: Callable[[Steps], None]
    report: Callable[[Steps], Path]
    card: Callable[[Steps, str], Path]
    plan: Callable[[], None]


def rehearsed(steps: Steps) -> Steps:
    """The steps of the rehearsal of a recipe: the same ones, of a smaller recipe with doubles, elsewhere."""
    recipe = small_recipe(steps)
    return Steps(recipe, str(Path(recipe.runs) / recipe.name / "recipe.toml"), steps.trust)


def run(steps: Steps, small: Steps, commands: Commands, progress: Progress) -> None:
    """Run everything with doubles; say what went through and what that proves, and end with the real run's plan.

    `steps` are the real ones, `small` those of their rehearsal. One that was stopped resumes.
    """
    doubles = doubles_of(steps)
    try:
        check_trainable(steps.student.light_path)  # a double is never quantised
        _make_doubles(doubles, steps, progress)
        os.environ.setdefault("WANDB_MODE", "offline")
        commands.run(small)
        if not is_first():
            return
        proofs = [("report", str(commands.report(small)), "figures, tables and the page are drawn")]
        if steps.recipe.compositions:
            name = next(iter(steps.recipe.compositions))
            proofs.append(("card", str(commands.card(small, name)), "a directory for the hub, with its evaluation"))
    except WeaveError as error:
        raise type(error)(
            f"{error}\nThe rehearsal stopped {_where(small)}, and the real run would. Nothing of that was started"
        ) from error
    progress.say("")
    progress.say(f"What went through ({small.store.run_dir}, a {small.recipe.mark}):")
    for stage, what, proves in (*_proofs(small), *proofs):
        progress.say(f"  {stage}: {what}. So {proves}")
    if wrong := list(_before_the_real_run(steps, small)):
        progress.say("")
        progress.say("To look at before the real run:")
        for line in wrong:
            progress.say(f"  {line}")
    progress.say("")
    progress.say(f"Now for real: {steps.command('run')}")
    commands.plan()


def small_recipe(steps: Steps) -> Recipe:
    """Write the recipe with doubles for its models and with less of everything."""
    recipe = steps.recipe
    data = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    data |= {"name": recipe.name + SUFFIX, "rehearsal": True}
    text = (files("lightning_weave.recipes") / "rehearsal.toml").read_text(encoding="utf-8")
    for section, limits in tomllib.loads(text).items():
        for key, limit in limits.items():
            own = data[section].get(key, limit)
            data[section][key] = limit if isinstance(limit, bool) else min(own, limit)
    if recipe.rollout.from_ is not None:
        data["rollout"] |= {"responses": recipe.rollout.responses, "from": str(_trajectories(steps))}
    if data["train"]["prompts_per_round"] * data["rollout"]["responses"] % data["train"]["updates_per_round"]:
        data["train"]["updates_per_round"] = 1
    for composition in data["compositions"].values():
        composition.pop("epochs", None)
        composition |= {"refresh": min(composition["refresh"], ROUNDS)} if "refresh" in composition else {}
    folders = {one: str(folder) for one, folder in _folders(steps).items()}
    data["student"] |= {"model": folders[steps.student]}
    data["student"].pop("revision", None)
    for name, policy in data["policies"].items():
        policy["model"] = folders[Checkpoint.of(recipe.policies[name])]
        policy.pop("revision", None)
    for name, anchor in data["anchors"].items():
        for role in ROLES:
            anchor.pop(f"{role}_revision", None)
            if role in anchor:
                anchor[role] = folders[steps.anchor(name, role)]
        if anchor.get("model") not in (None, "student"):
            anchor["model"] = folders[steps.anchor(name, "post")]
    return check_recipe(data, f"the rehearsal of {steps.arguments}")


def doubles_of(steps: Steps) -> dict[Checkpoint, list[Checkpoint]]:
    """All checkpoints of a recipe, each with the line that it was post-trained along, itself last."""
    recipe = steps.recipe
    before: dict[Checkpoint, Checkpoint] = {}
    checkpoints = [steps.student, *map(Checkpoint.of, recipe.policies.values())]
    for name in recipe.anchors:
        post, pre = (steps.anchor(name, role) for role in ROLES)
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


def _folders(steps: Steps) -> dict[Checkpoint, Path]:
    """Where each double is: below the run directory, by the last part of its name."""
    place = steps.store.run_dir.with_name(steps.recipe.name + SUFFIX) / "doubles"
    folders: dict[Checkpoint, Path] = {}
    for number, one in enumerate(doubles_of(steps)):
        folder = place / slug(Path(one.name).name)
        folders[one] = folder if folder not in folders.values() else folder.with_name(f"{folder.name}-{number}")
    return folders


def _make_doubles(doubles: Mapping[Checkpoint, list[Checkpoint]], steps: Steps, progress: Progress) -> None:
    """Make the doubles that are not there yet, bases before their adapters; other ranks wait for the first."""
    folders = _folders(steps)
    heads = heads_needed(steps.recipe)
    for one, line in sorted(doubles.items(), key=lambda pair: pair[0].base is not None):
        folder = folders[one]
        if is_first():
            base = folders[one.base] if one.base is not None else None
            make_double(line, folder, heads, base)
            progress.say(f"double of {one}: {folder}")
        while not is_made(line, folder):
            time.sleep(0.2)


def heads_needed(recipe: Recipe) -> int:
    """What the number of a double's heads must be a multiple of: the most GPUs that an engine divides them over."""
    engines = [recipe.rollout.options, recipe.reference.options, recipe.score.options, recipe.eval.options]
    engines += [anchor.options for anchor in recipe.anchors.values()]
    return max(int(options.get("tensor_parallel_size", 1)) for options in engines)


def _trajectories(steps: Steps) -> Path:
    """Write the first few of a user's own trajectories, all of which are read and checked."""
    file = steps.store.run_dir.with_name(steps.recipe.name + SUFFIX) / "trajectories.jsonl"
    contexts = [side for anchor in steps.recipe.anchors.values() for side in (anchor.post_prompt, anchor.pre_prompt)]
    columns = {name for context in contexts for name in context.columns} | tag_columns(steps.recipe)
    lines = []
    for group in own_trajectories(steps)[:FEW]:
        named = ("id", "answer", "prompt", *sorted(columns - {"id", "answer"}))
        fields = {key: group.row[key] for key in named if group.row.get(key) is not None}
        fields |= {"messages": group.row["messages"]} if group.row.get("messages") else {}
        for response in group.responses:
            row = {**fields, "prompt_ids": list(group.prompt_ids), "response_ids": response.ids[:SHORT]}
            if response.decided is not None:
                row["mask"] = [int(one) for one in response.decided[:SHORT]]
            row["finish"] = response.finish if len(response.ids) <= SHORT else "length"
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_atomic(file, "".join(lines).encode())
    return file


def _where(small: Steps) -> str:
    """Name the first stage that is not done."""
    try:
        waiting = [step.path for step in small.everything() if small.store.stage(step).state() != "done"]
    except WeaveError:  # a stage has no fingerprint without its models and data
        return "before the first stage"
    return f"before {waiting[0]} was made" if waiting else "after the last stage"


def _proofs(small: Steps) -> Iterator[tuple[str, str, str]]:
    """Say of every stage what was made, and what the real run can count on."""
    recipe = small.recipe
    own = _architecture(small.student)
    if small.needs_cache:
        rows = small.store.stage(small.prompts).require()["rows"]
        yield "prompts", f"{rows} prompts", "the source is read whole, and rendered as the student expects it"
        ended = [bool(row.finish_R[0] == STOP) for row in rollout_rows(small, ALL)]
        what = f"{len(ended)} responses, {sum(ended)} of them ended on their own"
        yield "rollout", what, f"{_engine(recipe.rollout)} loads {own} and samples it"
        yield "reference", "the candidates of all positions", f"{_engine(recipe.reference)} scores {own}"
        for scored, name in small.score_names.items():
            what = f"log-probabilities by {_architecture(scored.checkpoint)}"
            yield f"score/{name}", what, f"{_engine(small.scoring(scored))} loads it, and its tokens are aligned"
        for finding in check_scores(small):
            if finding.check == "positions":
                share = percent(finding.figures["share"])
                yield finding.about, f"{share} of positions have a shift", "the pair can be composed"
    for name, composition in recipe.compositions.items():
        updates = small.store.stage(small.train(name)).require().get("updates", "all")
        proves = f"{composition.method} training of {own} works, is saved, and is exported"
        yield f"train/{name}", f"{updates} updates", proves
    for policy in small.policies:
        whose = f"the exported {own}" if policy in recipe.compositions else _architecture(small.policy(policy))
        what = f"answers to {len(recipe.eval.benchmarks)} benchmarks, graded"
        yield f"eval/{policy}", what, f"{_engine(recipe.eval)} loads {whose}"


def _engine(section: Any) -> str:
    return {"hf": "transformers", "vllm": "vLLM"}.get(section.engine, section.engine)


def _architecture(checkpoint: Checkpoint) -> str:
    return str((getattr(checkpoint.config, "architectures", None) or [type(checkpoint.config).__name__])[0])


def _before_the_real_run(steps: Steps, small: Steps) -> Iterator[str]:
    """What doubles cannot show, or show and do not stop at: weights, disk, the end of a turn."""
    for anchor in steps.recipe.anchors:
        yield from (f"score: {finding.line}" for finding in check_anchor(small, anchor))
    for one in doubles_of(steps):
        if finding := check_usable("weights", one):
            yield finding.line
    disk = check_disk(steps, steps.recipe.prompts.take or 0, trainings=list(steps.recipe.compositions))
    if disk.verdict != "ok":
        yield f"disk: {disk.text}"
