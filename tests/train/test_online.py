"""Online training: live anchors on what the current student draws, held against the student it began as."""

import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from forked import Forked, kill_at
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.prompts import read_prompts
from lightning_weave.report import report
from lightning_weave.stages import run as run_stage
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.train.data import compose
from lightning_weave.train.loop import make_fit
from lightning_weave.train.online import LiveRows
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.schedule import make_schedule
from lightning_weave.train.student import open_trainee
from pipeline.scored import HALF, QUIET, make_scored, same, trained
from rows import read_row
from tiny import run_of
from train.cached import context


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return make_scored(tmp_path_factory.mktemp("online"))


@pytest.mark.parametrize("objective", ["direct-opd", "tilted", "reverse-kl"])
def test_online_begins_with_the_offline_gradient(recipe: dict, objective: str) -> None:
    """The paper's claim about initialisation: on the first round, live and cached updates are the same."""
    compositions = {"live": {"weights": HALF, "method": "online", "objective": objective}, "cached": {"weights": HALF}}
    if objective == "reverse-kl":  # whose first gradient lacks the tilted loss's division by the candidates' mass
        compositions["cached"]["objective"] = objective
    run = run_of({**recipe, "compositions": compositions})
    ranks = Ranks(0, 1, torch.device("cpu"))
    gradients, losses = {}, {}
    for name in compositions:
        trainee = open_trainee(run, context(ranks))
        schedule = make_schedule(run.recipe, 12)
        if name == "live":
            rows = LiveRows(run, name, trainee, read_prompts(run.prompts_file), schedule, ranks=ranks)
            rows.refresh(0)
        else:
            rows = open_cache(run, name)
        numbers = schedule.rows(0)
        fit = make_fit(run, name, trainee, rows, alpha=2.0, ranks=ranks)
        batch = compose(rows.block(numbers), rows.weights, 2.0)
        loss, _ = trainee(batch, fit.loss, float(len(batch)))
        loss.backward()
        losses[name] = loss.item()
        gradients[name] = torch.cat([p.grad.flatten() for p in trainee.parameters() if p.grad is not None])
        if name == "live":
            tokens = [read_row(rows, number).response_ids.tolist() for number in numbers]
        else:
            assert tokens == [read_row(rows, number).response_ids.tolist() for number in numbers], (
                "the same trajectories"
            )
    gap = (gradients["live"] - gradients["cached"]).norm() / gradients["cached"].norm()
    assert gap < 1e-5
    assert math.isfinite(losses["live"])


def test_online_training_is_another_when_it_would_draw_otherwise(recipe: dict) -> None:
    live = {**recipe, "compositions": {"live": {"weights": HALF, "method": "online"}}}
    run = run_of(live)
    for change in ({"responses": 4}, {"temperature": 0.7}, {"max_tokens": 9}, {"seed": 7}):
        other = run_of({**live, "rollout": {**recipe["rollout"], **change}})
        assert other.stage("train", "live").fingerprint != run.stage("train", "live").fingerprint, change


@pytest.mark.parametrize(
    ("objective", "weighed"), [("tilted", True), ("direct-opd", False), ("reverse-kl", False), (None, False)]
)
def test_only_losses_that_the_sampler_weighs_say_so(recipe: dict, objective: str | None, weighed: bool) -> None:
    """Students trained by the others before that was decided stay valid."""
    live = {"weights": HALF, "method": "online", "objective": objective}
    run = run_of({**recipe, "compositions": {"live": live, "plain": {"weights": HALF}}})
    assert ("loss_weights" in run.stage("train", "live").settings) is weighed
    assert "loss_weights" not in run.stage("train", "plain").settings


