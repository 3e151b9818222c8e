"""`lweave push` and `lweave pull` through a local store, and anchors that are only there."""

import copy
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from rich.console import Console

import lightning_weave as lw
from hub import serve_hub
from lightning_weave import published
from lightning_weave.errors import InputError
from lightning_weave.plan.architecture import find_gpu
from lightning_weave.plan.costs import PlannedMachine
from lightning_weave.plan.plan import make_plan
from lightning_weave.stages.run import dry_run
from lightning_weave.store import remote
from lightning_weave.store.files import sha256_file
from tiny import make_world, save_prompts


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A world whose run is trained and pushed."""
    root = tmp_path_factory.mktemp("published")
    recipe = make_world(root)
    recipe["compositions"] = {"both": recipe["compositions"]["both"]}
    problems = save_prompts(root / "bench.jsonl", 4, seed=6)
    recipe["eval"] = {"benchmarks": [f"file:{problems}"], "samples": 2, "max_tokens": 8, "chat": False}
    run = lw.Run(recipe, quiet=True)
    run.run()
    run.report()
    run.push(f"file://{root}/store")
    return {"root": root, "recipe": recipe, "url": f"file://{root}/store"}


def cached(original: dict[str, Any], runs: Path) -> dict[str, Any]:
    """The recipe of somebody else, who has the student and the prompts but no anchor."""
    recipe = copy.deepcopy(original["recipe"])
    recipe["runs"] = str(runs)
    recipe["anchors"] = {name: {"cache": original["url"]} for name in recipe["anchors"]}
    return recipe


def weights(run: lw.Run) -> bytes:
    return (run.stage("train", "both").folder / "final" / "model.safetensors").read_bytes()


@pytest.fixture
def without_anchors(original: dict[str, Any], tmp_path: Path) -> Any:
    names = ("acc-pre", "acc-post", "brief-pre", "brief-post")
    for name in names:
        shutil.move(original["root"] / name, tmp_path / name)
    yield
    for name in names:
        shutil.move(tmp_path / name, original["root"] / name)


@pytest.mark.slow
@pytest.mark.usefixtures("without_anchors")
def test_pulled_scores_train_the_same_student_without_the_anchors(original: dict[str, Any], tmp_path: Path) -> None:
    first = lw.Run(original["recipe"], quiet=True)
    second = lw.Run(cached(original, tmp_path / "runs"), quiet=True)
    second.run()
    for name in ("valid_P", "r_PC", "log_b_PO", "log_q_PO"):
        assert getattr(second.target("both"), name).tobytes() == getattr(first.target("both"), name).tobytes()
    assert weights(second) == weights(first)
    first.report()
    second.report()
    tables = [path.relative_to(first.path) for path in first.path.glob("report/tables/*") if "cost" not in path.name]
    for name in ("report/points.json", *tables):
        assert (second.path / name).read_bytes() == (first.path / name).read_bytes()
    shutil.move(original["root"] / "store", tmp_path / "gone")  # the run needs the store no more
    try:
        published.read_index.cache_clear()
        again = lw.Run(cached(original, tmp_path / "runs"), quiet=True)
        assert {row["state"] for row in again.status()} == {"complete"}
    finally:
        shutil.move(tmp_path / "gone", original["root"] / "store")


@pytest.mark.slow
def test_replicates_parts_and_legs_are_trained_with_published_scores(original: dict[str, Any], tmp_path: Path) -> None:
    """None of their names can be written in a recipe."""
    recipe = cached(original, tmp_path / "runs")
    names = list(recipe["anchors"])
    legs = {"method": "sequential", "weights": dict.fromkeys(names, 0.5), "sequence": names}
    recipe["compositions"] = {
        "both": recipe["compositions"]["both"],
        "again": {**recipe["compositions"]["both"], "refresh": 2},
        "legs": legs,
        "cached-legs": {**legs, "resample": False},
    }
    recipe["train"]["seeds"] = 2
    run = lw.Run(recipe, quiet=True)
    run.run(until="train", only=["both~2"])
    assert run.stage("train", "both~2").complete
    assert set(run.train("again", "legs", "cached-legs")) == {
        name + mark for name in ("again", "legs", "cached-legs") for mark in ("", "~2")
    }


@pytest.mark.usefixtures("without_anchors")
def test_what_is_fetched_is_neither_planned_nor_missed(original: dict[str, Any], tmp_path: Path) -> None:
    """The configurations of the anchors are not there either."""
    recipe = cached(original, tmp_path / "runs")
    run = lw.Run(recipe, quiet=True)
    fetched = {row["stage"] for row in run.status() if "anchors." in row["why"]}
    assert fetched == {"prompts", "rollout", "reference", *(f"score/{side}" for side in run.score_names.values())}
    console = Console(record=True, width=200, file=io.StringIO())
    dry_run(run, console)
    assert sum("anchors." in line for line in console.export_text().splitlines()) == len(fetched) == 7
    machine = PlannedMachine(find_gpu("H100"), 8)
    hours = make_plan(run.recipe, machine)
    assert (hours.cache_hours, [stage for stage in hours.stages if stage.stage == "score"]) == (0.0, [])
    assert hours.one_composition > 0
    recipe["compositions"]["both"]["refresh"] = 2  # scores new responses
    assert "acc-post" in refuse(lambda: make_plan(lw.Run(recipe, quiet=True).recipe, machine))
    verdicts = {(row["about"], row["verdict"]) for row in run.doctor()}
    assert (
        not {(f"anchors.{name}", verdict) for name in recipe["anchors"] for verdict in ("warning", "error")} & verdicts
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("without_anchors")
def test_a_pulled_run_continues(original: dict[str, Any], tmp_path: Path) -> None:
    directory = published.pull(original["url"], str(tmp_path / "runs"), lw.Run(original["recipe"], quiet=True).progress)
    run = lw.Run(directory / "recipe.toml", quiet=True)
    assert [row["state"] for row in run.status() if not row["stage"].startswith(("train", "eval"))] == ["complete"] * 7
    run.run()
    assert weights(run) == weights(lw.Run(original["recipe"], quiet=True))


def refuse(run: Any) -> str:
    with pytest.raises(InputError) as raised:
        run()
    assert raised.value.code == 2
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_foreign_student_and_another_reference_are_named(original: dict[str, Any], tmp_path: Path) -> None:
    recipe = cached(original, tmp_path / "runs")
    recipe["reference"]["candidates"] = 3
    assert "reference.candidates" in refuse(lambda: lw.Run(recipe, quiet=True).run())
    recipe = cached(original, tmp_path / "runs")
    recipe["rollout"]["max_tokens"] = 11
    assert "rollout.max_tokens" in refuse(lambda: lw.Run(recipe, quiet=True).run())
    recipe = cached(original, tmp_path / "runs")
    foreign = tmp_path / "foreign"
    shutil.copytree(original["root"] / "student", foreign)
    config = json.loads((foreign / "generation_config.json").read_text())
    (foreign / "generation_config.json").write_text(json.dumps({**config, "top_k": 7}))
    recipe["student"]["model"] = str(foreign)
    assert "student.model" in refuse(lambda: lw.Run(recipe, quiet=True).run())
    recipe = cached(original, tmp_path / "runs")
    recipe["anchors"]["acc"]["cache"] += "-gone"
    assert "anchors.acc.cache" in refuse(lambda: lw.Run(recipe, quiet=True).run())
    assert not (tmp_path / "runs" / "tiny").exists()


def test_another_students_run_is_not_pushed_to_the_same_place(original: dict[str, Any], tmp_path: Path) -> None:
    recipe = {**copy.deepcopy(original["recipe"]), "runs": str(tmp_path)}
    shutil.copytree(original["root"] / "acc-pre", tmp_path / "foreign")
    recipe["student"]["model"] = str(tmp_path / "foreign")
    recipe["anchors"] = recipe["compositions"] = {}
    run = lw.Run(recipe, quiet=True)
    run.rollout()
    run.reference()
    assert "student.model" in refuse(lambda: run.push(original["url"]))
    assert remote.Remote(original["url"]).index() == published.read_index(original["url"])


def test_rules_of_a_cached_anchor_can_be_removed(original: dict[str, Any], tmp_path: Path) -> None:
    recipe = cached(original, tmp_path / "runs")
    recipe["anchors"]["acc"] |= {"where": {"first": 2}, "kl_budget": 0.01}
    recipe["compositions"] = {"both": {"weights": {"acc": 1.0}, "normalize": False}}
    del recipe["anchors"]["brief"]
    lw.Run(recipe, quiet=True).score()
    recipe["anchors"]["acc"] = {"cache": original["url"]}
    anchor = lw.Run(recipe, quiet=True).recipe.anchors["acc"]
    assert anchor.post is not None
    assert (anchor.where, anchor.kl_budget) == (None, None)


def test_a_published_anchor_runs_no_code_without_trust(original: dict[str, Any], tmp_path: Path) -> None:
    from lightning_weave.store import read_checked, write_checked

    shutil.copytree(original["root"] / "store", tmp_path / "store")
    index = read_checked(tmp_path / "store" / remote.INDEX)
    index["anchors"]["acc"]["table"]["trust_remote_code"] = True
    write_checked(tmp_path / "store" / remote.INDEX, index)
    recipe = cached({**original, "url": f"file://{tmp_path}/store"}, tmp_path / "runs")
    run = lw.Run(recipe, quiet=True)
    assert "anchors.acc.trust_remote_code" in refuse(run.run)
    assert not run.recipe.anchors["acc"].trust_remote_code
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_scores_of_an_anchors_own_engine_are_composed(original: dict[str, Any], tmp_path: Path) -> None:
    """The engine that scored is part of what the anchor is; whoever composes needs neither engine nor server."""
    from lightning_weave.types import Scores

    first = tmp_path / "first"
    shutil.copytree(lw.Run(original["recipe"], quiet=True).path, first / "tiny", symlinks=True)
    recipe = {**copy.deepcopy(original["recipe"]), "runs": str(first)}
    scored = lw.Run(recipe, quiet=True).scores_of("acc")
    recipe["anchors"]["acc"] |= {"engine": {"post": "http://gpu:8000", "pre": "vllm"}}
    recipe["anchors"]["acc"] |= {"options": {"kv_cache_dtype": "fp8"}}
    run = lw.Run(recipe, quiet=True)
    for before, after in zip(scored, run.scores_of("acc"), strict=True):  # as if these engines had scored
        assert before.fingerprint != after.fingerprint
        for shard in range(3):
            after.write(shard, before.open(Scores, shard).read())
        assert after.finish(Scores, 3)
    url = f"file://{tmp_path}/store"
    run.push(url)
    composed = lw.Run(cached({**original, "url": url}, tmp_path / "runs"), quiet=True)
    composed.run(until="train")
    assert weights(composed) == weights(lw.Run(original["recipe"], quiet=True))


def test_a_flipped_byte_is_refused(original: dict[str, Any], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(original["root"] / "store", store)
    damaged = next(store.glob("reference@*/00001.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    progress = lw.Run(original["recipe"], quiet=True).progress
    message = refuse(lambda: published.pull(f"file://{store}", str(tmp_path / "runs"), progress))
    assert damaged.name in message
    assert not list((tmp_path / "runs").rglob(f"{damaged.parent.name}/{damaged.name}"))


OUTSIDE = ("../evil", "/evil", ".", "", "a/../../evil", "a\\..\\evil", "a\0b", "./recipe.toml", "a//b")


@pytest.mark.parametrize("where", ["files", "links", "targets"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_outside_of_the_run_is_refused(original: dict[str, Any], tmp_path: Path, where: str, name: str) -> None:
    """Names that are not plain are refused too: "./recipe.toml" would replace the recipe."""
    from lightning_weave.store import read_checked, write_checked

    store = tmp_path / "store"
    shutil.copytree(original["root"] / "store", store)
    index = read_checked(store / remote.INDEX)
    match where:
        case "files":
            index["files"][name] = next(iter(index["files"].values()))
        case "links":
            index["links"][name] = "prompts"
        case "targets":
            index["links"]["evil"] = name
    write_checked(store / remote.INDEX, index)
    progress = lw.Run(original["recipe"], quiet=True).progress
    refuse(lambda: published.pull(f"file://{store}", str(tmp_path / "runs"), progress))
    assert not (tmp_path / "runs").exists()


def test_memory_and_a_second_push(original: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run = lw.Run(original["recipe"], quiet=True)
    written: list[str] = []
    put = remote.Remote.put

    def note(self: remote.Remote, files: Any, *rest: Any) -> Any:
        written.extend(files)
        return put(self, files, *rest)

    monkeypatch.setattr(remote.Remote, "put", note)
    run.push("memory://shared/tiny")
    assert len(written) > 10
    written.clear()
    run.push("memory://shared/tiny")
    assert written == [published.CARD]
    card = remote.Remote("memory://shared/tiny").fs.cat_file("/shared/tiny/README.md").decode()
    assert "acc" in card
    assert str(run.student) in card


KILLED = """
import os, signal, sys
from lightning_weave.store import remote
from lightning_weave.cli import main
left = int(sys.argv.pop(1))

