"""The exported data set is the target that training uses, is resumable, and can be taken back as rollouts."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest

from lightning_weave.config import check_recipe, dump_recipe, merge_overrides
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.prompts import keep_prompts, own_trajectories
from lightning_weave.store import RowIndex
from lightning_weave.train.data import compose
from lightning_weave.types import Prompt
from lightning_weave.views import export
from train.cached import make_run

QUIET = Progress(quiet=True)


def some_valid(anchor: str, row: int, decisions: int) -> np.ndarray:
    return np.random.default_rng([row, len(anchor)]).random(decisions) < 0.8


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compositions = {
        "both": {"weights": {"long": 0.7, "short": 0.3}, "alpha": 1.5},
        "budget": {"weights": {"long": 1.0}, "kl_budget": 0.05},
        "mixed": {"method": "mixture", "weights": {"long": 0.5, "short": 0.5}},
        "live": {"method": "online", "weights": {"long": 1.0}},
    }
    run = make_run(tmp_path_factory.mktemp("run"), valid=some_valid, compositions=compositions)
    prompts = [Prompt(f"p{number}", [], "w3", [3], f"{number}") for number in range(6)]
    keep_prompts(run, prompts, {})
    return run


def with_set(run: Run, *sets: str) -> Run:
    return Run(check_recipe(merge_overrides(tomllib.loads(dump_recipe(run.recipe)), sets)), "cached.toml")


@pytest.mark.parametrize("name", ["both", "budget", "mixed"])
def test_the_rows_hold_what_training_composes(run: Run, tmp_path: Path, name: str) -> None:
    import datasets

    out = export.run(run, name, tmp_path / "out", QUIET)
    rows = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache")).with_format("numpy")
    cache = open_cache(run, name)
    alpha = json.loads((out / "export.json").read_text())["alpha"]
    assert len(rows) == len(cache) == 12
    for row in rows:
        batch = compose(cache.block([int(row["row"])]), cache.weights, alpha)
        kept = np.flatnonzero(row["kept"])
        np.testing.assert_array_equal(kept, batch.places_N)
        for column, expected in (("behaviour", batch.log_b_NO), ("target", batch.log_q_NO)):
            found = np.column_stack([np.stack(row[column]), row[f"{column}_other"]])
            np.testing.assert_allclose(found[kept], expected.numpy(), atol=1e-6)  # alone or beside others
            np.testing.assert_allclose(np.exp(found).sum(1), 1, atol=1e-5)
        np.testing.assert_array_equal(np.stack(row["candidate_ids"])[kept], batch.candidate_ids_NC)
        np.testing.assert_array_equal(np.stack(row["behaviour"])[~row["kept"]], np.stack(row["target"])[~row["kept"]])
    card = (out / "README.md").read_text()
    assert f"composition `{name}`" in card


def test_what_is_there_is_kept_and_what_is_missing_is_made_again(run: Run, tmp_path: Path) -> None:
    out = export.run(run, "both", tmp_path / "out", QUIET)
    files = sorted((out / "data").iterdir())
    assert len(files) == RowIndex.of(run.stage("reference").require()).shards
    whole = [file.read_bytes() for file in files]
    stamps = [file.stat().st_mtime_ns for file in files]
    files[1].unlink()
    export.run(run, "both", out, QUIET)
    assert [file.read_bytes() for file in files] == whole
    assert files[0].stat().st_mtime_ns == stamps[0]


def test_another_data_set_is_never_written_over(run: Run, tmp_path: Path) -> None:
    out = export.run(run, "both", tmp_path / "out", QUIET)
    export.run(with_set(run, "train.learning_rate=1e-5"), "both", out, QUIET)  # targets do not depend on it
    with pytest.raises(InputError, match="targets of another cache or composition"):
        export.run(with_set(run, "compositions.both.alpha=2.0"), "both", out, QUIET)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    with pytest.raises(InputError, match="was not made by this command"):
        export.run(run, "both", tmp_path / "mine", QUIET)
    with pytest.raises(InputError, match="its targets are made while it trains"):
        export.run(run, "live", tmp_path / "live", QUIET)
    refreshed = with_set(run, "compositions.both.refresh=2", "train.prompts_per_round=2")
    with pytest.raises(InputError, match="its later parts are made while it trains"):
        export.run(refreshed, "both", tmp_path / "refreshed", QUIET)


def test_a_data_set_comes_back_as_rollouts(run: Run, tmp_path: Path) -> None:
    out = export.run(run, "both", tmp_path / "out", QUIET)
    block = open_cache(run, "both").block(range(12))
    expected = [ids.tolist() for ids in block.rollouts.response_ids]
    first = sorted((out / "data").iterdir())[0]
    for source, count in ((out, 12), (first, 4)):
        groups = own_trajectories(with_set(run, f"rollout.from={json.dumps(str(source))}"))
        assert [response.ids for group in groups for response in group.responses] == expected[:count]
        assert groups[1].prompt.answer == "1"
        assert groups[1].prompt.id == "p1"
