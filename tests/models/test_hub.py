"""Models from the hub, with its real client: what is fetched when, by whom, and what is said when it fails."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hub import Hub, serve_hub
from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.errors import InputError
from lightning_weave.models import hub as hub_files
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.hub import _is_reachable
from lightning_weave.plan.architecture import find_gpu, find_shape
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan
from lightning_weave.prompts.sources import read_rows
from lightning_weave.store import files, model_identity
from lightning_weave.views import doctor, status
from tiny import make_world, run_of, save_model

NAME = "people/small"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    forget()
    with serve_hub(monkeypatch, tmp_path / "hub-cache") as served:
        yield served
    forget()


def forget() -> None:
    """Do as a new process does."""
    hub_files._download.cache_clear()
    hub_files._listing.cache_clear()
    _is_reachable.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "small", "student", "qwen3", 1)


def test_config_and_tokenizer_come_without_weights_and_the_identity_is_that_of_the_whole(hub: Hub, model: Path) -> None:
    hub.push(NAME, model)
    checkpoint = Checkpoint(NAME)
    assert checkpoint.vocabulary > 1
    assert checkpoint.config.model_type == "qwen3"
    assert not checkpoint.is_downloaded
    known = checkpoint.identity
    assert hub.sent(".safetensors") == []
    assert known == model_identity(model)

    checkpoint.load(torch.float32, torch.device("cpu"))
    assert len(hub.sent(".safetensors")) == 1
    assert checkpoint.is_downloaded
    assert checkpoint.identity == known


def test_what_the_hub_has_hashed_is_not_hashed_again(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push(NAME, model)
    folder = Checkpoint(NAME).path
    hashed = []
    real = files.sha256_file
    monkeypatch.setattr(files, "sha256_file", lambda path: hashed.append(path.name) or real(path))
    assert model_identity(folder) == model_identity(model)
    assert hashed.count("model.safetensors") == 1  # of the copy that is not the hub's


def test_status_doctor_and_plan_fetch_no_weights(hub: Hub, tmp_path: Path) -> None:
    recipe = make_world(tmp_path)
    sections = [recipe["student"], *recipe["anchors"].values()]
    for section in sections:
        for key in ("model", "post", "pre"):
            if key in section:
                folder = Path(section[key])
                hub.push(f"people/{folder.name}", folder)
                section[key] = f"people/{folder.name}"
    run = run_of(recipe)
    assert {row.state for row in status.run(run, Console(quiet=True))} == {"missing"}
    findings = doctor.examine(run)
    assert not [finding for finding in findings if finding.check == "checkpoint"]
    assert [finding for finding in findings if "still on the hub" in finding.text]
    assert make_plan(run.recipe, PlannedMachine(find_gpu("H100"), 8)).memory
    assert hub.sent(".safetensors") == []


def test_a_pinned_revision_stays_and_a_moved_branch_is_another_model(hub: Hub, model: Path, tmp_path: Path) -> None:
    first = hub.push(NAME, model)
    before = Checkpoint(NAME).identity
    changed = shutil.copytree(model, tmp_path / "changed")
    save_model(changed, "student", "qwen3", 2)
    hub.push(NAME, changed)
    forget()
    assert Checkpoint(NAME).identity != before
    assert Checkpoint(NAME, first).identity == before
    with pytest.raises(InputError, match=r"at revision 'none'.*no such revision"):
        Checkpoint(NAME, "none").identity  # noqa: B018


def test_gated_and_missing_repositories_say_what_to_do(hub: Hub, model: Path) -> None:
    with pytest.raises(InputError, match=r"people/none.*no such repository, or a private one.*hf download people/none"):
        hub_files.resolve_model("people/none")
    hub.push("people/gated", model)
    hub.gated.add("people/gated")
    with pytest.raises(InputError, match=r"people/gated.*Accept its terms.*hf auth login"):
        hub_files.resolve_model("people/gated")


def test_a_connection_that_breaks_in_the_middle_is_resumed(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 500)
    hub.cut = {"model.safetensors": 1000}
    hub.cuts = 1
    assert model_identity(hub_files.resolve_model(NAME)) == model_identity(model)
    assert [line.partition(" bytes=")[2] for line in hub.sent(".safetensors")] == ["", "1000-"]


def test_a_server_that_dies_in_the_middle_is_said_and_the_next_try_fetches_only_the_rest(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)
    hub.cut = {"model.safetensors": 1000}
    hub.cuts = 1000
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's between its tries
    with pytest.raises(InputError, match=r"people/small.*the download failed"):
        hub_files.resolve_model(NAME)
    hub.cuts = 0
    hub.asked.clear()
    assert model_identity(hub_files.resolve_model(NAME)) == model_identity(model)
    assert hub.sent(".json") == []
    assert len(hub.sent(".safetensors")) == 1


def test_the_first_rank_of_a_machine_downloads_and_the_others_wait(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.push(NAME, model)
    hub.hold.clear()
    found: list[Path] = []
    first = threading.Thread(target=lambda: hub_files.snapshot_download(NAME))  # as another process does
    first.start()
    monkeypatch.setenv("LOCAL_RANK", "1")
    second = threading.Thread(target=lambda: found.append(hub_files.resolve_model(NAME)))
    second.start()
    second.join(1)
    assert found == []
    hub.hold.set()
    for thread in (first, second):
        thread.join()
    assert [folder.name for folder in found] == [commit]
    assert len(hub.sent(".safetensors")) == 1


def test_a_rank_whose_first_rank_is_dead_downloads_by_itself(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(NAME, model)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert model_identity(hub_files.resolve_model(NAME)) == model_identity(model)


def test_without_the_hub_what_is_here_serves(hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.push(NAME, model)
    hub_files.resolve_model(NAME)
    forget()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert Checkpoint(NAME).identity == model_identity(model)


ASKERS: dict[str, tuple[Callable[[], object], str]] = {
    "model": (lambda: hub_files.resolve_model("nobody/nothing"), "model 'nobody/nothing'"),
    "shape": (lambda: find_shape("nobody/nothing"), "model 'nobody/nothing'"),
    "benchmark": (lambda: load_benchmark("aime-2024"), "eval.sources"),
    "code": (lambda: load_benchmark("livecodebench-v6"), "eval.sources"),
    "prompts": (lambda: next(iter(read_rows("nobody/data"))), "nobody/data: cannot be opened"),
}


@pytest.mark.parametrize("asker", list(ASKERS))
@pytest.mark.parametrize("how", ["refuses", "is silent"])
def test_a_hub_out_of_reach_is_asked_once_and_everywhere(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, asker: str, how: str
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("lightning_weave.models.hub.UNREACHABLE", set())
    tried: list[object] = []
    begun, held = threading.Event(), threading.Event()

    def connect(address: object, timeout: float) -> socket.socket:
        tried.append(address)
        begun.set()
        if how == "is silent":
            held.wait()  # as a name server may be
        raise ConnectionRefusedError

    monkeypatch.setattr("lightning_weave.models.hub.socket.create_connection", connect)
    monkeypatch.setattr("lightning_weave.models.hub.CONNECT_TIMEOUT", 0.05)
    ask, said = ASKERS[asker]
    try:
        for _ in range(2):
            with pytest.raises(InputError, match="is unreachable, and it was not downloaded before") as refused:
                ask()
            assert said in str(refused.value)
    finally:
        held.set()
    begun.wait()  # on a busy machine the thread may have its turn only now
    assert len(tried) == 1
    assert hub.asked == []  # and its client did not try again by itself
