"""SIGKILL anywhere in any stage, again and again: the run ends with the bytes of one that was left in peace."""

import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from faults.conftest import VERBS, Lab, Tally
from forked import Fault, kill_at
from lightning_weave.store.ledger import read_ledger

CHAINS = 6  # that begin in the first half of the stage's writes
DELAYS = (0.0, 0.0005, 0.002, 0.01)  # seconds after the write or rename began ...
LATEST = 2  # ... but before so many others have begun: on a slow machine, too, enough are left for the next kill
LAST = 3  # writes and renames of the stage that get a kill of their own


def place_of(event: str) -> str:
    """Name a file of the run by its duty, without the names and numbers that differ."""
    action, path = event.split(" ", 1)
    name = re.sub(r"^\.tmp-(.*-[0-9a-f]{8}-)?", "", Path(path).name)
    name = re.sub(r"[0-9]+", "N", name.lstrip("0123456789-"))
    return f"{path.split('/')[0]}: {action} {name or 'checkpoint'}"


@pytest.mark.parametrize("verb", [*VERBS, "sweep"])
def test_kills_leave_no_trace(lab: Lab, tally: Tally, verb: str) -> None:
    expected = lab.contents(f"after-{verb}")
    undisturbed = lab.copy(f"count-{verb}", f"before-{verb}")
    events = lab.lweave(undisturbed, verb).events
    assert lab.contents(undisturbed) == expected
    chains = [[2 + chain * len(events) // 2 // CHAINS, 3, 2] for chain in range(CHAINS)]
    alone = [[len(events) - place] for place in range(LAST)]
    killed = 0
    for trial, plan in enumerate([*chains, *alone]):
        name = lab.copy(f"killed-{verb}-{trial}", f"before-{verb}")
        for number, event in enumerate(plan):
            delay = DELAYS[(trial + number) % len(DELAYS)] if len(plan) > 1 else 0
            ended = lab.lweave(name, verb, fault=Fault(event=event, delay=delay, latest=LATEST))
            assert ended.code == -signal.SIGKILL, ended.said
            killed += 1
            tally.kills[place_of(ended.events[-1])] += 1
        assert lab.lweave(name, "status", "--verify").code == 0
        ended = lab.lweave(name, verb)
        assert ended.code == 0, ended.said
        assert lab.contents(name) == expected
    tally.survived[f"SIGKILL during lweave {verb}"] += killed


@pytest.mark.parametrize(("verb", "last"), [("rollout", "00005.safetensors"), ("eval", "00002.jsonl")])
def test_a_kill_after_the_last_piece_of_a_stage_leaves_its_cost(lab: Lab, tally: Tally, verb: str, last: str) -> None:
    name = lab.copy(f"spent-{verb}", f"before-{verb}")
    before = len(read_ledger(lab.folder(name)))
    job = replace(lab.job(name, verb), **kill_at("rename", last, 1))
    ended = lab.forked.run(job)
    assert ended.code == -signal.SIGKILL, ended.said
    assert lab.lweave(name, verb).code == 0
    spent = [row for row in read_ledger(lab.folder(name))[before:] if row["stage"] == verb]
    assert spent
    assert all(row["device_seconds"] > 0 for row in spent)
    tally.survived["killed before a row of the ledger"] += 1
