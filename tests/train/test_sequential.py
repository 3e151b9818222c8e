"""Anchors one after the other: matched budgets, prompts of their own, and legs that survive a kill."""

import json
import re
import signal
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file

from forked import Forked, kill_at
from lightning_weave.config import check_recipe, dump_recipe
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.report.figures import policy_hues, training_figures
from lightning_weave.stages.costs import read_spent
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from lightning_weave.store import read_lines
from lightning_weave.store.ledger import read_ledger
from lightning_weave.train.data import Balance
from lightning_weave.train.resampled import legs
from lightning_weave.types import Rollouts
from lightning_weave.views import status as verify
from pipeline.scored import HALF, QUIET, copied, make_scored, same, trained
from tiny import run_of

FORTH = {"method": "sequential", "weights": HALF, "sequence": ["acc", "brief"]}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return make_scored(tmp_path_factory.mktemp("sequential"))


@pytest.mark.slow
def test_a_sequence_is_trained_on_matched_budgets(recipe: dict, tmp_path: Path) -> None:
    recipe = copied(recipe, tmp_path)  # nothing with the same content is trained there under another name
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
    legs = [path for number in (1, 2) for path in folder.glob(f"leg-{number}/train/*@*/metrics.jsonl")]
    updates = [len(list(read_lines(path))) for path in legs]
    assert updates == [6, 6], "half of the 12 updates each"
    first = next(iter(read_lines(legs[1])))
    assert first["reverse_kl"] < 1, "the second leg starts from the first one's student, on its own samples"
    figures = training_figures(run_of({**recipe, "compositions": {"forth": FORTH}}), policy_hues(["forth"]))
    curve = {figure.name: figure.drawing for figure in figures}["training-reverse_kl"]
    (line,) = [line for line in curve.axes[0].lines if len(line.get_xdata()) > 1]
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
    run = run_of(recipe)
    make_cache(run, QUIET)
    make_students(run, QUIET)
    run_dir = run.directory
    everything = [row["id"] for row in read_lines(run_dir / "prompts" / "prompts.jsonl")]
    third_of_them = len(everything) // 3
    assert len(everything) == 3 * third_of_them
    assert leg_prompts(run_dir, "three", 3) == everything[:third_of_them]
    assert leg_prompts(run_dir, "three", 2) == everything[third_of_them : 2 * third_of_them]

    verify.verify(run, QUIET, Console(quiet=True))
    scored = next((run_dir / "train" / "three" / "leg-2").glob("score/*@*/0*.safetensors"))
    whole = scored.read_bytes()
    scored.write_bytes(whole[:-9] + bytes([whole[-9] ^ 4]) + whole[-8:])
    with pytest.raises(
        CorruptData, match=r"leg-2/score/.* is damaged .*Remove it \(rm -r .*train/three@\w{8}\), then run: .* train "
    ):
        verify.verify(run, QUIET, Console(quiet=True))


@pytest.mark.slow
def test_a_sequence_samples_anew_on_prompts_that_came_with_trajectories(recipe: dict, tmp_path: Path) -> None:
    run = run_of(recipe)
    rows = run.stage("rollout")
    lines = []
    for shard in range(len(rows.require()["shards"])):
        drawn = rows.open(Rollouts, shard).read()
        for prompt, response in zip(drawn.prompt_ids, drawn.response_ids, strict=True):
            lines.append(json.dumps({"prompt_ids": prompt.tolist(), "response_ids": response.tolist()}))
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(lines))
    brought = {**recipe, "runs": str(tmp_path), "rollout": {**recipe["rollout"], "from": str(own)}}
    brought["compositions"] = {"two": FORTH}
    run = run_of(brought)
    make_cache(run, QUIET)
    make_students(run, QUIET)
    assert len(leg_prompts(run.directory, "two", 2)) == 6, "half of the 12"
    _, leg = legs(run, "two")
    drawn = leg.run.stage("rollout").open(Rollouts, 0).read()
    pairs = zip(drawn.prompt_ids, drawn.response_ids, strict=True)
    made = [json.dumps({"prompt_ids": p.tolist(), "response_ids": r.tolist()}) for p, r in pairs]
    assert set(made) - set(lines), "the second leg's student has drawn"


