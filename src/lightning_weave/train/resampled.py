"""Sequential and refreshed training: the student samples again between stretches of training.

A sequence trains one anchor after the other, at matched trajectories and updates: each leg gets its share of the
prompts and so of the updates, and a later leg samples from the student of the leg before.

Refreshed training splits the updates of a joint composition into parts, and the student samples again before each later
part. The target stays that of the initial student, b0 exp(r / alpha). What changes are the states, and what the paper's
loss takes from the behaviour policy: the candidates and their weights are those of the student that sampled. (Weighted
by b0, an outcome that the initial student expects and the current one does not would outweigh all others.) The
optimizer's state is kept over all parts; while a part samples and scores, the trained model is not in memory.

With `refresh = "auto"` a later part samples only if the current student has left the one that sampled its rows: the
mean KL(student || sampler) over their decisions is above FAR. Else it goes on with these rows. What was decided is in
the manifest of the part's sampler, which has no files if nothing is sampled; a resumed training does not decide again.
(The KL, not importance weights of responses: with hundreds of decisions those say nothing, and the KL is exact at every
decision. Of n stretches of L decisions about n exp(-L KL) remain effective.)

What is sampled again has a run below the composition's folder, with the ordinary stages.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_weave.cache.block import Block, Cache
from lightning_weave.config import Joint, Sequential
from lightning_weave.devices import free_memory
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import keep_prompts, used_columns
from lightning_weave.stages.score import make_cache
from lightning_weave.store import Stage, append_line, whole_directory, write_atomic
from lightning_weave.store.ledger import LEDGER, measure, read_ledger
from lightning_weave.train.data import SAMPLED_UPDATES, find_dose
from lightning_weave.train.export import model_card
from lightning_weave.train.loop import Rows, Training, make_fit, train_offline
from lightning_weave.train.schedule import Schedule, make_schedule
from lightning_weave.train.student import TrainContext, open_trainee
from lightning_weave.types import Prompt

METHOD = "refreshed"  # in the ledger
FAR = 0.2  # nats per decision between student and sampler, above which refresh = "auto" samples again


def make_inner_cache(run: Run, inner: Run, prompts: Sequence[Prompt], context: TrainContext) -> None:
    """Sample and score these prompts of the run in an inner run."""
    if context.ranks.is_main_process:
        machine = run.directory / "machine.json"
        if machine.exists():
            write_atomic(inner.directory / machine.name, machine.read_bytes())
        if not inner.stage("prompts").complete:
            keep_prompts(inner, prompts, {})
    context.ranks.barrier()
    make_cache(inner, context.progress)
    context.ranks.barrier()


def add_to_ledger(run: Run, name: str, method: str, folders: Sequence[Path]) -> None:
    """Add the cost of inner runs to the ledger of the run, as training of this composition; each row once."""
    known = read_ledger(run.directory)
    own = {"stage": "train", "name": name, "method": method, "fingerprint": run.stage("train", name).fingerprint}
    for row in (row for folder in folders for row in read_ledger(folder)):
        if (spent := {**row, **own}) not in known:
            append_line(run.directory / LEDGER, spent)


@dataclass(frozen=True)
class Leg:
    """One leg of a sequence."""

    run: Run
    name: str  # of its composition
    prompts: range  # of the whole run
    start: Checkpoint | None  # None: the student of its run
    samples: bool  # again, from the student of the leg before


def train_in_sequence(run: Run, name: str, context: TrainContext) -> None:
    """Train leg after leg and keep the last one's student. Resumable within and between legs."""
    stage = run.stage("train", name)
    for inner in stage.inputs:
        inner.require()
    stage.begin()
    for leg in legs(run, name):
        if leg.samples:
            prompts = read_prompts(run.prompts_file)
            make_inner_cache(run, leg.run, [prompts[group] for group in leg.prompts], context)
        trained = leg.run.stage("train", leg.name)
        if not trained.complete:
            train_offline(leg.run, leg.name, context, leg.start, None if leg.samples else leg.prompts)
            free_memory()
    if context.ranks.is_main_process:
        final = stage.folder / "final"
        composition = run.recipe.compositions[name]
        assert isinstance(composition, Sequential), composition.method
        with whole_directory(final) as unfinished:
            # Without the last leg's adapter, which belongs to the student of the leg before.
            ignore = shutil.ignore_patterns("adapter")
            shutil.copytree(trained.folder / "final", unfinished, ignore=ignore, dirs_exist_ok=True)
            card = model_card(run, name, {"legs": composition.sequence})
            (unfinished / "README.md").write_text(card, encoding="utf-8")
        add_to_ledger(run, name, "sequential", sorted(stage.folder.glob("leg-*")))
        stage.record(sorted(final.iterdir()), {"legs": composition.sequence})
    context.ranks.barrier()


