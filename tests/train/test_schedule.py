"""Which rows make which update: whole groups, once an epoch, the same for everybody."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_weave.errors import InputError
from lightning_weave.train.schedule import Schedule, deal_rows, rate_share, row_cost

schedules = st.builds(
    Schedule,
    groups=st.integers(2, 40),
    responses=st.sampled_from([1, 2, 4]),
    epochs=st.integers(1, 3),
    prompts_per_round=st.sampled_from([4, 8]),
    updates_per_round=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 2**32 - 1),
    validation=st.sampled_from([0.0, 0.01, 0.3]),
)


@given(schedules)
def test_every_row_is_trained_on_once_an_epoch_in_rounds_of_whole_groups(schedule: Schedule) -> None:
    updates = [schedule.rows(update) for update in range(len(schedule))]
    held_out = set(schedule.held_out())
    trained = set(range(schedule.groups * schedule.responses)) - held_out
    assert Counter(row for rows in updates for row in rows) == dict.fromkeys(trained, schedule.epochs)
    assert all(rows for rows in updates)
    per_epoch = len(updates) // schedule.epochs
    for epoch in range(schedule.epochs):
        ours = updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        for start in range(0, per_epoch, schedule.updates_per_round):
            rows = [row for update in ours[start : start + schedule.updates_per_round] for row in update]
            groups = Counter(row // schedule.responses for row in rows)
            assert set(groups.values()) == {schedule.responses}
            assert len(groups) <= schedule.prompts_per_round


@given(schedules)
def test_whole_groups_are_held_out_and_never_trained_on(schedule: Schedule) -> None:
    groups = Counter(row // schedule.responses for row in schedule.held_out())
    assert set(groups.values()) <= {schedule.responses}
    wanted = max(1, round(schedule.validation * schedule.groups)) if schedule.validation else 0
    assert len(groups) == wanted


def test_the_papers_run_has_four_hundred_updates_of_sixty_four() -> None:
    paper = Schedule(3200, 4, epochs=2, prompts_per_round=64, updates_per_round=4, seed=1234)
    assert len(paper) == 400
    assert {len(paper.rows(update)) for update in range(0, 400, 13)} == {64}
    assert paper.rows(0) != paper.rows(200), "the second epoch is shuffled anew"
    assert paper.rows(0) == Schedule(3200, 4, 5, 64, 4, 1234).rows(0)
    assert paper.rows(0) != Schedule(3200, 4, 2, 64, 4, 1235).rows(0)


def test_a_last_round_that_is_not_full_makes_fewer_updates() -> None:
    schedule = Schedule(5, 2, epochs=1, prompts_per_round=4, updates_per_round=2, seed=0)
    assert [len(schedule.rows(update)) for update in range(len(schedule))] == [4, 4, 2]
    with pytest.raises(IndexError):
        schedule.rows(3)


def test_holding_everything_out_is_refused() -> None:
    with pytest.raises(InputError, match=r"train\.validation = 0\.9 leaves none of the 1 prompts"):
        Schedule(1, 4, 1, 4, 1, 0, validation=0.9)


rows = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@given(rows, st.integers(1, 5), st.integers(1, 120), st.booleans())
def test_ranks_share_all_rows_in_equally_many_micro_batches_within_the_budget(
    lengths: list[int], world: int, budget: int, packed: bool
) -> None:
    ranks = deal_rows(lengths, world, budget, width=4, packed=packed)
    assert sorted(index for share in ranks for batch in share for index in batch) == list(range(len(lengths)))
    assert len(ranks) == world
    assert len({len(share) for share in ranks}) == 1
    for batch in (batch for share in ranks for batch in share):
        sizes = [lengths[index] for index in batch]
        tokens = sum(sizes) if packed else len(sizes) * max(sizes, default=0)
        assert len(batch) <= 1 or tokens <= budget


@given(rows, st.integers(1, 5))
def test_what_runs_side_by_side_costs_the_same_but_for_a_row(lengths: list[int], world: int) -> None:
    ranks = deal_rows(lengths, world, 10**9, width=4)
    costs = [sum(row_cost(lengths[index], 4) for batch in share for index in batch) for share in ranks]
    assert max(costs) - min(costs) <= max(row_cost(length, 4) for length in lengths) * (1 + 1e-9)


def test_the_learning_rate_warms_up_and_falls() -> None:
    assert {rate_share(step, 9, 0, "constant") for step in range(1, 10)} == {1.0}
    for decay in ("linear", "cosine"):
        shares = [rate_share(step, 9, 3, decay) for step in range(1, 10)]
        assert shares[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
        assert all(before > after > 0 for before, after in pairwise(shares[3:]))
        assert rate_share(10, 9, 3, decay) == pytest.approx(0), "after the last one"
    assert rate_share(6, 8, 2, "cosine") == pytest.approx(0.5)
    assert rate_share(2, 2, 4, "linear") == 0.5, "a run that ends while it warms up"
