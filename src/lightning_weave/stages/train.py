"""`lweave train`: fit the student to each composition of the cached shifts, student only."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.load import checkpoint_dtype, load_model, load_tokenizer, vocabulary_size
from lightning_weave.progress import Progress
from lightning_weave.stages.card import model_card
from lightning_weave.stages.machine import set_up
from lightning_weave.stages.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import Meter, measure
from lightning_weave.train.cache import Cache, Pair
from lightning_weave.train.checkpoint import Checkpoints
from lightning_weave.train.data import compose
from lightning_weave.train.export import round_weights, trained_model, with_lora, write_model
from lightning_weave.train.loop import BAD_ROWS, Fit, adam, check_agreement
from lightning_weave.train.objectives import Loss, Trainee
from lightning_weave.train.parallel import Ranks, join, shard, whole_weights
from lightning_weave.train.schedule import Schedule
from lightning_weave.train.watch import Metrics, line

EXPORT_ROWS, EXPORT_DECISIONS = 4, 256  # where the exported weights are compared with the trained ones
RECORDED = ("updates", "zero_shift_loss", "loss", "reverse_kl", "validation_reverse_kl", "kept", "export_kl")


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
    """Fit one composition and export it."""
    recipe, cache = steps.recipe, open_cache(steps, name)
    schedule = _schedule(recipe, cache)
    fit = _make_fit(recipe, name, open_trainee(steps, ranks, dtype), cache, ranks, stage)
    checkpoints = Checkpoints(stage.folder / "checkpoints", stage.step.fingerprint, recipe.train.keep)
    job = Job(steps, name, stage, schedule, fit, checkpoints, progress)
    with measure(steps.store.run_dir, "train", name, method="offline") as meter:
        figures = job.check(dtype)
        figures |= job.fit_all(job.go_to_start(), meter)
        weights = whole_weights(fit.trainee)
        if ranks.first:
            job.export(weights, figures)
        ranks.wait()


def open_cache(steps: Steps, name: str) -> Cache:
    """Open the cached shifts of the anchors that take part in a composition."""
    composition = steps.recipe.compositions[name]
    pairs = []
    for anchor, weight in sorted(composition.weights.items()):
        if weight != 0:
            post, pre = (steps.store.stage(step) for step in steps.scores_of(anchor))
            pairs.append(Pair(anchor, post, pre, weight, steps.recipe.anchors[anchor].validity))
    return Cache(steps.store.stage(steps.rollout), steps.store.stage(steps.reference), pairs)


def open_trainee(steps: Steps, ranks: Ranks, dtype: torch.dtype) -> Trainee:
    """Load the student with float32 masters, wrapped and sharded as the recipe says."""
    section, path = steps.recipe.train, steps.student_path
    trust = steps.recipe.student.trust_remote_code
    model = load_model(path, dtype=torch.float32, device=ranks.device, trust_remote_code=trust)
    model.requires_grad_(True).train()
    if section.lora is not None:
        model = with_lora(model, section.lora, section.seed)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainee = Trainee(model, vocabulary_size(load_tokenizer(path, trust)))
    blocks = _blocks(model)
    if section.compile:
        for block in blocks:
            block.compile()
    if ranks.world > 1 or dtype != torch.float32:
        shard(trainee, blocks, ranks, dtype)
    return trainee


def _blocks(model: Any) -> list[nn.Module]:
    """The decoder layers: the longest list of modules in the model."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


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


def _schedule(recipe: Recipe, cache: Cache) -> Schedule:
    train, responses = recipe.train, recipe.rollout.responses
    return Schedule(
        len(cache) // responses,
        responses,
        train.epochs,
        train.prompts_per_round,
        train.updates_per_round,
        train.seed,
        train.validation,
    )


def _make_fit(recipe: Recipe, name: str, trainee: Trainee, cache: Cache, ranks: Ranks, stage: Stage) -> Fit:
    train, composition = recipe.train, recipe.compositions[name]
    loss = Loss(composition.objective or train.objective, composition.alpha)
    loss.check(recipe.reference.candidates, trainee.head_description.vocabulary)
    optimizer = adam(trainee, train.learning_rate, train.betas, train.weight_decay)
    return Fit(trainee, optimizer, cache, loss, train.clip, train.token_budget, train.seed, ranks, stage.folder)


