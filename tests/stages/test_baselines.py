"""The alternatives to the paper's method: each does what its name says, on the same cache and the same budget."""

import json
import math
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from lightning_weave.config import Composition, check_recipe, dump_recipe
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.maths import expected_kl
from lightning_weave.models.load import load_model
from lightning_weave.progress import Progress
from lightning_weave.stages import prompts, reference, report, rollout, run, score, train, verify
from lightning_weave.stages.dose import anchor_doses
from lightning_weave.stages.offline import open_cache
from lightning_weave.stages.online import LiveRows
from lightning_weave.stages.report_cost import training_figures
from lightning_weave.stages.sequential import legs
from lightning_weave.stages.train_job import make_fit, make_schedule, open_trainee
from lightning_weave.store import read_lines
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.data import compose
from lightning_weave.train.parallel import Ranks
from lightning_weave.train.sources import deal_groups
from lightning_weave.types import Rollouts, Scores
from tiny import make_world, steps_of

QUIET = Progress(quiet=True)
HALF = {"acc": 0.5, "brief": 0.5}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    recipe = make_world(tmp_path_factory.mktemp("baselines"))
    steps = steps_of(recipe)
    for stage in (rollout, reference, score):
        stage.run(steps, QUIET)
    return recipe


def trained(recipe: dict, **compositions: dict) -> dict[str, dict[str, torch.Tensor]]:
    recipe = {**recipe, "compositions": compositions}
    steps = steps_of(recipe)
    train.run(steps, QUIET)
    folder = steps.store.run_dir / "train"
    return {name: load_file(folder / name / "final" / "model.safetensors") for name in compositions}


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_degenerate_baselines_are_the_single_anchor_run_bit_for_bit(recipe: dict) -> None:
    models = trained(
        recipe,
        single={"weights": {"acc": 1.0}},
        mixture={"weights": {"acc": 1.0, "brief": 0.0}, "mixture": True},
        sequence={"weights": {"acc": 1.0}, "sequence": ["acc"]},
        other={"weights": {"brief": 1.0}},
    )
    assert same(models["single"], models["mixture"])
    assert same(models["single"], models["sequence"])
    assert not same(models["single"], models["other"])


def test_a_mixture_gives_each_prompt_one_anchor_in_exact_shares(recipe: dict) -> None:
    steps = steps_of({**recipe, "compositions": {"mix": {"weights": {"acc": 0.25, "brief": 0.75}, "mixture": True}}})
    cache = open_cache(steps, "mix")
    singles = {
        anchor: open_cache(steps_of({**recipe, "compositions": {"x": {"weights": {anchor: 1.0}}}}), "x")
        for anchor in ("acc", "brief")
    }
    found = []
    for number in range(len(cache)):
        row = cache.read(number)
        matches = [
            anchor
            for anchor, single in singles.items()
            if np.array_equal(row.r_KTC, single.read(number).r_KTC)
            and np.array_equal(row.valid_KT, single.read(number).valid_KT)
        ]
        assert len(matches) == 1
        found.append(matches[0])
    assert all(found[2 * group] == found[2 * group + 1] for group in range(12)), "prompt groups stay together"
    assert found.count("acc") == 6, "a quarter of 12 prompts x 2 responses"
    assert cache.weights == [1.0]


def test_dealing_is_exact_and_by_seed() -> None:
    dealt = deal_groups(100, [0.2, 0.3, 0.5], seed=1)
    assert np.bincount(dealt).tolist() == [20, 30, 50]
    assert not np.array_equal(dealt, deal_groups(100, [0.2, 0.3, 0.5], seed=2))
    assert np.array_equal(dealt, deal_groups(100, [0.2, 0.3, 0.5], seed=1))


