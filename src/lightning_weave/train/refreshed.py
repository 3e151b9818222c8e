"""Joint training on refreshed states: the updates in parts, and before each later part the student samples again.

The target stays that of the initial student, b0 exp(r / alpha). What moves are the states where it is learned, and what
the paper's loss has from the behaviour policy: the candidates and their weights are those of the student that sampled.
(Weighted by b0, an outcome that the initial student expects and the current one does not would outweigh all others.) A
later part has a small run of its own, below the composition's folder. The optimizer's state goes through all parts;
while a part samples and scores, the trained model is not in memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_weave.cache.block import Block
from lightning_weave.cache.reader import Cache
from lightning_weave.config import Joint
from lightning_weave.prompts import read_prompts
from lightning_weave.runs.caches import open_cache
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, Step
from lightning_weave.store.ledger import measure
from lightning_weave.train.dose import find_dose
from lightning_weave.train.inner import book, make_inner_cache
from lightning_weave.train.loop import Rows
from lightning_weave.train.schedule import Schedule, make_schedule
from lightning_weave.train.training import TrainContext, Training, give_back, make_fit, open_trainee

METHOD = "refreshed"  # in the ledger


@dataclass(frozen=True)
class Part:
    """Some of the updates, and the run that samples for them; the first part has the run's own cache."""

    number: int
    updates: range
    groups: list[int]  # the prompts that these updates use
    steps: Steps
    sampler: Stage  # the student that samples for this part

    def made(self) -> list[Step]:
        """The steps that are this part's own: its student and, for a later one, a cache."""
        return [self.sampler.step, *self.steps.cache]


def train_refreshed(steps: Steps, name: str, context: TrainContext) -> None:
    """Fit one composition part by part. Resumable within a part, and while a part samples and scores."""
    refreshed = Refreshed(steps, name, context)
    for part, later in zip(refreshed.parts, [*refreshed.parts[1:], None], strict=True):
        if later and context.ranks.told(later.sampler.state() == "done"):
            continue  # its student is there
        if part.number > 1:
            refreshed.sample(part)
        refreshed.fit(part, later)
        give_back()


def parts_of(steps: Steps, name: str) -> Iterator[Part]:
    """The parts of a composition, in their order."""
    composition = steps.recipe.compositions[name]
    assert isinstance(composition, Joint), composition.method
    schedule = schedule_of(steps, name)
    trained = steps.train(name)
    for number, updates in enumerate(schedule.parts(composition.refresh), start=1):
        rows = {row for update in updates for row in schedule.rows(update)}
        own = _own_steps(steps, name, number) if number > 1 else steps
        settings = {"composition": trained.fingerprint, "updates": updates.start}
        sampler = own.store.stage(Step("sampler", settings, (), trained.command))
        yield Part(number, updates, sorted({row // schedule.responses for row in rows}), own, sampler)


def schedule_of(steps: Steps, name: str) -> Schedule:
    """The updates of a composition, and the rows of each."""
    prompts = steps.store.stage(steps.prompts).require()["rows"]
    return make_schedule(steps.recipe, prompts, epochs=steps.recipe.compositions[name].epochs)


def _own_steps(steps: Steps, name: str, number: int) -> Steps:
    """A run of a part's own: the recipe's student and anchors, but the student of the part before samples."""
    recipe = steps.recipe
    runs = steps.store.run_dir / "train" / name
    inner = f"part-{number}"
    composition = recipe.compositions[name]
    changes = {
        "name": inner,
        "runs": str(runs),
        "rollout": recipe.rollout.model_copy(update={"from_": None, "seed": recipe.rollout.seed + number - 1}),
        "anchors": {anchor: recipe.anchors[anchor] for anchor in composition.used},
        "compositions": {name: composition},
        "policies": {},
    }
    if recipe.rollout.from_ is not None:  # the prompts came with trajectories
        changes["prompts"] = recipe.prompts.model_copy(update={"source": str(steps.prompts_file)})
    sampler = steps.student.at(runs / inner / "sampler" / "final")
    return Steps(recipe.model_copy(update=changes), steps.arguments, steps.trust, sampler=sampler)


class Refreshed:
    """The training of one composition on states that are refreshed."""

    def __init__(self, steps: Steps, name: str, context: TrainContext) -> None:
        self.steps = steps
        self.name = name
        self.context = context
        self.cache = open_cache(steps, name)
        self.schedule = schedule_of(steps, name)
        self.dose = find_dose(steps, name, self.cache, self.schedule)
        self.parts = list(parts_of(steps, name))

    def sample(self, part: Part) -> None:
        """Make the cache of a later part, and put on the ledger what it cost."""
        prompts = read_prompts(self.steps.prompts_file)
        make_inner_cache(self.steps, part.steps, [prompts[group] for group in part.groups], self.context)
        if self.context.ranks.first:
            book(self.steps, self.name, METHOD, [part.steps.store.run_dir])

    def fit(self, part: Part, later: Part | None) -> None:
        """Take the updates of a part, and export the student: for the next part, or as the composition's."""
        trainee = open_trainee(self.steps, self.context)
        fit = make_fit(self.steps, self.name, trainee, self.cache, alpha=self.dose.alpha, ranks=self.context.ranks)
        training = Training(self.steps, self.name, self.schedule, fit, self.context.progress)
        spent = {"method": METHOD, "fingerprint": training.stage.step.fingerprint}
        with measure(self.steps.store.run_dir, "train", self.name, **spent) as meter:
            training.say(f"part {part.number} of {len(self.parts)}, {self.dose}")
            figures = self.dose.figures() | training.check(self.context.dtype)
            fit.cache = self._rows(part)
            figures |= training.fit_all(training.go_to_start(), meter, part.updates.stop)
            stage = later.sampler if later else training.stage
            training.export(stage, part.updates.stop, figures)

    def _rows(self, part: Part) -> Rows:
        if part.number == 1:
            return self.cache
        return PartRows(self.cache, open_cache(part.steps, self.name), part.groups, self.schedule.responses)


class PartRows:
    """The rows of a part under their numbers in the run; what is not the part's is held out, and in the first cache."""

    def __init__(self, first: Cache, own: Cache, groups: Sequence[int], responses: int) -> None:
        self.first = first
        self.own = own
        self.place = {
            group * responses + response: index * responses + response
            for index, group in enumerate(groups)
            for response in range(responses)
        }

    @property
    def weights(self) -> list[float]:
        return self.own.weights

    def length(self, number: int) -> int:
        return self.own.length(self.place[number]) if number in self.place else self.first.length(number)

    def block(self, rows: Sequence[int]) -> Block:
        if not all(number in self.place for number in rows):
            return self.first.block(rows)
        block = self.own.block([self.place[number] for number in rows])
        return replace(block, number_R=np.array(rows, np.int64))
