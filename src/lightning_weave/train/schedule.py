"""Which trajectories make an update, which rank runs them in which micro-batches, and which updates are checkpointed.

No torch: `lweave status` reads it.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import Decay, Recipe
from lightning_weave.errors import InputError
from lightning_weave.store import read_json

POSITION = "position.json"  # of a checkpoint, written last


@dataclass(eq=False)
class Schedule:
    """The rows of every update: rounds of whole prompt groups, reshuffled each epoch, for any composition the same.

    Nothing here depends on anything but these numbers, so an update's number says where training stands.
    """

    groups: int
    responses: int
    epochs: int
    prompts_per_round: int
    updates_per_round: int
    seed: int
    validation: float = 0.0
    slots: int = 1  # effort levels and the plain prompt: rows of slot s are numbered from s times all rows
    first: int = 0  # group to begin with; the groups before it belong to other legs

    def __post_init__(self) -> None:
        held_out = max(1, round(self.groups * self.validation)) if self.validation else 0
        if held_out >= self.groups:
            raise InputError(
                f"train.validation = {self.validation:g} leaves none of the {self.groups} prompts to train on. "
                "Make it smaller, or take more prompts"
            )
        order = np.random.default_rng([self.seed, 1]).permutation(self.groups)
        self._held_out, self._trained = np.sort(order[:held_out]), np.sort(order[held_out:])
        self._size = self.prompts_per_round * self.responses // self.updates_per_round  # rows of an update
        self._rows = self.groups * self.responses
        offsets = np.random.default_rng([self.seed, 4]).permutation(self._rows)
        self._slot_R = offsets % self.slots  # of the first epoch; each epoch moves every row on by one
        self.per_epoch = -(-len(self._trained) * self.responses // self._size)  # updates

    def __len__(self) -> int:
        """Count all updates. A last round that is not full makes fewer of them, the last with fewer rows."""
        return self.epochs * self.per_epoch

    def rows(self, update: int) -> list[int]:
        """Give the row numbers of one update, counted from 0."""
        if not 0 <= update < len(self):
            raise IndexError(update)
        epoch, place = divmod(update, self.per_epoch)
        order = np.random.default_rng([self.seed, 2, epoch]).permutation(self._trained)
        # Updates divide a round evenly, so the rounds of an epoch are one row of updates.
        return self._at_levels(self._rows_of(order)[place * self._size : (place + 1) * self._size], epoch)

    def plain_rows(self, update: int) -> list[int]:
        """Give the rows of one update with the plain prompt."""
        return [number % self._rows if self.slots > 1 else number for number in self.rows(update)]

    def held_out(self) -> list[int]:
        """Give the rows of the prompts that are kept for validation."""
        return self._at_levels(self._rows_of(self._held_out), 0)

    def _at_levels(self, rows: NDArray[np.int64], epoch: int) -> list[int]:
        if self.slots == 1:
            return rows.tolist()
        return (rows + self._rows * ((self._slot_R[rows] + epoch) % self.slots)).tolist()

    def _rows_of(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((self.first + groups[:, None]) * self.responses + np.arange(self.responses)).ravel()

    def round_of(self, update: int) -> range:
        """Give the updates that replay the same round as this one."""
        epoch, place = divmod(update, self.per_epoch)
        begin = place - place % self.updates_per_round
        end = min(begin + self.updates_per_round, self.per_epoch)
        return range(epoch * self.per_epoch + begin, epoch * self.per_epoch + end)

    def parts(self, count: int, at_most: bool = False) -> list[range]:
        """Split the updates into so many parts of whole rounds, of about one length; or at most so many."""
        ends = sorted({self.round_of(update)[-1] + 1 for update in range(len(self))})
        count = min(count, len(ends)) if at_most else count
        if count > len(ends):
            raise InputError(
                f"refresh = {count}: this training has {len(ends)} rounds (train.epochs, train.prompts_per_round), and "
                f"a part is at least one. Set refresh to {len(ends)} at most"
            )
        cuts = [0, *(ends[round(len(ends) * part / count) - 1] for part in range(1, count + 1))]
        return [range(first, last) for first, last in pairwise(cuts)]


def make_schedule(recipe: Recipe, groups: int | range, composition: str | None = None, slots: int = 0) -> Schedule:
    """Give the updates of a run, or of a composition, on so many prompts, or on a range of them."""
    prompts = range(groups) if isinstance(groups, int) else groups
    train = recipe.train if composition is None else recipe.train_section(composition)
    return Schedule(
        groups=len(prompts),
        responses=recipe.rollout.responses,
        epochs=train.epochs,
        prompts_per_round=train.prompts_per_round,
        updates_per_round=train.updates_per_round,
        seed=train.seed,
        validation=train.validation,
        slots=slots or 1,
        first=prompts.start,
    )


def complete_checkpoints(folder: Path, fingerprint: str) -> list[Path]:
    """List the checkpoints that this recipe wrote, oldest first; each is named by the updates that were taken."""
    paths = [path for path in folder.glob("[0-9]*") if (path / POSITION).exists()]
    return sorted(path for path in paths if read_json(path / POSITION)["fingerprint"] == fingerprint)


def rate_share(step: int, total: int, warmup: int, decay: Decay) -> float:
    """Give the share of the learning rate that update `step` of `total` is taken with, counted from 1.

    It grows evenly over the first `warmup` updates; after that it stays, or falls so that one more update would have 0.

    >>> [rate_share(step, 6, 2, "linear") for step in range(1, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step <= warmup:
        return step / warmup
    progress = (step - 1 - warmup) / (total - warmup)
    match decay:
        case "constant":
            return 1.0
        case "linear":
            return 1 - progress
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        case _:
            assert_never(decay)


def deal_rows(
    lengths: Sequence[int], world: int, token_budget: int, *, width: int, packed: bool = True
) -> list[list[list[int]]]:
    """Deal the rows of an update: rank -> its micro-batches -> their rows. All ranks run equally many.

    Ranks run micro-batch after micro-batch side by side, and at each the slowest is waited for: so all that run
    together cost about the same. No micro-batch has more than `token_budget` tokens, but for a single longer row.

    >>> deal_rows([5, 2, 9, 2], world=2, token_budget=9, width=64)
    [[[2]], [[0, 1, 3]]]
    """
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    if not packed:  # from long to short, back and forth; rows of about one length are padded together
        order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
        for place, index in enumerate(order):
            turn = place % (2 * world)
            batches = ranks[min(turn, 2 * world - 1 - turn)]
            if not batches or lengths[batches[-1][0]] * (len(batches[-1]) + 1) > token_budget:
                batches.append([])
            batches[-1].append(index)
        most = max(len(batches) for batches in ranks)
        return [batches + [[]] * (most - len(batches)) for batches in ranks]
    cost = [row_cost(length, width) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda index: (-cost[index], index))
    count = max(1, math.ceil(sum(lengths) / (token_budget * world)))
    while (bins := _fill(order, lengths, cost, count * world, token_budget)) is None:
        count += 1
    bins.sort(key=lambda members: (-sum(cost[index] for index in members), members))
    spent = [0.0] * world
    for step in range(count):  # of those that run side by side, the dearest goes to the rank that has done least
        by_work = sorted(range(world), key=lambda rank: (spent[rank], rank))
        for rank, members in zip(by_work, bins[step * world : (step + 1) * world], strict=True):
            ranks[rank].append(members)
            spent[rank] += sum(cost[index] for index in members)
    return ranks


def row_cost(length: int, width: int) -> float:
    """Count the work of a row in tokens: its matrices grow with its length, its attention with the square.

    A layer has about 12 width^2 weights, each used once per token; attention takes width times the tokens before.
    """
    return length * (1 + length / (12 * width))


def _fill(
    order: Sequence[int], lengths: Sequence[int], cost: Sequence[float], count: int, token_budget: int
) -> list[list[int]] | None:
    """Put rows, dearest first, into whichever bin has cost least so far and has room; None where none has."""
    members: list[list[int]] = [[] for _ in range(count)]
    cheapest = [(0.0, 0, place) for place in range(count)]  # a heap of (cost, tokens, bin)
    for index in order:
        full = []
        while cheapest and members[cheapest[0][2]] and cheapest[0][1] + lengths[index] > token_budget:
            full.append(heapq.heappop(cheapest))
        if not cheapest:
            return None
        spent, tokens, place = heapq.heappop(cheapest)
        members[place].append(index)
        for entry in (*full, (spent + cost[index], tokens + lengths[index], place)):
            heapq.heappush(cheapest, entry)
    return [sorted(rows) for rows in members]
