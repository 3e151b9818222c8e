"""Too little memory, as an allocation that really fails: every stage halves, goes on, says so, and changes nothing."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from lightning_weave.errors import WeaveError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import reference, rollout, score
from lightning_weave.stages.caches import open_cache
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_json, read_lines
from lightning_weave.train import loop, student
from lightning_weave.train.loop import TOKEN_BUDGET_FILE, make_fit
from lightning_weave.train.parallel import Ranks, join
from lightning_weave.train.student import open_trainee
from lightning_weave.types import Candidates, Rollouts, Scores
from rounding import LOGPROB, UNIT
from tiny import run_of
from train.cached import context
from train.cached import make_run as train_run
from train.computed import train_and_see
from train.launch import Plan, run_out_of_memory, start, torchrun

QUIET = Progress(quiet=True)
Recipe = dict[str, Any]
Capture = pytest.CaptureFixture[str]
# The longest sums of an update are over its decisions and over the vocabulary, about 100 terms each, and a gradient is
# a sum of such sums through a dozen layers; what is found is near 1e-6. A row that is lost or counted twice moves the
# loss by a third.
ROUNDING = 1024 * UNIT  # 6e-5
LARGE = {"prompts_per_round": 6, "checkpoint_every": 1, "token_budget": 1000}
PROGRAM = Path(__file__).parents[1] / "train" / "short_of_memory.py"


@contextmanager
def room_for(tokens: int) -> Iterator[list[int]]:
    """Fail to allocate, as torch itself does, wherever a model reads more tokens at once; collects the failures."""
    failed: list[int] = []

    def allocate(module: nn.Module, args: Any) -> None:
        if isinstance(module, nn.Embedding) and args[0].numel() > tokens:
            failed.append(args[0].numel())
            torch.empty(2**55)

    hook = register_module_forward_pre_hook(allocate)
    try:
        yield failed
    finally:
        hook.remove()


def fields_of(run: Run, step: Any, kind: type) -> list[np.ndarray]:
    stage = step
    shards = [vars(stage.open(kind, shard).read()) for shard in range(len(stage.require()["shards"]))]
    return [np.asarray(getattr(value, "flat", value)) for shard in shards for value in shard.values()]


@pytest.mark.slow
def test_rollouts_are_the_same_tokens(cached: Recipe, recipe: Recipe, caplog: pytest.LogCaptureFixture) -> None:
    run, undisturbed = run_of(recipe), run_of(cached)
    with caplog.at_level(logging.WARNING, "lightning_weave"), room_for(25) as failed:
        rollout.rollout(run, QUIET)
    assert failed
    assert "out of memory with 6 rows: the batch size is now 3" in caplog.text
    found, expected = (fields_of(each, each.stage("rollout"), Rollouts) for each in (run, undisturbed))
    assert all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.slow
def test_references_and_scores_are_the_same_numbers(
    cached: Recipe, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    run, undisturbed = run_of(recipe), run_of(cached)
    rollout.rollout(run, QUIET)
    for stage in (reference.reference, score.score):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "lightning_weave"), room_for(70) as failed:
            stage(run, QUIET)
        assert failed
        assert "the token budget is now" in caplog.text
    pairs = [(run.stage("reference"), undisturbed.stage("reference"), Candidates)]
    scored = zip(run.score_names, undisturbed.score_names, strict=True)
    pairs += [(run.stage("score", one), undisturbed.stage("score", two), Scores) for one, two in scored]
    assert len(pairs) == 5
    for one, two, kind in pairs:
        for found, expected in zip(fields_of(run, one, kind), fields_of(undisturbed, two, kind), strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=LOGPROB)


@pytest.mark.slow
def test_evaluations_are_the_same_samples(recipe: Recipe, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    problems = [{"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {"benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"], "samples": 2, "max_tokens": 9, "chat": False}
    files = []
    for name, room in (("undisturbed", 1_000_000), ("disturbed", 20)):
        run = run_of(recipe | {"name": name})
        with caplog.at_level(logging.WARNING, "lightning_weave"), room_for(room) as failed:
            eval_stage.evaluate(run, QUIET, only=["base"])
        files.append((run.directory / "eval" / "base" / "sums" / "samples.jsonl").read_bytes())
    assert failed
    assert "out of memory with" in caplog.text
    assert files[0] == files[1]


@pytest.mark.slow
def test_students_are_the_same_up_to_rounding(
    make_run: Callable[[str], Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where no update is under way: the check before training, and the held-out rows."""
    runs = {name: make_run(name) for name in ("undisturbed", "disturbed")}
    run = {name: run_of(recipe | {"train": {**recipe["train"], "validation": 0.3}}) for name, recipe in runs.items()}
    expected = train_and_see(run["undisturbed"], "both", Progress())
    assert "out of memory" not in capsys.readouterr().err
    with room_for(70) as failed:
        found = train_and_see(run["disturbed"], "both", Progress())
    assert failed
    assert "train both: out of memory: train.token_budget halved to" in capsys.readouterr().err

    assert "validation_reverse_kl" in expected.figures[-1]
    for one, two in zip(expected.figures, found.figures, strict=True):
        for key in one.keys() - {"seconds", "tokens_per_s", "loading", "memory"}:
            assert two[key] == pytest.approx(one[key], rel=ROUNDING, abs=ROUNDING), key
    for one, two in zip(expected.gradients, found.gradients, strict=True):
        for key, gradient in one.items():
            torch.testing.assert_close(two[key], gradient, rtol=0, atol=ROUNDING * gradient.abs().max().item())
    # Adam divides a gradient by its own size. So a weight moves by no more than the learning rate per update, and
    # rounding has the share in that move that it has in the gradient: all of it where the gradient is nothing else.
    longest = len(expected.figures) * run["undisturbed"].recipe.train.learning_rate
    for key, weights in expected.weights.items():
        largest = torch.stack([gradients[key].abs().max() for gradients in expected.gradients]).max()
        share = (ROUNDING * largest / expected.gradients[0][key].abs()).clamp(max=2)
        allowed = longest * share + torch.finfo(torch.float32).eps * weights.abs()
        assert bool(((found.weights[key] - weights).abs() <= allowed).all()), key
        assert share.median() < 0.05, "for most weights this is a bound"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # bfloat16 is sharded, as on a GPU
