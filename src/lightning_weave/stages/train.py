"""`lweave train`: fit the student to each composition of the cached shifts, student only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError
from lightning_weave.models.load import checkpoint_dtype, load_model, load_tokenizer, vocabulary_size
from lightning_weave.progress import Progress
from lightning_weave.stages.card import model_card
from lightning_weave.stages.machine import set_up
from lightning_weave.stages.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import measure
from lightning_weave.train.cache import Cache, Pair
from lightning_weave.train.checkpoint import Checkpoints
from lightning_weave.train.data import Schedule
from lightning_weave.train.export import export, with_lora
from lightning_weave.train.loop import Fit, adam, check_agreement
from lightning_weave.train.objectives import Loss, Trainee
from lightning_weave.train.parallel import Ranks, join, shard, whole_weights
from lightning_weave.train.watch import Metrics, line

EXPORT_SAMPLE = 16  # rows on which the exported weights are compared with the trained ones


def run(steps: Steps, progress: Progress, only: Sequence[str] | None = None) -> None:
    """Train every composition that is not up to date. Resumable: goes on from the newest checkpoint."""
    names = list(steps.recipe.compositions)
    if unknown := sorted(set(only or ()) - set(names)):
        raise InputError(f"--only {unknown[0]}: no such composition; this recipe has {', '.join(names) or 'none'}")
    if not names:
        raise InputError("this recipe has no composition to train; add a [compositions.NAME] with weights")
    for name in names:
        stage = steps.store.stage(steps.train(name))
        if (only is None or name in only) and stage.state() != "done":
            train_composition(steps, name, stage, progress)


def train_composition(steps: Steps, name: str, stage: Stage, progress: Progress) -> None:
    """Fit one composition and export it."""
    recipe = steps.recipe
    device = set_up(recipe, steps.store)
    dtype = _compute_dtype(recipe, device)
    cache, weights = open_cache(steps, name)
    with join(device, sharded=dtype != torch.float32) as ranks:
        trainee = open_trainee(steps, ranks, dtype)
        fit = _make_fit(recipe, name, trainee, cache, weights, ranks, stage.folder)
        checkpoints = Checkpoints(stage.folder / "checkpoints", stage.step.fingerprint, recipe.train.keep)
        figures = _fit(steps, name, fit, checkpoints, progress)
        figures |= _round_to(fit, checkpoint_dtype(steps.student_path), _schedule(steps, cache).updates()[0])
        gathered = whole_weights(trainee)
        if ranks.first:
            _export(steps, name, stage, gathered, figures, progress)
            checkpoints.clear()
        ranks.wait()


def open_cache(steps: Steps, name: str) -> tuple[Cache, list[float]]:
    """Open the cached shifts of the anchors that take part in a composition."""
    composition = steps.recipe.compositions[name]
    pairs = []
    for anchor, weight in sorted(composition.weights.items()):
        if weight != 0:
            post, pre = (steps.store.stage(step) for step in steps.scores_of(anchor))
            pairs.append(Pair(anchor, post, pre, weight, steps.recipe.anchors[anchor].validity))
    cache = Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), pairs)
    return cache, [pair.weight for pair in pairs]


def open_trainee(steps: Steps, ranks: Ranks, dtype: torch.dtype) -> Trainee:
    """Load the student with float32 masters, wrapped and sharded as the recipe says."""
    section, path = steps.recipe.train, steps.student_path
    trust = steps.recipe.student.trust_remote_code
    model = load_model(path, dtype=torch.float32, device=ranks.device, trust_remote_code=trust)
    vocabulary = vocabulary_size(load_tokenizer(path, trust))
    model.requires_grad_(True)
    model.train()
    if section.lora is not None:
        model = with_lora(model, section.lora, section.seed)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainee = Trainee(model, vocabulary)
    if section.compile:
        for block in _blocks(model):
            block.compile()
    if ranks.world > 1 or dtype != torch.float32:
        shard(trainee, _blocks(model), ranks, dtype)
    return trainee


def _blocks(model: Any) -> list[nn.Module]:
    """The decoder layers: the longest list of modules in the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _compute_dtype(recipe: Recipe, device: torch.device) -> torch.dtype:
    """bfloat16 only where the hardware has it; masters are float32 in any case."""
    if recipe.train.dtype != "auto":
        return getattr(torch, recipe.train.dtype)
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_it else torch.float32


