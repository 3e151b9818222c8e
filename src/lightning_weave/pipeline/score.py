"""`lweave score`: every anchor model's log-probabilities of the cached candidates, each checkpoint once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lightning_weave.checks.end_of_turn import warn_if_masked
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.hf import Scorer
from lightning_weave.models.load import load_model, vocabulary_size
from lightning_weave.models.untrained import untrained_rows
from lightning_weave.pipeline.reference import row_names
from lightning_weave.progress import Progress
from lightning_weave.runs.alignment import Alignment, open_tokenizer
from lightning_weave.runs.machine import compute_dtype, set_up
from lightning_weave.runs.steps import ScoredModel, Steps
from lightning_weave.runs.work import Do, Job, Made, do_here
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores


def run(steps: Steps, progress: Progress, only: Sequence[str] | None = None, do: Do = do_here) -> None:
    """Score the cached candidates under every anchor model, one model at a time. Resumable."""
    names = steps.score_names
    if unknown := sorted(set(only or ()) - set(names.values())):
        raise InputError(f"--only {unknown[0]}: no such model; this recipe scores {', '.join(names.values())}")
    for scored, name in names.items():
        if only is None or name in only:
            score_model(steps, scored, progress, do)
    for anchor, section in steps.recipe.anchors.items():
        if steps.identity_of(section.post, section.post_revision) == steps.identity_of(
            section.pre, section.pre_revision
        ):
            progress.say(f"warning: anchors.{anchor}: post and pre are the same model, so its shift is zero everywhere")
        try:
            finding = warn_if_masked(steps, anchor)
        except InputError:  # its models are gone since they were scored
            continue
        if finding is not None and finding.verdict == "warning":
            progress.say(f"{finding.verdict}: {finding.about}: {finding.text}")


def score_model(steps: Steps, scored: ScoredModel, progress: Progress, do: Do = do_here) -> None:
    """Score every pending shard under one model."""
    shards = len(steps.store.stage(steps.reference).require()["shards"])
    stage, name = steps.store.stage(steps.score(scored)), steps.score_names[scored]
    do(Job("score", name, "shard", stage.pending(shards), partial(open_anchor, scored=scored)), steps, progress)
    stage.finish(Scores, shards)


@dataclass(frozen=True)
class Anchor:
    """One anchor model scoring the cache."""

    steps: Steps
    scored: ScoredModel
    reader: "AnchorReader"

    def make(self, shard: int) -> Made:
        """Score the candidates of one shard."""
        steps, store = self.steps, self.steps.store
        rows = store.stage(steps.rollout).open(Rollouts, shard).read()
        candidates = store.stage(steps.reference).open(Candidates, shard).read()
        scores = self.reader.score(rows, candidates)
        tokens = len(rows.prompt_ids.flat) + len(rows.response_ids.flat)
        return Made(tokens, store.stage(steps.score(self.scored)).write(shard, scores))

    def close(self) -> None:
        """Nothing to end."""


def open_anchor(steps: Steps, scored: ScoredModel) -> Anchor:
    """Load one anchor model."""
    return Anchor(steps, scored, AnchorReader.open(steps, scored))


@dataclass(frozen=True)
class AnchorReader:
    """One anchor model reading the student's trajectories in its own tokens."""

    scorer: Scorer
    alignment: Alignment

    @classmethod
    def open(cls, steps: Steps, scored: ScoredModel) -> "AnchorReader":
        """Load the model and align its tokenizer with the student's."""
        device, path = set_up(steps.recipe, steps.store), steps.path_of(scored.model, scored.revision)
        dtype = compute_dtype(steps.recipe.score.dtype, path, device)
        model = load_model(path, dtype=dtype, device=device, trust_remote_code=scored.trust_remote_code)
        anchor = open_tokenizer(path, scored.trust_remote_code)
        scorer = Scorer(model, vocabulary_size(anchor), steps.recipe.score.token_budget)
        masked = _untrained_aliases(scored, anchor, scorer) if scored.checks_aliases else frozenset()
        return cls(scorer, Alignment.open(steps, scored, scorer.limit, masked))

    def score(self, rows: Rollouts, candidates: Candidates) -> Scores:
        """Score one shard of candidates at the boundaries where the student decided (cross-tokenizer-shift)."""
        trajectory_R = rows.trajectories()
        if not np.array_equal(trajectory_R, candidates.trajectory_R):
            raise Mismatch("reference/ and rollout/ hold different trajectories. Make the reference again")
        prompts = zip(rows.prompt_R.tolist(), rows.prompt_ids, rows.response_ids, candidates.ids, strict=True)
        aligned = [self.alignment.align(*row) for row in prompts]
        scored = self.scorer.score(aligned, row_names(rows))
        return Scores(
            trajectory_R,
            logp=Ragged.of([logp_TC for logp_TC, _ in scored]),
            mapped=Ragged.of([row.mapped_TC for row in aligned]),
            mass=Ragged.of([mass_T for _, mass_T in scored]),
        )


def _untrained_aliases(scored: ScoredModel, anchor: Any, scorer: Scorer) -> frozenset[int]:
    """Find alias targets whose output row the pre-anchor never trained: their shift is arbitrary, many nats large."""
    untrained = untrained_rows(scorer.head.weight_VD, sorted(anchor.added_tokens_decoder))
    targets = {anchor.convert_tokens_to_ids(target): target for _, target in scored.aliases}
    found = {id: text for id, text in targets.items() if id in untrained}
    if found and scored.untrained is None:
        named = ", ".join(map(repr, found.values()))
        raise InputError(
            f"an alias leads to {named}, whose output row looks untrained in {scored.model}: its shift is arbitrary.\n"
            'Say untrained = "mask" (no supervision there) or untrained = "keep" in that anchor'
        )
    return frozenset(found) if scored.untrained == "mask" else frozenset()
