"""SIGTERM and Ctrl-C: a line that says so, exit code 130, and the same bytes after going on."""

import pytest

from faults.conftest import VERBS, Lab, Tally
from forked import Fault


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("verb", [*VERBS, "sweep"])
def test_a_stopped_command_says_so_and_goes_on(lab: Lab, tally: Tally, verb: str, signal: str) -> None:
    name = lab.copy(f"{signal}-{verb}", f"before-{verb}")
    ended = lab.lweave(name, verb, fault=Fault(signal, event=4, delay=0.001))
    assert ended.code == 130, ended.said
    assert "stopped. Finished work is kept; rerun the same command to resume" in ended.said
    assert "Traceback" not in ended.said
    assert lab.lweave(name, verb).code == 0
    assert lab.contents(name) == lab.contents(f"after-{verb}")
    tally.survived[signal] += 1