def _schedule(steps: Steps, cache: Cache) -> Schedule:
    train, responses = steps.recipe.train, steps.recipe.rollout.responses
    return Schedule(
        len(cache) // responses,
        responses,
        train.epochs,
        train.prompts_per_round,
        train.updates_per_round,
        train.seed,
        train.validation,
    )


def _make_fit(
    recipe: Recipe, name: str, trainee: Trainee, cache: Cache, weights: list[float], ranks: Ranks, folder: Path
) -> Fit:
    train, composition = recipe.train, recipe.compositions[name]
    loss = Loss(composition.objective or train.objective, composition.alpha)
    loss.check(recipe.reference.candidates, trainee.head_description.vocabulary)
    optimizer = adam(trainee, train.learning_rate, train.betas, train.weight_decay)
    return Fit(trainee, optimizer, cache, weights, loss, train.clip, train.token_budget, ranks, folder)


def _fit(steps: Steps, name: str, fit: Fit, checkpoints: Checkpoints, progress: Progress) -> dict[str, Any]:
    """Run all updates that are left; returns what the model card will say."""
    train, ranks = steps.recipe.train, fit.ranks
    schedule = _schedule(steps, fit.cache)
    updates, held_out = schedule.updates(), schedule.held_out()
    start = checkpoints.latest()
    if start is None:
        if ranks.first:
            checkpoints.clear()
        agreement = check_agreement(fit, updates[0], train.agreement, train.allow_disagreement)
        progress.say(f"train {name}: trainer and cache agree to {agreement:.1e} at zero shift")
        start = 0
    else:
        checkpoints.restore(start, fit.trainee, fit.optimizer)
        progress.say(f"train {name}: goes on after update {start}")
    metrics = Metrics(fit.folder, start, train.trackers, f"{steps.recipe.name}/{name}", ranks.first)
    figures: dict[str, float] = {}
    validation: dict[str, float] = {}
    with (
        measure(steps.store.run_dir, "train", name, method="offline") as meter,
        progress.bar(f"train {name}", len(updates) - start, "update") as bar,
    ):
        for number in range(start, len(updates)):
            figures = fit.update(updates[number])
            step = number + 1
            if held_out and (step % train.validate_every == 0 or step == len(updates)):
                validation = {f"validation_{key}": value for key, value in fit.distance(held_out).items()}
                figures |= validation
            metrics.add(step, figures)
            meter.add(tokens=int(figures["tokens"]))
            while fit.notes:
                progress.say(f"train {name}: {fit.notes.pop(0)}")
            if step % train.checkpoint_every == 0 and step < len(updates):
                checkpoints.save(step, fit.trainee, fit.optimizer, ranks)
            bar.advance(note=line(step, len(updates), figures))
    return {"updates": len(updates), **figures, **validation}


def _round_to(fit: Fit, dtype: torch.dtype, numbers: Sequence[int]) -> dict[str, float]:
    """Round the weights to the dtype they are exported in, and measure KL(exported || trained) on a few rows."""
    rows = [fit.cache.read(number) for number in numbers[:EXPORT_SAMPLE]]
    with torch.no_grad():
        before = [log_pi_NO for _, log_pi_NO in fit.look(rows)]
        for parameter in fit.trainee.parameters():
            parameter.copy_(parameter.to(dtype).to(torch.float32))
        after = [log_pi_NO for _, log_pi_NO in fit.look(rows)]
        gaps = [(new.exp() * (new - old)).sum(dim=-1) for new, old in zip(after, before, strict=True)]
    return {"export_kl": torch.cat(gaps).mean().item() if gaps else 0.0}


def _export(
    steps: Steps, name: str, stage: Stage, weights: dict[str, Any], figures: dict[str, Any], progress: Progress
) -> None:
    card = model_card(steps, name, figures)
    files = export(
        stage.folder / "final",
        steps.student_path,
        weights,
        dtype=checkpoint_dtype(steps.student_path),
        lora=steps.recipe.train.lora,
        card=card,
        trust_remote_code=steps.recipe.student.trust_remote_code,
    )
    wanted = ("updates", "export_kl", "reverse_kl", "kept")
    stage.record(files, {str(key): value for key, value in figures.items() if key in wanted})
    progress.say(f"train {name}: {stage.folder / 'final'} (KL exported || trained {figures['export_kl']:.1e} nats)")
