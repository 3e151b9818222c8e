"""Which trajectories make an update, which rank runs them, and in which micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.config import Recipe
from lightning_weave.errors import InputError


@dataclass(frozen=True)
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
    first: int = 0  # group to begin with; the groups before it belong to other legs

    def __post_init__(self) -> None:
        if len(self._held_out_groups()) >= self.groups:
            raise InputError(
                f"train.validation = {self.validation:g} leaves none of the {self.groups} prompts to train on. "
                "Make it smaller, or take more prompts"
            )

    def __len__(self) -> int:
        """All updates. A last round that is not full makes fewer of them, the last with fewer rows."""
        return self.epochs * self._per_epoch

    def rows(self, update: int) -> list[int]:
        """Row numbers of one update, counted from 0."""
        if not 0 <= update < len(self):
            raise IndexError(update)
        epoch, place = divmod(update, self._per_epoch)
        trained = np.setdiff1d(np.arange(self.groups), self._held_out_groups())
        order = np.random.default_rng([self.seed, 2, epoch]).permutation(trained)
        # Updates divide a round evenly, so the rounds of an epoch are one row of updates.
        return self._rows_of(order)[place * self._size : (place + 1) * self._size].tolist()

    def held_out(self) -> list[int]:
        """Rows of the prompts that are kept for validation."""
        return self._rows_of(self._held_out_groups()).tolist()

    def round_of(self, update: int) -> range:
        """The updates that replay the same round as this one."""
        epoch, place = divmod(update, self._per_epoch)
        begin = place - place % self.updates_per_round
        end = min(begin + self.updates_per_round, self._per_epoch)
        return range(epoch * self._per_epoch + begin, epoch * self._per_epoch + end)

    def epoch_of(self, update: int) -> int:
        """How often all prompts have been seen before."""
        return update // self._per_epoch

    @property
    def _size(self) -> int:
        return self.prompts_per_round * self.responses // self.updates_per_round

    @property
    def _per_epoch(self) -> int:
        return -(-(self.groups - len(self._held_out_groups())) * self.responses // self._size)

    def _held_out_groups(self) -> NDArray[np.int64]:
        count = max(1, round(self.groups * self.validation)) if self.validation else 0
        return np.sort(np.random.default_rng([self.seed, 1]).permutation(self.groups)[:count])

    def _rows_of(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((self.first + groups[:, None]) * self.responses + np.arange(self.responses)).ravel()


def make_schedule(
    recipe: Recipe, groups: int, part: tuple[float, float] = (0.0, 1.0), epochs: int | None = None
) -> Schedule:
    """The updates of a run: the same rows in the same order for every composition."""
    train = recipe.train
    first = round(part[0] * groups)
    return Schedule(
        groups=round(part[1] * groups) - first,
        responses=recipe.rollout.responses,
        epochs=epochs or train.epochs,
        prompts_per_round=train.prompts_per_round,
        updates_per_round=train.updates_per_round,
        seed=train.seed,
        validation=train.validation,
        first=first,
    )


def micro_batches(lengths: Sequence[int], token_budget: int) -> Iterator[list[int]]:
    """Pack rows into micro-batches of at most `token_budget` tokens, padding included; a longer row goes alone.

    >>> list(micro_batches([5, 2, 9, 2], token_budget=10))
    [[1, 3], [0], [2]]
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if batch and lengths[index] * (len(batch) + 1) > token_budget:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def share_rows(lengths: Sequence[int], rank: int, world: int) -> list[int]:
    """Deal rows to ranks from long to short, back and forth, so that all get about the same work.

    >>> [share_rows([5, 2, 9, 2], rank, 2) for rank in range(2)]
    [[2, 3], [0, 1]]
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    turns = [turn % (2 * world) for turn in range(len(order))]
    return [index for index, turn in zip(order, turns, strict=True) if min(turn, 2 * world - 1 - turn) == rank]