def legs(run: Run, name: str) -> Iterator[Leg]:
    """Yield the legs of a sequence in order, up to the first that has no student yet."""
    composition = run.recipe.compositions[name]
    assert isinstance(composition, Sequential), composition.method
    folder = run.stage("train", name).folder
    final: Path | None = None
    count = len(composition.sequence)
    prompts = run.stage("prompts").require()["rows"]
    if prompts < count:
        raise InputError(f"compositions.{name}.sequence: {prompts} prompts cannot be shared among {count} legs")
    for number, anchor in enumerate(composition.sequence):
        # The first leg gets the last share.
        part = range(round((1 - (number + 1) / count) * prompts), round((1 - number / count) * prompts))
        own = Joint(
            weights={anchor: composition.weights[anchor] if composition.dose == "matched" else 1.0},
            normalize=False,
            alpha=composition.alpha,
            objective=composition.objective,
            epochs=composition.epochs,
            seed=composition.seed,
        )
        if final is None or not composition.resample:
            leg_name = f"{name}/leg-{number + 1}"
            recipe = run.recipe.model_copy(update={"compositions": {leg_name: own}})
            inner = Run(recipe, run.arguments, run.trust, trains_in=folder)
            start = None if final is None else run.student.at(final)
            leg = Leg(inner, leg_name, part, start, samples=False)
        else:
            leg_name = f"{name}.leg-{number + 1}"
            recipe = run.recipe
            taken = recipe.prompts.model_copy(update={"source": str(run.prompts_file), "take": len(part)})
            if recipe.rollout.from_ is None and (used_columns(recipe) or recipe.anchors[anchor].graded):
                taken = recipe.prompts  # contexts, tags and graders of code read columns of its rows
            changes = {
                "name": f"leg-{number + 1}",
                "runs": str(folder),
                "student": recipe.student.model_copy(update={"model": str(final)}),
                "prompts": taken,
                "rollout": recipe.rollout.model_copy(update={"from_": None}),
                "anchors": {anchor: recipe.anchors[anchor]},
                "compositions": {leg_name: own},
                "policies": {},
            }
            inner = Run(recipe.model_copy(update=changes), run.arguments, run.trust)
            leg = Leg(inner, leg_name, part, None, samples=True)
        yield leg
        final = leg.run.stage("train", leg.name).folder / "final"
        if not final.exists():
            return


@dataclass(frozen=True)
class Part:
    """Some of the updates of refreshed training, and the run that samples for them."""

    number: int
    updates: range
    groups: list[int]  # the prompts that these updates use
    run: Run
    sampler: Stage  # the student that samples for this part
    auto: bool  # whether it is decided in training if it samples

    @property
    def samples(self) -> bool:
        """Whether the student samples again for this part, as far as that is decided."""
        return self.number > 1 and (not self.auto or bool((self.sampler.manifest() or {}).get("shards")))


