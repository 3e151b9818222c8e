"""Numbers gone bad: planted in real checkpoints, real shards and real gradients, and met by the stages themselves."""

import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_weave.errors import CorruptData, InputError, WeaveError
from lightning_weave.models.vllm import VLLMSampler
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import reference, rollout, score
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from lightning_weave.store import read_lines
from lightning_weave.train import loop
from lightning_weave.train.schedule import make_schedule
from lightning_weave.types import Candidates, Ragged, Request, Rollouts, SamplingSettings, Scores
from programs import write_program
from rows import Row, read_row
from tiny import make_tokenizer, run_of, save_model
from train.cached import make_run as make_cached_run

QUIET = Progress(quiet=True)
Recipe = dict[str, Any]
BadNumber = Callable[[dict[str, Tensor]], None]


def spoil(folder: Path, copy: Path, change: BadNumber) -> str:
    """Copy a checkpoint with other numbers in its weights."""
    shutil.copytree(folder, copy)
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return str(copy)


def token_of(value: float, token: int) -> BadNumber:
    """Whoever reads this token gets a number gone bad."""
    return lambda weights: weights["model.embed_tokens.weight"][token].fill_(value)


def final_weights(run: Run, name: str = "both") -> dict[str, Tensor]:
    return load_file(run.directory / "train" / name / "final" / "model.safetensors")


def assert_all_finite(run: Run, name: str = "both") -> list[dict[str, Any]]:
    assert all(tensor.isfinite().all() for tensor in final_weights(run, name).values())
    rows = list(read_lines(run.directory / "train" / name / "metrics.jsonl"))
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


def own(recipe: Recipe, path: Path, rows: list[tuple[list[int], list[list[int]]]]) -> Recipe:
    """Bring trajectories along: (prompt, its responses)."""
    lines = [{"prompt_ids": prompt, "response_ids": response} for prompt, responses in rows for response in responses]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return recipe | {"rollout": {"from": str(path), "responses": len(rows[0][1]), "prompts_per_shard": 2}}


# A model's logits.


