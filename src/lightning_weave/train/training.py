"""What training is whatever its rows are: a student, a schedule, updates with checkpoints between, an export."""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_weave.config import Train
from lightning_weave.devices import can_shard
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.attention import spare_memory
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.load import room_for_weights
from lightning_weave.models.memory import free_memory
from lightning_weave.models.parts import blocks_of, freeze_all_but_text
from lightning_weave.progress import Progress
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage
from lightning_weave.store.ledger import Meter
from lightning_weave.train.card import model_card
from lightning_weave.train.checkpoint import CheckpointWriter, TrainingCheckpoints
from lightning_weave.train.data import Batch, compose
from lightning_weave.train.export import read_weights, round_weights, trained_adapter, with_lora, write_model
from lightning_weave.train.loop import BAD_ROWS, Fit, Rows, adam, check_agreement, set_rate
from lightning_weave.train.objectives import Loss, Trainee
from lightning_weave.train.parallel import Ranks, give_memory, reshard, shard
from lightning_weave.train.probe import Probe, with_aes
from lightning_weave.train.room import FILE as LOWERED
from lightning_weave.train.room import agreed_budget, leave_budget
from lightning_weave.train.schedule import Schedule, rate_share
from lightning_weave.train.watch import Metrics, line

EXPORT_ROWS = 4
EXPORT_DECISIONS = 64  # of each row, where the exported weights are compared with the trained ones
RECORDED = (
    "alpha",
    "target_kl",
    "start_kl",
    "updates",
    "zero_shift_loss",
    "loss",
    "reverse_kl",
    "validation_reverse_kl",
    "kept",
    "export_kl",
)


@dataclass(frozen=True)
class TrainContext:
    """What every way to train is given beside the recipe."""

    ranks: Ranks
    dtype: torch.dtype  # of the computation; master weights are float32
    progress: Progress
    make_cache: Callable[[Steps], None]  # the stages before training, for ways that sample while they train


def open_trainee(steps: Steps, context: TrainContext, start: Checkpoint | None = None) -> Trainee:
    """Open the student with float32 masters (frozen weights: as its files have them), wrapped and sharded.

    It is built and sharded without memory; then each rank reads its own rows, and never holds more than it keeps.
    """
    give_back()  # what sampled and scored before
    section = steps.recipe.train
    ranks = context.ranks
    checkpoint = start or steps.student
    if is_quantised(section):
        return _open_quantised(section, context, checkpoint)
    among = section.shard_ranks or ranks.world
    if ranks.world % among:
        raise InputError(f"train.shard_ranks = {among} does not divide the {ranks.world} ranks. Set one that does")
    sharded = ranks.world > 1 or needs_sharding(steps, context.dtype, ranks.device)
    layout = checkpoint.layout
    model = checkpoint.without_weights(_kept_dtype(section, checkpoint, context.dtype, ranks.device)).train()
    spare_memory(model)
    freeze_all_but_text(model)
    decoder, others = blocks_of(model)
    if section.lora is not None:
        model = with_lora(model, section.lora, section.seed)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainee = Trainee(model, checkpoint.vocabulary)
    if sharded:
        shard(trainee, decoder + others, ranks, context.dtype, among)
    with room_for_weights(checkpoint.path, ranks.device):
        give_memory(trainee, ranks.device)
        read_weights(trainee, layout, checkpoint.updates)
    trainee.look(pack=not section.compile)  # compiled layers would be compiled again for every new set of lengths
    reshard(trainee)
    if section.compile:
        for block in decoder:
            block.compile()
    return trainee


def is_quantised(section: Train) -> bool:
    """Whether the frozen student is kept in fewer bits than its files have."""
    return section.lora is not None and section.lora.base != "own"


def _open_quantised(section: Train, context: TrainContext, checkpoint: Checkpoint) -> Trainee:
    """Open the student in 4 or 8 bits with an adapter beside it, whole on one rank."""
    assert section.lora is not None, "only a frozen student is quantised"
    bits = section.lora.base
    if context.ranks.world > 1:
        raise InputError(
            f"train.lora.base = {bits!r}: a quantised student is on one rank, and there are {context.ranks.world}. "
            'Start one process, or set base = "own"'
        )
    model = checkpoint.load_quantised(bits, context.dtype, context.ranks.device).train()
    spare_memory(model)
    model = with_lora(model, section.lora, section.seed)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data = weight.data.to(context.ranks.device)
    if section.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    trainee = Trainee(model, checkpoint.vocabulary)
    trainee.look(pack=not section.compile)
    return trainee


