"""Refreshed training: later parts learn the first student's target on what the current student draws."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from forked import Forked, kill_at
from lightning_weave.cache.shifts import entropy
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.costs import offline_cost
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train import resampled
from lightning_weave.train.data import compose, find_dose, open_targets
from lightning_weave.train.loop import Fit
from lightning_weave.train.resampled import parts_of, rows_of, schedule_of
from lightning_weave.train.schedule import Schedule
from lightning_weave.views import status as verify
from pipeline.scored import HALF, QUIET, copied, make_scored, same, trained
from rows import read_row
from tiny import run_of

BOTH = ("candidates", "proposal")
THRICE = {"weights": HALF, "refresh": 3}
AUTO = {"weights": HALF, "refresh": "auto", "refresh_budget": 3}  # which finds no reason to sample again


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    recipe = make_scored(tmp_path_factory.mktemp("refreshed"))
    return {**recipe, "train": {**recipe["train"], "validation": 0.25, "learning_rate": 0.01}}


@pytest.fixture(scope="module")
def refreshed(recipe: dict) -> Run:
    run = run_of({**recipe, "compositions": {"thrice": THRICE, "auto": AUTO}})
    make_students(run, QUIET)
    return run


def test_parts_are_whole_rounds_of_about_one_length() -> None:
    schedule = Schedule(groups=10, responses=2, epochs=3, prompts_per_round=4, updates_per_round=2, seed=0)
    assert len(schedule) == 15
    for count in range(1, 10):
        parts = schedule.parts(count)
        assert [update for part in parts for update in part] == list(range(15))
        assert all(part[0] == schedule.round_of(part[0])[0] for part in parts)
        rounds = [len({schedule.round_of(update)[0] for update in part}) for part in parts]
        assert len(parts) == count
        assert max(rounds) - min(rounds) <= 1
    with pytest.raises(InputError, match=r"refresh = 10: this training has 9 rounds .* Set refresh to 9 at most"):
        schedule.parts(10)


@pytest.mark.slow
def test_later_parts_hold_the_first_students_numbers_on_the_current_ones_candidates(refreshed: Run) -> None:
    """Against plain transformers: who drew, who proposes, and whose distribution is tilted."""
    run = refreshed
    schedule = schedule_of(run, "thrice")
    cache = open_cache(run, "thrice")
    vocabulary = run.student.vocabulary
    began = Checkpoint(str(run.student.path)).load(torch.float32, torch.device("cpu"))
    for part in [*parts_of(run, "thrice")][1:]:
        now = Checkpoint(str(part.sampler.folder / "final")).load(torch.float32, torch.device("cpu"))
        rows = rows_of(part, "thrice", cache)
        changed = 0
        for number in schedule.rows(part.updates[0]):
            row = read_row(rows, number)
            assert row.number == number
            before = read_row(cache, number)
            assert row.prompt_ids.tolist() == before.prompt_ids.tolist(), "the same prompt as in the first cache"
            changed += row.response_ids.tolist() != before.response_ids.tolist()
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
            with torch.no_grad():
                began_TV, now_TV = (
                    model(ids).logits[0, len(row.prompt_ids) - 1 : -1, :vocabulary].log_softmax(-1)
                    for model in (began, now)
                )
            asked_TC = torch.tensor(row.candidate_ids_TC).long()
            assert np.allclose(row.logp_TC, began_TV.gather(1, asked_TC).numpy(), atol=1e-4)
            rest_T = began_TV.double().exp().scatter(1, asked_TC, 0.0).sum(-1).log()
            assert np.allclose(row.other_logp_T, rest_T.numpy(), atol=1e-3)
            least_T = now_TV.gather(1, asked_TC).min(-1).values
            others_TV = now_TV.scatter(1, asked_TC, -torch.inf)
            assert (others_TV.max(-1).values <= least_T + 1e-4).all(), "what the current one finds likely"
            batch = compose(rows.block([number]), rows.weights, alpha=0.5)
            place_N = batch.places_N
            weight_NO = torch.cat(
                [now_TV.gather(1, asked_TC).exp(), now_TV.double().exp().scatter(1, asked_TC, 0.0).sum(-1)[:, None]], 1
            )[place_N]
            assert np.allclose(batch.log_b_NO.exp(), weight_NO, atol=1e-4), "the loss is weighted by who sampled"
            log_student_NO = torch.cat([began_TV.gather(1, asked_TC), rest_T[:, None]], 1)[place_N]
            target_NO = (log_student_NO + torch.nn.functional.pad(batch.r_NC, (0, 1)) / 0.5).softmax(-1)
            assert np.allclose(batch.log_q_NO.exp(), target_NO, atol=1e-4), "the target is that of the first student"
        assert changed, "the current student draws"
        for number in schedule.held_out():
            kept = read_row(rows, number)
            assert kept.response_ids.tolist() == read_row(cache, number).response_ids.tolist()


@pytest.mark.slow
def test_the_first_part_is_plain_joint_training(refreshed: Run, recipe: dict) -> None:
    trained(recipe, plain={"weights": HALF})
    folder = refreshed.directory / "train"
    plain, thrice = (list(read_lines(folder / name / "metrics.jsonl")) for name in ("plain", "thrice"))
    assert [row["step"] for row in thrice] == [row["step"] for row in plain]
    end = next(parts_of(refreshed, "thrice")).updates.stop
    for one, two in zip(plain[:end], thrice[:end], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
    assert plain[end]["loss"] != thrice[end]["loss"], "from here on the states differ"


@pytest.mark.slow
def test_parts_on_one_cache_are_one_training(
    recipe: dict, monkeypatch: pytest.MonkeyPatch, refreshed: Run, tmp_path: Path
) -> None:
    """Optimizer, schedule and rows go on over the parts: where nothing is drawn again, nothing is different."""
    expected = trained(recipe, plain={"weights": HALF})["plain"]
    monkeypatch.setattr(resampled, "rows_of", lambda part, name, first: first)
    monkeypatch.setattr(resampled, "make_inner_cache", lambda *_: None)
    found = trained(copied(recipe, tmp_path), parts=THRICE)["parts"]
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_cost_and_damage_of_the_parts_are_the_compositions(refreshed: Run) -> None:
    run = refreshed
    rows = [row for row in read_ledger(run.directory) if row["name"] == "thrice"]
    folders = [part.run.directory for part in [*parts_of(run, "thrice")][1:]]
    sampled = [row for folder in folders for row in read_ledger(folder)]
    assert len(sampled) == 2 * 7, "rollout, proposal, reference, four scored models"
    assert len(rows) == len(sampled) + 3, "and three stretches of training"
    assert {row["method"] for row in rows} == {"refreshed"}
    assert offline_cost(run, rows) is None, "what a plain composition costs is not to be learned from this one"

    verify.verify(run, QUIET, Console(quiet=True))
    scored = next((run.directory / "train/thrice/part-2").glob("score/*/0*.safetensors"))
    whole = scored.read_bytes()
    scored.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with pytest.raises(
        CorruptData, match=r"part-2/score/.* is damaged .*Remove it \(rm -r .*/train/thrice@\w{8}\), then run"
    ):
        verify.verify(run, QUIET, Console(quiet=True))
    scored.write_bytes(whole)


@pytest.mark.slow
def test_a_floor_of_entropy_is_that_of_the_student_that_sampled(recipe: dict) -> None:
    """As in online training and in the first part. The targets of the first part alone are not exported."""
    floor = 1.2
    anchors = {name: {**anchor, "shift": {"only_above": floor}} for name, anchor in recipe["anchors"].items()}
    run = run_of({**recipe, "anchors": anchors, "compositions": {"twice": {"weights": HALF, "refresh": 2}}})
    make_students(run, QUIET)
    part = [*parts_of(run, "twice")][1]
    block = open_cache(part.run, "twice").block(range(4))
    certain = {name: entropy(candidates) < floor for name, candidates in vars(block).items() if name in BOTH}
    assert (certain["candidates"] != certain["proposal"]).any(), "the two students differ"
    assert not block.valid_KP[:, certain["proposal"]].any()
    assert block.valid_KP[:, ~certain["proposal"] & certain["candidates"]].any()
    with pytest.raises(InputError, match=r"compositions\.twice\.refresh: the targets of its later parts"):
        open_targets(run, "twice")


@pytest.mark.slow
def test_weights_by_tag_and_a_budget_stay_those_of_the_first_cache(recipe: dict) -> None:
    routed = {"weights": {"product": {"acc": 1.0}, "default": {"brief": 1.0}}, "kl_budget": 0.02, "refresh": 2}
    rules = {"rules": {"product": r"\*"}}
    run = run_of({**recipe, "tags": rules, "compositions": {"routed": routed}})
    make_students(run, QUIET)
    whole = open_cache(run, "routed")
    later = rows_of([*parts_of(run, "routed")][1], "routed", whole)
    assert whole.weight_RK is not None
    for number, place in later.place.items():
        assert later.own.weight_RK[place].tolist() == whole.weight_RK[number].tolist()
    assert len(np.unique(whole.weight_RK, axis=0)) == 2
    alone = run_of({**recipe, "tags": rules, "compositions": {"routed": {**routed, "refresh": 1}}})
    doses = [
        find_dose(each, "routed", open_cache(each, "routed"), schedule_of(each, "routed")) for each in (run, alone)
    ]
    assert doses[0].alpha == doses[1].alpha


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "where", "count"),
    [
        ("thrice", r"/part-2/sampler@\w+/\.tmp-final$", 1),
        ("thrice", r"/part-3/score/.*\.safetensors$", 2),
        ("auto", r"/part-3/sampler@\w+/.*manifest\.json$", 1),
    ],
    ids=["between parts", "scoring", "deciding"],
)
def test_killed_anywhere_it_ends_the_same(
    refreshed: Run, recipe: dict, tmp_path: Path, forked: Forked, name: str, where: str, count: int
) -> None:
    expected = load_file(refreshed.directory / f"train/{name}/final/model.safetensors")
    file = tmp_path / "thrice.toml"
    mine = {**copied(recipe, tmp_path), "compositions": {name: refreshed.recipe.compositions[name].model_dump()}}
    file.write_text(dump_recipe(check_recipe(mine)))
    assert forked.lweave("train", file, **kill_at("rename", where, count)).code == -signal.SIGKILL
    status = forked.lweave("status", file)
    assert re.search(rf"train/{name} +partial", status.said), status.said
    ended = forked.lweave("train", file)
    assert ended.code == 0, ended.said
    assert same(load_file(tmp_path / f"runs/tiny/train/{name}/final/model.safetensors"), expected)
    assert [part.sampler.state() for part in parts_of(run_of(mine), name)][1:] == ["complete", "complete"]


@pytest.mark.slow
def test_auto_samples_again_only_where_the_student_has_left_who_sampled(
    refreshed: Run, recipe: dict, tmp_path: Path
) -> None:
    """At a weak dose it is plain training, at a strong one training with all parts, to the last bit."""
    strong = {"alpha": 0.05}
    compositions = {"plain": {"weights": HALF}, "all": {**THRICE, **strong}, "strong": {**AUTO, **strong}}
    students = trained(mine := copied(recipe, tmp_path), **compositions)
    assert same(students["strong"], students["all"])
    assert same(load_file(refreshed.directory / "train/auto/final/model.safetensors"), students["plain"])
    for run, name, samples in (
        (refreshed, "auto", False),
        (run_of({**mine, "compositions": compositions}), "strong", True),
    ):
        parts = [*parts_of(run, name)]
        assert [part.samples for part in parts] == [False, samples, samples]
        drift = parts[1].sampler.require()["drift"]
        assert (drift > resampled.FAR) == samples
        assert run.stage("train", name).require()["parts"] == (3 if samples else 1)
        rows = [row for row in read_ledger(run.directory) if row["name"] == name]
        assert {row["method"] for row in rows} == {"refreshed"}
        assert len(rows) == (2 * 7 if samples else 0) + 3
    card = (refreshed.stage("train", "auto").folder / "final" / "README.md").read_text()
    assert "sampled again by the current student 0 times" in card


@pytest.mark.slow
def test_auto_asks_a_student_with_levels_as_it_samples(
    recipe: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New rows are drawn from the plain prompt: at a level the student differs from them whoever samples."""
    asked: list[int] = []
    measure = Fit.measure

    def spy(fit: Fit, numbers: list[int]) -> dict[str, float]:
        asked.extend(numbers)
        return measure(fit, numbers)

    monkeypatch.setattr(Fit, "measure", spy)
    levels = {"a": HALF, "b": {"acc": 1.0, "alpha": 0.1}}
    dial = {"levels": levels, "default": "a", "control": {"prefix": "{level}+"}, "refresh": "auto", "refresh_budget": 2}
    mine = {**copied(recipe, tmp_path), "train": {**recipe["train"], "validation": 0.0}}
    trained(mine, dial=dial)
    rows = len(open_cache(run_of({**mine, "compositions": {"dial": dial}}), "dial"))
    assert {number // rows for number in asked} == {0}