@pytest.mark.slow
def test_logits_gone_bad_stop_the_sampler_and_only_the_shard_in_flight(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text("".join(f'{{"problem": "{n}+{n}", "id": "{n}"}}\n' for n in range(8)))
    recipe["prompts"] |= {"source": str(tmp_path / "own.jsonl"), "columns": {"prompt": "problem", "id": "id"}}
    recipe["rollout"]["temperature"] = 0.0  # the same responses until the bad number is met
    student = save_model(tmp_path / "untied", "student", "llama", 7)
    recipe |= {"name": "good", "student": {"model": str(student)}}
    run = run_of(recipe)
    rollout.rollout(run, QUIET)
    first, later = (run.stage("rollout").open(Rollouts, shard).read() for shard in range(2))
    token = max({*later.prompt_ids.flat} - {*first.prompt_ids.flat, *first.response_ids.flat})

    recipe |= {"name": "bad", "student": {"model": spoil(student, tmp_path / "bad", token_of(math.nan, int(token)))}}
    run = run_of(recipe)
    with pytest.raises(
        WeaveError, match=r"^prompt [4-7], response \d: .*logits are not finite \(.*bad\)\. Try float32"
    ):
        rollout.rollout(run, QUIET)
    stage = run.stage("rollout")
    assert (stage.state(), stage.pending(2)) == ("partial", [1])
    assert np.array_equal(stage.open(Rollouts, 0).read().response_ids.flat, first.response_ids.flat)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_gone_bad_stop_the_reference_by_prompt_and_response(
    recipe: Recipe, tmp_path: Path, value: float
) -> None:
    student = save_model(tmp_path / "untied", "student", "llama", 7)
    recipe["student"]["model"] = spoil(student, tmp_path / "bad", token_of(value, 30))
    trajectories = [([9, number], [[11, 12], [13, 30 if number == 24 else 14, 15]]) for number in (21, 22, 23, 24)]
    run = run_of(own(recipe, tmp_path / "own.jsonl", trajectories))
    rollout.rollout(run, QUIET)
    with pytest.raises(WeaveError, match=r"^prompt 3, response 1: the model's logits are not finite \(.*bad\)"):
        reference.reference(run, QUIET)
    stage = run.stage("reference")
    assert (stage.state(), stage.pending(2)) == ("partial", [1])


@pytest.mark.parametrize(
    ("everywhere", "message"),
    [
        (True, r"bad: the model's logits are never finite\. Try float32, or check the checkpoint"),
        (False, r"^prompt \d, response \d: the model's logits are not finite \(.*bad\)\. Try float32"),
    ],
)
def test_logits_gone_bad_stop_the_score_and_nothing_is_trained_on_it(
    make_run: Callable[[str], Recipe], tmp_path: Path, everywhere: bool, message: str
) -> None:
    recipe = make_run("runs")
    asked = read_prompts(run_of(recipe).prompts_file)[0].text
    token = max(make_tokenizer("accuracy").encode(asked))
    change: BadNumber = token_of(math.nan, token)
    if everywhere:
        change = lambda weights: weights["model.norm.weight"].fill_(math.nan)  # noqa: E731
    recipe["anchors"]["acc"]["post"] = spoil(Path(recipe["anchors"]["acc"]["post"]), tmp_path / "bad", change)
    run = run_of(recipe)
    with pytest.raises(WeaveError, match=message):
        score.score(run, QUIET)
    assert run.scores_of("acc")[0].state() == "missing"
    with pytest.raises(
        InputError, match=r"score/bad is not there yet\. Make it with: lweave score tiny\.toml --only bad"
    ):
        make_students(run, QUIET)


def test_logits_gone_bad_stop_the_evaluation(recipe: Recipe, tmp_path: Path) -> None:
    student = save_model(tmp_path / "untied", "student", "llama", 7)
    bad = spoil(student, tmp_path / "bad", lambda w: w["lm_head.weight"].fill_(math.inf))
    recipe |= {"anchors": {}, "compositions": {}, "policies": {"bad": {"model": bad}}}
    (tmp_path / "sums.jsonl").write_text('{"id": "q", "problem": "1+1", "answer": "2"}\n')
    recipe["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 2, "max_tokens": 5, "chat": False}
    run = run_of(recipe)
    with pytest.raises(WeaveError, match=r"prompt 0, response \d: the model's logits are not finite \(.*bad\)"):
        eval_stage.evaluate(run, QUIET, only=["bad"])
    folder = run.directory / "eval" / "bad"
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert files == {"stage.json", "engines.jsonl"}  # no sample of it


ENGINE = """
import json, sys
sys.stdin.readline()
print(json.dumps({"limit": 100}), flush=True)
for line in sys.stdin:
    question = json.loads(line)["question"]
    drawn = {"ids": json.loads(sys.argv[1]), "finish": "length", "logprobs": json.loads(sys.argv[2])}
    print(json.dumps({"question": question, "index": 0, **drawn}))
    print(json.dumps({"question": question, "end": True}), flush=True)
"""


@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ("[]", "[]", "breaks its settings"),
        ("[4,5]", "[-1.0,NaN]", r"prompt 3, response 1: the model's logits are not finite \(student\)"),
    ],
)
def test_an_engine_that_says_nothing_or_nonsense_is_not_believed(
    tmp_path: Path, ids: str, logprobs: str, message: str
) -> None:
    (tmp_path / "engine.py").write_text(ENGINE)
    python = write_program(tmp_path / "python", sys.executable, tmp_path / "engine.py", ids, logprobs)
    with (
        VLLMSampler(Path("student"), frozenset({1}), 50, python=str(python)) as sampler,
        pytest.raises(WeaveError, match=message),
    ):
        sampler.sample([Request([7], 3, 1)], SamplingSettings(1.0, 1.0, 8, 0))


# A cached number.


def plant(run: Run, where: str, value: float) -> Path:
    """Write a bad number into a shard as the store itself would write it: its checksums are right."""
    post, pre = (step for step in run.scores_of("brief"))
    stage = {"post": post, "mass": post, "pre": pre}.get(where) or run.stage("reference")
    shard: Any = stage.open(Candidates if stage.path == "reference" else Scores, 1).read()
    name = {"post": "logp", "pre": "logp"}.get(where, where)
    flat = getattr(shard, name).flat.copy()
    place = np.argwhere(shard.mapped.flat)[0] if isinstance(shard, Scores) and name == "logp" else np.zeros(1, int)
    flat[tuple(place)] = value
    stage.write(1, replace(shard, **{name: Ragged(flat, getattr(shard, name).offsets)}))
    return stage.shard_path(1)


