"""SIGKILL in training that samples again: between its parts, beside a checkpoint's thread, while an engine reloads."""

import signal
from dataclasses import replace
from typing import Any

from faults.conftest import Lab, Tally
from forked import Fault
from train.test_round_engine import with_engine

REFRESHED = [  # the write or rename at whose beginning each kill falls, in the order of the work
    ("write", r"/both@\w+/checkpoints/\.tmp-000004/__0_0\.distcp$"),
    ("rename", r"/both@\w+/checkpoints/\.tmp-000006$"),
    ("write", r"/part-2/sampler@\w+/\.tmp-final/config\.json$"),
    ("rename", r"/part-2/sampler@\w+/\.tmp-final$"),
    ("write", r"/part-2/sampler@\w+/.*manifest\.json$"),
    ("write", r"/part-2/prompts@\w+/.*stage\.json$"),
    ("write", r"/part-2/rollout@\w+/.*-00003\.safetensors$"),
    ("write", r"/part-2/proposal@\w+/.*manifest\.json$"),
    ("rename", r"/part-2/reference@\w+/.*-00002\.safetensors$"),
    ("write", r"/part-2/score/brief-post@\w+/.*-00001\.safetensors$"),
    ("write", r"/both@\w+/checkpoints/\.tmp-000010/\.metadata\.tmp$"),
    ("write", r"/train/both@\w+/\.tmp-final/model\.safetensors$"),
]


def at(action: str, path: str) -> dict[str, Any]:
    return {"counted": rf"^{action} .*{path}", "fault": Fault()}


def kill(lab: Lab, name: str, tally: Tally, what: str, **job: Any) -> None:
    ended = lab.forked.run(replace(lab.job(name, "train", "--trust"), **job))
    assert ended.code == -signal.SIGKILL, ended.said
    tally.survived[f"SIGKILL during {what}"] += 1


def check_ends_as(lab: Lab, name: str, undisturbed: str) -> None:
    """Let it end, with the bytes of one that was left in peace."""
    assert lab.lweave(name, "status", "--verify").code == 0
    ended = lab.lweave(name, "train", "--trust")
    assert ended.code == 0, ended.said
    assert "resuming from update" in ended.said, ended.said
    assert lab.contents(name) == lab.contents(undisturbed)


def test_kills_in_refreshed_training_leave_no_trace(lab: Lab, tally: Tally) -> None:
    """Of twelve updates, the last six learn on what the student draws after the first six."""
    compositions = {"both": {**lab.recipe["compositions"]["both"], "refresh": 2}}
    for name in ("refreshed", "killed-refreshed"):
        lab.write(lab.copy(name, "before-train"), compositions=compositions)
    assert lab.lweave("refreshed", "train").code == 0
    for action, path in REFRESHED:
        kill(lab, "killed-refreshed", tally, "refreshed training", **at(action, path))
    check_ends_as(lab, "killed-refreshed", "refreshed")


def test_kills_beside_the_engine_of_online_training_leave_no_trace(lab: Lab, tally: Tally) -> None:
    """The engine itself kills whoever gives it the weights of the third round, and then reads them."""
    recipe = with_engine(lab.recipe, lab.root / "round-engine")
    live = {"live": {"weights": lab.recipe["compositions"]["both"]["weights"], "method": "online", "epochs": 1}}
    for name in ("online", "killed-online"):
        (lab.root / name).mkdir()
        lab.write(name, engine=recipe["engine"], compositions=live)
    assert lab.lweave("online", "train", "--trust").code == 0
    what = "online training with an engine"
    kill(lab, "killed-online", tally, what, **at("write", r"/\.tmp-round-000002/model\.safetensors$"))
    kill(lab, "killed-online", tally, what, environment={"STAND_IN_KILLS": "round-000004"})
    kill(lab, "killed-online", tally, what, **at("rename", r"/checkpoints/\.tmp-000006$"))
    check_ends_as(lab, "killed-online", "online")