def parts_of(run: Run, name: str) -> Iterator[Part]:
    """Yield the parts of a composition in order."""
    recipe = run.recipe
    composition = recipe.compositions[name]
    assert isinstance(composition, Joint), composition.method
    schedule = schedule_of(run, name)
    trained = run.stage("train", name)
    auto = composition.refresh == "auto"
    for number, updates in enumerate(schedule.parts(composition.parts, at_most=auto), start=1):
        rows = {row for update in updates for row in schedule.plain_rows(update)}
        groups = sorted({row // schedule.responses for row in rows})
        settings = {"composition": trained.fingerprint, "updates": updates.start}
        sampler = Stage(trained.folder / f"part-{number}", "sampler", settings, (), trained.command)
        if number == 1:
            yield Part(number, updates, groups, run, sampler, auto)
            continue
        changes = {
            "name": sampler.directory.name,
            "runs": str(sampler.directory.parent),
            "rollout": recipe.rollout.model_copy(update={"from_": None, "seed": recipe.rollout.seed + number - 1}),
            "anchors": {anchor: recipe.anchors[anchor] for anchor in composition.used},
            "compositions": {name: composition},
            "policies": {},
        }
        if recipe.rollout.from_ is not None:  # the prompts came with trajectories
            changes["prompts"] = recipe.prompts.model_copy(update={"source": str(run.prompts_file)})
        at = run.student.at(sampler.folder / "final")
        inner = Run(recipe.model_copy(update=changes), run.arguments, run.trust, sampler=at)
        yield Part(number, updates, groups, inner, sampler, auto)


def schedule_of(run: Run, name: str) -> Schedule:
    """Give the updates of a composition, and the rows of each."""
    prompts = run.stage("prompts").require()["rows"]
    return make_schedule(run.recipe, prompts, name, len(run.recipe.compositions[name].slots))


def train_refreshed(run: Run, name: str, context: TrainContext) -> None:
    """Fit one composition part by part. Resumable within a part, and while a part samples and scores."""
    cache = open_cache(run, name)
    schedule = schedule_of(run, name)
    dose = find_dose(run, name, cache, schedule)
    parts = list(parts_of(run, name))
    source = parts[0]  # of the rows
    training = None
    for part, later in zip(parts, [*parts[1:], None], strict=True):
        source = part if context.ranks.broadcast(part.samples) else source
        if later and context.ranks.broadcast(later.sampler.complete):
            continue  # its student exists, or goes on with the same rows
        if part is source and part.number > 1:
            prompts = read_prompts(run.prompts_file)
            make_inner_cache(run, part.run, [prompts[group] for group in part.groups], context)
            if context.ranks.is_main_process:
                add_to_ledger(run, name, METHOD, [part.run.directory])
        if training is None:
            fit = make_fit(run, name, open_trainee(run, context, name), cache, alpha=dose.alpha, ranks=context.ranks)
            training = Training(run, name, schedule, fit, context.progress)
            checked = training.check(context.dtype)
        spent = {"method": METHOD, "fingerprint": training.stage.fingerprint}
        with measure(run.directory, "train", name, **spent) as meter:
            training.say(f"part {part.number} of {len(parts)}, {dose}")
            training.fit.cache = rows_of(source, name, cache)
            figures = dose.figures() | checked | training.run_updates(training.restore(), meter, part.updates.stop)
            if later is None:
                figures["parts"] = 1 + sum(one.samples for one in parts)
                training.export(training.stage, part.updates.stop, figures)
            elif _samples_again(training, source, later, figures):
                training.export(later.sampler, part.updates.stop, figures)
                del fit, training
                training = None
                free_memory()
            elif context.ranks.is_main_process:
                later.sampler.record([], {"drift": figures["drift"]})
        context.ranks.barrier()


def _samples_again(training: Training, source: Part, later: Part, figures: dict[str, Any]) -> bool:
    """Decide whether the student samples for a later part, or learns on with the rows of an earlier one."""
    if not later.auto:
        return True
    if source.number > 1 and not set(later.groups) <= set(source.groups):
        training.say("samples again: the next prompts have responses of the initial student only")
        return True
    updates = later.updates[:SAMPLED_UPDATES]
    rows = [row for update in updates for row in training.schedule.plain_rows(update)]  # as it would sample
    drift = training.fit.ranks.broadcast(training.fit.measure(rows)["drift"])
    figures["drift"] = drift
    samples = drift > FAR or training.run.recipe.rehearsal
    training.say(
        f"KL(student || sampler) {drift:.3f} nats: {'samples again' if samples else 'continues with these rows'}"
    )
    return samples


def rows_of(part: Part, name: str, first: Cache) -> Rows:
    """Give the rows of a part, of which the first has the first cache."""
    return first if part.number == 1 else PartRows(first, open_cache(part.run, name), part)


class PartRows:
    """The rows of a part under their numbers in the outer run; all other rows are held out, and in the first cache."""

    def __init__(self, first: Cache, own: Cache, part: Part) -> None:
        self.first = first
        self.own = own
        if own.levels is not None and first.levels is not None:  # alphas that were solved on the first cache
            own.levels = replace(own.levels, weight_SK=first.levels.weight_SK)
        responses = part.run.recipe.rollout.responses
        self.place = {
            group * responses + response: index * responses + response
            for index, group in enumerate(part.groups)
            for response in range(responses)
        }
        if first.weight_RK is not None:  # also solved there, if anchors have budgets
            own.weight_RK = first.weight_RK[list(self.place)]

    @property
    def weights(self) -> list[float]:
        return self.own.weights

    def _own(self, number: int) -> int | None:
        slot, row = divmod(number, len(self.first))
        return slot * len(self.own) + self.place[row] if row in self.place else None

    def length(self, number: int) -> int:
        own = self._own(number)
        return self.first.length(number) if own is None else self.own.length(own)

    def block(self, rows: Sequence[int]) -> Block:
        own = [place for number in rows if (place := self._own(number)) is not None]
        if len(own) < len(rows):
            return self.first.block(rows)
        block = self.own.block(own)
        return replace(block, number_R=np.array(rows, np.int64))