@pytest.mark.slow
def test_online_training_alone_makes_no_cache(recipe: dict, tmp_path: Path) -> None:
    live = {**recipe, "runs": str(tmp_path), "compositions": {"live": {"weights": HALF, "method": "online"}}}
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    live["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 1, "max_tokens": 4, "chat": False}
    run = run_of({**live, "train": {**recipe["train"], "epochs": 1}})
    assert [step.path for step in run.everything()][:2] == ["prompts", "train/live"]
    assert run.stage("prompts").command.startswith("lweave train")
    make_students(run, QUIET)
    page = report.run([run], QUIET)
    assert (page.parent / "figures" / "training-reverse_kl.svg").exists(), "training shows before anything is evaluated"
    run_stage.run_all(run, QUIET)
    assert not (run.directory / "rollout").exists()
    assert (run.directory / "eval" / "live" / "sums" / "summary.json").exists()


def test_online_holds_on_to_the_frozen_student(recipe: dict) -> None:
    """What the current student does is held against the student it began as, and held-out rows stay what they were."""
    live = {"weights": HALF, "method": "online", "objective": "tilted"}
    run = run_of({**recipe, "compositions": {"live": live}, "train": {**recipe["train"], "validation": 0.25}})
    ranks, schedule = Ranks(0, 1, torch.device("cpu")), make_schedule(run.recipe, 12)
    trainee, cache = open_trainee(run, context(ranks)), open_cache(run, "live")
    rows = LiveRows(run, "live", trainee, read_prompts(run.prompts_file), schedule, ranks=ranks)
    for number in schedule.held_out():
        assert read_row(rows, number).response_ids.tolist() == read_row(cache, number).response_ids.tolist()
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.mul_(1.5)
    rows.refresh(0)
    model = Checkpoint(str(run.student.path)).load(torch.float32, torch.device("cpu"))
    changed = 0
    for number in schedule.rows(0):
        row = read_row(rows, number)
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
        with torch.no_grad():
            began, now = (m(ids).logits[0, len(row.prompt_ids) - 1 : -1] for m in (model, trainee.model))
        asked_TC = torch.from_numpy(row.candidate_ids_TC).long()
        for logits, wanted in ((began, True), (now, False)):
            logp_TC = logits[:, : rows.vocabulary].log_softmax(-1).gather(1, asked_TC)
            assert np.allclose(row.logp_TC, logp_TC.numpy(), atol=1e-4) is wanted
        batch = compose(rows.block([number]), rows.weights, 2.0)
        weight_TC = now[:, : rows.vocabulary].softmax(-1).gather(1, asked_TC)
        assert np.allclose(batch.log_b_NO[:, :-1].exp(), weight_TC[batch.places_N], atol=1e-4), "weighed by who samples"
        assert set(now[0, : rows.vocabulary].topk(4).indices.tolist()) <= set(row.candidate_ids_TC[0].tolist())
        changed += row.response_ids.tolist() != read_row(cache, number).response_ids.tolist()
    assert changed, "the current student draws"


@pytest.mark.slow
def test_an_online_run_is_validated_on_the_rows_held_out(recipe: dict) -> None:
    live = {**recipe, "train": {**recipe["train"], "validation": 0.25}}
    run = run_of({**live, "compositions": {"watched": {"weights": HALF, "method": "online"}}})
    make_students(run, QUIET)
    assert run.stage("train", "watched").require()["validation_reverse_kl"] > 0


@pytest.mark.slow
def test_an_online_run_killed_between_rounds_ends_the_same(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    live = {**recipe, "compositions": {"live": {"weights": HALF, "method": "online"}}}
    live["train"] = {**recipe["train"], "checkpoint_every": 1, "epochs": 4}
    expected = trained({**live, "runs": str(tmp_path / "whole")}, **live["compositions"])["live"]

    live["runs"] = str(tmp_path / "killed")
    file = tmp_path / "live.toml"
    file.write_text(dump_recipe(check_recipe(live)))
    first_round = kill_at("rename", r"/checkpoints/\.tmp-\d+$", count=1)
    assert forked.lweave("train", file, **first_round).code == -signal.SIGKILL
    ended = forked.lweave("train", file)
    assert ended.code == 0, ended.said
    assert "resuming from update" in ended.said, "it was killed after its first round, before its last"
    found = load_file(tmp_path / "killed" / "tiny" / "train" / "live" / "final" / "model.safetensors")
    assert same(found, expected)
