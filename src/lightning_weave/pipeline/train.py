"""`lweave train`: fit the student to each composition of the cached shifts, student only."""

from collections.abc import Sequence

import torch

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.train.offline import train_offline
from lightning_weave.train.online import train_online
from lightning_weave.train.parallel import Ranks, join
from lightning_weave.train.sequential import train_in_sequence


def run(steps: Steps, progress: Progress, only: Sequence[str] | None = None) -> None:
    """Train every composition that is not up to date. Resumable: goes on from the newest checkpoint."""
    names = list(steps.recipe.compositions)
    if unknown := sorted(set(only or ()) - set(names)):
        raise InputError(f"--only {unknown[0]}: no such composition; this recipe has {', '.join(names) or 'none'}")
    if not names:
        raise InputError("this recipe has no composition to train; add a [compositions.NAME] with weights")
    stages = {name: steps.store.stage(steps.train(name)) for name in names if only is None or name in only}
    pending = {name: stage for name, stage in stages.items() if stage.state() != "done"}
    if pending:
        device = set_up(steps.recipe, steps.store)
        dtype = _compute_dtype(steps.recipe, device)
        with join(device, sharded=dtype != torch.float32) as ranks:
            for name, stage in pending.items():
                train_composition(steps, name, stage, ranks, dtype, progress)


def train_composition(
    steps: Steps, name: str, stage: Stage, ranks: Ranks, dtype: torch.dtype, progress: Progress
) -> None:
    """Fit one composition, in the way that it asks for, and export it."""
    match steps.recipe.compositions[name].method:
        case "sequential":
            train_in_sequence(steps, name, stage, ranks, dtype, progress)
        case "online":
            train_online(steps, name, stage, ranks, dtype, progress)
        case _:
            train_offline(steps, name, stage, ranks, dtype, progress)


def _compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """bfloat16 only where the hardware has it; masters are float32 in any case."""
    match recipe.train.dtype:
        case "auto":
            has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
            return torch.bfloat16 if has_it else torch.float32
        case "float16":
            raise InputError('train.dtype = "float16": small gradients would vanish in it. Use "bfloat16" or "float32"')
        case named:
            return getattr(torch, named)
