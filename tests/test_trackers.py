"""Trackers: one run per policy, which a resume continues and evaluation and report add to."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imsave

from lightning_weave.config import Recipe, check_recipe
from lightning_weave.report.results import track_evaluation, track_figures
from lightning_weave.trackers import TrackedRun, open_trackers
from report.evaluated import write_evaluations
from tiny import run_of, save_model
from wandb_server import serve_wandb

MINIMAL: dict[str, Any] = {"name": "mine", "student": {"model": "m"}}
SAID = {"project": "weave", "tags": ["first", "try"], "name": "{policy} of {run}"}


def recipe_of(tracker: str, **more: Any) -> Recipe:
    return check_recipe({**MINIMAL, "train": {"trackers": [tracker]}, "tracking": {**SAID, **more}})


def train(recipe: Recipe, folder: Path) -> None:
    """Four updates, of which the last two are taken again after a kill."""
    for start, run in ((0, (1, 2, 3, 4)), (2, (3, 4, 5))):
        (tracker,) = open_trackers(recipe, TrackedRun("even", folder, "abc123", start))
        for step in run:
            tracker.log(step, {"loss": 10.0 * start + step})
        tracker.close()


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard")).Reload()


def test_tensorboard_continues_a_run_where_its_checkpoint_was(tmp_path: Path) -> None:
    train(recipe_of("tensorboard"), tmp_path)
    found = events(tmp_path)
    assert [(event.step, event.value) for event in found.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 23.0),
        (4, 24.0),
        (5, 25.0),
    ]
    texts = {
        tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"] if "/" in tag
    }
    assert texts == {
        "name/text_summary": "even of mine",
        "group/text_summary": "mine",
        "project/text_summary": "weave",
        "tags/text_summary": "first, try",
    }


def test_evaluation_and_figures_are_logged_too(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(4))
    )
    recipe = {
        "name": "tiny",
        "runs": str(tmp_path / "runs"),
        "student": {"model": str(save_model(tmp_path / "student", "student", "qwen3", 1))},
        "policies": {"other": {"model": str(save_model(tmp_path / "other", "student", "qwen3", 2))}},
        "eval": {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "chat": False},
        "train": {"trackers": ["tensorboard"]},
    }
    run = run_of(recipe)
    write_evaluations(run, {"base": (0.5, 40), "other": (0.9, 20)})
    track_evaluation(run, "other")
    found = events(tmp_path / "runs/tiny/eval/other")
    assert {"eval/accuracy", "eval/tokens", "eval/aes", "eval/sums/accuracy", "eval/sums/tokens"} <= set(
        found.Tags()["scalars"]
    )
    assert 50 < found.Scalars("eval/accuracy")[0].value <= 100

    (tmp_path / "page" / "figures").mkdir(parents=True)
    imsave(tmp_path / "page" / "figures" / "frontier.png", np.zeros((4, 5, 3)))
    track_figures(run, tmp_path / "page")
    (image,) = events(tmp_path / "runs/tiny/report").Images("frontier")
    assert (image.height, image.width) == (4, 5)


def records(file: Path) -> Iterator[Any]:
    """Read what W&B keeps for its server: protocol buffers in blocks of 32 kB, after a head of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + length > len(data):  # it is being written
            return
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield Record.FromString(parts)
            parts = b""


@pytest.fixture
def fresh_wandb() -> Iterator[None]:
    """Its client reads the environment once, until it is torn down."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()
    yield
    wandb.teardown()


def finished(file: Path) -> list[Any]:
    """Read a file to the record that ends a run: the process that writes it is still at it when `finish` returns."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        read = list(records(file))
        if read and read[-1].WhichOneof("record_type") == "exit":
            return read
        time.sleep(0.1)
    raise AssertionError(f"{file} does not end")


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_gets_the_settings_and_one_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: a resume makes a second directory of the same run, which `wandb sync` joins by its id."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = recipe_of("wandb", entity="me")
    train(recipe, tmp_path)
    (tracker,) = open_trackers(recipe, TrackedRun("even", tmp_path, "abc123"))
    tracker.results({"eval/accuracy": 75.0})
    imsave(tmp_path / "frontier.png", np.zeros((4, 5, 3)))
    tracker.images({"frontier": tmp_path / "frontier.png"})
    tracker.close()

    files = sorted(tmp_path.glob("wandb/offline-run-*-abc123*/run-*.wandb"))
    assert len(files) == 3
    losses, summary = [], {}
    for file in files:
        for record in finished(file):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                assert (run.run_id, run.project, run.entity) == ("abc123", "weave", "me")
                assert (run.display_name, run.run_group, list(run.tags)) == ("even of mine", "mine", ["first", "try"])
            if kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                losses += [(row["_step"], row["train/loss"])] if "train/loss" in row else []
            if kind == "summary":
                summary |= {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update
                }
    assert [step for step, _ in losses] == [1, 2, 3, 4, 3, 4, 5]
    assert summary["eval/accuracy"] == 75.0
    assert summary["frontier/_type"] == "image-file"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_continues_a_run_on_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real client with a stand-in for the server: training, its resume and evaluation are one run there."""
    monkeypatch.chdir(tmp_path)
    recipe = recipe_of("wandb", entity="me")
    with serve_wandb() as (address, runs):
        settings = {"BASE_URL": address, "API_KEY": 40 * "a", "MODE": "online", "DIR": str(tmp_path), "SILENT": "true"}
        for name, value in settings.items():
            monkeypatch.setenv(f"WANDB_{name}", value)
        train(recipe, tmp_path)
        (tracker,) = open_trackers(recipe, TrackedRun("even", tmp_path, "abc123"))
        tracker.results({"eval/accuracy": 75.0})
        tracker.close()
    (run,) = runs.values()
    # Updates 3 and 4 were logged before the kill; a server keeps what it has, and the same update is the same.
    assert [(row["_step"], row["train/loss"]) for row in run.history] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 25)]
    assert (run.summary["train/loss"], run.summary["eval/accuracy"]) == (25, 75)
    begun = [one for one in run.settings if one["displayName"]]
    assert [(one["name"], one["displayName"], one["groupName"]) for one in begun] == 3 * [
        ("abc123", "even of mine", "mine")
    ]


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_trackio_continues_a_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package with its files in a folder: training, its resume and evaluation are one run."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which it reads when it is imported
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    recipe = recipe_of("trackio", entity="me")
    train(recipe, tmp_path)
    (tracker,) = open_trackers(recipe, TrackedRun("even", tmp_path, "abc123"))
    tracker.results({"eval/accuracy": 75.0})
    imsave(tmp_path / "frontier.png", np.zeros((4, 5, 3)))
    tracker.images({"frontier": tmp_path / "frontier.png"})
    tracker.close()
    rows = storage.get_logs("weave", "even of mine@abc123")
    losses = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert losses == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 25)]
    assert [row["eval/accuracy"] for row in rows if "eval/accuracy" in row] == [75.0]
    assert [row["frontier"]["_type"] for row in rows if "frontier" in row] == ["trackio.image"]
    assert storage.get_run_config("weave", "even of mine@abc123")["name"] == "mine"
