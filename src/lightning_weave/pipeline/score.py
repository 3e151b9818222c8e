"""`lweave score`: every anchor model's log-probabilities of the cached candidates, each checkpoint once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_weave.checks.watch import Watch, check_scores, warn
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.runs.anchors import AnchorScorer, Bases
from lightning_weave.runs.engines import Engines, borrowed, gpus_of, note_engine
from lightning_weave.runs.scored import ScoredModel
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.work import Do, Job, Made, do_here, make_room
from lightning_weave.types import Candidates, Rollouts, Scores


def run(
    steps: Steps,
    progress: Progress,
    only: Sequence[str] | None = None,
    do: Do = do_here,
    watch: Watch = warn,
    engines: Engines | None = None,
) -> None:
    """Score the cached candidates under every anchor model. Resumable."""
    names = steps.score_names
    if unknown := sorted(set(only or ()) - set(names.values())):
        raise InputError(f"{unknown[0]!r}: no such model; this recipe scores {', '.join(names.values())}")
    made = any(steps.store.stage(steps.score(scored)).state() != "done" for scored in names)
    scored_models = [scored for scored, name in names.items() if only is None or name in only]
    with borrowed(engines) as engines:
        bases: Bases = {}
        jobs = [score_job(steps, scored, bases, engines) for scored in _by_model(steps, scored_models)]
        do(jobs, steps, progress)
    watch(lambda: check_scores(steps), made, progress)


def _by_model(steps: Steps, scored_models: Sequence[ScoredModel]) -> list[ScoredModel]:
    """Put those together that one load serves: contexts of one checkpoint, adapters of one base.

    The student comes first: the engine of the reference may still be up.
    """
    groups: dict[Checkpoint, list[ScoredModel]] = {}
    for scored in scored_models:
        try:
            whole = scored.checkpoint.base or scored.checkpoint
        except InputError:  # gone since it was scored
            whole = scored.checkpoint
        groups.setdefault(whole, []).append(scored)
    models = sorted(groups, key=lambda whole: whole != steps.student)
    return [scored for whole in models for scored in groups[whole]]


def score_job(steps: Steps, scored: ScoredModel, bases: Bases, engines: Engines) -> Job:
    """Score every pending shard under one model; `bases` is what the model before has left loaded."""
    shards = len(steps.store.stage(steps.reference).require()["shards"])
    stage = steps.store.stage(steps.score(scored))
    make_room(stage)
    opener = partial(open_worker, scored=scored, bases=bases, engines=engines)
    name = steps.score_names[scored]
    pending = stage.pending(shards)
    devices = gpus_of(steps.scoring(scored))
    finish = partial(stage.finish, Scores, shards)
    return Job(
        "score", name, "shard", pending, opener, fingerprint=stage.step.fingerprint, devices=devices, finish=finish
    )


@dataclass(frozen=True)
class ScoreWorker:
    """One anchor model scoring the cache."""

    steps: Steps
    scored: ScoredModel
    scorer: AnchorScorer

    def make(self, shards: Sequence[int]) -> Iterator[Made]:
        """Score the candidates of these shards."""
        return map(self._make, shards)

    def _make(self, shard: int) -> Made:
        store = self.steps.store
        rows = store.stage(self.steps.rollout).open(Rollouts, shard).read()
        candidates = store.stage(self.steps.reference).open(Candidates, shard).read()
        scores = self.scorer.score(rows, candidates)
        tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
        return Made(tokens, store.stage(self.steps.score(self.scored)).write(shard, scores))

    def close(self) -> None:
        """The model stays for another context or adapter of it."""


def open_worker(steps: Steps, scored: ScoredModel, bases: Bases, engines: Engines) -> ScoreWorker:
    """Load one anchor model, in place of another that the worker before has left."""
    whole = scored.checkpoint.base or scored.checkpoint
    for other in bases.keys() - {whole}:
        del bases[other]
    scorer = AnchorScorer.open(steps, scored, bases, engines)
    note_engine(steps, steps.store.stage(steps.score(scored)), whole, steps.scoring(scored), scored.url)
    return ScoreWorker(steps, scored, scorer)