@pytest.mark.parametrize(
    ("where", "value"),
    [("post", math.nan), ("pre", -math.inf), ("mass", math.inf), ("logp", math.nan), ("sampled_logp", -math.inf)],
)
@pytest.mark.slow
def test_a_cached_number_gone_bad_is_named_and_the_remedy_works(
    make_run: Callable[[str], Recipe], where: str, value: float
) -> None:
    recipe = make_run("runs")
    run = run_of(recipe)
    before = run.stage("reference").shard_path(1).read_bytes()
    path = plant(run, where, value)
    with pytest.raises(CorruptData, match=r"row (8|9|1\d) has a log-probability that is not finite") as caught:
        make_students(run, QUIET)
    assert f"rm {path}" in str(caught.value)
    verb = "reference" if where in ("logp", "sampled_logp") else "score"
    assert f"lweave {verb} tiny.toml" in str(caught.value)
    if where not in ("post", "logp"):
        return
    path.unlink()
    {"reference": reference.reference, "score": score.score}[verb](run, QUIET)
    assert run.stage("reference").shard_path(1).read_bytes() == before
    make_students(run_of(recipe), QUIET)
    assert_all_finite(run)


def test_what_is_not_mapped_is_not_looked_at(make_run: Callable[[str], Recipe]) -> None:
    run = run_of(make_run("runs"))
    expected = [read_row(open_cache(run, "both"), row) for row in range(16)]
    stage = run.scores_of("acc")[0]
    for index in range(2):
        shard = stage.open(Scores, index).read()
        assert not shard.mapped.flat.all()
        logp = np.where(shard.mapped.flat, shard.logp.flat, np.float32(np.nan))
        stage.write(index, replace(shard, logp=Ragged(logp, shard.logp.offsets)))
    for row, old in enumerate(expected):
        found = read_row(open_cache(run, "both"), row)
        for name in Row.__dataclass_fields__:
            assert np.array_equal(getattr(found, name), getattr(old, name)), name


# Probabilities of zero and one.


@pytest.mark.parametrize("objective", ["tilted", "reverse-kl", "direct-opd"])
@pytest.mark.slow
def test_anchors_and_students_without_a_doubt_train_to_finite_weights(
    recipe: Recipe, tmp_path: Path, objective: str
) -> None:
    """Logits of tens of thousands: one candidate has all of the mass, and the others none that a float can hold."""
    student = save_model(tmp_path / "untied", "student", "llama", 7)
    loud: BadNumber = lambda weights: weights["lm_head.weight"].mul_(1e4)  # noqa: E731
    recipe["student"]["model"] = spoil(student, tmp_path / "sure", loud)
    post = Path(recipe["anchors"]["acc"]["post"])
    recipe["anchors"] = {"acc": {**recipe["anchors"]["acc"], "post": spoil(post, tmp_path / "sure-post", loud)}}
    recipe["compositions"] = {"both": {"weights": {"acc": 1.0}}}
    recipe["train"] |= {"objective": objective}
    run = run_of(recipe)
    make_cache(run, QUIET)
    found = run.stage("reference").open(Candidates, 0).read()
    scores = run.scores_of("acc")[0].open(Scores, 0).read()
    assert (np.exp(found.logp.flat) == [1, 0, 0, 0]).all(axis=1).any()
    assert max(found.logp.flat.min(), scores.logp.flat.min()) < -1e3
    assert all(np.isfinite(values.flat).all() for values in (found.logp, found.other_logp, scores.logp, scores.mass))
    make_students(run, QUIET)
    assert_all_finite(run)


# Nothing to learn from.


def test_a_run_in_which_every_decision_is_masked_leaves_the_student_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_cached_run(tmp_path, valid=lambda anchor, row, decisions: np.zeros(decisions, dtype=bool))
    make_students(run, Progress())
    expected = load_file(run.student.path / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in final_weights(run).items())
    assert {row["kept"] for row in assert_all_finite(run)} == {0.0}
    assert capsys.readouterr().err.count("has no valid decision and changes nothing; lweave doctor says why") == 1