def test_a_teacher_target_is_the_teachers_own_distribution(recipe: dict) -> None:
    steps = steps_of({**recipe, "compositions": {"opd": {"weights": {"acc": 1.0}, "teacher": True, "alpha": 3.0}}})
    cache = open_cache(steps, "opd")
    post = steps.store.stage(steps.scores_of("acc")[0])
    for number in range(8):
        batch = compose([cache.read(number)], cache.weights, 3.0)
        scores = post.open(Scores, number // 8).read(number % 8, number % 8 + 1)
        kept = scores.mapped[0].all(axis=-1)
        logp_NC, mass_N = torch.from_numpy(scores.logp[0][kept]), torch.from_numpy(scores.mass[0][kept])
        torch.testing.assert_close(batch.log_q_NO[:, :-1], logp_NC, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(batch.log_q_NO[:, -1].exp(), 1 - mass_N, atol=1e-5, rtol=1e-4)


def test_self_distillation_aims_at_the_student_at_another_temperature(recipe: dict) -> None:
    steps = steps_of({**recipe, "compositions": {"self": {"sharpen": 0.5, "alpha": 3.0}}})
    cache = open_cache(steps, "self")
    batch = compose([cache.read(0)], cache.weights, 3.0)
    torch.testing.assert_close(batch.log_q_NO, torch.log_softmax(2 * batch.log_b_NO, dim=-1), atol=1e-5, rtol=1e-5)


def test_a_contrast_subtracts_a_shift(recipe: dict) -> None:
    weights = {"acc": 1.5, "brief": -0.5}
    steps = steps_of({**recipe, "compositions": {"minus": {"weights": weights, "allow_negative": True}}})
    row = (cache := open_cache(steps, "minus")).read(0)
    batch = compose([row], cache.weights, 2.0)
    kept = row.valid_KT.all(axis=0)
    expected = 1.5 * row.r_KTC[0][kept] - 0.5 * row.r_KTC[1][kept]
    torch.testing.assert_close(batch.r_NC, torch.from_numpy(expected))


def test_a_kl_budget_is_hit_within_one_percent_on_the_cache(recipe: dict) -> None:
    budget = 0.02
    trained(recipe, budget={"weights": HALF, "kl_budget": budget})
    steps = steps_of({**recipe, "compositions": {"budget": {"weights": HALF, "kl_budget": budget}}})
    manifest = steps.store.stage(steps.train("budget")).require()
    cache = open_cache(steps, "budget")
    rows = [cache.read(number) for number in range(len(cache))]
    batch = compose(rows, cache.weights, manifest["alpha"])
    assert expected_kl(batch.log_q_NO, batch.log_b_NO).mean().item() == pytest.approx(budget, rel=0.01)
    assert manifest["target_kl"] == pytest.approx(budget, rel=0.01)


def test_an_unreachable_kl_budget_names_the_range(recipe: dict) -> None:
    with pytest.raises(InputError, match=r"compositions\.far\.kl_budget = 1e\+06: .* spends"):
        trained(recipe, far={"weights": HALF, "kl_budget": 1e6})


@pytest.mark.parametrize("objective", ["direct-opd", "tilted", "reverse-kl"])
def test_online_begins_with_the_offline_gradient(recipe: dict, objective: str) -> None:
    """The paper's claim about initialisation: on the first round, live and cached updates are the same."""
    compositions = {"live": {"weights": HALF, "online": True, "objective": objective}, "cached": {"weights": HALF}}
    if objective == "reverse-kl":  # whose first gradient lacks the tilted loss's division by the candidates' mass
        compositions["cached"]["objective"] = objective
    steps = steps_of({**recipe, "compositions": compositions})
    ranks = Ranks(0, 1, torch.device("cpu"))
    gradients, losses = {}, {}
    for name in compositions:
        trainee = open_trainee(steps, ranks, torch.float32)
        schedule = make_schedule(steps.recipe, 12)
        if name == "live":
            rows = LiveRows(steps, name, trainee, prompts.make(steps, QUIET), schedule)
            rows.refresh(0)
        else:
            rows = open_cache(steps, name)
        numbers = schedule.rows(0)
        fit = make_fit(steps, name, trainee, rows, 2.0, ranks, steps.store.stage(steps.train(name)))
        batch = compose([rows.read(number) for number in numbers], rows.weights, 2.0)
        loss, _ = trainee(batch, fit.loss, float(len(batch)))
        loss.backward()
        losses[name] = loss.item()
        gradients[name] = torch.cat([p.grad.flatten() for p in trainee.parameters() if p.grad is not None])
        if name == "live":
            tokens = [rows.read(number).response_ids.tolist() for number in numbers]
        else:
            assert tokens == [rows.read(number).response_ids.tolist() for number in numbers], "the same trajectories"
    gap = (gradients["live"] - gradients["cached"]).norm() / gradients["cached"].norm()
    assert gap < 1e-5
    assert math.isfinite(losses["live"])


def test_a_sequence_is_trained_on_matched_budgets(recipe: dict) -> None:
    models = trained(
        recipe,
        forth={"weights": HALF, "sequence": ["acc", "brief"]},
        back={"weights": HALF, "sequence": ["brief", "acc"]},
        gentle={"weights": HALF, "sequence": ["acc", "brief"], "dose": "matched"},
        cached={"weights": HALF, "sequence": ["acc", "brief"], "resample": False},
    )
    names = list(models)
    assert not any(same(models[one], models[two]) for one in names for two in names if one < two)
    folder = Path(recipe["runs"]) / "tiny" / "train" / "forth"
    legs = [folder / "leg-1" / "metrics.jsonl", folder / "leg-2" / "train" / "forth.leg-2" / "metrics.jsonl"]
    updates = [len(list(read_lines(path))) for path in legs]
    assert updates == [6, 6], "half of the 12 updates each"
    first = next(iter(read_lines(folder / "leg-2" / "train" / "forth.leg-2" / "metrics.jsonl")))
    assert first["reverse_kl"] < 1, "the second leg starts from the first one's student, on its own samples"
    curve = training_figures(
        steps_of({**recipe, "compositions": {"forth": {"weights": HALF, "sequence": ["acc", "brief"]}}})
    )
    (line,) = [line for line in curve["reverse_kl"].axes[0].lines if len(line.get_xdata()) > 1]
    assert line.get_xdata().tolist() == list(range(1, 13)), "one leg's curve after the other's"
    rows = [row for row in read_lines(Path(recipe["runs"]) / "tiny" / "ledger.jsonl") if row["name"] == "forth"]
    assert {row["method"] for row in rows} == {"sequential"}


def leg_prompts(run_dir: Path, name: str, leg: int) -> list[str]:
    return [row["id"] for row in read_lines(run_dir / "train" / name / f"leg-{leg}" / "prompts" / "prompts.jsonl")]


@pytest.mark.parametrize("take", [9, 1000], ids=["some", "all"])
def test_every_leg_has_prompts_of_its_own(recipe: dict, tmp_path: Path, take: int) -> None:
    third = {**recipe["anchors"]["acc"], "validity": "candidate"}
    recipe = {
        **recipe,
        "runs": str(tmp_path),
        "anchors": {**recipe["anchors"], "third": third},
        "prompts": {**recipe["prompts"], "take": take},
        "train": {**recipe["train"], "epochs": 1},
        "compositions": {
            "three": {
                "weights": {"acc": 0.4, "brief": 0.3, "third": 0.3},
                "sequence": ["acc", "brief", "third"],
                "dose": "matched",
            }
        },
    }
    steps = steps_of(recipe)
    for stage in (rollout, reference, score, train):
        stage.run(steps, QUIET)
    run_dir = steps.store.run_dir
    everything = [row["id"] for row in read_lines(run_dir / "prompts" / "prompts.jsonl")]
    third_of_them = len(everything) // 3
    assert len(everything) == 3 * third_of_them
    assert leg_prompts(run_dir, "three", 3) == everything[:third_of_them]
    assert leg_prompts(run_dir, "three", 2) == everything[third_of_them : 2 * third_of_them]

    verify.run(steps, QUIET, Console(quiet=True))
    scored = next((run_dir / "train" / "three" / "leg-2").glob("score/*/0*.safetensors"))
    whole = scored.read_bytes()
    scored.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with pytest.raises(CorruptData, match=r"leg-2/score/.* is damaged .*Remove .*train/three and train it again with"):
        verify.run(steps, QUIET, Console(quiet=True))


def test_a_sequence_samples_anew_on_prompts_that_came_with_trajectories(recipe: dict, tmp_path: Path) -> None:
    steps = steps_of(recipe)
    rows = steps.store.stage(steps.rollout)
    lines = []
    for shard in range(len(rows.require()["shards"])):
        drawn = rows.open(Rollouts, shard).read()
        for prompt, response in zip(drawn.prompt_ids, drawn.response_ids, strict=True):
            lines.append(json.dumps({"prompt_ids": prompt.tolist(), "response_ids": response.tolist()}))
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(lines))
    brought = {**recipe, "runs": str(tmp_path), "rollout": {**recipe["rollout"], "from": str(own)}}
    brought["compositions"] = {"two": {"weights": HALF, "sequence": ["acc", "brief"]}}
    steps = steps_of(brought)
    for stage in (rollout, reference, score, train):
        stage.run(steps, QUIET)
    assert len(leg_prompts(steps.store.run_dir, "two", 2)) == 6, "half of the 12"
    _, leg = legs(steps, "two")
    drawn = leg.steps.store.stage(leg.steps.rollout).open(Rollouts, 0).read()
    pairs = zip(drawn.prompt_ids, drawn.response_ids, strict=True)
    made = [json.dumps({"prompt_ids": p.tolist(), "response_ids": r.tolist()}) for p, r in pairs]
    assert set(made) - set(lines), "the second leg's student has drawn"


def test_too_few_prompts_for_the_legs_are_said(recipe: dict, tmp_path: Path) -> None:
    few = {**recipe, "runs": str(tmp_path), "prompts": {**recipe["prompts"], "take": 1}}
    steps = steps_of({**few, "compositions": {"two": {"weights": HALF, "sequence": ["acc", "brief"]}}})
    for stage in (rollout, reference, score):
        stage.run(steps, QUIET)
    with pytest.raises(InputError, match=r"compositions\.two\.sequence: 1 prompts cannot be shared among 2 legs"):
        train.run(steps, QUIET)


def test_what_a_sequence_cost_is_booked_once(recipe: dict) -> None:
    steps = steps_of({**recipe, "compositions": {"again": {"weights": HALF, "sequence": ["acc", "brief"]}}})
    train.run(steps, QUIET)
    booked = [row for row in read_ledger(steps.store.run_dir) if row["name"] == "again"]
    steps.store.stage(steps.train("again")).manifest_path.unlink()
    train.run(steps_of({**recipe, "compositions": {"again": {"weights": HALF, "sequence": ["acc", "brief"]}}}), QUIET)
    assert [row for row in read_ledger(steps.store.run_dir) if row["name"] == "again"] == booked


@pytest.mark.parametrize(
    ("way", "doses"),
    [
        ({"weights": HALF}, {"acc": 0.25, "brief": 0.25}),
        ({"weights": HALF, "mixture": True}, {"acc": 0.5, "brief": 0.5}),
        ({"weights": HALF, "sequence": ["acc", "brief"]}, {"acc": 0.5, "brief": 0.5}),
        ({"weights": HALF, "sequence": ["acc", "brief"], "dose": "matched"}, {"acc": 0.25, "brief": 0.25}),
        ({"weights": {"acc": 1.0}, "teacher": True}, {}),
        ({"sharpen": 0.5}, {}),
    ],
)
def test_the_dose_is_what_each_anchor_acts_with(way: dict, doses: dict) -> None:
    assert anchor_doses(Composition.model_validate(way), 2.0) == doses


def test_online_training_is_stale_when_it_would_draw_otherwise(recipe: dict) -> None:
    live = {**recipe, "compositions": {"live": {"weights": HALF, "online": True}}}
    steps = steps_of(live)
    for change in ({"responses": 4}, {"temperature": 0.7}, {"max_tokens": 9}, {"seed": 7}, {"top_p": 0.9}):
        other = steps_of({**live, "rollout": {**recipe["rollout"], **change}})
        assert other.train("live").fingerprint != steps.train("live").fingerprint, change


def test_online_training_alone_makes_no_cache(recipe: dict, tmp_path: Path) -> None:
    live = {**recipe, "runs": str(tmp_path), "compositions": {"live": {"weights": HALF, "online": True}}}
    (tmp_path / "sums.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    live["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 1, "max_tokens": 4, "chat": False}
    steps = steps_of({**live, "train": {**recipe["train"], "epochs": 1}})
    assert [step.path for step in steps.everything()][:2] == ["prompts", "train/live"]
    assert steps.prompts.command.startswith("lweave train")
    train.run(steps, QUIET)
    page = report.run([steps], QUIET)
    assert (page.parent / "figures" / "training-reverse_kl.svg").exists(), "training shows before anything is evaluated"
    run.run(steps, QUIET)
    assert not (steps.store.run_dir / "rollout").exists()
    assert (steps.store.run_dir / "eval" / "live" / "sums" / "summary.json").exists()


def test_self_distillation_without_anchors_is_a_whole_run(recipe: dict, tmp_path: Path) -> None:
    alone = {key: value for key, value in recipe.items() if key != "anchors"}
    steps = steps_of({**alone, "runs": str(tmp_path), "compositions": {"self": {"sharpen": 0.5}}})
    assert [step.path for step in steps.everything()][:4] == ["prompts", "rollout", "reference", "train/self"]
    for stage in (rollout, reference, train):
        stage.run(steps, QUIET)
    assert steps.store.stage(steps.train("self")).state() == "done"


def test_online_holds_on_to_the_frozen_student(recipe: dict) -> None:
    """What the current student does is held against the student it began as, and held-out rows stay what they were."""
    live = {"weights": HALF, "online": True, "objective": "tilted"}
    steps = steps_of({**recipe, "compositions": {"live": live}, "train": {**recipe["train"], "validation": 0.25}})
    ranks, schedule = Ranks(0, 1, torch.device("cpu")), make_schedule(steps.recipe, 12)
    trainee, cache = open_trainee(steps, ranks, torch.float32), open_cache(steps, "live")
    rows = LiveRows(steps, "live", trainee, prompts.make(steps, QUIET), schedule)
    for number in schedule.held_out():
        assert rows.read(number).response_ids.tolist() == cache.read(number).response_ids.tolist()
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter.mul_(1.5)
    rows.refresh(0)
    model = load_model(steps.student_path, dtype=torch.float32, device="cpu")
    changed = 0
    for number in schedule.rows(0):
        row = rows.read(number)
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids])).long()[None]
        with torch.no_grad():
            began, now = (m(ids).logits[0, len(row.prompt_ids) - 1 : -1] for m in (model, trainee.model))
        asked_TC = torch.from_numpy(row.candidate_ids_TC).long()
        for logits, wanted in ((began, True), (now, False)):
            logp_TC = logits[:, : rows.vocabulary].log_softmax(-1).gather(1, asked_TC)
            assert np.allclose(row.logp_TC, logp_TC.numpy(), atol=1e-4) is wanted
        assert set(now[0, : rows.vocabulary].topk(4).indices.tolist()) <= set(row.candidate_ids_TC[0].tolist())
        changed += row.response_ids.tolist() != cache.read(number).response_ids.tolist()
    assert changed, "the current student draws"


