"""Trajectories with everything that is known about their decisions: what training, reports and checks all read.

`Cache` reads blocks from memory-mapped shards; what is held never grows with the cache.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_weave.cache.shifts import Shift, ShiftSource
from lightning_weave.errors import CorruptData, InputError, Mismatch
from lightning_weave.maths import compose_shifts, tilted_target, with_other
from lightning_weave.store import RowIndex, Shard, Stage
from lightning_weave.types import Candidates, Ragged, Rollouts, Scores, join_rows, pick_rows

OPEN_SHARDS = 256  # maps kept open, over all stages
SHIFTS = ("r_KPC", "mapped_KPC", "valid_KP")  # of a block; decisions are their second axis
T = TypeVar("T")


def outcomes(candidates: Candidates) -> Tensor:
    """Copy log-probabilities of candidates and of `other` (P, O); a cache's arrays are read-only maps of its files."""
    return with_other(torch.tensor(candidates.logp.flat), torch.tensor(candidates.other_logp.flat))


@dataclass(frozen=True)
class Tensors:
    """Copies of a block's arrays. Whole numbers are int64, so that they index; the last of O outcomes is `other`."""

    tokens: list[Tensor]  # prompt and response of each row
    row_P: Tensor  # which row of the block a decision is of
    state_P: Tensor  # at which token of its row it is made: the one before it
    sampled_P: Tensor
    candidate_ids_PC: Tensor
    log_b_PO: Tensor
    r_KPC: Tensor
    mapped_KPC: Tensor
    valid_KP: Tensor