def test_empty_responses_keep_their_place_and_add_nothing(recipe: Recipe, tmp_path: Path) -> None:
    said = [[11, 12, 13], [14, 15]]
    trajectories = [([9, 21], [[], []]), ([9, 22], [[], []]), ([9, 23], said), ([9, 24], [[], [16]])]
    run = run_of(own(recipe, tmp_path / "own.jsonl", trajectories))
    make_cache(run, QUIET)
    make_students(run, QUIET)
    cache = open_cache(run, "both")
    assert [len(read_row(cache, row).response_ids) for row in range(8)] == [0, 0, 0, 0, 3, 2, 0, 1]
    rows = assert_all_finite(run)
    assert sum(row["tokens"] for row in rows) == 8 * 2 + 6
    assert max(row["kept"] for row in rows) > 0


# Longer than the context.


def test_a_prompt_that_fills_the_context_is_refused_before_anything_is_sampled(recipe: Recipe, tmp_path: Path) -> None:
    long = {"problem": "1+" * 150 + "1", "answer": "1", "id": "long"}
    path = tmp_path / "with-long.jsonl"
    path.write_text(Path(recipe["prompts"]["source"]).read_text() + json.dumps(long) + "\n")
    recipe["prompts"] |= {"source": str(path), "take": 9}
    with pytest.raises(
        InputError, match=r"'long' has 3\d\d tokens.* 256 of .*student\. Set prompts\.max_tokens to 255"
    ):
        rollout.rollout(run_of(recipe), QUIET)
    assert list(Path(recipe["runs"]).rglob("*.safetensors")) == []
    recipe["prompts"]["max_tokens"] = 255
    rollout.rollout(run_of(recipe), QUIET)
    assert run_of(recipe).stage("rollout").require()["rows"] == 16


def test_a_trajectory_longer_than_the_context_is_refused_by_prompt_and_response(recipe: Recipe, tmp_path: Path) -> None:
    run = run_of(own(recipe, tmp_path / "own.jsonl", [([9, 21], [[11], [12]]), ([9], [[11], [12] * 260])]))
    rollout.rollout(run, QUIET)
    with pytest.raises(InputError, match=r"prompt 1, response 1: 260 tokens are more than the 256 .*student\)"):
        reference.reference(run, QUIET)


def test_a_problem_that_fills_the_context_is_refused_by_its_name(recipe: Recipe, tmp_path: Path) -> None:
    problems = [{"id": "short", "problem": "1+1", "answer": "2"}, {"id": "long", "problem": "1+" * 150, "answer": "2"}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 1, "max_tokens": 4, "chat": False}
    with pytest.raises(InputError, match=r"sums\.jsonl: problem 'long' has 3\d\d tokens.*Leave the problem out"):
        eval_stage.evaluate(run_of(recipe), QUIET, only=["base"])


# A gradient.


@pytest.mark.slow
def test_a_gradient_gone_bad_stops_with_its_rows_and_costs_nothing(
    make_run: Callable[[str], Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed, disturbed = run_of(make_run("alone")), run_of(make_run("disturbed"))
    make_students(undisturbed, QUIET)
    real, updates = loop.open_trainee, 0

    def with_bad_gradient(*arguments: Any) -> Any:
        trainee = real(*arguments)

        def bad_at_the_third(gradient: Tensor) -> Tensor:
            nonlocal updates
            updates += 1
            return gradient * math.nan if updates == 3 else gradient

        trainee.model.model.norm.weight.register_hook(bad_at_the_third)
        return trainee

    with monkeypatch.context() as patched:
        patched.setattr(loop, "open_trainee", with_bad_gradient)
        with pytest.raises(WeaveError, match=r"the gradient is nan, from the rows .*The last checkpoint is kept"):
            make_students(disturbed, QUIET)
    folder = disturbed.directory / "train" / "both"
    written = json.loads((folder / "bad_rows.json").read_text())
    schedule = make_schedule(disturbed.recipe, groups=8)
    assert written == {"what": "gradient", "value": "nan", "rows": [{"row": row} for row in schedule.rows(2)]}
    assert [row["step"] for row in read_lines(folder / "metrics.jsonl")] == [1, 2]
    make_students(disturbed, QUIET)
    expected = final_weights(undisturbed)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in final_weights(disturbed).items())
    assert not (folder / "bad_rows.json").exists()
