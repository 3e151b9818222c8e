"""Anchors one after the other: matched budgets, prompts of their own, and legs that survive a kill."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from forked import Forked, kill_at
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.pipeline.flow import make_cache, make_students
from lightning_weave.report.colours import policy_hues
from lightning_weave.report.costs import training_figures
from lightning_weave.store import read_lines
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.sequential import legs
from lightning_weave.types import Rollouts
from lightning_weave.views import verify
from pipeline.scored import HALF, QUIET, make_scored, same, trained
from tiny import steps_of

FORTH = {"method": "sequential", "weights": HALF, "sequence": ["acc", "brief"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return make_scored(tmp_path_factory.mktemp("sequential"))


@pytest.mark.slow
def test_a_sequence_is_trained_on_matched_budgets(recipe: dict) -> None:
    models = trained(
        recipe,
        forth=FORTH,
        back={**FORTH, "sequence": ["brief", "acc"]},
        gentle={**FORTH, "dose": "matched"},
        cached={**FORTH, "resample": False},
    )
    names = list(models)
    assert not any(same(models[one], models[two]) for one in names for two in names if one < two)
    folder = Path(recipe["runs"]) / "tiny" / "train" / "forth"
    legs = [folder / "leg-1" / "metrics.jsonl", folder / "leg-2" / "train" / "forth.leg-2" / "metrics.jsonl"]
    updates = [len(list(read_lines(path))) for path in legs]
    assert updates == [6, 6], "half of the 12 updates each"
    first = next(iter(read_lines(folder / "leg-2" / "train" / "forth.leg-2" / "metrics.jsonl")))
    assert first["reverse_kl"] < 1, "the second leg starts from the first one's student, on its own samples"
    curve = training_figures(steps_of({**recipe, "compositions": {"forth": FORTH}}), policy_hues(["forth"]))
    (line,) = [line for line in curve["training-reverse_kl"].axes[0].lines if len(line.get_xdata()) > 1]
    assert line.get_xdata().tolist() == list(range(1, 13)), "one leg's curve after the other's"
    rows = [row for row in read_lines(Path(recipe["runs"]) / "tiny" / "ledger.jsonl") if row["name"] == "forth"]
    assert {row["method"] for row in rows} == {"sequential"}


def leg_prompts(run_dir: Path, name: str, leg: int) -> list[str]:
    return [row["id"] for row in read_lines(run_dir / "train" / name / f"leg-{leg}" / "prompts" / "prompts.jsonl")]


@pytest.mark.parametrize("take", [9, 1000], ids=["some", "all"])
@pytest.mark.slow
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
                "method": "sequential",
                "sequence": ["acc", "brief", "third"],
                "dose": "matched",
            }
        },
    }
    steps = steps_of(recipe)
    make_cache(steps, QUIET)
    make_students(steps, QUIET)
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


@pytest.mark.slow
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
    brought["compositions"] = {"two": FORTH}
    steps = steps_of(brought)
    make_cache(steps, QUIET)
    make_students(steps, QUIET)
    assert len(leg_prompts(steps.store.run_dir, "two", 2)) == 6, "half of the 12"
    _, leg = legs(steps, "two")
    drawn = leg.steps.store.stage(leg.steps.rollout).open(Rollouts, 0).read()
    pairs = zip(drawn.prompt_ids, drawn.response_ids, strict=True)
    made = [json.dumps({"prompt_ids": p.tolist(), "response_ids": r.tolist()}) for p, r in pairs]
    assert set(made) - set(lines), "the second leg's student has drawn"


def test_too_few_prompts_for_the_legs_are_said(recipe: dict, tmp_path: Path) -> None:
    few = {**recipe, "runs": str(tmp_path), "prompts": {**recipe["prompts"], "take": 1}}
    steps = steps_of({**few, "compositions": {"two": FORTH}})
    make_cache(steps, QUIET)
    with pytest.raises(InputError, match=r"compositions\.two\.sequence: 1 prompts cannot be shared among 2 legs"):
        make_students(steps, QUIET)


@pytest.mark.slow
def test_what_a_sequence_cost_is_booked_once(recipe: dict) -> None:
    steps = steps_of({**recipe, "compositions": {"again": FORTH}})
    make_students(steps, QUIET)
    booked = [row for row in read_ledger(steps.store.run_dir) if row["name"] == "again"]
    steps.store.stage(steps.train("again")).manifest_path.unlink()
    make_students(
        steps_of(
            {
                **recipe,
                "compositions": {"again": FORTH},
            }
        ),
        QUIET,
    )
    assert [row for row in read_ledger(steps.store.run_dir) if row["name"] == "again"] == booked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count"),
    [(r"/leg-1/checkpoints/\.tmp-\d+$", 1), (r"/leg-2/score/.*\.safetensors$", 2), (r"/leg-2/train/.*/\.tmp-\d+$", 1)],
    ids=["first leg", "sampling anew", "second leg"],
)
def test_a_sequence_killed_in_any_leg_ends_the_same(
    recipe: dict, tmp_path: Path, forked: Forked, where: str, count: int
) -> None:
    steps = {**recipe, "compositions": {"steps": FORTH}}
    steps["train"] = {**recipe["train"], "checkpoint_every": 2}
    expected = trained(steps, **steps["compositions"])["steps"]

    killed = tmp_path / "killed"
    shutil.copytree(Path(recipe["runs"]), killed, ignore=shutil.ignore_patterns("train"))
    file = tmp_path / "steps.toml"
    file.write_text(dump_recipe(check_recipe({**steps, "runs": str(killed)})))
    assert forked.lweave("train", file, **kill_at("rename", where, count)).code == -signal.SIGKILL
    status = forked.lweave("status", file)
    assert status.code == 0, status.said
    begun = 1 if "leg-1" in where else 2
    assert re.search(rf"train/steps +partial +in leg {begun}", status.said)
    assert forked.lweave("train", file).code == 0
    assert same(load_file(killed / "tiny" / "train" / "steps" / "final" / "model.safetensors"), expected)


@pytest.mark.slow
def test_a_later_leg_reads_the_columns_of_its_context(recipe: dict, tmp_path: Path) -> None:
    hinted = {"model": "student", "post_prompt": {"template": "{prompt} {hint}"}}
    rows = [{**row, "hint": row["answer"]} for row in read_lines(Path(recipe["prompts"]["source"]))]
    source = tmp_path / "hinted.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = {"method": "sequential", "weights": {"acc": 0.5, "hinted": 0.5}, "sequence": ["acc", "hinted"]}
    own = {**recipe, "runs": str(tmp_path), "prompts": {**recipe["prompts"], "source": str(source)}}
    own |= {"anchors": {"acc": recipe["anchors"]["acc"], "hinted": hinted}, "compositions": {"both": both}}
    steps = steps_of({**own, "train": {**recipe["train"], "epochs": 1}})
    make_cache(steps, QUIET)
    make_students(steps, QUIET)
    assert steps.store.stage(steps.train("both")).state() == "done"
    assert len(leg_prompts(steps.store.run_dir, "both", 2)) == 6, "half of the 12"
