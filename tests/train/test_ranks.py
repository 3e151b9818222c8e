"""Two ranks are one process, whatever the rows they get; a run goes on with another number of ranks."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.train import parallel
from lightning_weave.train.schedule import make_schedule
from rounding import assert_same_weights
from train.cached import make_run
from train.launch import Plan, lopsided, on_ranks, start, torchrun, train_and_count

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

UNEVEN = {"prompts_per_round": 3, "updates_per_round": 1, "token_budget": 1, "epochs": 1}


def patchy(anchor: str, row: int, decisions: int) -> np.ndarray:
    """Some decisions are masked by one anchor, and every third row by both."""
    valid = np.ones(decisions, dtype=bool)
    if anchor == "short":
        valid[decisions // 2 :: 3] = False
    return valid & (row % 3 != 0)


def losses(run: Run, name: str) -> list[float]:
    lines = (run.directory / "train" / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def weights(run: Run, name: str) -> dict[str, torch.Tensor]:
    return load_file(run.directory / "train" / name / "final" / "model.safetensors")


def assert_same(one: Run, other: Run, updates: int) -> None:
    for name in one.recipe.compositions:
        assert len(losses(one, name)) == updates
        # They are written with six digits, so that what differs at all may differ by 1e-5 of itself.
        np.testing.assert_allclose(losses(one, name), losses(other, name), rtol=1e-5, atol=1e-5)
        rate = one.recipe.train.learning_rate
        assert_same_weights(weights(other, name), weights(one, name), updates=updates, learning_rate=rate, apart=1e-5)


def runs(root: Path) -> list[Run]:
    """Both heads, every way of training, and a second composition in the same processes."""
    shared: dict[str, Any] = {"groups": 12, "valid": patchy}
    naive = {"weights": {"long": 1.0}, "objective": "direct-opd"}
    both = {"weights": {"long": 0.5, "short": 0.5}}
    untied = {"tie_word_embeddings": False}
    return [
        make_run(root / "tied", **shared, train=UNEVEN),
        make_run(
            root / "untied",
            **shared,
            compositions={"both": both, "naive": naive},
            train={**UNEVEN, "gradient_checkpointing": True, "validation": 0.1, "shard_ranks": 1},  # two copies
            student=untied,
        ),
        make_run(root / "lora", **shared, train={**UNEVEN, "lora": {"rank": 2}, "objective": "reverse-kl"}),
    ]


def test_two_ranks_train_as_one_process(tmp_path: Path) -> None:
    alone, together = runs(tmp_path / "alone"), runs(tmp_path / "together")
    assert start(Plan(alone)) == [0]
    assert start(Plan(together, lopsided=True), ranks=2) == [0, 0]
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other, updates=4)

    # Rank 0 ran one row against five, and at some updates that one had nothing to learn from.
    cache = open_cache(alone[0], "both")
    schedule = make_schedule(alone[0].recipe, groups=12)
    lengths = [[cache.length(row) for row in schedule.rows(update)] for update in range(4)]
    dealt = [lopsided(each, 2, 1, width=16) for each in lengths]
    assert {len([row for batch in share for row in batch]) for share, _ in dealt} == {1}
    longest = [schedule.rows(update)[share[0][0]] for update, (share, _) in enumerate(dealt)]
    assert {row % 3 == 0 for row in longest} == {True, False}


def test_each_machine_has_a_copy_and_gradients_cross_machines_once_per_update(tmp_path: Path) -> None:
    """Two machines with two ranks each, and several micro-batches to an update."""
    alone, together = (make_run(tmp_path / name, groups=12, train=UNEVEN) for name in ("alone", "together"))
    assert start(Plan([alone])) == [0]
    assert on_ranks(4, train_and_count, Plan([together]), machines=2) == [0] * 4
    assert_same(alone, together, updates=4)
    parts = together.student.config.num_hidden_layers + 1  # each is reduced at once: the layers, and all the rest
    for rank in range(4):
        sizes = json.loads((together.directory / f"all-reduced-{rank}.json").read_text())
        assert sizes == [2] * parts * 4, "of each part at each of four updates, over two copies"


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    settings = {"prompts_per_round": 2, "updates_per_round": 1, "epochs": 2, "checkpoint_every": 2}
    undisturbed, shrunk, grown = (
        make_run(tmp_path / name, valid=patchy, train=settings) for name in ("undisturbed", "shrunk", "grown")
    )
    assert start(Plan([undisturbed])) == [0]
    assert -9 in start(Plan([shrunk], kill="update", after=3), ranks=2)
    assert start(Plan([shrunk])) == [0]
    assert start(Plan([grown], kill="update", after=3)) == [-9]
    torchrun(grown, ranks=2)
    assert_same(undisturbed, shrunk, 6)
    assert_same(undisturbed, grown, 6)


def test_ranks_wait_for_the_export_in_a_group_without_the_clock_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, whose own group would end a wait of hours as an error: what is asked of torch is written down."""
    said: list[Any] = []
    monkeypatch.setattr(parallel.dist, "new_group", lambda **how: said.append(how) or "hosts")
    monkeypatch.setattr(parallel.dist, "barrier", lambda group: said.append(group))
    parallel.host_group.cache_clear()
    try:
        parallel.Ranks(0, 2, torch.device("cuda", 0)).barrier()
    finally:
        parallel.host_group.cache_clear()
    assert said == [{"backend": "gloo", "timeout": parallel.HOST_TIMEOUT}, "hosts"]
    assert parallel.HOST_TIMEOUT > parallel.DEVICE_TIMEOUT


def test_ranks_that_start_again_do_not_meet_the_keys_of_an_earlier_start() -> None:
    """Three starts on one store, before which rank 1 was killed when it had said hello."""
    store = parallel.HashStore()
    parts: list[Any] = [None] * 3

    def open_part(number: int) -> None:
        parts[number] = parallel.fresh_store(store, number, 3)

    store.set("hello/1", "a rank that was killed")
    for attempt in range(3):
        ranks = [threading.Thread(target=open_part, args=(number,)) for number in range(3)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not parts[1].check(["address"])
        parts[0].set("address", str(attempt))
        assert [part.get("address") for part in parts] == [str(attempt).encode()] * 3


def test_a_rank_that_failed_does_not_wait_for_the_others_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """To end a group of GPUs in good order is to wait for passes under way, which a rank that failed never joins."""
    at_end: list[Any] = []
    monkeypatch.setattr(parallel.atexit, "register", at_end.append)
    monkeypatch.setattr(parallel.atexit, "unregister", at_end.remove)
    monkeypatch.setattr(parallel.dist, "rendezvous", lambda *_, **__: iter([(None, 0, 2)]))
    monkeypatch.setattr(parallel, "fresh_store", lambda *_: None)
    monkeypatch.setattr(parallel.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(parallel, "host_group", lambda purpose: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with parallel.join(torch.device("cpu"), sharded=True):
        assert at_end == [parallel.dist.destroy_process_group]
    at_end.clear()
    with pytest.raises(ValueError, match="too bad"), parallel.join(torch.device("cpu"), sharded=True):
        raise ValueError("too bad")
    assert at_end == []
