"""`lweave reference`: the student's own candidates on its own trajectories, in one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.errors import InputError
from lightning_weave.models.hf import RowCandidates, Scorer
from lightning_weave.models.load import load_model, load_tokenizer, vocabulary_size
from lightning_weave.progress import Progress
from lightning_weave.runs.machine import compute_dtype, set_up
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, Job, Made, do_here
from lightning_weave.types import Candidates, Ragged, Rollouts


def run(steps: Steps, progress: Progress, do: Do = do_here) -> None:
    """Find candidates for every pending shard. Resumable."""
    shards = len(steps.store.stage(steps.rollout).require()["shards"])
    stage = steps.store.stage(steps.reference)
    do(Job("reference", "", "shard", stage.pending(shards), open_reader), steps, progress)
    stage.finish(Candidates, shards)


@dataclass(frozen=True)
class Reader:
    """The student reading its own trajectories."""

    steps: Steps
    scorer: Scorer

    def make(self, shard: int) -> Made:
        """Find the candidates of one shard."""
        store = self.steps.store
        rows = store.stage(self.steps.rollout).open(Rollouts, shard).read()
        found = find_candidates(self.scorer, rows, self.steps.recipe.reference.candidates)
        tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
        return Made(tokens, store.stage(self.steps.reference).write(shard, found))

    def close(self) -> None:
        """Nothing to end."""


def open_reader(steps: Steps) -> Reader:
    """Load the student."""
    return Reader(steps, _open_scorer(steps))


def find_candidates(scorer: Scorer, rows: Rollouts, count: int) -> Candidates:
    """Run the student over one shard of its trajectories."""
    return _packed(rows, scorer.candidates(_pairs(rows), count, row_names(rows)))


def reread_candidates(scorer: Scorer, rows: Rollouts, found: Candidates) -> Candidates:
    """Ask another model with the student's tokenizer about candidates that were found already."""
    return _packed(rows, scorer.reread(_pairs(rows), list(found.ids), row_names(rows)))


def _pairs(rows: Rollouts) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    return list(zip(rows.prompt_ids, rows.response_ids, strict=True))


def _packed(rows: Rollouts, found: Sequence[RowCandidates]) -> Candidates:
    ids, logp, other, sampled = (Ragged.of([np.asarray(row[part]) for row in found]) for part in range(4))
    return Candidates(rows.trajectories(), ids, logp, other, sampled)


def row_names(rows: Rollouts) -> list[str]:
    """Name the rows of a shard in messages as rollout does."""
    places = zip(rows.prompt_R.tolist(), rows.response_R.tolist(), strict=True)
    return [f"prompt {prompt}, response {response}" for prompt, response in places]


def _open_scorer(steps: Steps) -> Scorer:
    device, section = set_up(steps.recipe, steps.store), steps.recipe.reference
    path, trust = steps.student_path, steps.recipe.student.trust_remote_code
    vocabulary = vocabulary_size(load_tokenizer(path, trust))
    if section.candidates > vocabulary:
        raise InputError(f"reference.candidates = {section.candidates}: the student has only {vocabulary} tokens")
    model = load_model(path, dtype=compute_dtype(section.dtype, path, device), device=device, trust_remote_code=trust)
    return Scorer(model, vocabulary, section.token_budget)
