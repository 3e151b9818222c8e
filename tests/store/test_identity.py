"""Things are known by their content; hashes are remembered only while size and time stay the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_weave.config import check_recipe
from lightning_weave.errors import InputError
from lightning_weave.run import Run
from lightning_weave.store import file_identity, files, fingerprint, model_identity


@pytest.fixture(autouse=True)
def own_cache(place_at_home: Callable[[], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "_cache_file", place_at_home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lightning-weave" / "identities.json"


def make_model(folder: Path, weight: bytes = b"w", tokenizer: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weight)
    (folder / "tokenizer.json").write_text(tokenizer)
    (folder / "README.md").write_text(str(folder))
    return folder


def test_the_same_model_under_another_name_is_the_same(tmp_path: Path) -> None:
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    assert model_identity(first) == model_identity(second)


def test_other_weights_or_another_tokenizer_are_another_model(tmp_path: Path) -> None:
    models = [
        make_model(tmp_path / "a"),
        make_model(tmp_path / "b", weight=b"v"),
        make_model(tmp_path / "c", tokenizer="{ }"),
    ]
    assert len({model_identity(model) for model in models}) == 3


def test_a_model_changed_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    before = model_identity(model)
    (model / "model.safetensors").write_bytes(b"x")
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert model_identity(model) != before


def test_hashes_are_remembered_by_size_and_time(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    os.utime(file, ns=(5, 5))
    true = file_identity(file)
    remembered = json.loads(own_cache.read_text())
    assert remembered[str(file)] == [3, 5, true]
    own_cache.write_text(json.dumps({str(file): [3, 5, "as remembered"]}))
    assert file_identity(file) == "as remembered"
    os.utime(file, ns=(6, 6))
    assert file_identity(file) == true


def test_a_whole_model_is_remembered_until_its_files_are_gone(tmp_path: Path, own_cache: Path) -> None:
    first, second = make_model(tmp_path / "a"), make_model(tmp_path / "b")
    counted = {"config.json", "model.safetensors", "tokenizer.json"}
    model_identity(first)
    assert {Path(path).name for path in json.loads(own_cache.read_text())} == counted
    shutil.rmtree(first)
    model_identity(second)
    assert set(json.loads(own_cache.read_text())) == {str(second / name) for name in counted}


def test_a_broken_or_unwritable_cache_only_costs_time(tmp_path: Path, own_cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    true = file_identity(file)
    own_cache.write_text("{broken")
    assert file_identity(file) == true
    own_cache.unlink()
    own_cache.parent.rmdir()
    own_cache.parent.write_text("a file where the directory should be")
    assert file_identity(file) == true


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no model here"):
        model_identity(tmp_path)


def test_fingerprints_do_not_depend_on_order() -> None:
    assert (
        fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1}) != fingerprint({"a": 1, "b": [2, 1]})
    )


def test_everything_that_decides_tokens_counts() -> None:
    assert {"merges.txt", "chat_template.*", "tokenizer.model"} <= set(files.TOKENIZER_FILES)


def test_a_run_knows_what_is_gone_and_looks_once(tmp_path: Path) -> None:
    def gone() -> str:
        raise InputError("no such directory")

    recipe = check_recipe({"name": "known", "runs": str(tmp_path), "student": {"model": "student"}})
    first = Run(recipe)
    assert first.identity("model", lambda: "abc") == "abc"
    assert first.identity("model", gone) == "abc"  # not looked at again
    with pytest.raises(InputError, match="no such directory"):
        first.identity("other", gone)
    first.remember()

    later = Run(recipe)
    assert later.identity("model", gone) == "abc"
    changed = Run(recipe)
    assert changed.identity("model", lambda: "def") == "def"  # what is there counts, not what was