def needs_sharding(steps: Steps, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights are kept in another dtype than they compute in, even in one process: sharding converts them."""
    train = steps.recipe.train
    if is_quantised(train) or _kept_dtype(train, steps.student, dtype, device) == dtype:
        return False  # adapters, which are float32, convert what they read themselves
    if not can_shard(device):
        raise InputError(f'train.dtype = {train.dtype!r}: on {device} weights compute as they are kept. Use "float32"')
    return True


def _kept_dtype(train: Train, student: Checkpoint, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What weights are kept in: trained ones in float32, frozen ones as their files have them, if that can compute."""
    if train.lora is None:
        return torch.float32
    return student.dtype if can_shard(device) else dtype


def give_back() -> None:
    """Free the models of what has been trained, before another is loaded or an engine looks for room.

    State dicts and sharded modules hold on to themselves in cycles, which Python drops only when it is told to.
    """
    gc.collect()
    free_memory()


def make_fit(steps: Steps, name: str, trainee: Trainee, rows: Rows, *, alpha: float, ranks: Ranks) -> Fit:
    """Put student, objective and optimizer together."""
    train = steps.recipe.train
    loss = Loss.of(steps.objective(name), alpha, steps.trust)
    loss.check(steps.recipe.reference.candidates, trainee.head_description.vocabulary)
    budget = train.token_budget
    run_dir = steps.store.run_dir
    agreed = agreed_budget(run_dir, budget, ranks)
    lowered = f"train.token_budget is {agreed}: {budget} was too much at an earlier start ({run_dir / LOWERED})"
    return Fit(
        trainee=trainee,
        optimizer=adam(trainee, train.learning_rate, train.betas, train.weight_decay),
        cache=rows,
        loss=loss,
        clip=train.clip,
        token_budget=agreed,
        leave_budget=partial(leave_budget, run_dir, budget),
        seed=train.seed,
        ranks=ranks,
        folder=steps.store.stage(steps.train(name)).folder,
        notes=[lowered] if agreed != budget else [],
    )


@dataclass(frozen=True)
class Training:
    """The training of one composition."""

    steps: Steps
    name: str
    schedule: Schedule
    fit: Fit
    progress: Progress
    before_round: Callable[[int], None] | None = None  # online training makes the round's trajectories here

    @property
    def stage(self) -> Stage:
        return self.steps.store.stage(self.steps.train(self.name))

    @property
    def checkpoints(self) -> TrainingCheckpoints:
        """Where this composition's checkpoints are."""
        folder = self.stage.folder / "checkpoints"
        return TrainingCheckpoints(folder, self.stage.step.fingerprint, self.steps.recipe.train.keep)

    def say(self, message: str) -> None:
        """Tell people something about this composition."""
        self.progress.say(f"train {self.name}: {message}")

    def check(self, dtype: torch.dtype) -> dict[str, float]:
        """Make sure, before anything is spent, that trainer and cache see the same student."""
        train = self.steps.recipe.train
        if remark := self.fit.loss.remark(self.fit.trainee.head_description):
            self.say(remark)
        if not self.fit.trainee.packs:
            reason = (
                "train.compile takes no packed ones" if train.compile else "its layers do not keep packed ones apart"
            )
            self.say(f"the student's rows are padded to one length: {reason}")
        agreement, complaint = check_agreement(self.fit, self.schedule.rows(0), train.agreement, dtype)
        if complaint and is_quantised(train):
            self.say(f"the quantised student differs from the one that was cached: {agreement:.1e} at zero shift")
            return {"zero_shift_loss": agreement}
        if complaint and not train.allow_disagreement:
            raise Mismatch(f"{complaint}.\nRerun the reference, or set train.allow_disagreement = true")
        self.say(complaint or f"trainer and cache agree to {agreement:.1e} at zero shift")
        return {"zero_shift_loss": agreement}

    def go_to_start(self) -> int:
        """Restore the newest checkpoint of this recipe that rank 0 sees; returns how many updates it has."""
        ranks = self.fit.ranks
        start = ranks.told((self.checkpoints.latest() or 0) if ranks.first else 0)
        if ranks.first:
            (self.stage.folder / BAD_ROWS).unlink(missing_ok=True)
            if not start:
                self.checkpoints.clear()
        if start:
            self.checkpoints.wait_for(start)
            self.checkpoints.restore(start, self.fit.trainee, self.fit.optimizer)
            self.say(f"resuming from update {start}")
        return start

    def fit_all(self, start: int, meter: Meter, end: int | None = None) -> dict[str, float]:
        """Run all updates that are left, or those up to `end`; rank 0 returns the last figures."""
        train = self.steps.recipe.train
        total = len(self.schedule)
        end = total if end is None else end
        metrics = self._open_metrics(start) if self.fit.ranks.first else None
        probe = Probe.of(self.steps) if train.eval_every else None
        if probe and start == 0:
            figures = probe.answer(self.fit.trainee, self.fit.ranks)
            if metrics:
                metrics.add(0, figures)
        writer = CheckpointWriter(self.checkpoints, self.fit.ranks)
        with writer, self.progress.bar(f"train {self.name}", end - start, "update") as bar:
            for step in range(start + 1, end + 1):
                if self.before_round is not None and self.schedule.round_of(step - 1)[0] == step - 1:
                    self.before_round(step - 1)
                rate = train.learning_rate * rate_share(step, total, train.warmup, train.decay)
                set_rate(self.fit.optimizer, rate)
                figures = self.fit.update(step, self.schedule.rows(step - 1), self._upcoming(step, end))
                if step % train.validate_every == 0 or step == total:
                    figures |= self._validate()
                if probe and (step % train.eval_every == 0 or step == total):
                    figures |= self._evaluate(probe, step, metrics)
                if metrics:
                    metrics.add(step, figures | {"learning_rate": rate})
                    meter.add(tokens=int(figures["tokens"]))  # of all ranks
                while self.fit.notes:
                    self.say(self.fit.notes.pop(0))
                if step == end or self._is_checkpoint(step):
                    writer.save(step, self.fit.trainee, self.fit.optimizer)
                bar.advance(note=line(figures))
        if metrics is None:
            return {}
        metrics.close()
        return {**metrics.last, "updates": end}

    def _upcoming(self, step: int, end: int) -> list[int]:
        """The rows of the next update, if they can be read now; an online round's are not there before it begins."""
        if step == end or (self.before_round and step not in self.schedule.round_of(step - 1)):
            return []
        return self.schedule.rows(step)

    def _is_checkpoint(self, step: int) -> bool:
        """Every so many updates; of an online run, at the end of the round, since a resume samples the round again."""
        every = self.steps.recipe.train.checkpoint_every
        this_round = self.schedule.round_of(step - 1)
        if self.before_round is None:
            return step % every == 0
        return step == this_round[-1] + 1 and any((update + 1) % every == 0 for update in this_round)

    def _open_metrics(self, start: int) -> Metrics:
        return Metrics(self.steps.recipe, self.name, self.stage.folder, start, self.checkpoints.fingerprint)

    def _evaluate(self, probe: Probe, step: int, metrics: Metrics | None) -> dict[str, float]:
        answered = probe.answer(self.fit.trainee, self.fit.ranks)
        figures = with_aes(answered, metrics.at(0) if metrics else None)
        score = f", AES {figures['eval_aes']:.2f}" if "eval_aes" in figures else ""
        right = f"{figures['eval_accuracy']:.1f} % of {len(probe.requests)} problems right"
        self.say(f"update {step}: {right} with {figures['eval_tokens']:.0f} tokens{score}")
        return figures

    def _validate(self) -> dict[str, float]:
        held_out = self.schedule.held_out()
        return {f"validation_{key}": value for key, value in self.fit.distance(held_out).items()} if held_out else {}

    def finish(self, figures: dict[str, Any]) -> None:
        """Export the student as this composition's."""
        self.export(self.stage, len(self.schedule), figures)

    def export(self, stage: Stage, updates: int, figures: dict[str, Any]) -> None:
        """Round the weights to the student's dtypes, write final/ after so many updates, and say what rounding cost."""
        student = self.steps.student
        layout = student.layout
        trainee = self.fit.trainee
        ranks = self.fit.ranks
        if is_quantised(self.steps.recipe.train):  # what was trained is added to the student's own weights
            compared = "trained beside quantised weights, added to the student's own"
        else:
            lost = round_weights(trainee, layout.dtypes, [batch.to(ranks.device) for batch in self._looked_at(updates)])
            figures = {**figures, "export_kl": lost}
            compared = f"KL exported || trained {lost:.1e} nats"
        final = stage.folder / "final"
        card = model_card(self.steps, self.name, figures) if ranks.first else ""
        adapter = trained_adapter(trainee, student)
        files = write_model(final, trainee, layout, card, ranks, merged=student.updates.keys(), adapter=adapter)
        if ranks.first:
            stage.record(files, {key: figures[key] for key in RECORDED if key in figures})
            self.say(f"{final} ({compared})")
        ranks.wait()

    def _looked_at(self, updates: int) -> list[Batch]:
        """A few decisions of the last update, row by row, on which exported weights are compared with trained ones."""
        rows = self.fit.cache
        last = self.schedule.rows(updates - 1)
        blocks = [rows.block([number]) for number in last[:EXPORT_ROWS]]
        return [compose(block, rows.weights, self.fit.loss.alpha).first(EXPORT_DECISIONS) for block in blocks]