class Local(remote.LocalFileSystem):
    def put_file(self, source, target, **more):
        global left
        with open(source, "rb") as data:
            text = data.read()
        os.makedirs(os.path.dirname(target), exist_ok=True)
        for part in (text[: len(text) // 2], text):  # dies with half of a file written, too
            with open(target, "wb") as file:
                file.write(part)
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    get_file = put_file

import fsspec
fsspec.register_implementation("file", Local, clobber=True)
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["push", "pull"])
def test_a_transfer_killed_at_ten_points_resumes(original: dict[str, Any], tmp_path: Path, verb: str) -> None:
    """Each start gets a little further than the one before, and dies in the middle of some file or of the index."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(tomli_w.dumps(original["recipe"]))
    store, runs = tmp_path / "store", tmp_path / "runs"
    if verb == "push":
        words = ["push", str(recipe), f"file://{store}"]
    else:
        shutil.copytree(original["root"] / "store", store)
        words = ["pull", f"file://{store}", "--runs", str(runs)]
    for kill in range(10):
        done = subprocess.run([sys.executable, "-c", KILLED, str(kill), *words], capture_output=True)
        assert done.returncode == -signal.SIGKILL, (kill, done.stderr.decode())
    done = subprocess.run([sys.executable, "-m", "lightning_weave.cli", *words], capture_output=True, env=os.environ)
    assert done.returncode == 0, done.stderr.decode()
    if verb == "push":
        published.pull(f"file://{store}", str(runs), lw.Run(original["recipe"], quiet=True).progress)
    first = lw.Run(original["recipe"], quiet=True).path
    arrived = [*runs.glob("tiny/*@*/*"), *runs.glob("tiny/score/*@*/*")]
    assert sum(path.name == "manifest.json" for path in arrived) >= 7
    for path in arrived:
        assert path.read_bytes() == (first / path.relative_to(runs / "tiny")).read_bytes()


def test_a_killed_push_is_not_composed_with(original: dict[str, Any], tmp_path: Path) -> None:
    """Until all files of the scores are there, the index does not list them."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(tomli_w.dumps(original["recipe"]))
    words = ["push", str(recipe), f"file://{tmp_path}/store"]
    files = len(list((original["root"] / "store").rglob("*.*")))
    done = subprocess.run([sys.executable, "-c", KILLED, str(2 * files - 3), *words], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    other = {**cached(original, tmp_path / "runs"), "anchors": {"acc": {"cache": f"file://{tmp_path}/store"}}}
    other["compositions"] = {"both": {"weights": {"acc": 1.0}}}
    refuse(lambda: lw.Run(other, quiet=True).run())


def test_a_revoked_permission_is_one_line(
    original: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = original["root"] / "store"
    files = [path for path in store.rglob("*") if path.is_file()]
    data = {path.relative_to(store).as_posix(): path.read_bytes() for path in files}
    progress = lw.Run(original["recipe"], quiet=True).progress
    with serve_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.push_files("datasets/org/cache", data)
        published.pull("hf://datasets/org/cache", str(tmp_path / "runs"), progress)
        assert list((tmp_path / "runs").rglob("manifest.json"))
        hub.gated.add("datasets/org/cache")
        message = refuse(lambda: published.pull("hf://datasets/org/cache", str(tmp_path / "others"), progress))
        assert "hf://datasets/org/cache" in message


@pytest.mark.slow
@pytest.mark.usefixtures("without_anchors")
def test_a_whole_run_moves(original: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(lw.Run(original["recipe"], quiet=True).path, tmp_path / "first" / "tiny", symlinks=True)
    recipe = {**copy.deepcopy(original["recipe"]), "runs": str(tmp_path / "first")}
    recipe["compositions"]["same"] = recipe["compositions"]["both"]  # eval/same/bench links to ../both
    run = lw.Run(recipe, quiet=True)
    run.run()
    (run.path / "mine").symlink_to(tmp_path)  # leads out of the run: stays here
    odd = run.path / "a\nb"
    odd.write_text("")
    assert "a\\nb" in refuse(lambda: run.push(f"file://{tmp_path}/store", everything=True))
    odd.unlink()
    run.push(f"file://{tmp_path}/store", everything=True)
    directory = published.pull(f"file://{tmp_path}/store", str(tmp_path / "runs"), run.progress)
    moved = lw.Run(directory / "recipe.toml", quiet=True)
    assert {row["state"] for row in moved.status()} == {"complete"}
    assert weights(moved) == weights(run)
    links = {path.relative_to(run.path): os.readlink(path) for path in run.path.rglob("*") if path.is_symlink()}
    del links[Path("mine")]
    arrived = {path.relative_to(directory): os.readlink(path) for path in directory.rglob("*") if path.is_symlink()}
    assert arrived == links


def test_a_damaged_shard_is_not_pushed(original: dict[str, Any], tmp_path: Path) -> None:
    run = lw.Run(original["recipe"], quiet=True)
    shard = run.stage("reference").shard_path(0)
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    try:
        assert shard.name in refuse(lambda: run.push(f"file://{tmp_path}/store"))
    finally:
        shard.write_bytes(good)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_an_own_anchor_costs_two_scorings(
    original: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_weave.stages import score

    recipe = cached(original, tmp_path / "runs")
    recipe["anchors"]["brief"] = original["recipe"]["anchors"]["brief"]
    scored = []
    real = score.open_model

    def count(run: Any, side: Any, engines: Any) -> Any:
        scored.append(side.checkpoint.name)
        return real(run, side, engines)

    monkeypatch.setattr(score, "open_model", count)
    run = lw.Run(recipe, quiet=True)
    plan = make_plan(run.recipe, PlannedMachine(find_gpu("H100"), 8))
    paid = {Path(stage.what).name for stage in plan.stages if stage.stage == "score" and stage.gpu_hours > 0}
    assert paid == {"brief-post", "brief-pre"}
    run.run(until="train")
    assert {Path(name).name for name in scored} == {"brief-post", "brief-pre"}
    assert weights(run) == weights(lw.Run(original["recipe"], quiet=True))


def stop_after(last: str, get: Any) -> Any:
    """Fetching that is interrupted after a file."""

    def fetch(self: remote.Remote, name: str, *rest: Any) -> None:
        get(self, name, *rest)
        if name == last:
            raise KeyboardInterrupt

    return fetch


def test_a_run_that_has_only_begun_moves(original: dict[str, Any], tmp_path: Path) -> None:
    """Shards of an unfinished stage go along, and a file that only this machine has changed stays as it is there."""
    first = tmp_path / "first"
    shutil.copytree(lw.Run(original["recipe"], quiet=True).path, first / "tiny", symlinks=True)
    recipe = {**original["recipe"], "runs": str(first)}
    run = lw.Run(recipe, quiet=True)
    for verb in ("train", "eval", "score"):
        shutil.rmtree(run.path / verb)
    reference = run.stage("reference")
    reference.manifest_path.unlink()
    reference.shard_path(1).unlink()
    (run.path / "notes.txt").write_text("one")
    url = f"file://{tmp_path}/store"
    refuse(lambda: lw.Run(recipe, quiet=True).push(url))
    lw.Run(recipe, quiet=True).push(url, everything=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote.Remote, "get", stop_after("notes.txt", remote.Remote.get))
        with pytest.raises(KeyboardInterrupt):
            published.pull(url, str(tmp_path / "second"), run.progress)
    assert (tmp_path / "second" / "tiny" / "notes.txt").read_text() == "one"
    (run.path / "notes.txt").write_text("more")
    lw.Run(recipe, quiet=True).push(url, everything=True)
    directory = published.pull(url, str(tmp_path / "second"), run.progress)
    assert (directory / "notes.txt").read_text() == "more"
    moved = lw.Run(directory / "recipe.toml", quiet=True)
    assert moved.stage("reference").shard_path(0).read_bytes() == reference.shard_path(0).read_bytes()
    assert not moved.stage("reference").complete
    moved.reference()
    assert moved.stage("reference").complete
    (run.path / "notes.txt").write_text("two")
    lw.Run(recipe, quiet=True).push(url, everything=True)
    published.pull(url, str(tmp_path / "second"), run.progress)
    assert (directory / "notes.txt").read_text() == "two"
    (directory / "notes.txt").write_text("mine")
    (run.path / "notes.txt").write_text("three")
    lw.Run(recipe, quiet=True).push(url, everything=True)
    published.pull(url, str(tmp_path / "second"), run.progress)
    assert (directory / "notes.txt").read_text() == "mine"
    assert moved.stage("reference").complete
    moved.push(url, everything=True)  # and back to where it began
    published.pull(url, str(first), run.progress)
    assert (run.path / "notes.txt").read_text() == "mine"
    assert lw.Run(recipe, quiet=True).stage("reference").complete


@pytest.mark.parametrize(
    "url",
    [
        "s3://me:hunter2@bucket/tiny",
        "s3://me:hun/hunter2@bucket/tiny",
        "simplecache::s3://me:hunter2@bucket/tiny",
        "https://hunter2@host/tiny",
        "https://host/tiny?signature=hunter2",
    ],
)
def test_a_password_is_neither_used_nor_logged(original: dict[str, Any], tmp_path: Path, url: str) -> None:
    recipe = {**original["recipe"], "runs": str(tmp_path / "runs")}
    progress = lw.Run(recipe, quiet=True).progress
    cached = {**recipe, "anchors": {"acc": {**recipe["anchors"]["acc"], "cache": url}}, "compositions": {}}
    for use in (
        lambda: lw.Run(recipe, quiet=True).push(url),
        lambda: published.pull(url, str(tmp_path / "runs"), progress),
        lambda: lw.Run(cached, quiet=True).run(),
    ):
        assert "hunter2" not in refuse(use)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("key", "table"),
    [
        ("tracking.settings.api_key", {"tracking": {"settings": {"api_key": "hunter2"}}}),
        ("engine.options.hf_token", {"engine": {"options": {"hf_token": "hunter2"}}}),
        ("anchors.acc.engine", {"anchors": {"acc": {"post": "a", "pre": "b", "engine": "http://me:hunter2@gpu:8000"}}}),
    ],
)
def test_a_recipe_with_a_password_is_refused(original: dict[str, Any], key: str, table: dict[str, Any]) -> None:
    """It would be in the run directory, on trackers and in what is published."""
    message = refuse(lambda: lw.Run({**original["recipe"], "compositions": {}, **table}, quiet=True))
    assert key in message
    assert "hunter2" not in message


def test_a_pull_into_the_run_of_another_student_changes_nothing(original: dict[str, Any], tmp_path: Path) -> None:
    recipe = {**copy.deepcopy(original["recipe"]), "runs": str(tmp_path / "runs"), "anchors": {}, "compositions": {}}
    shutil.copytree(original["root"] / "acc-pre", tmp_path / "foreign")
    recipe["student"]["model"] = str(tmp_path / "foreign")
    run = lw.Run(recipe, quiet=True)
    run.rollout()
    before = sorted(run.path.rglob("*"))
    message = refuse(lambda: published.pull(original["url"], recipe["runs"], run.progress))
    assert str(run.path) in message
    assert sorted(run.path.rglob("*")) == before


@pytest.mark.usefixtures("without_anchors")
def test_scores_arrive_where_this_recipe_looks_for_them(original: dict[str, Any], tmp_path: Path) -> None:
    """A folder that own scoring has begun is finished, whatever the published one is called."""
    from lightning_weave.store import read_checked, write_checked

    shutil.copytree(original["root"] / "store", tmp_path / "store")
    index = read_checked(tmp_path / "store" / remote.INDEX)
    (stage,) = (one for one in index["stages"].values() if one["path"] == "score/acc-post")
    other = stage["folder"].replace("acc-post", "other")
    shutil.move(tmp_path / "store" / stage["folder"], tmp_path / "store" / other)
    index["files"] = {name.replace(stage["folder"], other): digest for name, digest in index["files"].items()}
    stage["folder"] = other
    write_checked(tmp_path / "store" / remote.INDEX, index)
    recipe = cached({**original, "url": f"file://{tmp_path}/store"}, tmp_path / "runs")
    run = lw.Run(recipe, quiet=True)
    (folder,) = (stage.folder for stage in run.stages("score") if stage.name == "acc-post")
    folder.mkdir(parents=True)
    shutil.copy(next((tmp_path / "store" / other).glob("*.safetensors")), folder)
    run.score()
    assert all(stage.complete for stage in run.stages("score"))


SMALL = """
mount -t tmpfs -o size=$SIZE tmpfs small
$LWEAVE $WORDS > said.txt 2>&1
echo $? > code.txt
find small -name '.tmp-*' >> said.txt
"""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0, reason="needs a mount namespace"
)
@pytest.mark.parametrize(("verb", "size"), [("pull", "100k"), ("push", "60k")])
def test_a_full_disk_is_one_line_that_names_it(original: dict[str, Any], tmp_path: Path, verb: str, size: str) -> None:
    (tmp_path / "small").mkdir()
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(original["recipe"]))
    words = {"pull": f"pull {original['url']} --runs small", "push": f"push tiny.toml file://{tmp_path}/small/store"}
    lweave = f"{sys.executable} -m lightning_weave.cli"
    environment = {**os.environ, "SIZE": size, "WORDS": words[verb], "LWEAVE": lweave}
    subprocess.run(["unshare", "-rm", "sh", "-c", SMALL], cwd=tmp_path, env=environment, check=True)
    (line,) = (tmp_path / "said.txt").read_text().splitlines()
    assert (tmp_path / "code.txt").read_text().strip() == "1", line
    assert f"{tmp_path}/small/" in line
    assert str(original["root"] / "store") not in line
    assert "No space left on device" in line


def without_powers() -> list[str]:
    """The start of a command that root runs as others do: bound by permissions."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root needs setpriv to be refused anything")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


@pytest.mark.slow
def test_a_folder_that_may_not_be_written_is_named(original: dict[str, Any], tmp_path: Path) -> None:
    run = lw.Run(cached(original, tmp_path / "runs"), quiet=True)
    folder = run.stage("reference").folder
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    (tmp_path / "store").mkdir(mode=0o500)
    (tmp_path / "tiny.toml").write_text(tomli_w.dumps(original["recipe"]))
    pull = (["pull", original["url"], "--runs", str(tmp_path / "runs")], f"{folder}", 1)
    push = (["push", str(tmp_path / "tiny.toml"), f"file://{tmp_path}/store"], f"file://{tmp_path}/store", 2)
    for words, place, code in (pull, push):
        command = [*without_powers(), sys.executable, "-m", "lightning_weave.cli", *words]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == code, ended.stderr
        assert place in ended.stderr.splitlines()[-1]
        assert "ermission denied" in ended.stderr
    assert not list(folder.iterdir())
    assert not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize("folder", ["train/both@12345678", "report", "../reference@"])
def test_a_stage_in_the_folder_of_another_is_one_line(original: dict[str, Any], tmp_path: Path, folder: str) -> None:
    """Fetching it would replace results of whoever composes."""
    from lightning_weave.store import read_checked, write_checked

    index = read_checked(original["root"] / "store" / remote.INDEX)
    for fingerprint, stage in index["stages"].items():
        if stage["path"] == "reference":
            stage["folder"] = folder + fingerprint[:8] * folder.endswith("@")
    (tmp_path / "store").mkdir()
    write_checked(tmp_path / "store" / remote.INDEX, index)
    recipe = cached({**original, "url": f"file://{tmp_path}/store"}, tmp_path / "runs")
    assert remote.INDEX in refuse(lambda: lw.Run(recipe, quiet=True).score())
    assert not (tmp_path / "runs").exists()


def test_published_scores_of_other_lengths_are_one_line(original: dict[str, Any], tmp_path: Path) -> None:
    """All checksums of what a hostile or a broken program published may be right."""
    from lightning_weave.errors import CorruptData
    from lightning_weave.store import Shard, read_checked, write_checked
    from lightning_weave.store.stage import pack
    from lightning_weave.types import Ragged, Scores

    store = tmp_path / "store"
    shutil.copytree(original["root"] / "store", store)
    path = next(store.glob("score/acc-post@*/00000.safetensors"))
    shard = Shard(Scores, path)
    scores, fingerprint = shard.read(), shard.fingerprint
    assert fingerprint is not None
    offsets = scores.logp.offsets.copy()
    offsets[-1] -= 1
    scores = replace(scores, logp=Ragged(scores.logp.flat[:-1], offsets))
    path.write_bytes(pack(scores, fingerprint))
    manifest = read_checked(path.parent / "manifest.json")
    manifest["shards"][0] |= {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    write_checked(path.parent / "manifest.json", manifest)
    index = read_checked(store / remote.INDEX)
    for file in (path, path.parent / "manifest.json"):
        index["files"][file.relative_to(store).as_posix()] = sha256_file(file)
    write_checked(store / remote.INDEX, index)
    run = lw.Run(cached({**original, "url": f"file://{store}"}, tmp_path / "runs"), quiet=True)
    with pytest.raises(CorruptData, match=path.name):
        run.run(until="train")


@pytest.mark.parametrize("damage", ["text", "deep", "checksum"])
def test_a_damaged_index_is_one_line(original: dict[str, Any], tmp_path: Path, damage: str) -> None:
    store = tmp_path / "store"
    store.mkdir()
    text = (original["root"] / "store" / remote.INDEX).read_text()
    damaged = {"text": text[:-9], "deep": 100_000 * "[", "checksum": text.replace("tiny", "tony")}[damage]
    (store / remote.INDEX).write_text(damaged)
    progress = lw.Run(original["recipe"], quiet=True).progress
    assert remote.INDEX in refuse(lambda: published.pull(f"file://{store}", str(tmp_path / "runs"), progress))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("value", [None, 3, "x", [3], {"x": 3}, {"x": {"path": 3}}])
@pytest.mark.parametrize("key", ["recipe", "identities", "licences", "anchors", "stages", "files", "links"])
def test_an_index_of_other_things_is_one_line(
    original: dict[str, Any], tmp_path: Path, key: str, value: object
) -> None:
    """Its checksum is right, as that of a hostile one may be. Every command that reads it refuses it."""
    from lightning_weave.store import write_checked

    store = tmp_path / "store"
    index = json.loads((original["root"] / "store" / remote.INDEX).read_text())
    index.pop("checksum")
    write_checked(store / remote.INDEX, {**index, key: value})
    url = f"file://{store}"
    run = lw.Run(original["recipe"], quiet=True)
    assert remote.INDEX in refuse(lambda: published.pull(url, str(tmp_path / "runs"), run.progress))
    assert remote.INDEX in refuse(lambda: lw.Run(cached({**original, "url": url}, tmp_path / "runs"), quiet=True))
    assert remote.INDEX in refuse(lambda: run.push(url))
    assert not (tmp_path / "runs").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the hub's client, which calls httpx in an old way
def test_the_hub_gets_a_private_data_set_and_two_pushes_at_once(
    original: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client uploads to a hub on this machine; a commit that came in between is not lost."""
    url, name = "hf://datasets/org/cache", "datasets/org/cache"
    run = lw.Run(original["recipe"], quiet=True)
    with serve_hub(monkeypatch, tmp_path / "hub") as hub:
        hub.refused = 3  # the permission ends in the middle
        assert url in refuse(lambda: run.push(url))
        hub.refused = None
        assert hub.private == {name: True}
        uploaded = set(hub.large)
        run.push(url)
        assert uploaded <= set(hub.large)
        (tmp_path / "other.txt").write_text("other")
        other = remote.Remote(url)
        added: Any = {**other.index(), "files": {"other.txt": sha256_file(tmp_path / "other.txt")}}
        hub.before_commit = lambda: other.put({"other.txt": tmp_path / "other.txt"}, added, "Add")
        asked = len(hub.sent(".safetensors")) + len(hub.large)
        run.push(url)
        assert len(hub.sent(".safetensors")) + len(hub.large) == asked, "nothing is transferred again"
        directory = published.pull(url, str(tmp_path / "runs"), run.progress)
        assert (directory / "other.txt").read_text() == "other"
        for stage in (*run.stages("score"), run.stage("reference")):
            for path in stage.folder.iterdir():
                assert path.read_bytes() == (directory / path.relative_to(run.path)).read_bytes()
        refuse(lambda: run.push("hf://org/model"))
        run.push("hf://datasets/org/open/part", public=True)
        assert hub.private["datasets/org/open"] is False
        assert all(file.startswith("part/") for file in list(hub.commits["datasets/org/open"].values())[-1])


def test_the_card_names_every_model_with_its_licence(original: dict[str, Any], tmp_path: Path) -> None:
    readme = original["root"] / "acc-post" / "README.md"
    readme.write_text("---\nlicense: apache-2.0\n---\n")
    url = f"file://{tmp_path}/store"
    try:
        lw.Run(original["recipe"], quiet=True).push(url)
    finally:
        readme.unlink()
    recipe = copy.deepcopy(original["recipe"])
    recipe["anchors"] = {"brief": recipe["anchors"]["brief"]}
    recipe["compositions"] = {"both": {"weights": {"brief": 1.0}}}
    lw.Run(recipe, quiet=True).push(url)  # knows nothing of the other anchor, and keeps what is said of it
    rows = [line for line in (tmp_path / "store" / "README.md").read_text().splitlines() if "acc-post`" in line]
    assert len(rows) == 1
    assert "apache-2.0" in rows[0]
    text = (tmp_path / "store" / "README.md").read_text()
    for name in ("student", "acc-pre", "brief-post", "brief-pre", "prompts.jsonl", "rollout", "MB"):
        assert name in text
