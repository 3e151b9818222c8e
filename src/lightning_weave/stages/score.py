"""`lweave score`: every anchor model's log-probabilities of the cached candidates, each checkpoint and context once."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.shifts import ShiftRules, pair_shift
from lightning_weave.checks.findings import Finding, pending_anchors
from lightning_weave.checks.models import attempt, check_engine, check_model, check_package, check_student
from lightning_weave.checks.pairs import find_same_model, judge_positions, judge_stops, open_alignment, take_sample
from lightning_weave.checks.watch import Watch, check_scores, warn
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.scorer import GrowingBody, HFBody, Scorer
from lightning_weave.models.weights import attach_adapter, untrained_rows, untrained_special_tokens, using_adapter
from lightning_weave.progress import Progress
from lightning_weave.run import ROLES, Run, Side
from lightning_weave.stages.alignment import Alignment, check_template, masked_aliases, own_prompts, row_names
from lightning_weave.stages.engines import Engines, borrowed, gpus_of, note_engine, open_scorer, share_an_engine
from lightning_weave.stages.prompts import load_prompts, planned_prompts
from lightning_weave.stages.reference import reference
from lightning_weave.stages.rollout import rollout
from lightning_weave.stages.work import LOCAL, ComputeShards, Executor, Job, ShardStats, wait_for_ranks
from lightning_weave.store import Stage
from lightning_weave.types import Candidates, Prompt, Ragged, Rollouts, Scores


def score(
    run: Run,
    progress: Progress,
    only: Sequence[str] | None = None,
    executor: Executor = LOCAL,
    watch: Watch = warn,
    engines: Engines | None = None,
) -> None:
    """Score the cached candidates under every anchor model. Resumable: finished shards are skipped."""
    names = run.score_names
    if unknown := sorted(set(only or ()) - set(names.values())):
        raise InputError(f"{unknown[0]!r}: no such model; this recipe scores {', '.join(names.values())}")
    is_new = any(not run.stage("score", side).complete for side in names)
    # One load serves all contexts of a checkpoint and all adapters of a base. The student may still be loaded.
    by_model: dict[Checkpoint, list[Side]] = {run.student: []}
    for side, name in names.items():
        if only is None or name in only:
            try:
                model = model_of(run, side)
            except InputError:  # deleted since it was scored
                model = side.checkpoint
            by_model.setdefault(model, []).append(side)
    shards = len(run.stage("reference").require()["shards"])
    with borrowed(engines) as engines:
        jobs: list[Job] = []
        for side in chain.from_iterable(by_model.values()):
            stage = run.stage("score", side)
            is_planned = any(job.fingerprint == stage.fingerprint for job in jobs)  # the same model elsewhere
            job = Job(
                stage.path,
                [] if is_planned else stage.pending(shards),
                partial(open_model, side=side, engines=engines),
                fingerprint=stage.fingerprint,
                devices=gpus_of(run.scoring(side)),
                finish=partial(stage.finish, Scores, shards),
            )
            jobs.append(job)
        executor.run_jobs(jobs, run, progress)
    watch(lambda: check_scores(run), is_new, progress)


def model_of(run: Run, side: Side) -> Checkpoint:
    """The checkpoint that is loaded for a side: an adapter's base, which may be the student by another name."""
    base = side.checkpoint.base
    if base is None:
        return side.checkpoint
    return run.student if run.identity_of(base) == run.identity_of(run.student) else base


@contextmanager
def open_model(run: Run, side: Side, engines: Engines) -> Iterator[ComputeShards]:
    """Yield the function that scores shards with one anchor model.

    The model stays loaded for its other contexts and, if it is a base, for its adapters. If the side is the student
    with the prompts that it answered, nothing is loaded: the reference has the scores.
    """
    if run.is_student(side) and _reads_as_student(run, side):
        yield partial(_copy_reference, run, run.stage("score", side))
        return
    section = run.scoring(side)
    model = model_of(run, side)
    opened = model if section.engine == "hf" else side.checkpoint  # only transformers attaches adapters
    anchor = AnchorScorer.open(run, side, engines.scorer(run, opened, section, side.url))
    stage = run.stage("score", side)
    note_engine(run, stage, model, section, side.url)

    def compute_shards(shards: Sequence[int]) -> Iterator[ShardStats]:
        for shard in shards:
            rows = run.stage("rollout").open(Rollouts, shard).read()
            candidates = run.stage("reference").open(Candidates, shard).read()
            scores = anchor.score(rows, candidates)
            tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
            yield ShardStats(tokens, stage.write(shard, scores))

    yield compute_shards