def test_too_few_prompts_for_the_legs_are_said(recipe: dict, tmp_path: Path) -> None:
    few = {**recipe, "runs": str(tmp_path), "prompts": {**recipe["prompts"], "take": 1}}
    run = run_of({**few, "compositions": {"two": FORTH}})
    make_cache(run, QUIET)
    with pytest.raises(InputError, match=r"compositions\.two\.sequence: 1 prompts cannot be shared among 2 legs"):
        make_students(run, QUIET)


@pytest.mark.slow
def test_what_a_sequence_cost_is_booked_once(recipe: dict, tmp_path: Path) -> None:
    recipe = copied(recipe, tmp_path)
    run = run_of({**recipe, "compositions": {"again": FORTH}})
    make_students(run, QUIET)
    booked = [row for row in read_ledger(run.directory) if row["name"].startswith("again")]
    assert {row["name"] for row in booked} == {"again", "again/leg-1"}
    kept = read_spent(run.directory).kept
    assert [row for row in kept if row["name"].startswith("again")] == booked
    run.stage("train", "again").manifest_path.unlink()
    make_students(
        run_of(
            {
                **recipe,
                "compositions": {"again": FORTH},
            }
        ),
        QUIET,
    )
    assert [row for row in read_ledger(run.directory) if row["name"].startswith("again")] == booked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "count"),
    [(r"/leg-1/train/.*/\.tmp-\d+$", 1), (r"/leg-2/score/.*\.safetensors$", 2), (r"/leg-2/train/.*/\.tmp-\d+$", 1)],
    ids=["first leg", "sampling anew", "second leg"],
)
def test_a_sequence_killed_in_any_leg_ends_the_same(
    recipe: dict, tmp_path: Path, forked: Forked, where: str, count: int
) -> None:
    run = {**recipe, "compositions": {"run": FORTH}}
    run["train"] = {**recipe["train"], "checkpoint_every": 2}
    expected = trained(run, **run["compositions"])["run"]

    file = tmp_path / "run.toml"
    file.write_text(dump_recipe(check_recipe(copied(run, tmp_path))))
    assert forked.lweave("train", file, **kill_at("rename", where, count)).code == -signal.SIGKILL
    status = forked.lweave("status", file)
    assert status.code == 0, status.said
    begun = 1 if "leg-1" in where else 2
    assert re.search(rf"train/run +partial +in leg {begun}", status.said)
    assert forked.lweave("train", file).code == 0
    assert same(load_file(tmp_path / "runs" / "tiny" / "train" / "run" / "final" / "model.safetensors"), expected)


@pytest.mark.slow
def test_a_later_leg_reads_the_columns_of_its_context_and_of_tags(recipe: dict, tmp_path: Path) -> None:
    hinted = {"model": "student", "post_prompt": {"template": "{prompt} {hint}"}}
    rows = [{**row, "hint": row["answer"]} for row in read_lines(Path(recipe["prompts"]["source"]))]
    rows = [{**row, "kind": "ab"[place % 2]} for place, row in enumerate(rows)]
    source = tmp_path / "hinted.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = {"method": "sequential", "weights": {"acc": 0.5, "hinted": 0.5}, "sequence": ["acc", "hinted"]}
    own = {**recipe, "runs": str(tmp_path), "prompts": {**recipe["prompts"], "source": str(source)}}
    compositions = {"both": both, "back": {**both, "sequence": ["hinted", "acc"]}}
    own |= {"anchors": {"acc": recipe["anchors"]["acc"], "hinted": hinted}, "compositions": compositions}
    own |= {"train": {**recipe["train"], "epochs": 1, "balance": "tags"}, "tags": {"column": "kind"}}
    run = run_of(own)
    make_cache(run, QUIET)
    make_students(run, QUIET)
    for name in compositions:
        assert run.stage("train", name).complete
        assert len(leg_prompts(run.directory, name, 2)) == 6, "half of the 12"
        tag_G = Balance.from_run([*legs(run, name)][1].run).tag_G
        assert tag_G is not None
        assert len(tag_G) == 6
        assert set(tag_G.tolist()) == {0, 1}
