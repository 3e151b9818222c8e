"""From cached trajectories to a batch with its target. Composing is cheap enough to be done while loading."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.block import Block, Cache, Targets, compute_targets
from lightning_weave.cache.budgets import AnchorShare
from lightning_weave.config import ALPHA, Composition, Distilled, Joint, Mixture, Sequential
from lightning_weave.errors import InputError
from lightning_weave.maths import expected_kl, reverse_kl, solve_alpha_for_kl, tilted_target, with_other
from lightning_weave.models.packing import packed_positions
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import load_prompts, tag_columns, tag_of
from lightning_weave.train.schedule import Schedule, make_schedule

SAMPLED_UPDATES = 8  # of the first epoch, on which a dose is measured


@dataclass(frozen=True)
class Dose:
    """How far a composition moves the student, measured on a sample of the cache."""

    alpha: float
    per_anchor: dict[str, float]
    target_kl: float  # KL(q || b), nats per token
    start_kl: float  # KL(b || q): where training starts
    levels: dict[str, float] = field(default_factory=dict)  # the alpha of each level; "" is the plain prompt
    shares: Sequence[AnchorShare] = ()  # what each anchor got, where some have a budget

    def __str__(self) -> str:
        dose = "dose " + ", ".join(map(str, self.shares)) if self.shares else format_doses(self.per_anchor)
        dose = f"alpha {self.alpha:.4g}, {dose}"
        if self.levels:
            dose = "alpha by level " + ", ".join(f"{name} {alpha:.4g}" for name, alpha in self.levels.items() if name)
        return f"{dose}; the target is {self.target_kl:.4f} nats per token away"

    def figures(self) -> dict[str, Any]:
        levels: dict[str, Any] = {"levels": self.levels} if self.levels else {}
        levels |= {"budgets": [asdict(share) for share in self.shares]} if self.shares else {}
        return {"alpha": self.alpha, "target_kl": self.target_kl, "start_kl": self.start_kl, **levels}


def anchor_doses(composition: Composition, alpha: float) -> dict[str, float]:
    """Give w / alpha of every anchor, which is all that a target depends on.

    In a mixture, and in a sequence at full dose, each anchor acts alone at weight 1. A teacher's target has no dose.
    """
    match composition:
        case Distilled():
            return {}
        case Mixture() | Sequential(dose="full"):
            return dict.fromkeys(composition.used, 1 / alpha)
        case _:
            return {anchor: weight / alpha for anchor, weight in composition.used.items()}


def format_doses(doses: dict[str, float]) -> str:
    return "dose " + (", ".join(f"{anchor} {dose:g}" for anchor, dose in doses.items()) or "none")


def find_dose(run: Run, name: str, cache: Cache, schedule: Schedule) -> Dose:
    """Measure a composition's dose, solving for alpha where the recipe gives a KL budget."""
    composition = run.recipe.compositions[name]
    updates = min(SAMPLED_UPDATES, len(schedule))
    rows = [number for update in range(updates) for number in schedule.rows(update)]
    levels = _dose_levels(run, name, cache, rows) if cache.levels is not None else {}
    block = cache.block(rows)
    batch = compose(block, cache.weights, ALPHA)  # only behaviour and shift are read: any alpha will do
    valid_P = block.valid_KP.all(axis=0)
    if valid_P.any() and not len(batch) and not run.recipe.rehearsal:
        raise InputError(
            f"compositions.{name}: no anchor speaks at any of the {valid_P.sum():,} decisions of the first {updates} "
            f"updates. Change their `where`; {run.command('doctor')} shows how many decisions each rule keeps"
        )
    if cache.alpha is not None or composition.alpha is not None or levels:
        alpha = cache.alpha or composition.alpha or ALPHA
    else:
        assert composition.kl_budget is not None, "a composition has alpha or kl_budget"
        alpha = _solve(run, batch, composition.kl_budget, f"compositions.{name}.kl_budget")
    log_q_NO = tilted_target(batch.log_b_NO, batch.r_NC, alpha)
    distances = expected_kl(log_q_NO, batch.log_b_NO), reverse_kl(batch.log_b_NO, log_q_NO, 1.0)
    target_kl, start_kl = (float(kl_N.mean()) if len(batch) else 0.0 for kl_N in distances)
    return Dose(alpha, anchor_doses(composition, alpha), target_kl, start_kl, levels, cache.shares)


def _solve(run: Run, batch: "Batch", budget: float, key: str) -> float:
    if run.recipe.rehearsal and not len(batch):  # doubles write no delimiters, and are never right
        return ALPHA
    try:
        return solve_alpha_for_kl(batch.log_b_NO, batch.r_NC, budget)
    except ValueError as error:
        raise InputError(f"{key} = {budget:g}: {error}") from None


