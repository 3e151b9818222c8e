"""`lweave reference`: the student's own candidates on its own trajectories, in one forward pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_weave.errors import InputError
from lightning_weave.models.hf import Scorer
from lightning_weave.progress import Progress
from lightning_weave.runs.engines import gpus_of, open_scorer
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.trajectories import find_candidates
from lightning_weave.runs.work import Do, Job, Made, do_here, make_room
from lightning_weave.types import Candidates, Rollouts


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Find candidates for every pending shard. Resumable."""
    shards = len(steps.store.stage(steps.rollout).require()["shards"])
    stage = steps.store.stage(steps.reference)
    make_room(stage)
    pending = stage.pending(shards)
    devices = gpus_of(steps.recipe.reference)
    job = Job("reference", "", "shard", pending, open_worker, fingerprint=stage.step.fingerprint, devices=devices)
    do(job, steps, progress)
    stage.finish(Candidates, shards)


@dataclass(frozen=True)
class ReferenceWorker:
    """The student reading its own trajectories."""

    steps: Steps
    scorer: Scorer

    def make(self, shards: Sequence[int]) -> Iterator[Made]:
        """Find the candidates of these shards."""
        return map(self._make, shards)

    def _make(self, shard: int) -> Made:
        store = self.steps.store
        rows = store.stage(self.steps.rollout).open(Rollouts, shard).read()
        candidates = find_candidates(self.scorer, rows, self.steps.recipe.reference.candidates)
        tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
        return Made(tokens, store.stage(self.steps.reference).write(shard, candidates))

    def close(self) -> None:
        """Release the model."""
        self.scorer.close()


def open_worker(steps: Steps) -> ReferenceWorker:
    """Load the student."""
    section = steps.recipe.reference
    vocabulary = steps.student.vocabulary
    if section.candidates > vocabulary:
        raise InputError(f"reference.candidates = {section.candidates}: the student has only {vocabulary} tokens")
    return ReferenceWorker(steps, open_scorer(steps, steps.student, section))