def _reads_as_student(run: Run, side: Side) -> bool:
    """Whether a side reads every prompt as the student does."""
    if not side.reads_other_prompts:
        return True
    own = own_prompts(run, side, load_prompts(run, side.context.columns))
    return own.by_response is None and list(own.read) == list(own.given)


def _copy_reference(run: Run, stage: Stage, shards: Sequence[int]) -> Iterator[ShardStats]:
    """Take the student's own scores from the reference."""
    for engine in run.stage("reference").engines():
        stage.note_engine(engine)
    for shard in shards:
        rows = run.stage("rollout").open(Rollouts, shard).read()
        scores = _student_scores(rows, run.stage("reference").open(Candidates, shard).read())
        yield ShardStats(len(rows.response_ids.flat), stage.write(shard, scores))


def _student_scores(rows: Rollouts, found: Candidates) -> Scores:
    """Read the student's log-probabilities of its candidates as the scores of a side."""
    mapped = np.ones(found.logp.flat.shape, np.bool_)
    if rows.decided is not None:
        mapped &= rows.decided.flat[:, None]
    logp = np.where(mapped, found.logp.flat, np.float32(0))
    mass = np.where(mapped, np.exp(logp), 0).sum(axis=1, dtype=np.float32)
    return Scores(found.trajectory_R, *(Ragged(values, found.logp.offsets) for values in (logp, mapped, mass)))


@dataclass(frozen=True)
class AnchorScorer:
    """One anchor model that scores the student's trajectories in its own tokens."""

    scorer: Scorer
    alignment: Alignment
    model: Any = None  # the loaded base, if the side is an adapter
    adapter: str | None = None  # active while this side is scored

    @classmethod
    def open(cls, run: Run, side: Side, scorer: Scorer) -> "AnchorScorer":
        """Align the tokenizer of a side with the student's, and attach an adapter to its loaded base."""
        checkpoint = side.checkpoint
        model = adapter = None
        if checkpoint.base is not None:
            assert isinstance(scorer.body, HFBody), "no other engine takes adapters"
            model = scorer.body.model
            adapter = hashlib.sha256(str(checkpoint).encode()).hexdigest()[:12]
            attach_adapter(model, adapter, checkpoint.adapter_path)
            scorer = Scorer.from_model(model, checkpoint.vocabulary, scorer.token_budget)
        masked: frozenset[int] = frozenset()
        if side.checks_aliases:
            special = sorted(checkpoint.tokenizer.added_tokens_decoder)
            masked = masked_aliases(side, untrained_rows(scorer.head.weight_VD, special))
        return cls(scorer, Alignment.open(run, side, scorer.limit, masked), model, adapter)

    def score(self, rows: Rollouts, candidates: Candidates) -> Scores:
        """Score candidates at the student's token boundaries (cross-tokenizer-shift)."""
        trajectory_R = rows.trajectories()
        if not np.array_equal(trajectory_R, candidates.trajectory_R):
            raise Mismatch("reference/ and rollout/ hold different trajectories. Rerun the reference")
        prompts = zip(rows.prompt_R.tolist(), rows.prompt_ids, rows.response_ids, candidates.ids, strict=True)
        aligned = [self.alignment.align(*row) for row in prompts]
        if rows.decided is not None:  # skip tokens that the student did not write (agent logs)
            pairs = zip(aligned, rows.decided, strict=True)
            aligned = [replace(row, mapped_TC=row.mapped_TC & decided_T[:, None]) for row, decided_T in pairs]
        with using_adapter(self.model, self.adapter):
            scored = self.scorer.score(aligned, row_names(rows))
        return Scores(
            trajectory_R,
            logp=Ragged.of([logp_TC for logp_TC, _ in scored]),
            mapped=Ragged.of([row.mapped_TC for row in aligned]),
            mass=Ragged.of([mass_T for _, mass_T in scored]),
        )


