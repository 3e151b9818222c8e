"""Datasets from the hub, with the real `datasets` client: what is read, pinned, refused and said."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub import Hub, serve_hub
from lightning_weave.errors import InputError
from lightning_weave.prompts.sources import read_rows

pytestmark = pytest.mark.slow
NAME = "people/sums"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with serve_hub(monkeypatch, tmp_path / "hub-cache") as served:
        monkeypatch.setattr("datasets.config.HF_ENDPOINT", served.url)
        yield served


def push(hub: Hub, folder: Path, **splits: list[str]) -> str:
    """Push a dataset with one file per split."""
    folder.mkdir(exist_ok=True)
    for split, problems in splits.items():
        lines = [json.dumps({"problem": problem, "answer": str(eval(problem)), "junk": "x"}) for problem in problems]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return hub.push(f"datasets/{NAME}", folder)


def problems(revision: str = "", **how: str) -> list[str]:
    source = f"{NAME}@{revision}" if revision else NAME
    return [row.values["problem"] for row in read_rows(source, columns={"problem", "answer"}, **how)]


def test_a_dataset_is_read_by_name_split_and_revision(hub: Hub, tmp_path: Path) -> None:
    old = push(hub, tmp_path / "data", train=["1+2", "3+4"], test=["5+6"])
    assert problems() == ["1+2", "3+4"]
    assert problems(split="test") == ["5+6"]
    assert len(hub.sent("train.jsonl")) == len(hub.sent("test.jsonl")) == 1, "what is here is not fetched again"
    push(hub, tmp_path / "data", train=["7+8"])
    assert problems() == ["7+8"], "the file has changed, and the branch moved"
    assert problems(revision=old) == ["1+2", "3+4"], "a pinned revision has not"
    with pytest.raises(InputError, match=r"people/sums: .*Unknown split \"bad\""):
        problems(split="bad")
    with pytest.raises(InputError, match=r"people/sums@f+: .*revision"):
        problems(revision="f" * 40)


def test_what_cannot_be_fetched_is_said_and_a_broken_download_goes_on(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"people/sums: .*doesn't exist on the Hub"):
        problems()
    push(hub, tmp_path / "data", train=["1+2"] * 2000)
    hub.gated.add(f"datasets/{NAME}")
    with pytest.raises(InputError, match=r"people/sums: .*gated dataset"):
        problems()
    hub.gated.clear()
    hub.cut, hub.cuts = {"train.jsonl": 500}, 100  # the server dies whenever it is asked
    with pytest.raises(InputError, match=r"people/sums: .*peer closed connection"):
        problems()
    hub.cuts = 1  # and once more in the middle
    assert problems() == ["1+2"] * 2000
