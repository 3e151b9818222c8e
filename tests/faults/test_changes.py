"""Bytes damaged, a manifest edited, the recipe or a model changed, two commands at once: noticed, said, mended."""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from faults.conftest import Lab, Tally
from forked import Fault, serve


def mend(lab: Lab, name: str, said: str) -> None:
    """Do what a message says: remove the file it names, and run the command it names."""
    words = said.replace("(", " ").replace(")", " ").split()
    if "rm" in words:
        (lab.root / name / words[words.index("rm") + 2]).unlink()  # rm -r FILE
    for verb in ("rollout", "reference", "score"):
        ended = lab.lweave(name, verb)
        assert ended.code == 0, ended.said


def check_train(lab: Lab, name: str) -> None:
    """After mending, the rest of the pipeline gives what an undisturbed run gives."""
    ended = lab.lweave(name, "train")
    assert ended.code == 0, ended.said
    assert lab.contents(name) == lab.contents("after-train")


@pytest.mark.parametrize("stage", ["rollout", "reference", "score/acc-pre"])
def test_a_truncated_shard_is_refused_and_only_it_is_made_again(lab: Lab, tally: Tally, stage: str) -> None:
    name = lab.copy(f"truncated-{stage.replace('/', '-')}", "before-train")
    shard = lab.folder(name) / stage / "00001.safetensors"
    os.truncate(shard, shard.stat().st_size - 5)
    ended = lab.lweave(name, "train")
    assert ended.code == 2
    assert f"runs/tiny/{stage} is not finished. Make it with: lweave {stage.split('/')[0]} r.toml" in ended.said
    assert lab.lweave(name, "status", "--verify").code == 1
    ended = lab.lweave(name, stage.split("/")[0])
    assert [event for event in ended.events if event.endswith(".safetensors") and event.startswith("rename")] == [
        next(event for event in ended.events if "00001.safetensors" in event and event.startswith("rename"))
    ]
    check_train(lab, name)
    tally.refused["shard truncated"] += 1


@pytest.mark.parametrize("stage", ["rollout", "reference", "score/brief-post"])
def test_a_flipped_byte_is_refused_with_the_remedy(lab: Lab, tally: Tally, stage: str) -> None:
    name = lab.copy(f"flipped-{stage.replace('/', '-')}", "before-train")
    shard = (lab.folder(name) / stage).resolve() / "00002.safetensors"
    file = str(shard.relative_to(lab.folder(name).resolve()))
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    place = json.loads(content[8 : 8 + header])  # of the last number of the largest tensor: every command reads it
    entry = max(
        (value for key, value in place.items() if key != "__metadata__"), key=lambda one: one["data_offsets"][1]
    )
    content[8 + header + entry["data_offsets"][0]] ^= 0x10
    shard.write_bytes(content)
    ended = lab.lweave(name, "status", "--verify")
    assert ended.code == 1
    assert f"runs/tiny/{file} is damaged" in ended.said
    refused = lab.lweave(name, "train")
    assert refused.code == 1, refused.said
    assert f"runs/tiny/{file}: row" in refused.said
    assert "Traceback" not in refused.said
    mend(lab, name, ended.said)
    check_train(lab, name)
    tally.refused["byte flipped"] += 1