@dataclass
class LiveAnchors:
    """The anchors of one composition, loaded: they compute what a cache would hold.

    With `grows`, candidates are the student's own, and rows are those of the block before and a token: a model with the
    student's tokens keeps its keys and values, and the student with its own prompts is not run.
    """

    run: Run
    weights: dict[str, float]  # of the anchors that take part
    keep: bool = True  # all models in memory, or one at a time
    grows: bool = False
    loaded: dict[Side, AnchorScorer] = field(default_factory=dict)
    prompts: Sequence[Prompt] | None = None  # None: the prompts of the run
    # Weights of each prompt, by tag; None: the same for all.
    weights_of: Callable[[Sequence[Prompt]], NDArray[np.float32]] | None = None
    _weight_GK: NDArray[np.float32] | None = None
    _models: dict[Checkpoint, Scorer] = field(default_factory=dict)  # by the base of adapters
    _with_prompts: dict[Side, AnchorScorer] = field(default_factory=dict)
    _growing: dict[Side, Scorer] = field(default_factory=dict)

    def set_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Set the prompts that the rows after this refer to by number."""
        self.prompts = prompts
        self._weight_GK = None if self.weights_of is None else self.weights_of(prompts)
        self._with_prompts = {}

    def load(self) -> None:
        """Load every side now."""
        for anchor in self.weights:
            for role in ROLES:
                self._open(self.run.side(anchor, role))

    def block(self, numbers: Sequence[int], rows: Rollouts, candidates: Candidates) -> Block:
        """Score rows under every anchor."""
        shifts = []
        for anchor in self.weights:
            post, pre = (self._score(self.run.side(anchor, role), rows, candidates) for role in ROLES)
            rules = ShiftRules.from_anchor(self.run.recipe.anchors[anchor])
            shifts.append(pair_shift(post, pre, candidates, rules))
        block = Block.from_shifts(numbers, rows, candidates, shifts)
        return block if self._weight_GK is None else block.with_row_weights(self._weight_GK[rows.prompt_R])

    def _score(self, side: Side, rows: Rollouts, candidates: Candidates) -> Scores:
        if self.grows and not side.reads_other_prompts and self.run.is_student(side):
            return _student_scores(rows, candidates)
        anchor = self._open(side)
        if self.grows and anchor.alignment.tokens.identical:
            assert isinstance(anchor.scorer.body, HFBody), "live anchors are models of transformers"
            scorer = self._growing.setdefault(side, Scorer(GrowingBody(anchor.scorer.body), sys.maxsize))
            anchor = replace(anchor, scorer=scorer)
        return anchor.score(rows, candidates)

    def _open(self, side: Side) -> AnchorScorer:
        """Return the scorer of a side, loaded once; aligned again if it reads other prompts than the student."""
        if self.prompts is not None and side.reads_other_prompts:
            if side not in self._with_prompts:
                plain = self._open(side.with_student_prompts())
                known = plain.alignment.limit, plain.alignment.masked_ids
                self._with_prompts[side] = replace(
                    plain, alignment=Alignment.open(self.run, side, *known, self.prompts)
                )
            return self._with_prompts[side]
        if side in self.loaded:
            return self.loaded[side]
        base = model_of(self.run, side)
        # With transformers in any case: these models share the GPU with the trainee.
        engine = replace(self.run.scoring(side), engine="hf")
        scorer = self._models.get(base) or open_scorer(self.run, base, engine)
        anchor = AnchorScorer.open(self.run, side, scorer)
        if self.keep:
            self._models[base], self.loaded[side] = scorer, anchor
        return anchor


def make_cache(
    run: Run,
    progress: Progress,
    executor: Executor = LOCAL,
    watch: Watch = warn,
    evaluates: bool = False,
    until: str = "score",
) -> None:
    """Compute everything that offline training reads. `watch` receives the findings.

    If the student is evaluated too, its rollouts' engine does that before it is closed, where it can.
    """
    from lightning_weave.stages.eval import evaluate_policy, room_of  # which imports this module for live anchors

    evaluates = evaluates and bool(run.recipe.eval.benchmarks)
    shared = evaluates and share_an_engine(run.recipe.engine_of("rollout"), run.recipe.engine_of("eval"))
    with Engines(room_of(run, "base") if shared else 0) as engines:
        shards = rollout(run, progress, executor, watch, engines)
        if shared:
            evaluate_policy(run, "base", progress, engines, executor, watch=watch)
    wait_for_ranks(run.stage("rollout"), Rollouts, shards)
    if until == "rollout":
        return
    with Engines() as engines:
        reference(run, progress, executor, engines)
        wait_for_ranks(run.stage("reference"), Candidates, shards)
        if until == "reference":
            return
        score(run, progress, executor=executor, watch=watch, engines=engines)
    for side in run.score_names:
        wait_for_ranks(run.stage("score", side), Scores, shards)


def validate(run: Run) -> Iterator[Finding]:
    """Check the models of every pending anchor, their engines, and what makes a pair unusable."""
    anchors = pending_anchors(run)
    if not anchors:
        return
    of_student = check_student(run, "score")
    yield from of_student
    for name in anchors:
        section = run.recipe.anchors[name]
        if section.cache is not None and not all(stage.complete for stage in run.scores_of(name)):
            from lightning_weave.published import check_published

            yield from attempt(f"anchors.{name}.cache", "published", check_published, run, name)
            continue
        faults = list(of_student)
        for role in ROLES:
            engine = run.recipe.scored_by(name, role)
            yield from check_engine(run, "score", engine)
            try:
                found = list(check_model(f"anchors.{name}.{role}", run.anchor(name, role), "score", engine))
            except InputError as error:  # the adapter does not name its base
                found = [Finding(f"anchors.{name}.{role}", "checkpoint", "error", str(error))]
            yield from found
            faults += found
        if section.post and section.pre is None:
            yield from check_package(f"anchors.{name}.post", "peft")
        if not faults:
            yield from validate_anchor(run, name)


def validate_anchor(run: Run, name: str) -> Iterator[Finding]:
    """Check the aliases, the chat template and the contexts of an anchor, and that its sides differ."""
    about = f"anchors.{name}"
    pre = run.side(name, "pre")
    try:
        for role in ROLES:
            open_alignment(run, name, role, cached=False)
        if pre.checks_aliases and pre.untrained is None:
            masked_aliases(pre, untrained_special_tokens(pre.checkpoint))
        stops = judge_stops(run, name)
    except InputError as error:
        yield Finding(about, "aliases", "error", str(error))
        return
    yield stops
    with suppress(InputError):  # prompts that cannot be read are reported by their stage
        yield judge_positions(run, name, take_sample(run))
    yield from attempt(about, "chat template", check_template, run.side(name, "post"))
    yield from find_same_model(run, name)
    for role in ROLES:
        side = run.side(name, role)
        if side.reads_other_prompts:
            try:
                prompts = planned_prompts(run)[0]
            except InputError:  # reported with the prompts
                return
            where = f"{about}.{role}_prompt" if side.context else f"{about}.prompt"
            try:
                own_prompts(run, side, load_prompts(run, side.context.columns, prompts))
                known = load_prompts(run, side.context.run_columns, prompts)
            except InputError as error:
                yield Finding(where, "context", "error", str(error))
                continue
            for column in sorted({column for one in known for column in one.columns or ()}):
                text = f"{{{column}}} is another response of the run, not the column {column!r} of the prompts. If "
                text += "the column is meant, give it another name"
                yield Finding(where, "columns", "warning", text)
