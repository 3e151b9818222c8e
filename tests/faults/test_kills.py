"""SIGKILL anywhere in any stage, again and again: the run ends with the bytes of one that was left in peace."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import VERBS, Lab, Tally
from forked import Fault

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
    for trial, plan in enumerate([*chains, *alone]):
        name = lab.copy(f"killed-{verb}-{trial}", f"before-{verb}")
        check_killed(lab, tally, verb, name, plan, trial, expected)
    tally.survived[f"SIGKILL during lweave {verb}"] += sum(map(len, chains)) + len(alone)


def test_kills_in_refreshed_training_leave_no_trace(lab: Lab, tally: Tally) -> None:
    """Between its parts, while a part samples and scores, and while it trains on."""
    refreshed = {"both": {**lab.recipe["compositions"]["both"], "refresh": 2}}
    undisturbed = lab.copy("refreshed", "before-train")
    lab.write(undisturbed, compositions=refreshed)
    events = lab.lweave(undisturbed, "train").events
    inner = [number for number, event in enumerate(events, start=1) if "/part-2/" in event]
    between = [number for number in inner if "/sampler/" in events[number - 1]]
    assert between
    assert between[-1] < inner[-1]
    expected = lab.contents(undisturbed)
    plans = [[between[0], 1], [between[-1], 2], [inner[-1] - 2, 1], [inner[len(inner) // 2], 3, 2], [inner[-1] + 2]]
    for trial, plan in enumerate(plans):
        name = lab.copy(f"killed-refreshed-{trial}", "before-train")
        lab.write(name, compositions=refreshed)
        check_killed(lab, tally, "train", name, plan, trial, expected)
    tally.survived["SIGKILL during refreshed training"] += sum(map(len, plans))


def check_killed(
    lab: Lab, tally: Tally, verb: str, name: str, plan: list[int], trial: int, expected: dict[str, Any]
) -> None:
    """Kill a command at one event after another; then let it end, with the bytes of one that was left in peace."""
    for number, event in enumerate(plan):
        delay = DELAYS[(trial + number) % len(DELAYS)] if len(plan) > 1 else 0
        ended = lab.lweave(name, verb, fault=Fault(event=event, delay=delay, latest=LATEST))
        assert ended.code == -signal.SIGKILL, ended.said
        tally.kills[place_of(ended.events[-1])] += 1
    assert lab.lweave(name, "verify").code == 0
    ended = lab.lweave(name, verb)
    assert ended.code == 0, ended.said
    assert lab.contents(name) == expected
