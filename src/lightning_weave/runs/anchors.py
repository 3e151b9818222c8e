"""Anchor models at work: one of them scoring trajectories, or all of a composition giving shifts live."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightning_weave.cache.block import Block
from lightning_weave.cache.sources import pair_shift
from lightning_weave.config import Score
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.hf import Scorer
from lightning_weave.models.untrained import untrained_rows
from lightning_weave.runs.alignment import Alignment
from lightning_weave.runs.engines import open_scorer
from lightning_weave.runs.steps import Role, ScoredModel, Steps
from lightning_weave.runs.trajectories import row_names
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores


@dataclass(frozen=True)
class AnchorScorer:
    """One anchor model that scores the student's trajectories in its own tokens."""

    scorer: Scorer
    alignment: Alignment

    @classmethod
    def open(cls, steps: Steps, scored: ScoredModel, section: Score | None = None) -> "AnchorScorer":
        """Load the model as the recipe's [score] says, or as another, and align its tokenizer with the student's."""
        scorer = open_scorer(steps, scored.checkpoint, section or steps.recipe.score)
        tokenizer = scored.checkpoint.tokenizer
        masked = _untrained_aliases(scored, tokenizer, scorer) if scored.checks_aliases else frozenset()
        return cls(scorer, Alignment.open(steps, scored, scorer.limit, masked))

    def close(self) -> None:
        """Release the model."""
        self.scorer.close()

    def score(self, rows: Rollouts, candidates: Candidates) -> Scores:
        """Score candidates at the boundaries where the student decided (cross-tokenizer-shift)."""
        trajectory_R = rows.trajectories()
        if not np.array_equal(trajectory_R, candidates.trajectory_R):
            raise Mismatch("reference/ and rollout/ hold different trajectories. Rerun the reference")
        prompts = zip(rows.prompt_R.tolist(), rows.prompt_ids, rows.response_ids, candidates.ids, strict=True)
        aligned = [self.alignment.align(*row) for row in prompts]
        scored = self.scorer.score(aligned, row_names(rows))
        return Scores(
            trajectory_R,
            logp=Ragged.of([logp_TC for logp_TC, _ in scored]),
            mapped=Ragged.of([row.mapped_TC for row in aligned]),
            mass=Ragged.of([mass_T for _, mass_T in scored]),
        )


def _untrained_aliases(scored: ScoredModel, tokenizer: Any, scorer: Scorer) -> frozenset[int]:
    """Find alias targets whose output row the pre-anchor never trained: their shift is arbitrary, many nats large."""
    untrained = untrained_rows(scorer.head.weight_VD, sorted(tokenizer.added_tokens_decoder))
    targets = {tokenizer.convert_tokens_to_ids(target): target for _, target in scored.aliases}
    aliased = {id: text for id, text in targets.items() if id in untrained}
    if aliased and scored.untrained is None:
        names = ", ".join(map(repr, aliased.values()))
        raise InputError(
            f"an alias leads to {names}, whose output row looks untrained in {scored.checkpoint.name}: its shift is "
            'arbitrary.\nSet untrained = "mask" (no supervision there) or untrained = "keep" in that anchor'
        )
    return frozenset(aliased) if scored.untrained == "mask" else frozenset()


@dataclass
class LiveAnchors:
    """The anchors of one composition, loaded: they give at once what a cache would hold."""

    steps: Steps
    weights: dict[str, float]  # of the anchors that take part
    keep: bool = True  # all models in memory, or one at a time
    loaded: dict[ScoredModel, AnchorScorer] = field(default_factory=dict)

    def block(self, numbers: Sequence[int], rows: Rollouts, candidates: Candidates) -> Block:
        """Score rows under every anchor."""
        shifts = []
        for anchor in self.weights:
            post, pre = (self._scorer(anchor, role).score(rows, candidates) for role in ("post", "pre"))
            shifts.append(pair_shift(post, pre, self.steps.recipe.anchors[anchor].validity))
        return Block.of(numbers, rows, candidates, shifts)

    def _scorer(self, anchor: str, role: Role) -> AnchorScorer:
        scored = ScoredModel.of(self.steps.recipe.anchors[anchor], role)
        if scored in self.loaded:
            return self.loaded[scored]
        # Beside a trainee, and beside each other: an engine would want a GPU of its own.
        scorer = AnchorScorer.open(self.steps, scored, self.steps.recipe.score.model_copy(update={"engine": "hf"}))
        if self.keep:
            self.loaded[scored] = scorer
        return scorer
