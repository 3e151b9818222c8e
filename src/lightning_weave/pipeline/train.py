"""`lweave train`: fit the student to each composition of the cached shifts."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from lightning_weave.checks.watch import Watch, check_training, warn
from lightning_weave.config import Joint, Online, Recipe, Sequential
from lightning_weave.devices import has_bfloat16
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.ranks import can_meet
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import HERE, Workers, make_room
from lightning_weave.train.offline import train_offline
from lightning_weave.train.online import train_online
from lightning_weave.train.parallel import join
from lightning_weave.train.refreshed import train_refreshed
from lightning_weave.train.sequential import train_in_sequence
from lightning_weave.train.training import TrainContext, give_back, needs_sharding


def run(
    steps: Steps,
    progress: Progress,
    make_cache: Callable[[Steps, Progress], None],
    only: Sequence[str] | None = None,
    watch: Watch = warn,
    workers: Workers = HERE,
) -> None:
    """Train every composition that is not up to date, resuming from the newest checkpoint.

    `make_cache` makes the cache of a method that samples while it trains.
    """
    names = list(steps.recipe.compositions)
    if unknown := sorted(set(only or ()) - set(names)):
        raise InputError(f"{unknown[0]!r}: no such composition; this recipe has {', '.join(names) or 'none'}")
    if not names:
        raise InputError("this recipe has no composition to train; add a [compositions.NAME] with weights")
    selection = [name for name in names if only is None or name in only]
    pending = [name for name in selection if steps.store.stage(steps.train(name)).state() != "done"]
    for name in selection:
        if name not in pending:
            make_room(steps.store.stage(steps.train(name)))  # of a run that was killed as it ended
            watch(partial(check_training, steps, name), False, progress)
    if pending or can_meet():  # all ranks join, so that rank 0 can say what is pending: disks show files late
        workers.train(partial(train_compositions, names=pending, make_cache=make_cache, watch=watch), steps, progress)


def train_compositions(
    steps: Steps, progress: Progress, names: Sequence[str], make_cache: Callable[[Steps, Progress], None], watch: Watch
) -> None:
    """Train these compositions, all ranks together; those that rank 0 names count."""
    device = set_up(steps.recipe, steps.store)
    dtype = _compute_dtype(steps.recipe, device)
    with join(device, sharded=needs_sharding(steps, dtype, device)) as ranks:
        context = TrainContext(ranks, dtype, progress, lambda inner: make_cache(inner, progress))
        for name in ranks.gathered(list(names) if ranks.first else []):
            train_composition(steps, name, context)
            give_back()
            watch(partial(check_training, steps, name), True, progress)


def train_composition(steps: Steps, name: str, context: TrainContext) -> None:
    """Fit one composition with its own method, and export it."""
    stage = steps.store.stage(steps.train(name))
    make_room(stage)
    if any(context.ranks.gathered([stage.state() == "done"] if context.ranks.first else [])):
        return  # it had been set aside
    match steps.recipe.compositions[name]:
        case Sequential():
            train_in_sequence(steps, name, context)
        case Online():
            train_online(steps, name, context)
        case Joint(refresh=parts) if parts > 1:
            train_refreshed(steps, name, context)
        case _:
            train_offline(steps, name, context)


def _compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """bfloat16 only where the hardware has it; masters are float32 in any case."""
    match recipe.train.dtype:
        case "auto":
            return torch.bfloat16 if has_bfloat16(device) else torch.float32
        case "float16":
            raise InputError('train.dtype = "float16": small gradients would vanish in it. Use "bfloat16" or "float32"')
        case named:
            return getattr(torch, named)