EDITS: dict[str, Any] = {
    "not JSON": lambda text: text[: len(text) // 2],
    "no shards": lambda text: json.dumps({"fingerprint": json.loads(text)["fingerprint"]}),
    "other fingerprint": lambda text: text.replace(json.loads(text)["fingerprint"], "0123456789abcdef"),
    "other size": lambda text: text.replace('"bytes": ', '"bytes": 1'),
    "other checksum": lambda text: text.replace('"sha256": "', '"sha256": "0'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_manifest_is_noticed(lab: Lab, tally: Tally, edit: str) -> None:
    name = lab.copy(f"manifest-{edit.replace(' ', '-')}", "before-train")
    manifest = lab.folder(name) / "reference" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(EDITS[edit](text))
    for command in (["train"], ["status"], ["status", "--verify"]):
        ended = lab.lweave(name, *command)
        assert ended.code == 1, ended.said
        assert "Traceback" not in ended.said
        assert f"runs/tiny/{manifest.parent.resolve().name}/manifest.json" in ended.said
        assert "Remove it" in ended.said
    manifest.unlink()
    mend(lab, name, "")
    whole = json.loads(text)  # which engine had made the shards stood nowhere else
    own = [key for key in whole if key not in ("engines", "checksum")]
    assert {key: json.loads(manifest.read_text()).get(key) for key in own} == {key: whole[key] for key in own}
    manifest.write_text(text)
    check_train(lab, name)
    tally.refused["manifest edited"] += 1


def test_a_recipe_changed_midway_is_refused_and_status_names_what_changed(lab: Lab, tally: Tally) -> None:
    name = lab.copy("recipe", "before-score")
    lab.write(name, rollout=lab.recipe["rollout"] | {"seed": 43})
    ended = lab.lweave(name, "score")
    assert ended.code == 2
    assert "runs/tiny/reference is not there yet. Make it with: lweave reference r.toml" in ended.said
    said = lab.lweave(name, "status").said
    assert "rollout.seed: 42 -> 43" in said
    assert "first rollout. Next: lweave run r.toml" in said
    assert lab.contents(name) == lab.contents("before-score"), "a refusal touches nothing"
    lab.write(name)
    assert lab.lweave(name, "score").code == 0
    assert lab.contents(name) == lab.contents("after-score")
    tally.refused["recipe changed midway"] += 1


def unchanged(lab: Lab, name: str, moment: str) -> bool:
    """Whether every stage of a run as it was at some moment is still there; names may lead elsewhere."""
    now = lab.contents(name)
    before = {
        path: content
        for path, content in lab.contents(moment).items()
        if path not in ("recipe.toml", "identities.json")
    }
    return all(now[path] == content or str(content).startswith("-> ") for path, content in before.items())


@pytest.mark.parametrize("event", [1, 2, 3, 5, 9, 14])
def test_a_kill_after_a_change_loses_neither_the_old_nor_the_new(lab: Lab, tally: Tally, event: int) -> None:
    name = lab.copy(f"changed-{event}", "after-score")
    lab.write(name, reference=lab.recipe["reference"] | {"candidates": 3})
    assert lab.lweave(name, "reference", fault=Fault(event=event)).code == -signal.SIGKILL
    assert unchanged(lab, name, "after-score")
    begun = lab.copy(f"changed-{event}-on", name)
    ended = lab.lweave(begun, "reference")
    assert ended.code == 0, ended.said
    assert unchanged(lab, begun, "after-score")
    assert lab.lweave(begun, "status", "--verify").code == 0
    for trial in (name, begun):  # from half of another, and from the whole of it
        lab.write(trial)
        ended = lab.lweave(trial, "reference")
        assert ended.code == 0, ended.said
        assert not [event for event in ended.events if event.endswith((".safetensors", ".json"))], "nothing is written"
        now = lab.contents(trial)
        assert {path: now.get(path) for path in lab.contents("after-score")} == lab.contents("after-score")
    tally.survived["killed after a changed recipe began another folder"] += 1


def test_settings_of_execution_may_change_midway(lab: Lab, tally: Tally) -> None:
    name = lab.copy("execution", "before-train")
    assert lab.lweave(name, "train", fault=Fault(event=8)).code == -signal.SIGKILL
    lab.write(name, train=lab.recipe["train"] | {"checkpoint_every": 5})
    ended = lab.lweave(name, "train")
    assert ended.code == 0, ended.said
    model = Path("train/both/final/model.safetensors")
    assert (lab.folder(name) / model).read_bytes() == (lab.folder("after-train") / model).read_bytes()
    tally.survived["execution settings changed midway"] += 1


def test_a_model_changed_under_its_name_is_scored_again(lab: Lab, tally: Tally) -> None:
    name = lab.copy("model", "before-train")
    weights, kept = Path(lab.recipe["anchors"]["acc"]["post"]) / "model.safetensors", lab.root / "kept.safetensors"
    shutil.copy2(weights, kept)
    try:
        content = bytearray(weights.read_bytes())
        content[-3] ^= 0x40
        weights.write_bytes(content)
        ended = lab.lweave(name, "train")
        assert ended.code == 2
        assert "runs/tiny/score/acc-post is not there yet" in ended.said
        assert "lweave score r.toml --only acc-post" in ended.said
        assert lab.lweave(name, "score", "--only", "acc-post").code == 0
        assert len(list(lab.folder(name).glob("score/acc-post@*"))) == 2
        assert unchanged(lab, name, "before-train")
    finally:
        shutil.copy2(kept, weights)
    ended = lab.lweave(name, "score")
    assert ended.code == 0, ended.said
    assert not [event for event in ended.events if event.endswith(".safetensors")], "found again"
    ended = lab.lweave(name, "clean", "--yes")
    assert ended.code == 0, ended.said
    assert "score/acc-post@" in ended.said
    check_train(lab, name)
    tally.refused["model changed under its name"] += 1


def test_a_second_command_is_told_who_holds_the_run(lab: Lab, tally: Tally) -> None:
    name = lab.copy("two", "before-score")
    with serve() as other:
        other.start(lab.job(name, "score", fault=Fault("SIGSTOP", event=3)))
        lock = lab.folder(name) / ".holder"
        while not (holder := lock.read_text() if lock.exists() else "") or not _stopped(int(holder.split()[1])):
            time.sleep(0.05)
        second = lab.lweave(name, "score")
        assert second.code == 2
        assert f"runs/tiny is in use by {holder.strip()}. Wait for it or stop it" in second.said
        os.kill(int(holder.split()[1]), signal.SIGCONT)
        (first,) = other.wait()
        assert first.code == 0, first.said
    assert lab.contents(name) == lab.contents("after-score")
    tally.refused["two commands on one run"] += 1


def _stopped(pid: int) -> bool:
    with suppress(OSError):  # of a process that held the run before
        return "State:\tT" in Path(f"/proc/{pid}/status").read_text()
    return False
