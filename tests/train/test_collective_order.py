"""All ranks call the same collectives in the same order; otherwise they wait for each other without end."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from train.cached import make_run
from train.collectives import train_as_rank
from train.launch import SERVER

LORA = {"lora": {"rank": 2}, "gradient_checkpointing": True}


@pytest.mark.ranks
@pytest.mark.parametrize(("world", "among", "train"), [(8, 8, {}), (8, 4, LORA), (64, 64, {}), (64, 8, {})])
def test_every_rank_calls_the_same_collectives(tmp_path: Path, world: int, among: int, train: dict[str, Any]) -> None:
    run = make_run(tmp_path, train={"prompts_per_round": 6, "shard_ranks": among, **train})
    with SERVER.Pool(1, maxtasksperchild=1) as pool:
        played = pool.starmap(train_as_rank, [(run, rank, world) for rank in range(world)], chunksize=1)
    for what in played[0][0]:
        for place, side_by_side in enumerate(zip_longest(*(calls[what] for calls, _ in played))):
            where = f"{what}, collective {place}"
            for call in set(side_by_side):
                callers = [rank for rank in range(world) if side_by_side[rank] == call]
                assert call is not None, f"{where}: none on ranks {callers}"
                assert callers == [*call.members], f"{where}: {call} on ranks {callers} only"
            assert len({(call.operation, call.tensors, len(call.members)) for call in side_by_side}) == 1, where

    calls, dealt = zip(*played, strict=True)
    assert all(len(each[how]) > 1 for each in dealt for how in each), "several micro-batches"
    assert sum(not any(each["lopsided"]) for each in dealt) == world - 2, "ranks without rows"
    update = calls[0]["even update"]
    kinds = {"allreduce_", "all_reduce", "_allgather_base_", "_reduce_scatter_base_"}  # of c10d and of DTensor
    assert {each.operation for each in update} == kinds
    assert {len(each.members) for each in update} == {world, among, world // among} - {1}
    assert {"barrier", "all_gather_into_tensor"} <= {each.operation for each in calls[0]["export"]}
    # Six prompts are twelve rows and there are three problems: some ranks sample nothing, and gather what others did.
    for what, kinds in (
        ("probe", {"_allgather_base_", "allreduce_"}),
        ("rounds, hf", {"_allgather_base_", "all_gather_object"}),
        ("rounds, vllm", {"_allgather_base_", "all_gather_into_tensor", "all_gather_object", "allreduce_", "barrier"}),
    ):
        assert {each.operation for each in calls[0][what]} == kinds, what
