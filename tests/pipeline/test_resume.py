"""Rollouts and scores are the same bytes whether killed and resumed, on one rank or on two."""

import signal
from pathlib import Path

import pytest

from forked import Forked, Job, kill_at
from lightning_weave.config import check_recipe, dump_recipe
from tiny import make_world

RANKS = ({"RANK": "0", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"})
SHARD = r"/\.tmp-[^/]*\.safetensors$"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same recipe three times, in run directories of their own: undisturbed, killed, and on two ranks."""
    root = tmp_path_factory.mktemp("resume")
    world = make_world(root, prompts=20)
    world["rollout"]["prompts_per_shard"] = 2
    files = {}
    for name in ("whole", "killed", "ranks"):
        recipe = check_recipe(world | {"runs": str(root / name)})
        files[name] = root / f"{name}.toml"
        files[name].write_text(dump_recipe(recipe))
    return files


def contents(recipe: Path, stage: str) -> dict[str, bytes]:
    folder = recipe.parent / recipe.stem / "tiny" / stage
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def disturb(forked: Forked, recipes: dict[str, Path], stage: str, shards: int) -> None:
    whole, killed, ranks = recipes["whole"], recipes["killed"], recipes["ranks"]
    assert forked.lweave(stage, whole).code == 0
    expected = contents(whole, stage)
    assert sum(name.endswith(".safetensors") for name in expected) == shards
    for kill in (kill_at("write", SHARD), kill_at("rename", SHARD)):
        finished = _finished(killed, stage)
        assert forked.lweave(stage, killed, **kill).code == -signal.SIGKILL
        now = _finished(killed, stage)
        assert len(finished) < len(now) < shards
        assert all(expected[name] == content for name, content in now.items())
    assert forked.lweave(stage, killed).code == 0
    assert contents(killed, stage) == expected
    two = [Job([stage, str(ranks)], environment=rank) for rank in RANKS]
    assert [ended.code for ended in forked.together(*two)] == [0, 0]
    assert contents(ranks, stage) == expected


def _finished(recipe: Path, stage: str) -> dict[str, bytes]:
    """Whole shards, by their final names."""
    found = contents(recipe, stage)
    return {name: content for name, content in found.items() if name.endswith(".safetensors") and ".tmp-" not in name}


@pytest.mark.slow
def test_rollouts_and_scores_survive_kills_and_do_not_depend_on_ranks(forked: Forked, recipes: dict[str, Path]) -> None:
    disturb(forked, recipes, "rollout", shards=10)
    ended = forked.together(*(Job(["reference", str(recipe)]) for recipe in recipes.values()))
    assert [one.code for one in ended] == [0, 0, 0]
    assert contents(recipes["killed"], "reference") == contents(recipes["whole"], "reference")
    disturb(forked, recipes, "score", shards=40)
    assert forked.lweave("status", recipes["killed"], "--verify").code == 0