def _dose_levels(run: Run, name: str, cache: Cache, rows: Sequence[int]) -> dict[str, float]:
    """Find the alpha of every level, solving where it has a KL budget, and weigh the levels of the cache by them."""
    assert cache.levels is not None
    composition = run.recipe.compositions[name]
    assert isinstance(composition, Joint), composition.method
    weight_SK = cache.levels.weight_SK.copy()
    cache.levels = replace(cache.levels, weight_SK=weight_SK)
    common = composition.alpha or ALPHA
    alphas = {}
    for number, slot in enumerate(composition.slots):
        alpha = slot.alpha
        if slot.kl_budget is not None:
            weight_SK[number] = [slot.weights.get(anchor, 0.0) for anchor in cache.names]  # not as solved before
            block = cache.block([number * len(cache) + row % len(cache) for row in rows])
            batch = compose(block, cache.weights, common)
            key = f"compositions.{name}.levels.{slot.level or composition.default}.kl_budget"
            alpha = _solve(run, batch, slot.kl_budget, key)
            weight_SK[number] *= common / alpha
        alphas[slot.level or ""] = float(alpha or common)
    return alphas


@dataclass(frozen=True)
class Batch:
    """One micro-batch: its rows' tokens after one another, T in all. N kept decisions; C candidates, O = C + 1."""

    lengths: tuple[int, ...]  # tokens of each row, up to the last that is needed
    whole: tuple[int, ...]  # tokens of each row, all of them
    input_ids_T: Tensor
    positions_T: Tensor  # of each token in its row
    states_N: Tensor  # index into the T hidden states: the token before each kept decision
    rows_N: Tensor  # row number of each kept decision ...
    places_N: Tensor  # ... and its place in the row's response
    candidate_ids_NC: Tensor
    log_b_NO: Tensor  # of the behaviour policy, which sampled these rows
    log_q_NO: Tensor
    r_NC: Tensor
    sampled_ids_N: Tensor
    sampled_log_b_N: Tensor
    weight_N: Tensor  # in the loss; 1 unless `Balance` changes it

    def __len__(self) -> int:
        return len(self.states_N)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Change every tensor, such as by `Tensor.pin_memory`."""
        tensors = {name: change(value) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return Batch(lengths=self.lengths, whole=self.whole, **tensors)

    def to(self, device: torch.device) -> "Batch":
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def weighted(self, weights: Mapping[int, float]) -> "Batch":
        """Weigh the loss of each decision by its row."""
        return replace(self, weight_N=torch.tensor([weights[row] for row in self.rows_N.tolist()]))

    def first(self, decisions: int) -> "Batch":
        """Keep the first few decisions and the tokens that they need. With none, a pass that adds nothing is left."""
        parts = {name: getattr(self, name)[:decisions] for name in _OF_DECISIONS}
        # Two tokens: compiled layers would be compiled again for a single one.
        tokens = int(parts["states_N"].max()) + 1 if len(parts["states_N"]) else min(2, len(self.input_ids_T))
        ends = np.minimum(np.cumsum(self.lengths), tokens)
        lengths = np.diff(ends, prepend=0)
        lengths = lengths[lengths > 0]
        parts |= {"input_ids_T": self.input_ids_T[:tokens], "positions_T": self.positions_T[:tokens]}
        return Batch(lengths=tuple(lengths.tolist()), whole=self.whole[: len(lengths)], **parts)


_OF_DECISIONS = [field.name for field in fields(Batch) if field.name.endswith(("_N", "_NC", "_NO"))]


def compose(block: Block, weights: Sequence[float], alpha: float) -> Batch:
    """Make a batch of the kept decisions of a block and their targets, with no token after the last one needed."""
    targets = compute_targets(block, weights, alpha)
    kept_P = targets.valid_P

    def kept(values: NDArray) -> Tensor:
        return torch.from_numpy(values[kept_P])

    offsets = block.rollouts.response_ids.offsets
    tokens, lengths = [], []
    for row, (prompt_ids, response_ids) in enumerate(
        zip(block.rollouts.prompt_ids, block.rollouts.response_ids, strict=True)
    ):
        places = np.flatnonzero(kept_P[offsets[row] : offsets[row + 1]])
        lengths.append(len(prompt_ids) + int(places[-1]) if len(places) else 1)  # nothing after it needs to be run
        tokens.append(np.concatenate([prompt_ids, response_ids])[: lengths[-1]])
    starts_R = np.cumsum([0, *lengths[:-1]])
    row_P = np.repeat(np.arange(len(block)), block.decisions_R)
    place_P = np.arange(len(row_P)) - offsets[row_P]
    prompt_R = np.diff(block.rollouts.prompt_ids.offsets)
    candidates = block.candidates
    log_b_NO = kept(targets.log_b_PO)
    if block.proposal is not None:  # another student sampled these rows
        log_b_NO = with_other(kept(block.proposal.logp.flat), kept(block.proposal.other_logp.flat))
    return Batch(
        lengths=tuple(lengths),
        whole=tuple((prompt_R + np.diff(offsets)).tolist()),
        input_ids_T=torch.from_numpy(np.concatenate(tokens)).long(),
        positions_T=packed_positions(lengths),
        # The state before a decision: the prompt's last token comes before the first.
        states_N=kept(starts_R[row_P] + prompt_R[row_P] - 1 + place_P),
        rows_N=kept(block.number_R[row_P]),
        places_N=kept(place_P),
        candidate_ids_NC=kept(candidates.ids.flat).long(),
        log_b_NO=log_b_NO,
        log_q_NO=kept(targets.log_q_PO),
        r_NC=kept(targets.r_PC),
        sampled_ids_N=kept(block.sampled_P).long(),
        sampled_log_b_N=kept(candidates.sampled_logp.flat),
        weight_N=torch.ones(int(kept_P.sum())),
    )


@dataclass(frozen=True)
class Balance:
    """What counts equally in the loss of an update: each decision (the paper's), each row, or each tag."""

    kind: str = "decisions"
    tag_G: NDArray[np.int64] | None = None  # of each prompt, for kind "tags"
    responses: int = 1

    @classmethod
    def from_run(cls, run: Run) -> "Balance":
        """Read the recipe's choice, and the tags of the prompts if it needs them."""
        kind, responses = run.recipe.train.balance, run.recipe.rollout.responses
        if kind != "tags":
            return cls(kind, None, responses)
        tags = [tag_of(run.recipe, prompt) for prompt in load_prompts(run, tag_columns(run.recipe))]
        return cls(kind, np.unique(tags, return_inverse=True)[1], responses)

    def groups(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Number the group that each row of an update belongs to."""
        if self.tag_G is not None:
            return self.tag_G[np.asarray(numbers) // self.responses % len(self.tag_G)]
        return np.arange(len(numbers)) * (self.kind == "rows")

    def counts(self, numbers: Sequence[int], own: Sequence[int], kept_R: NDArray[np.int64]) -> dict[str, float]:
        """Count the kept decisions of each group among a rank's own rows, given as indices into `numbers`."""
        group_R = self.groups(numbers)
        groups = len(self.tag_G) if self.tag_G is not None else len(numbers)
        counts_G = np.bincount(group_R[list(own)], kept_R, minlength=groups)
        return {f"group {group}": float(counts_G[group]) for group in np.unique(group_R)}

    def weights(self, numbers: Sequence[int], totals: Mapping[str, float]) -> dict[int, float]:
        """Give the weight of a decision of each row from the counts of all ranks; over all decisions their mean is 1.

        A group without a kept decision has no part in the update.
        """
        kept_G = {group: totals[f"group {group}"] for group in np.unique(self.groups(numbers)).tolist()}
        share = sum(kept_G.values()) / max(sum(kept > 0 for kept in kept_G.values()), 1)
        rows = zip(numbers, self.groups(numbers).tolist(), strict=True)
        return {number: share / max(kept_G[group], 1.0) for number, group in rows}


@dataclass(frozen=True)
class TargetReader:
    """The cache of a composition, read as targets."""

    cache: Cache
    alpha: float

    def __call__(self, rows: Sequence[int]) -> Targets:
        return compute_targets(self.cache.block(rows), self.cache.weights, self.alpha)


def open_targets(run: Run, name: str) -> TargetReader:
    """Open the cache of a composition."""
    if name not in run.recipe.compositions:
        raise InputError(f"{name!r}: no such composition; this recipe has {', '.join(run.recipe.compositions)}")
    composition = run.recipe.compositions[name]
    if composition.method in ("online", "sequential"):
        raise InputError(f"compositions.{name} is {composition.method}: its targets are made while it trains")
    if composition.slots:
        raise InputError(
            f"compositions.{name} has effort levels, each with its own targets. Write the weights of one level as a "
            "composition to have its targets"
        )
    if composition.samples:
        raise InputError(
            f"compositions.{name}.refresh: the targets of its later parts are made while it trains. For those of the "
            "first part, set refresh = 1"
        )
    cache = open_cache(run, name)
    schedule = make_schedule(run.recipe, len(cache) // run.recipe.rollout.responses, name)
    return TargetReader(cache, find_dose(run, name, cache, schedule).alpha)
