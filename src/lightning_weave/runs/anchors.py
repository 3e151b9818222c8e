"""Anchor models at work: one of them scoring trajectories, or all of a composition giving shifts live."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_weave.cache.block import Block
from lightning_weave.cache.sources import ShiftRules, pair_shift
from lightning_weave.config import Score
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models.adapters import attach, using_adapter
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hf import Scorer, hf_scorer
from lightning_weave.models.untrained import untrained_rows
from lightning_weave.runs.alignment import Alignment
from lightning_weave.runs.engines import Engines
from lightning_weave.runs.machine import set_up
from lightning_weave.runs.prompts import Asked
from lightning_weave.runs.scored import Role, ScoredModel
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.trajectories import row_names
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores

Bases = dict[Checkpoint, Any]  # loaded models, each with the adapters that were attached to it


@dataclass(frozen=True)
class AnchorScorer:
    """One anchor model that scores the student's trajectories in its own tokens."""

    scorer: Scorer
    alignment: Alignment
    model: Any  # behind the scorer, and shared; None: an engine's. Of several adapters on it ...
    adapter: str | None  # ... this one is put on while it scores

    @classmethod
    def open(cls, steps: Steps, scored: ScoredModel, bases: Bases, engines: Engines | None) -> "AnchorScorer":
        """Load the model with the engine that the recipe gives it, and align its tokenizer with the student's.

        A model that `bases` has is used as it is there; one that it has not is added. Without `engines` transformers
        loads it in any case.
        """
        section = steps.scoring(scored)
        checkpoint = scored.checkpoint
        model = None
        if engines is not None and section.engine != "hf":
            scorer = engines.scorer(steps, checkpoint, section, scored.url)
        else:
            if engines is not None:
                engines.close()  # one of them would leave no room for the model
            model = _shared_model(steps, checkpoint, section, bases)
            scorer = hf_scorer(model, checkpoint.vocabulary, section.token_budget)
        masked = _untrained_aliases(scored, checkpoint.tokenizer, scorer) if scored.checks_aliases else frozenset()
        alignment = Alignment.open(steps, scored, scorer.limit, masked)
        return cls(scorer, alignment, model, None if checkpoint.base is None else _adapter_name(checkpoint))

    def after(self, steps: Steps, scored: ScoredModel, asked: Sequence[Asked]) -> "AnchorScorer":
        """The same model, reading these prompts in place of the run's."""
        alignment = Alignment.open(steps, scored, self.alignment.limit, self.alignment.masked_ids, asked)
        return replace(self, alignment=alignment)

    def score(self, rows: Rollouts, candidates: Candidates) -> Scores:
        """Score candidates at the boundaries where the student decided (cross-tokenizer-shift)."""
        trajectory_R = rows.trajectories()
        if not np.array_equal(trajectory_R, candidates.trajectory_R):
            raise Mismatch("reference/ and rollout/ hold different trajectories. Rerun the reference")
        prompts = zip(rows.prompt_R.tolist(), rows.prompt_ids, rows.response_ids, candidates.ids, strict=True)
        aligned = [self.alignment.align(*row) for row in prompts]
        if rows.decided is not None:  # what the student did not write needs no scores
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


def _shared_model(steps: Steps, checkpoint: Checkpoint, section: Score, bases: Bases) -> Any:
    """Load a checkpoint, or the base of an adapter, unless it is there already; attach the adapter."""
    device = set_up(steps.recipe, steps.store)
    whole = checkpoint.base or checkpoint
    if whole not in bases:
        bases[whole] = whole.load(whole.compute_dtype(section.dtype, device), device)
    if checkpoint.base is not None:
        attach(bases[whole], _adapter_name(checkpoint), checkpoint.adapter_path)
    return bases[whole]


def _adapter_name(checkpoint: Checkpoint) -> str:
    """Name an adapter among those of its base; a path would not do."""
    return hashlib.sha256(str(checkpoint).encode()).hexdigest()[:12]


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
    asked: Sequence[Asked] | None = None  # what a preview asks, instead of the prompts of the run
    weigh: Callable[[Sequence[Asked]], NDArray[np.float32]] | None = None  # weights by tag; None: the same for all
    _weight_GK: NDArray[np.float32] | None = None
    _bases: Bases = field(default_factory=dict)
    _after: dict[ScoredModel, AnchorScorer] = field(default_factory=dict)

    def ask(self, asked: Sequence[Asked]) -> None:
        """From here on rows answer these prompts, by number."""
        self.asked = asked
        self._weight_GK = None if self.weigh is None else self.weigh(asked)
        self._after = {}

    def block(self, numbers: Sequence[int], rows: Rollouts, candidates: Candidates) -> Block:
        """Score rows under every anchor."""
        shifts = []
        for anchor in self.weights:
            post, pre = (self._scorer(anchor, role).score(rows, candidates) for role in ("post", "pre"))
            rules = ShiftRules.of(self.steps.recipe.anchors[anchor])
            shifts.append(pair_shift(post, pre, candidates, rules))
        block = Block.of(numbers, rows, candidates, shifts)
        return block if self._weight_GK is None else block.weighed(self._weight_GK[rows.prompt_R])

    def _scorer(self, anchor: str, role: Role) -> AnchorScorer:
        scored = self.steps.side(anchor, role)
        if self.asked is None or not scored.reads_own_prompts:
            return self._loaded(scored)
        if scored not in self._after:
            plain = self._loaded(scored.without_own_prompts())
            self._after[scored] = plain.after(self.steps, scored, self.asked)
        return self._after[scored]

    def _loaded(self, scored: ScoredModel) -> AnchorScorer:
        if scored in self.loaded:
            return self.loaded[scored]
        # Beside a trainee, and beside each other: an engine would want a GPU of its own.
        scorer = AnchorScorer.open(self.steps, scored, self._bases if self.keep else {}, engines=None)
        if self.keep:
            self.loaded[scored] = scorer
        return scorer