@dataclass(frozen=True)
class Block:
    """Some rows of a run. R rows, P decisions of all rows one after another, C candidates, K sources of shifts."""

    number_R: NDArray[np.int64]  # row numbers in the run
    rollouts: Rollouts
    candidates: Candidates
    r_KPC: NDArray[np.float32]
    mapped_KPC: NDArray[np.bool_]
    valid_KP: NDArray[np.bool_]
    proposal: Candidates | None = None  # the same candidates under another model that sampled the rows

    @classmethod
    def from_shifts(
        cls,
        numbers: Sequence[int],
        rollouts: Rollouts,
        candidates: Candidates,
        shifts: Sequence[Shift],
        proposal: Candidates | None = None,
    ) -> "Block":
        """Combine rows with the shift of every source."""
        shape_KPC = (len(shifts), *candidates.ids.flat.shape)
        r_KPC, mapped_KPC = np.zeros(shape_KPC, np.float32), np.zeros(shape_KPC, np.bool_)
        valid_KP = np.zeros(shape_KPC[:2], np.bool_)
        for source, shift in enumerate(shifts):
            r_KPC[source], mapped_KPC[source], valid_KP[source] = shift
        if rollouts.decided is not None:
            valid_KP &= rollouts.decided.flat
        return cls(np.array(numbers, np.int64), rollouts, candidates, r_KPC, mapped_KPC, valid_KP, proposal)

    @classmethod
    def concatenate(cls, blocks: Sequence["Block"]) -> "Block":
        """Concatenate the rows of several blocks."""
        if len(blocks) == 1:
            return blocks[0]
        proposed = any(block.proposal is not None for block in blocks)
        return cls(
            number_R=np.concatenate([block.number_R for block in blocks]),
            rollouts=join_rows([block.rollouts for block in blocks]),
            candidates=join_rows([block.candidates for block in blocks]),
            **{name: np.concatenate([getattr(block, name) for block in blocks], axis=1) for name in SHIFTS},
            proposal=join_rows([block.behaviour for block in blocks]) if proposed else None,
        )

    def with_row_weights(self, weight_RK: NDArray[np.float32]) -> "Block":
        """Weigh the shifts row by row: all sources then count 1, and one of weight 0 masks nothing."""
        weight_KP = np.repeat(weight_RK.T, self.decisions_R, axis=1)
        used_KP = weight_KP != 0
        r_KPC = np.where(used_KP[..., None], weight_KP[..., None] * self.r_KPC, np.float32(0))
        mapped_KPC = self.mapped_KPC & used_KP[..., None]
        return replace(self, r_KPC=r_KPC, mapped_KPC=mapped_KPC, valid_KP=(self.valid_KP | ~used_KP) & self.decided_P)

    def kept(self, weights: Sequence[float]) -> NDArray[np.bool_]:
        """Find the decisions that are trained on: all anchors of nonzero weight are valid, and one of them speaks."""
        used_K = np.array(weights) != 0
        return np.asarray(self.valid_KP[used_K].all(axis=0) & self.mapped_KPC[used_K].any(axis=(0, 2)))

    def __len__(self) -> int:
        return len(self.number_R)

    @property
    def sampled_P(self) -> NDArray[np.int32]:
        """The token that was sampled at each decision."""
        return self.rollouts.response_ids.flat

    @property
    def behaviour(self) -> Candidates:
        """The candidates under the model that sampled the rows: the student itself, unless another proposed them."""
        return self.candidates if self.proposal is None else self.proposal

    @property
    def decided_P(self) -> NDArray[np.bool_]:
        """Which tokens the student wrote; the others of a logged run are context, valid for no source."""
        decided = self.rollouts.decided
        return np.ones(len(self.sampled_P), np.bool_) if decided is None else decided.flat

    @property
    def decisions_R(self) -> NDArray[np.int64]:
        """How many decisions each row has."""
        return np.diff(self.rollouts.response_ids.offsets)

    @property
    def tokens_R(self) -> NDArray[np.int64]:
        """How many tokens each row has, prompt and response."""
        return np.diff(self.rollouts.prompt_ids.offsets) + self.decisions_R

    def tensors(self) -> "Tensors":
        """Copy all of it into torch."""
        prompts = [torch.tensor(ids).long() for ids in self.rollouts.prompt_ids]
        responses = [torch.tensor(ids).long() for ids in self.rollouts.response_ids]
        rows = list(enumerate(zip(prompts, responses, strict=True)))
        return Tensors(
            tokens=[torch.cat([prompt, response]) for _, (prompt, response) in rows],
            row_P=torch.cat([torch.full((len(response),), row) for row, (_, response) in rows]),
            state_P=torch.cat([torch.arange(len(response)) + len(prompt) - 1 for _, (prompt, response) in rows]),
            sampled_P=torch.cat(responses),
            candidate_ids_PC=torch.tensor(self.candidates.ids.flat).long(),
            log_b_PO=outcomes(self.candidates),
            r_KPC=torch.tensor(self.r_KPC),
            mapped_KPC=torch.tensor(self.mapped_KPC),
            valid_KP=torch.tensor(self.valid_KP),
        )

    def pick(self, rows: Sequence[int]) -> "Block":
        """Take some of its rows, by their place in the block."""
        offsets = self.rollouts.response_ids.offsets
        places_P = np.concatenate([np.arange(0), *(np.arange(offsets[row], offsets[row + 1]) for row in rows)])
        return Block(
            number_R=self.number_R[list(rows)],
            rollouts=pick_rows(self.rollouts, rows),
            candidates=pick_rows(self.candidates, rows),
            **{name: getattr(self, name)[:, places_P] for name in SHIFTS},
            proposal=self.proposal and pick_rows(self.proposal, rows),
        )

    def chunks(self, decisions: int) -> Iterator["Block"]:
        """Cut into blocks of whole rows with at most so many decisions each; a longer row stands alone."""
        rows: list[int] = []
        for row, count in enumerate(self.decisions_R.tolist()):
            if rows and self.decisions_R[rows].sum() + count > decisions:
                yield self.pick(rows)
                rows = []
            rows.append(row)
        if rows:
            yield self.pick(rows)

    def first(self, decisions: int) -> "Block":
        """Cut a block of one row after its first decisions."""

        def cut(table: Any) -> Any:
            ragged = {name: rows for name, rows in vars(table).items() if isinstance(rows, Ragged)}
            cut_rows = {name: Ragged.of([rows[0][:decisions]]) for name, rows in ragged.items() if name != "prompt_ids"}
            return replace(table, **cut_rows)

        tables = {name: getattr(self, name) for name in ("rollouts", "candidates", "proposal")}
        shifts = {name: getattr(self, name)[:, :decisions] for name in SHIFTS}
        return replace(self, **{name: table and cut(table) for name, table in tables.items()}, **shifts)


@dataclass(frozen=True)
class Rules:
    """What a composition does to the shifts of its anchors, apart from weighing them. All of these are placebos."""

    flip: bool = False
    shuffle: str | None = None

    def apply(self, block: Block, weights: Sequence[float]) -> Block:
        """Change the shifts of a block. It depends on each row alone, not on what is read with it."""
        if self.shuffle:
            block = self._shuffle(block, block.kept(weights))
        return replace(block, r_KPC=-block.r_KPC) if self.flip else block

    def _shuffle(self, block: Block, kept_P: NDArray[np.bool_]) -> Block:
        """Give every kept decision the shifts of another one of its row, candidate by candidate in their order.

        The only one of a row has no other to take them from, and is masked.
        """
        offsets = block.rollouts.response_ids.offsets
        from_P, alone_P = np.arange(len(kept_P)), np.zeros(len(kept_P), np.bool_)
        for row, number in enumerate(block.number_R.tolist()):
            places = offsets[row] + np.flatnonzero(kept_P[offsets[row] : offsets[row + 1]])
            cycle = np.random.default_rng([number, 5]).permutation(places)
            from_P[cycle] = np.roll(cycle, 1)
            alone_P[places] = len(places) == 1
        moved = {name: getattr(block, name)[:, from_P] for name in ("r_KPC", "mapped_KPC")}
        return replace(block, valid_KP=block.valid_KP & ~alone_P, **moved)


