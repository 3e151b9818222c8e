"""`lweave reference`: the student's own candidates on its own trajectories, in one forward pass."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from lightning_weave.checks.findings import Finding, is_pending
from lightning_weave.checks.models import attempt, check_engine, check_student
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.alignment import find_candidates
from lightning_weave.stages.engines import Engines, borrowed, gpus_of, note_engine
from lightning_weave.stages.work import LOCAL, ComputeShards, Executor, Job, ShardStats, wait_for_ranks
from lightning_weave.types import Candidates, Rollouts


def reference(run: Run, progress: Progress, executor: Executor = LOCAL, engines: Engines | None = None) -> None:
    """Find candidates for every pending shard. Resumable.

    Where another model samples in the student's place, it proposes the candidates, and the student rescores them.
    """
    shards = len(run.stage("rollout").require()["shards"])
    with borrowed(engines) as engines:
        for stage in run.stages("reference"):  # proposal, if there is one, and reference
            job = Job(
                stage.path,
                stage.pending(shards),
                partial(open_model, engines=engines, proposes=stage.path == "proposal"),
                fingerprint=stage.fingerprint,
                devices=gpus_of(run.recipe.engine_of("reference")),
                finish=partial(stage.finish, Candidates, shards),
            )
            executor.run_jobs([job], run, progress)
            if stage.path == "proposal":
                wait_for_ranks(stage, Candidates, shards)


@contextmanager
def open_model(run: Run, engines: Engines, proposes: bool = False) -> Iterator[ComputeShards]:
    """Load the student, which finds its own candidates or rescores a proposal; or what samples in its place.

    The model stays loaded for the next job.
    """
    _check_candidates(run)
    count = run.recipe.reference.candidates
    stage = run.stage("proposal" if proposes else "reference")
    model = run.sampler if proposes else run.student
    assert model is not None, "something samples in the student's place"
    engine = run.recipe.engine_of("reference")
    scorer = engines.scorer(run, model, engine)
    note_engine(run, stage, model, engine)

    def compute_shards(shards: Sequence[int]) -> Iterator[ShardStats]:
        for shard in shards:
            rows = run.stage("rollout").open(Rollouts, shard).read()
            given = None
            if run.sampler is not None and not proposes:
                given = run.stage("proposal").open(Candidates, shard).read()
            candidates = find_candidates(scorer, rows, count, given)
            tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
            yield ShardStats(tokens, stage.write(shard, candidates))

    yield compute_shards


def _check_candidates(run: Run) -> None:
    candidates = run.recipe.reference.candidates
    if candidates > (vocabulary := run.student.vocabulary):
        raise InputError(f"reference.candidates = {candidates}: the student has only {vocabulary} tokens")


def validate(run: Run) -> Iterator[Finding]:
    """Check that the student can be scored, its engine, and that it has as many tokens as candidates are wanted."""
    if run.needs_cache and is_pending(run, "reference"):
        yield from (faults := check_student(run, "reference", run.recipe.engine.reference))
        yield from check_engine(run, "reference")
        if not faults:
            yield from attempt("reference.candidates", "candidates", _check_candidates, run)