@dataclass(frozen=True)
class Job:
    """The training of one composition."""

    steps: Steps
    name: str
    stage: Stage
    schedule: Schedule
    fit: Fit
    checkpoints: Checkpoints
    progress: Progress

    def say(self, message: str) -> None:
        """Tell people something about this composition."""
        self.progress.say(f"train {self.name}: {message}")

    def check(self, dtype: torch.dtype) -> dict[str, float]:
        """Make sure, before anything is spent, that trainer and cache see the same student."""
        train = self.steps.recipe.train
        if remark := self.fit.loss.remark(self.fit.trainee.head_description):
            self.say(remark)
        agreement, complaint = check_agreement(self.fit, self.schedule.rows(0), train.agreement, dtype)
        if complaint and not train.allow_disagreement:
            raise Mismatch(f"{complaint}.\nMake the reference again, or set train.allow_disagreement = true")
        self.say(complaint or f"trainer and cache agree to {agreement:.1e} at zero shift")
        return {"zero_shift_loss": agreement}

    def go_to_start(self) -> int:
        """Restore the newest checkpoint of this recipe, if there is one; returns how many updates it has."""
        start = self.checkpoints.latest() or 0
        self.fit.ranks.wait()  # for all to have looked
        if self.fit.ranks.first:
            (self.stage.folder / BAD_ROWS).unlink(missing_ok=True)
            if not start:
                self.checkpoints.clear()
        if start:
            self.checkpoints.restore(start, self.fit.trainee, self.fit.optimizer)
            self.say(f"goes on after update {start}")
        return start

    def fit_all(self, start: int, meter: Meter) -> dict[str, float]:
        """Run all updates that are left; rank 0 returns the last figures."""
        train, total = self.steps.recipe.train, len(self.schedule)
        metrics = self._open_metrics(start) if self.fit.ranks.first else None
        with self.progress.bar(f"train {self.name}", total - start, "update") as bar:
            for step in range(start + 1, total + 1):
                figures = self.fit.update(step, self.schedule.rows(step - 1))
                if step % train.validate_every == 0 or step == total:
                    figures |= self._validate()
                if metrics:
                    metrics.add(step, figures)
                    meter.add(tokens=int(figures["tokens"]))  # of all ranks
                while self.fit.notes:
                    self.say(self.fit.notes.pop(0))
                if step % train.checkpoint_every == 0 or step == total:
                    self.checkpoints.save(step, self.fit.trainee, self.fit.optimizer, self.fit.ranks)
                bar.advance(note=line(figures))
        if metrics is None:
            return {}
        metrics.close()
        return {**metrics.last, "updates": total}

    def _open_metrics(self, start: int) -> Metrics:
        name = f"{self.steps.recipe.name}/{self.name}"
        return Metrics(self.stage.folder, start, self.steps.recipe.train.trackers, name, self.checkpoints.fingerprint)

    def _validate(self) -> dict[str, float]:
        held_out = self.schedule.held_out()
        return {f"validation_{key}": value for key, value in self.fit.distance(held_out).items()} if held_out else {}

    def export(self, weights: dict[str, Any], figures: dict[str, Any]) -> None:
        """Write final/ in the student's dtype, and say what the rounding cost."""
        recipe, student, cache = self.steps.recipe, self.steps.student_path, self.fit.cache
        model = trained_model(student, weights, recipe.train.lora, recipe.student.trust_remote_code)
        rows = [cache.read(number) for number in self.schedule.rows(0)[:EXPORT_ROWS]]
        batch = compose(rows, cache.weights, self.fit.loss.alpha).first(EXPORT_DECISIONS)
        dtype = checkpoint_dtype(student)
        lost = round_weights(model, dtype, batch, self.fit.trainee.head_description.vocabulary)
        figures = {**figures, "export_kl": lost}
        final = self.stage.folder / "final"
        files = write_model(final, model, dtype, student, model_card(self.steps, self.name, figures))
        self.stage.record(files, {key: figures[key] for key in RECORDED if key in figures})
        self.say(f"{final} (KL exported || trained {lost:.1e} nats)")