def test_an_optimizer_without_room_is_said(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train_run(tmp_path, train={"dtype": dtype, "agreement": False})
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", lambda *_: torch.empty(2**55))
    with pytest.raises(WeaveError, match=r"out of memory at update 1: no room for the optimizer.*train\.lora"):
        make_students(run, QUIET)


def test_weights_without_room_are_said(cached: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: torch.empty(2**55))
    with pytest.raises(WeaveError, match=r"student: its weights do not fit on cpu\. Use a smaller dtype"):
        Checkpoint(str(Path(cached["student"]["model"]))).load(torch.float32, torch.device("cpu"))
    monkeypatch.setattr(student, "materialize", lambda *_: torch.empty(2**55))
    with pytest.raises(WeaveError, match=r"student: its weights do not fit on cpu\. Use a smaller dtype"):
        make_students(run_of(cached), QUIET)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_sharded_student_goes_on_with_smaller_micro_batches(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU always shards. The losses are those of a run that had the smaller micro-batches from its beginning."""
    run = train_run(tmp_path)
    with join(torch.device("cpu"), sharded=True) as ranks:
        monkeypatch.setattr(Qwen3MLP, "forward", Qwen3MLP.forward)  # put back when the test is over
        run_out_of_memory(where, least=40)
        disturbed = open_fit(run, ranks, 1000)
        found = [disturbed.update(step, range(12))["loss"] for step in (1, 2, 3)]
        assert disturbed.token_budget < 100, "it was halved"
        assert "out of memory: train.token_budget halved" in disturbed.notes[0]
        monkeypatch.undo()
        undisturbed = open_fit(run, ranks, disturbed.token_budget)
        expected = [undisturbed.update(step, range(12))["loss"] for step in (1, 2, 3)]
    assert expected[2] < 0.9 * expected[0], "it learns"
    assert found == pytest.approx(expected, abs=1e-5)


def open_fit(run: Run, ranks: Ranks, token_budget: int) -> loop.Fit:
    trainee = open_trainee(run, context(ranks, torch.bfloat16))
    fit = make_fit(run, "both", trainee, open_cache(run, "both"), alpha=2.0, ranks=ranks)
    fit.token_budget = token_budget
    return fit


@pytest.fixture
def undisturbed(tmp_path: Path) -> Run:
    run = train_run(tmp_path / "undisturbed", train=LARGE)
    assert start(Plan([run]), ranks=2) == [0, 0]
    return run


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.ranks
def test_ranks_that_start_again_take_less_and_learn_the_same(where: str, tmp_path: Path, undisturbed: Run) -> None:
    """In the middle of a pass the other rank waits for the one that ran out. So they agree at the next start."""
    run = train_run(tmp_path / "disturbed", train=LARGE)
    plan = Plan([run], too_much=where, least=40)  # of 47 tokens on each rank
    assert start(plan, ranks=2) == [1, 1]
    said = [(run.directory / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == "rank 0: another rank has stopped; its own message says why"
    assert "out of memory on rank 1 at update 1 with train.token_budget = 1000. Run the same command again" in said[1]
    assert start(plan, ranks=2) == [0, 0]
    assert_same_losses(run, undisturbed)


@pytest.mark.slow
@pytest.mark.ranks
def test_torchrun_starts_them_again_by_itself(tmp_path: Path, undisturbed: Run, capfd: Capture) -> None:
    """Half of 47 tokens is still too much: two starts are in vain, and two only. The other composition knows."""
    compositions = {"both": {"weights": {"long": 0.5, "short": 0.5}}, "long": {"weights": {"long": 1.0}}}
    run = train_run(tmp_path / "disturbed", train=LARGE, compositions=compositions)
    torchrun(run, 2, "--max-restarts=3", program=[str(PROGRAM)])
    said = capfd.readouterr().err
    assert said.count("out of memory on rank 1 at update 1") == 2
    fits = read_json(run.directory / TOKEN_BUDGET_FILE)["smaller"]
    for name in compositions:
        assert f"train {name}: train.token_budget is {fits}: 1000 did not fit" in said
    assert_same_losses(run, undisturbed)


def assert_same_losses(found: Run, undisturbed: Run) -> None:
    expected = losses(undisturbed)
    assert expected[-1] < expected[0], "it learns"
    assert losses(found) == pytest.approx(expected, abs=1e-5)


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in read_lines(run.directory / "train" / "both" / "metrics.jsonl")]


def test_a_budget_that_was_too_large_is_forgotten_when_the_recipe_asks_for_another(tmp_path: Path) -> None:
    alone = Ranks(0, 1, torch.device("cpu"))
    trainee = torch.nn.Linear(2, 2)
    trainee.head_description = SimpleNamespace(vocabulary=2)

    def open_fit(asked: int) -> loop.Fit:
        run = train_run(tmp_path, train={"token_budget": asked})
        return make_fit(run, "both", trainee, open_cache(run, "both"), alpha=2.0, ranks=alone)

    fit = open_fit(1000)
    assert (fit.token_budget, fit.notes) == (1000, [])
    fit.save_budget(300)
    assert open_fit(1000).token_budget == 300
    assert "train.token_budget is 300: 1000 did not fit" in open_fit(1000).notes[0]
    assert open_fit(2000).token_budget == 2000


@pytest.mark.slow
@pytest.mark.ranks
def test_when_one_of_two_ranks_has_no_room_for_the_optimizer_both_stop(tmp_path: Path) -> None:
    run = train_run(tmp_path, train={"dtype": "bfloat16", "agreement": False})
    assert start(Plan([run], too_much="step"), ranks=2) == [1, 1]
    said = [(run.directory / f"rank-{rank}.txt").read_text() for rank in range(2)]
    assert said[0] == "rank 0: another rank has stopped; its own message says why"
    assert "out of memory at update 1: no room for the optimizer's state" in said[1]