def test_an_online_run_is_validated_on_the_rows_held_out(recipe: dict) -> None:
    live = {**recipe, "train": {**recipe["train"], "validation": 0.25}}
    steps = steps_of({**live, "compositions": {"watched": {"weights": HALF, "online": True}}})
    train.run(steps, QUIET)
    assert steps.store.stage(steps.train("watched")).require()["validation_reverse_kl"] > 0


@pytest.mark.slow
def test_an_online_run_killed_between_rounds_ends_the_same(
    recipe: dict, tmp_path: Path, lweave: Callable[..., list[int]]
) -> None:
    live = {**recipe, "compositions": {"live": {"weights": HALF, "online": True}}}
    live["train"] = {**recipe["train"], "checkpoint_every": 1, "epochs": 4}
    expected = trained({**live, "runs": str(tmp_path / "whole")}, **live["compositions"])["live"]

    live["runs"] = str(tmp_path / "killed")
    file = tmp_path / "live.toml"
    file.write_text(dump_recipe(check_recipe(live)))
    job = {"arguments": ["train", str(file)], "output": str(tmp_path / "said")}
    first_round = {"kill": "rename", "where": r"/checkpoints/\.tmp-\d+$", "count": 1}
    assert lweave({**job, **first_round}) == [signal.SIGKILL], "killed after its first round, before its last"
    assert lweave(job) == [0]
    assert "goes on after update" in (tmp_path / "said").read_text()
    found = load_file(tmp_path / "killed" / "tiny" / "train" / "live" / "final" / "model.safetensors")
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count"),
    [(r"/leg-1/checkpoints/\.tmp-\d+$", 1), (r"/leg-2/score/.*\.safetensors$", 2), (r"/leg-2/train/.*/\.tmp-\d+$", 1)],
    ids=["first leg", "sampling anew", "second leg"],
)
def test_a_sequence_killed_in_any_leg_ends_the_same(
    recipe: dict, tmp_path: Path, lweave: Callable[..., list[int]], where: str, count: int
) -> None:
    steps = {**recipe, "compositions": {"steps": {"weights": HALF, "sequence": ["acc", "brief"]}}}
    steps["train"] = {**recipe["train"], "checkpoint_every": 2}
    expected = trained(steps, **steps["compositions"])["steps"]

    killed = tmp_path / "killed"
    shutil.copytree(Path(recipe["runs"]), killed, ignore=shutil.ignore_patterns("train"))
    file = tmp_path / "steps.toml"
    file.write_text(dump_recipe(check_recipe({**steps, "runs": str(killed)})))
    said = tmp_path / "said"
    job = {"arguments": ["train", str(file)], "output": str(said)}
    assert lweave({**job, "kill": "rename", "where": where, "count": count}) == [signal.SIGKILL]
    assert lweave({"arguments": ["status", str(file)], "output": str(said)}) == [0]
    begun = 1 if "leg-1" in where else 2
    assert re.search(rf"train/steps +partial +leg {begun} has begun", said.read_text())
    assert lweave(job) == [0]
    assert same(load_file(killed / "tiny" / "train" / "steps" / "final" / "model.safetensors"), expected)