@dataclass(frozen=True)
class Targets:
    """Behaviour and target of P decisions over O = C + 1 outcomes, as log-probabilities; the last is `other`.

    Where `valid_P` is false the composition has no shift and the target is the behaviour. The arrays can be written to,
    so `torch.from_numpy` takes them; `block.tensors()` has the rest.
    """

    block: Block
    valid_P: NDArray[np.bool_]
    r_PC: NDArray[np.float32]  # the composed shift
    log_b_PO: NDArray[np.float32]
    log_q_PO: NDArray[np.float32]
    alpha: float


def compute_targets(block: Block, weights: Sequence[float], alpha: float) -> Targets:
    """Weigh the shifts, intersect the masks (composed-shift) and tilt the behaviour (finite-candidate-target)."""
    shifts = torch.from_numpy(block.r_KPC), torch.from_numpy(block.valid_KP)
    r_PC, _ = compose_shifts(*shifts, torch.tensor(weights, dtype=torch.float32))
    valid_P = block.kept(weights)
    log_b_PO = outcomes(block.candidates)
    log_q_PO = tilted_target(log_b_PO, r_PC, alpha)
    log_q_PO[~valid_P] = log_b_PO[~valid_P]
    return Targets(block, valid_P, r_PC.numpy(), log_b_PO.numpy(), log_q_PO.numpy(), alpha)


@dataclass(frozen=True)
class Levels:
    """Effort levels: row `slot * rows + row` is a cached row whose prompt names the level, with its weights."""

    read: Callable[[int, int], Sequence[int]]  # slot and prompt -> what the student reads
    weight_SK: NDArray[np.float32]
    limit: int | None = None  # of the student's context


