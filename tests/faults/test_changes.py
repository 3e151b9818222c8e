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
        (lab.root / name / words[words.index("rm") + 1]).unlink()
    for verb in ("rollout", "reference", "score"):
        assert lab.lweave(name, verb, "--yes").code == 0


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
    assert lab.lweave(name, "verify").code == 1
    ended = lab.lweave(name, stage.split("/")[0])
    assert [event for event in ended.events if event.endswith(".safetensors") and event.startswith("rename")] == [
        next(event for event in ended.events if "00001.safetensors" in event and event.startswith("rename"))
    ]
    check_train(lab, name)
    tally.refused["shard truncated"] += 1


@pytest.mark.parametrize("stage", ["rollout", "reference", "score/brief-post"])
def test_a_flipped_byte_is_refused_with_the_remedy(lab: Lab, tally: Tally, stage: str) -> None:
    name = lab.copy(f"flipped-{stage.replace('/', '-')}", "before-train")
    shard = lab.folder(name) / stage / "00002.safetensors"
    content = bytearray(shard.read_bytes())
    header = int.from_bytes(content[:8], "little")
    place = json.loads(content[8 : 8 + header])  # of the last number of the largest tensor: every command reads it
    entry = max(
        (value for key, value in place.items() if key != "__metadata__"), key=lambda one: one["data_offsets"][1]
    )
    content[8 + header + entry["data_offsets"][0]] ^= 0x10
    shard.write_bytes(content)
    ended = lab.lweave(name, "verify")
    assert ended.code == 1
    assert f"runs/tiny/{stage}/00002.safetensors is damaged" in ended.said
    refused = lab.lweave(name, "train")
    assert refused.code == 1, refused.said
    assert f"runs/tiny/{stage}/00002.safetensors: row" in refused.said
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
    ended = lab.lweave(name, "verify" if edit == "other checksum" else "train")
    assert ended.code in {1, 2}, ended.said
    assert "Traceback" not in ended.said
    assert "runs/tiny/reference" in ended.said
    if "Remove it" in ended.said and edit != "other checksum":
        manifest.unlink()
    if edit == "other checksum":
        for shard in manifest.parent.glob("*.safetensors"):  # as it says of each
            assert f"rm runs/tiny/reference/{shard.name}" in ended.said
            shard.unlink()
    mend(lab, name, "")
    if edit in {"not JSON", "no shards"}:  # which engine had made the shards stood nowhere else
        whole = json.loads(text)
        assert json.loads(manifest.read_text()) == {key: whole[key] for key in whole if key != "engines"}
        manifest.write_text(text)
    check_train(lab, name)
    tally.refused["manifest edited"] += 1


def test_a_recipe_changed_midway_is_refused_with_what_changed(lab: Lab, tally: Tally) -> None:
    name = lab.copy("recipe", "before-score")
    lab.write(name, rollout=lab.recipe["rollout"] | {"seed": 43})
    ended = lab.lweave(name, "score")
    assert ended.code == 2
    assert "seed 42 -> 43" in ended.said
    assert "Rerun: lweave rollout r.toml" in ended.said
    lab.write(name)
    assert lab.lweave(name, "score").code == 0
    assert lab.contents(name) == lab.contents("after-score")
    tally.refused["recipe changed midway"] += 1


@pytest.mark.parametrize("event", [1, 2, 5, 9])
def test_a_kill_between_setting_aside_and_finishing_loses_neither(lab: Lab, tally: Tally, event: int) -> None:
    name = lab.copy(f"aside-{event}", "after-score")
    old = {path.name: path.read_bytes() for path in (lab.folder(name) / "reference").iterdir()}
    lab.write(name, reference=lab.recipe["reference"] | {"candidates": 3})
    refused = lab.lweave(name, "reference")
    assert refused.code == 2
    assert "reference.candidates: 4 -> 3" in refused.said
    assert "tokens" in refused.said
    assert "--yes" in refused.said
    assert lab.contents(name) == lab.contents("after-score"), "a refusal touches nothing"
    assert lab.lweave(name, "reference", "--yes", fault=Fault(event=event)).code == -signal.SIGKILL
    (aside,) = lab.folder(name).glob(".aside-reference@*")
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == old
    begun = lab.copy(f"aside-{event}-on", name)
    ended = lab.lweave(begun, "reference", "--yes")
    assert ended.code == 0, ended.said
    assert not list(lab.folder(begun).rglob(".aside-*"))
    assert lab.lweave(begun, "verify").code == 0
    lab.write(name)
    ended = lab.lweave(name, "reference", "--yes")
    assert ended.code == 0, ended.said
    assert not [event for event in ended.events if event.endswith(".safetensors")], "put back, not made again"
    assert lab.contents(name) == lab.contents("after-score")
    tally.survived["killed after an old stage was set aside"] += 1


def test_settings_of_execution_may_change_midway(lab: Lab, tally: Tally) -> None:
    name = lab.copy("execution", "before-train")
    assert lab.lweave(name, "train", fault=Fault(event=8)).code == -signal.SIGKILL
    lab.write(name, train=lab.recipe["train"] | {"checkpoint_every": 5, "keep": 1})
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
        assert "runs/tiny/score/acc-post is stale" in ended.said
        assert "lweave score r.toml --only acc-post" in ended.said
        refused = lab.lweave(name, "score", "--only", "acc-post")
        assert (refused.code, "To discard them: --yes" in refused.said) == (2, True), refused.said
        assert lab.lweave(name, "score", "--only", "acc-post", "--yes").code == 0
        assert lab.contents(name) != lab.contents("before-train")
    finally:
        shutil.copy2(kept, weights)
    assert "acc-post is stale" in lab.lweave(name, "train").said
    assert lab.lweave(name, "score", "--yes").code == 0
    check_train(lab, name)
    tally.refused["model changed under its name"] += 1


def test_a_second_command_is_told_who_holds_the_run(lab: Lab, tally: Tally) -> None:
    name = lab.copy("two", "before-score")
    with serve() as other:
        other.start(lab.job(name, "score", fault=Fault("SIGSTOP", event=3)))
        lock = lab.folder(name) / ".lock"
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
