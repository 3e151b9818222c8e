"""`lweave reference`: the student's own candidates on its own trajectories, in one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hf import Scorer
from lightning_weave.progress import Progress
from lightning_weave.runs.engines import Engines, borrowed, gpus_of, note_engine
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.trajectories import find_candidates, rescore_candidates
from lightning_weave.runs.work import Do, Job, Made, do_here, make_room, wait_for_ranks
from lightning_weave.store import Stage, Step
from lightning_weave.types import Candidates, Rollouts


def run(steps: Steps, progress: Progress, do: Do = do_here, engines: Engines | None = None) -> None:
    """Find candidates for every pending shard. Resumable.

    Where another model samples in the student's place, it proposes the candidates, and the student reads them.
    """
    with borrowed(engines) as engines:
        if steps.sampler is None:
            _make(steps, steps.store.stage(steps.reference), partial(open_worker, engines=engines), progress, do)
            return
        proposal = steps.store.stage(steps.proposal)
        _make(steps, proposal, partial(open_proposer, engines=engines), progress, do)
        wait_for_ranks(proposal, Candidates, len(steps.store.stage(steps.rollout).require()["shards"]))
        _make(steps, steps.store.stage(steps.reference), partial(open_reader, engines=engines), progress, do)


def _make(steps: Steps, stage: Stage, open_: Callable[[Steps], "ReferenceWorker"], progress: Progress, do: Do) -> None:
    shards = len(steps.store.stage(steps.rollout).require()["shards"])
    make_room(stage)
    pending = stage.pending(shards)
    devices = gpus_of(steps.recipe.reference)
    job = Job(stage.step.path, "", "shard", pending, open_, fingerprint=stage.step.fingerprint, devices=devices)
    do([job], steps, progress)
    stage.finish(Candidates, shards)


@dataclass(frozen=True)
class ReferenceWorker:
    """A model reading trajectories: it finds its own candidates there, or scores those of a proposal."""

    rollouts: Stage
    proposal: Stage | None
    to: Stage
    scorer: Scorer
    candidates: int

    def make(self, shards: Sequence[int]) -> Iterator[Made]:
        """Find the candidates of these shards."""
        return map(self._make, shards)

    def _make(self, shard: int) -> Made:
        rows = self.rollouts.open(Rollouts, shard).read()
        if self.proposal is None:
            candidates = find_candidates(self.scorer, rows, self.candidates)
        else:
            candidates = rescore_candidates(self.scorer, rows, self.proposal.open(Candidates, shard).read())
        tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
        return Made(tokens, self.to.write(shard, candidates))

    def close(self) -> None:
        """The model stays loaded for the next job."""


def open_worker(steps: Steps, engines: Engines) -> ReferenceWorker:
    """Load the student, which finds its own candidates."""
    return _open(steps, engines, steps.student, steps.reference)


def open_proposer(steps: Steps, engines: Engines) -> ReferenceWorker:
    """Load what samples in the student's place."""
    assert steps.sampler is not None, "something samples in the student's place"
    return _open(steps, engines, steps.sampler, steps.proposal)


def open_reader(steps: Steps, engines: Engines) -> ReferenceWorker:
    """Load the student, which reads what another has proposed."""
    return _open(steps, engines, steps.student, steps.reference, steps.store.stage(steps.proposal))


def _open(
    steps: Steps, engines: Engines, model: Checkpoint, step: Step, proposal: Stage | None = None
) -> ReferenceWorker:
    section = steps.recipe.reference
    vocabulary = steps.student.vocabulary
    if section.candidates > vocabulary:
        raise InputError(f"reference.candidates = {section.candidates}: the student has only {vocabulary} tokens")
    rollouts, to = (steps.store.stage(one) for one in (steps.rollout, step))
    scorer = engines.scorer(steps, model, section)
    note_engine(steps, to, model, section)
    return ReferenceWorker(rollouts, proposal, to, scorer, section.candidates)