@dataclass(eq=False, repr=False)
class Cache:
    """All trajectories of a run with the shifts of the given sources, addressed by row number."""

    rollouts: Stage
    reference: Stage
    sources: Sequence[ShiftSource] = ()
    weight_RK: NDArray[np.float32] | None = None  # of the sources, row by row: by tag, or one alone (the data mixture)
    proposal: Stage | None = None  # the same candidates under the model that sampled, if that is not the student
    levels: Levels | None = None
    rules: Rules = Rules()
    alpha: float | None = None  # solved with the budgets of its anchors ...
    shares: list[Any] = field(default_factory=list)  # ... and what each of them got

    def __post_init__(self) -> None:
        stages = [self.rollouts, self.reference, *(stage for source in self.sources for stage in source.stages)]
        stages += [] if self.proposal is None else [self.proposal]
        for stage in stages:
            stage.require()
        self.rows = RowIndex.of(self.reference.require())
        by_folder = {stage.folder: stage for stage in stages}
        self._open = lru_cache(OPEN_SHARDS)(lambda folder, kind, shard: by_folder[folder].open(kind, shard))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def weights(self) -> list[float]:
        """The weight of each source; 1 where rows have their own weights."""
        return [source.weight if self.weight_RK is None and self.levels is None else 1.0 for source in self.sources]

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]

    def length(self, number: int) -> int:
        """Tokens of one row, prompt and response."""
        slot, row = divmod(number, len(self))
        shard, place = self.rows.find(row)
        rollouts = self._open(self.rollouts.folder, Rollouts, shard).read(place, place + 1)
        prompt = self.levels.read(slot, int(rollouts.prompt_R[0])) if slot and self.levels else rollouts.prompt_ids.flat
        return len(prompt) + len(rollouts.response_ids.flat)

    def block(self, rows: Sequence[int]) -> Block:
        """Read rows from every stage, checking CRCs, that all stages mean the same trajectories, and every number."""
        if not len(rows):  # a rank without rows: an empty block with the right shapes
            return self.block([0]).pick([])
        block = self._plain(rows) if self.levels is None else self._at_levels(rows, self.levels)
        return self.rules.apply(block, self.weights)

    def _at_levels(self, numbers: Sequence[int], levels: Levels) -> Block:
        """Give rows the prompts and weights of their levels; the rest is that of the plain prompt.

        A longer prompt may leave the last decisions no room in the context: they are masked.
        """
        slot_R, row_R = np.divmod(np.asarray(numbers), len(self))
        block = self._plain(row_R.tolist()).with_row_weights(levels.weight_SK[slot_R])
        rollouts = block.rollouts
        prompts = [
            np.array(levels.read(slot, prompt), np.int32) if slot else plain
            for slot, prompt, plain in zip(
                slot_R.tolist(), rollouts.prompt_R.tolist(), rollouts.prompt_ids, strict=True
            )
        ]
        places = [len(prompt) + np.arange(count) for prompt, count in zip(prompts, block.decisions_R, strict=True)]
        valid_KP = block.valid_KP & (np.concatenate(places) <= (levels.limit or np.inf))
        rollouts = replace(rollouts, prompt_ids=Ragged.of(prompts))
        return replace(block, number_R=np.asarray(numbers, np.int64), rollouts=rollouts, valid_KP=valid_KP)

    def _plain(self, rows: Sequence[int]) -> Block:
        for row in (min(rows), max(rows)):
            if not 0 <= row < len(self):
                raise InputError(f"row {row}: this run has rows 0 to {len(self) - 1}")

        def run_of_rows(item: tuple[int, int]) -> tuple[int, int]:
            place, number = item
            return self.rows.find(number)[0], number - place  # constant while the numbers are consecutive

        groups = groupby(enumerate(rows), key=run_of_rows)
        return Block.concatenate([self._read([number for _, number in group]) for _, group in groups])

    def shard_rows(self, shard: int) -> range:
        """The rows of one shard."""
        return range(int(self.rows.starts[shard]), int(self.rows.starts[shard + 1]))

    def _read(self, span: list[int]) -> Block:
        """Read rows that follow one another in one shard."""
        shard, place = self.rows.find(span[0])

        def read(stage: Stage, kind: type[T]) -> T:
            opened: Shard[T] = self._open(stage.folder, kind, shard)  # type: ignore[arg-type]
            table = opened.read(place, place + len(span))
            each = [value.offsets for value in vars(table).values() if isinstance(value, Ragged)]
            if kind is not Rollouts and not all(np.array_equal(one, rollouts.response_ids.offsets) for one in each):
                path = stage.shard_path(shard)
                raise CorruptData(f"{path}: not as many decisions as tokens. Remove it and rerun: {stage.command}")
            return table

        rollouts = read(self.rollouts, Rollouts)
        trajectory_R = rollouts.trajectories()

        def check(stage: Stage, table: Candidates | Scores, *parts: NDArray) -> None:
            if not np.array_equal(trajectory_R, table.trajectory_R):
                number = span[int(np.flatnonzero(trajectory_R != table.trajectory_R)[0])]
                raise Mismatch(f"{stage.folder}: row {number} belongs to another trajectory. Rerun: {stage.command}")
            for values in parts:  # finite logits never give a score of -inf
                finite = np.isfinite(values)
                if not finite.all():
                    position = int(np.argwhere(~finite)[0, 0])
                    number = span[int(np.searchsorted(table.logp.offsets, position, side="right")) - 1]
                    path = stage.shard_path(shard)
                    raise CorruptData(
                        f"{path}: row {number} has a log-probability that is not finite. Remove the shard (rm {path}) "
                        f"and rerun it with: {stage.command}"
                    )

        def read_candidates(stage: Stage) -> Candidates:
            candidates = read(stage, Candidates)
            check(stage, candidates, candidates.logp.flat, candidates.other_logp.flat, candidates.sampled_logp.flat)
            return candidates

        candidates = read_candidates(self.reference)
        proposal = None if self.proposal is None else read_candidates(self.proposal)
        shifts = []
        for source in self.sources:
            scores = [read(stage, Scores) for stage in source.stages]
            for stage, one in zip(source.stages, scores, strict=True):
                # Where a candidate is not mapped its number means nothing, so it is not checked.
                check(stage, one, np.where(one.mapped.flat, one.logp.flat, 0), one.mass.flat)
            # A rule may ask for the entropy of what sampled the rows.
            shift = source.shift(candidates if proposal is None else proposal, scores)
            shifts.append(source.rules.silence(shift, span, rollouts))
        block = Block.from_shifts(span, rollouts, candidates, shifts, proposal)
        return block if self.weight_RK is None else block.with_row_weights(self.weight_RK[span])
