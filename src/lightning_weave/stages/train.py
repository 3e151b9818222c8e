"""`lweave train`: fit the student to each composition of the cached shifts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from lightning_weave.checks.findings import Finding, listed, pending_compositions
from lightning_weave.checks.models import attempt, check_engine, check_package, check_student
from lightning_weave.checks.pairs import find_same_model
from lightning_weave.checks.watch import Watch, check_training, warn
from lightning_weave.config import Joint, Online, Recipe, Sequential, is_own_function, replicate_of
from lightning_weave.config.fields import MOST_CANDIDATES
from lightning_weave.devices import free_memory
from lightning_weave.errors import InputError
from lightning_weave.models.hub import check_trainable
from lightning_weave.plugins import load_function
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_distributed
from lightning_weave.run import Run, is_wanted
from lightning_weave.stages.caches import open_levels, routed_weights
from lightning_weave.stages.prompts import (
    build_prompts,
    load_prompts,
    own_trajectories,
    planned_prompts,
    tag_columns,
    tag_of,
)
from lightning_weave.stages.work import LOCAL, Executor, set_up
from lightning_weave.train.loop import train_offline
from lightning_weave.train.online import train_online
from lightning_weave.train.parallel import join
from lightning_weave.train.resampled import train_in_sequence, train_refreshed
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import TrainContext, check_lora, compute_dtype, needs_sharding


def train(
    run: Run,
    progress: Progress,
    only: Sequence[str] | None = None,
    watch: Watch = warn,
    executor: Executor = LOCAL,
) -> None:
    """Train every composition that is not complete, resuming from the newest checkpoint."""
    names = list(run.recipe.compositions)
    if unknown := sorted(set(only or ()) - set(names)):
        raise InputError(f"{unknown[0]!r}: no such composition; this recipe has {', '.join(names) or 'none'}")
    if not names:
        raise InputError("this recipe has no composition to train; add a [compositions.NAME] with weights")
    if "online" in run.methods(only):
        build_prompts(run, progress)
    selection = [name for name in names if is_wanted(name, only)]
    pending = [name for name in selection if not run.stage("train", name).complete]
    _check_resampling(run, pending)
    for name in pending:
        _check_candidates(run, name)
    for name in selection:
        if name not in pending:
            run.stage("train", name).settle()
            watch(partial(check_training, run, name), False, progress)
    if pending or is_distributed():  # all ranks join, so that rank 0 can name what is pending: disks show files late
        work = partial(train_compositions, names=pending, watch=watch)
        if executor.train is None:
            work(run, progress)
        else:
            executor.train(work, run, progress)


def train_compositions(run: Run, progress: Progress, names: Sequence[str], watch: Watch) -> None:
    """Train the compositions that rank 0 names, each with its method, all ranks together."""
    device = set_up(run)
    _check_dtype(run.recipe)
    dtype = compute_dtype(run.recipe.train, device)
    with join(device, sharded=needs_sharding(run, dtype, device)) as ranks:
        context = TrainContext(ranks, dtype, progress)
        for name in ranks.broadcast(list(names)):
            if ranks.broadcast(run.stage("train", name).complete):  # by another composition with the same content
                run.stage("train", name).settle()
            else:
                match run.recipe.compositions[name]:
                    case Sequential():
                        train_in_sequence(run, name, context)
                    case Online():
                        train_online(run, name, context)
                    case Joint(parts=parts) if parts > 1:
                        train_refreshed(run, name, context)
                    case _:
                        train_offline(run, name, context)
                free_memory()
            watch(partial(check_training, run, name), True, progress)


PAPER_UPDATES = 400
FEW_UPDATES = 10


def validate(run: Run) -> Iterator[Finding]:
    """Check that the student can be trained as every pending composition wants it, and has the prompts for it."""
    recipe = run.recipe
    pending = [(replicate_of(name), name) for name in pending_compositions(run)]  # `--only` may leave a replicate alone
    names = list(dict.fromkeys(own if own in recipe.compositions else name for own, name in pending))
    tables = [table for one in recipe.compositions.values() for table in (one.weights, *one.routes.values(), one.used)]
    for anchor in recipe.anchors if names or not tables else ():
        if not any(anchor in table for table in tables):
            text = "it is in no composition, so nothing is trained with it. Add [compositions.NAME] with weights = "
            text += f"{{ {anchor} = 1.0 }}, or remove it"
            yield Finding(f"anchors.{anchor}", "composition", "error", text, judged=True)
    if not names:
        return
    lora = recipe.train.lora
    lacks = [] if lora is None else list(check_package("train.lora", "peft"))
    yield from lacks
    if lora is not None and lora.base != "own":
        yield from check_package("train.lora.base", "bitsandbytes")
    for tracker in recipe.train.trackers:
        yield from check_package("train.trackers", tracker, tracker)
    for name in names:
        if is_own_function(run.objective(name)):
            yield from attempt(f"compositions.{name}", "function", load_function, run.objective(name), run.trust)
    for anchor in sorted({anchor for name in names for anchor in recipe.compositions[name].used}):
        with suppress(InputError):  # a model that cannot be read is reported with the scores
            yield from find_same_model(run, anchor)
    online = any(recipe.compositions[name].method == "online" for name in names)
    if online:
        yield from check_engine(run, "rollout")
    faults = check_student(run, "rollout", recipe.engine.rollout if online else "hf")
    faults = faults or list(attempt("student", "checkpoint", _check_trainable, run))
    yield from faults
    if faults:
        return
    yield from attempt("train.dtype", "dtype", _check_dtype, recipe)
    for name in names:
        yield from attempt(f"compositions.{name}", "candidates", _check_candidates, run, name)
    if lora is not None and not lacks:
        yield from attempt("train.lora", "targets", check_lora, run.student, lora)
    try:
        prompts = planned_prompts(run)[0]
    except InputError:  # reported with the prompts
        return
    yield from attempt("rollout.from", "turns", _check_resampling, run, names)
    updates = count_updates(recipe, len(prompts))
    if updates < FEW_UPDATES and not recipe.rehearsal:
        text = f"{len(prompts):,} prompts make {updates:,} updates, too few for the student to change; the paper has "
        text += f"{PAPER_UPDATES}. Give more prompts, or raise train.epochs"
        yield Finding("prompts", "updates", "warning", text, {"updates": updates})
    for name in names:
        if recipe.compositions[name].slots and prompts:
            yield from attempt(f"compositions.{name}.control", "levels", open_levels, run, name, prompts)
    routed = [name for name in names if recipe.compositions[name].routes]
    if not routed:
        return
    try:
        asked = load_prompts(run, tag_columns(recipe), prompts)
        counts = Counter(tag_of(recipe, one) for one in asked)
        words = listed(f"{tag} {count:,}" for tag, count in counts.most_common())
        yield Finding("tags", "prompts", "note", f"prompts by tag: {words}", {"tags": dict(counts)})
        for name in routed:
            routed_weights(run, name, asked)
            for tag in [tag for tag in recipe.compositions[name].routes if tag not in counts]:
                text = f"no prompt has the tag {tag!r}, so its weights are never used"
                yield Finding(f"compositions.{name}.weights.{tag}", "routes", "warning", text)
    except InputError as error:
        yield Finding("tags", "routes", "error", str(error))


def _check_dtype(recipe: Recipe) -> None:
    if recipe.train.dtype == "float16":
        raise InputError('train.dtype = "float16": small gradients would vanish in it. Use "bfloat16" or "float32"')


def _check_candidates(run: Run, name: str) -> None:
    run.recipe.refuse_rules(name)
    candidates, vocabulary = run.recipe.reference.candidates, run.student.vocabulary
    if run.objective(name) == "reverse-kl-full" and candidates != vocabulary:
        small = f"set reference.candidates = {vocabulary}, or " if vocabulary <= MOST_CANDIDATES else ""
        raise InputError(
            f'objective = "reverse-kl-full" needs the whole vocabulary as candidates, {vocabulary:,} tokens (now '
            f'reference.candidates = {candidates}, at most {MOST_CANDIDATES}): {small}use "reverse-kl"'
        )


def _check_resampling(run: Run, names: Sequence[str]) -> None:
    """Refuse to sample logs with turns of tools or users again: nobody would answer the student."""
    samples = [name for name in names if run.recipe.compositions[name].samples]
    if run.recipe.rollout.from_ is None or not samples:
        return
    responses = [response for group in own_trajectories(run) for response in group.responses]
    if any(response.decided is not None and not all(response.decided) for response in responses):
        raise InputError(
            f"compositions.{samples[0]} samples while it trains, but the trajectories of rollout.from = "
            f"{run.recipe.rollout.from_!r} have turns of tools or users, which cannot be sampled again. Train on the "
            'log: method = "joint", without refresh'
        )


def _check_trainable(run: Run) -> None:
    check_trainable(run.student.config_path)
    if run.student.is_downloaded:
        _ = run.student.updates  # an adapter that is more than low-rank updates is refused


def count_updates(recipe: Recipe, prompts: int) -> int:
    """Count the updates that so many prompts make. The last one of an epoch may have fewer rows."""
    try:
        return len(make_schedule(recipe, prompts))
    except InputError:  # validation leaves no prompt to train on, which training says
        return 0
