"""Engines other than our own: refused when they disagree with the scorer, and real vLLM where its environment is."""

import json
import logging
import pickle
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import tiny
from lightning_weave import devices as memory
from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.config import StageEngine
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.models import checkpoint
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.models.worker_process import WorkerProcess
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages import engines, prompts, rollout
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages.engines import Engines, judge, longest_context, score_a_few
from lightning_weave.stages.prompts import render_problems
from lightning_weave.stages.score import make_cache
from lightning_weave.store import read_lines
from lightning_weave.types import Prompt, Rollouts
from pipeline.scored import make_scored
from programs import write_program

QUIET = Progress(quiet=True)
# Speaks the protocol of the engine's process: settings, then jobs. It knows what it answers, and how likely rows are.
# What it was started with is beside what it knows.
ENGINE = """
import json, sys
known = json.load(open(sys.argv[1]))
if "--version" in sys.argv:
    print(json.dumps({"version": known["version"]}))
    sys.exit()
settings = json.loads(sys.stdin.readline())
with open(sys.argv[1] + ".starts", "a") as starts:
    starts.write(json.dumps(settings) + "\\n")
print(json.dumps({"limit": settings["max_length"]}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "rows" in job:
        rows = [next(logps for ids, logps in known["rows"] if ids[: len(row)] == row) for row in job["rows"]]
        print(json.dumps({"logprobs": [logps[: len(row) - 1] for row, logps in zip(job["rows"], rows)]}), flush=True)
        continue
    for index, ids in reversed(list(enumerate(job["prompts"]))):  # they finish in an order of their own
        answer = known["answers"][" ".join(map(str, ids))]
        print(json.dumps({"question": job["question"], "index": index, **answer}))
    print(json.dumps({"question": job["question"], "end": True}), flush=True)
"""


def make_recipe(root: Path, python: str) -> dict:
    """The tiny world with a student whose heads are large enough for vLLM, and a problem file."""
    recipe = tiny.make_world(root)
    tokenizer = tiny.make_tokenizer("student")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    config = Qwen3Config(
        **shape,
        vocab_size=-(-len(tokenizer) // 16) * 16,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # opinions, so that a disagreement could be seen
    folder = root / "large-heads"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    problems = tiny.save_prompts(root / "problems.jsonl", 5, seed=9)
    recipe["student"]["model"] = str(folder)
    options = {"gpu_memory_utilization": 0.2, "enforce_eager": True}  # of a machine that others use too
    recipe["engine"] = {"rollout": "vllm", "eval": "vllm", "python": python, "options": options}
    recipe["eval"] = {
        "benchmarks": [f"file:{problems}"],
        "samples": 3,
        "max_tokens": 12,
        "chat": False,
    }
    return recipe


@pytest.fixture
def false_engine(tmp_path: Path) -> tuple[dict, Path]:
    """A recipe whose engine says what a file says."""
    script, known = tmp_path / "engine.py", tmp_path / "known.json"
    script.write_text(ENGINE)
    python = write_program(tmp_path / "python", sys.executable, script, known)
    return make_recipe(tmp_path / "world", str(python)), known


def made_prompts(run: Run) -> list[Prompt]:
    prompts.build_prompts(run, QUIET)
    return read_prompts(run.prompts_file)


def write_known(recipe: dict, known: Path, error: float, version: str = "1", written: float = 0.0) -> None:
    """Let the engine answer every prompt with the first tokens of the vocabulary, its log-probs off by `error`.

    Those of the tokens that it writes itself are off by `written` more.
    """
    run = tiny.run_of(recipe)
    model = AutoModelForCausalLM.from_pretrained(run.student.path, dtype=torch.float32)
    prompts = [prompt.token_ids for prompt in made_prompts(run)]
    section = run.recipe.eval
    asked = [
        one.token_ids
        for name in section.benchmarks
        for one in render_problems(load_eval_benchmark(run.recipe, name), run.student.tokenizer, section, None)
    ]
    few = partial(score_a_few, run.student, dtype=torch.float32, device=torch.device("cpu"), padded=True)
    drawn = [*few(prompts, 256), *few(asked, 256)]
    response = [1, 2, 3]

    def logps(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logp_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(logp_TV[place, token]) + error for place, token in enumerate(ids[1:])]

    rows = [ids + response for ids in [*prompts, *asked]] + [row.prompt + row.response for row in drawn]
    answers = {}
    for ids in [*prompts, *asked]:
        likely = [logp + written for logp in logps(ids + response)[len(ids) - 1 :]]
        answers[" ".join(map(str, ids))] = {"ids": response, "finish": "length", "logprobs": likely}
    known.write_text(json.dumps({"version": version, "answers": answers, "rows": [(ids, logps(ids)) for ids in rows]}))


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Every model that is loaded; the one before it and all others must be gone by then, also from the pool."""
    models: list[weakref.ref] = []
    in_pool: list[weakref.ref] = []
    load = Checkpoint.load
    explain_out_of_memory = memory.explain_out_of_memory

    def make_room(*args: Any) -> Any:
        assert [model() for model in models if model() is not None] == []
        assert in_pool == []
        return explain_out_of_memory(*args)

    def watched(*args: Any) -> Any:
        model = load(*args)
        models.append(weakref.ref(model))
        in_pool.append(models[-1])
        return model

    def empty_pool() -> None:
        in_pool[:] = [model for model in in_pool if model() is not None]

    monkeypatch.setattr(checkpoint, "explain_out_of_memory", make_room)
    monkeypatch.setattr(Checkpoint, "load", watched)
    monkeypatch.setattr(memory, "empty_pool", empty_pool)
    return models


def open_engine(run: Run) -> None:
    prompts = [prompt.token_ids for prompt in read_prompts(run.prompts_file)]
    with Engines() as engines:
        engines.sampler(run, run.student, run.recipe.engine_of("rollout"), prompts, 12)


@pytest.mark.slow
def test_an_engine_is_compared_once_per_model_and_version(
    false_engine: tuple[dict, Path], loaded: list[weakref.ref]
) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.001)
    loaded.clear()
    run = tiny.run_of(recipe)
    threads = [threading.Thread(target=open_engine, args=(run,)) for _ in range(2)]  # as two ranks would
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    open_engine(tiny.run_of(recipe))
    assert len(loaded) == 1
    known.write_text(known.read_text().replace('"version": "1"', '"version": "2"'))
    open_engine(run)
    assert len(loaded) == 2
    rows = list(read_lines(run.directory / "parity.jsonl"))
    assert [row["engine"] for row in rows] == ["vllm 1", "vllm 2"]
    assert {(row["model"], row["dtype"]) for row in rows} == {(run.student.identity, "torch.float32")}
    strict = tiny.run_of({**recipe, "engine": recipe["engine"] | {"parity": 1e-5}})
    with pytest.raises(Mismatch, match=r"engine\.parity = 1e-05"):  # what is remembered is judged again
        open_engine(strict)


def test_the_scorer_is_gone_when_the_engine_starts(
    false_engine: tuple[dict, Path], loaded: list[weakref.ref], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.0)
    loaded.clear()
    launch = WorkerProcess._launch

    def watched(self: WorkerProcess) -> Any:
        assert [model() for model in loaded] == [None]
        return launch(self)

    monkeypatch.setattr(WorkerProcess, "_launch", watched)
    open_engine(tiny.run_of(recipe))


@pytest.mark.slow
def test_a_scored_model_is_gone_when_the_next_is_loaded(tmp_path: Path, loaded: list[weakref.ref]) -> None:
    make_scored(tmp_path)  # the student samples and is scored, then four sides of anchors
    assert [model() for model in loaded] == [None] * 6


@pytest.mark.slow
def test_a_policy_is_gone_when_the_next_is_loaded(tmp_path: Path, loaded: list[weakref.ref]) -> None:
    recipe = make_recipe(tmp_path, sys.executable)
    recipe["engine"] |= {"eval": "hf"}
    recipe["eval"] |= {"samples": 1}
    recipe["policies"] = {"again": {"model": str(tmp_path / "student")}}
    eval_stage.evaluate(tiny.run_of(recipe), QUIET, ["base", "again"])
    assert [model() for model in loaded] == [None, None]


def test_an_engine_that_reads_well_and_writes_badly_is_refused(false_engine: tuple[dict, Path]) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.0, written=0.125)
    with pytest.raises(Mismatch, match=r"disagree by 0\.1250 nats per token"):
        rollout.rollout(tiny.run_of(recipe), QUIET)


def test_an_engine_gets_gpus_by_what_its_options_ask(
    false_engine: tuple[dict, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.0)
    recipe["engine"]["options"] |= {"tensor_parallel_size": 2}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    monkeypatch.setattr(engines, "set_up", lambda *_: torch.device("cuda", 0))
    with pytest.raises(InputError, match="needs 2 GPUs, and 1 are visible"):
        open_engine(tiny.run_of(recipe))
    asked: list[torch.device] = []
    monkeypatch.setattr(engines, "own_gpus", lambda *_: {})
    monkeypatch.setattr(engines, "use_engine_gpu", lambda device, count: torch.device("cuda", 1 + count))
    monkeypatch.setattr(engines, "score_a_few", lambda *_, device, **__: asked.append(device))
    open_engine(tiny.run_of(recipe))
    assert asked == [torch.device("cuda", 3)]  # what it is compared with is on the first of its own


def test_an_engine_that_agrees_may_sample(false_engine: tuple[dict, Path], caplog: pytest.LogCaptureFixture) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=0.001)
    run = tiny.run_of(recipe)
    with caplog.at_level(logging.INFO, "lightning_weave"):
        rollout.rollout(run, QUIET)
    assert "vLLM and the scorer agree to 1.0e-03 nats per token" in caplog.text
    rows = run.stage("rollout").open(Rollouts, 0).read()
    assert {tuple(ids) for ids in rows.response_ids} == {(1, 2, 3)}


@pytest.mark.slow
def test_an_engine_that_disagrees_is_refused_with_the_figure(false_engine: tuple[dict, Path]) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=-0.25)
    run = tiny.run_of(recipe)
    message = r"disagree by 0\.2500 nats per token, more than engine\.parity = 0\.002 \(\d+ tokens"
    with pytest.raises(Mismatch, match=message):
        rollout.rollout(run, QUIET)
    assert run.stage("rollout").state() == "missing"
    patient = tiny.run_of({**recipe, "engine": recipe["engine"] | {"parity": 0.3}})
    rollout.rollout(patient, QUIET)
    assert patient.stage("rollout").complete


@pytest.mark.parametrize(
    ("gap", "dtype", "experts", "verdict"),
    [
        (0.042, torch.bfloat16, False, "agree"),  # as SmolLM2 measured
        (0.042, torch.float16, False, "refused"),
        (0.042, torch.float32, True, "refused"),
        (0.3, torch.bfloat16, True, "warned"),
        (0.3, torch.bfloat16, False, "refused"),
        (0.5, torch.bfloat16, True, "refused"),
        (float("nan"), torch.bfloat16, True, "refused"),
    ],
)
def test_what_rounding_explains_depends_on_the_dtype_and_on_experts(
    gap: float, dtype: torch.dtype, experts: bool, verdict: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = {"hidden_size": 8, "num_hidden_layers": 1}
    config = Qwen3MoeConfig(**shape, num_experts=4) if experts else Qwen3Config(**shape)
    config.save_pretrained(tmp_path)
    section = StageEngine("rollout", "vllm", "auto", python=None, parity=None, options={})
    with caplog.at_level(logging.INFO, "lightning_weave"):
        if verdict == "refused":
            with pytest.raises(Mismatch, match=r"nats per token, more than engine\.parity"):
                judge(gap, 100, section, Checkpoint(str(tmp_path)), dtype)
            return
        judge(gap, 100, section, Checkpoint(str(tmp_path)), dtype)
    expected = "vLLM and the scorer agree" if verdict == "agree" else "as a mixture of experts may in bfloat16"
    assert expected in caplog.text


def test_an_engine_that_says_nan_does_not_agree(false_engine: tuple[dict, Path]) -> None:
    recipe, known = false_engine
    write_known(recipe, known, error=float("nan"))
    with pytest.raises(Mismatch, match="disagree by nan"):
        rollout.rollout(tiny.run_of(recipe), QUIET)


def starts(known: Path) -> list[dict[str, Any]]:
    """What every engine was started with."""
    return [json.loads(line) for line in Path(f"{known}.starts").read_text().splitlines()]


def with_long_benchmark(recipe: dict, tmp_path: Path) -> dict:
    """Two benchmarks, the second with a problem that takes more room than all others."""
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"problem": "+".join("123456789" * 3), "answer": "5", "id": "long"}) + "\n")
    short = recipe["eval"]["benchmarks"][0]
    return {**recipe, "eval": recipe["eval"] | {"benchmarks": [short, f"file:{long}"]}}


@pytest.mark.slow
def test_one_engine_samples_the_rollouts_and_evaluates_the_student(
    false_engine: tuple[dict, Path], tmp_path: Path
) -> None:
    recipe, known = false_engine
    recipe = with_long_benchmark(recipe, tmp_path)
    write_known(recipe, known, error=0.0)
    run = tiny.run_of(recipe)
    make_cache(run, QUIET, evaluates=True)
    longest = max(len(ids.split()) for ids in json.loads(known.read_text())["answers"])
    assert [start["max_length"] for start in starts(known)] == [longest + 12 + 1]
    made = [run.stage("eval", "base", name) for name in run.recipe.eval.benchmarks]
    assert {
        step.state() for step in [*run.stages("rollout"), *run.stages("reference"), *run.stages("score"), *made]
    } == {"complete"}


@pytest.mark.slow
def test_an_engine_of_other_options_is_one_of_its_own(false_engine: tuple[dict, Path], tmp_path: Path) -> None:
    recipe, known = false_engine
    recipe = with_long_benchmark(recipe, tmp_path)
    recipe["engine"]["options"] |= {"eval": {"max_num_seqs": 4}}
    write_known(recipe, known, error=0.0)
    run = tiny.run_of(recipe)
    make_cache(run, QUIET, evaluates=True)
    assert len(starts(known)) == 1
    assert run.stage("eval", "base", run.recipe.eval.benchmarks[0]).state() == "missing"
    eval_stage.evaluate(run, QUIET, ["base"])
    assert [start["options"].get("max_num_seqs") for start in starts(known)] == [None, 4]  # and both benchmarks on one


class Stub:
    """Stands for an engine; writes down when it is closed."""

    def __init__(self, events: list[str], name: str) -> None:
        self.events, self.name = events, name
        events.append(f"open {name}")

    def close(self) -> None:
        self.events.append(f"close {self.name}")


def test_what_is_up_serves_the_same_again_and_makes_room_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    monkeypatch.setattr(engines, "open_sampler", lambda run, model, *_: Stub(events, f"{model.path.name} sampler"))
    monkeypatch.setattr(engines, "open_scorer", lambda run, model, *_: Stub(events, f"{model.path.name} scorer"))
    recipe = tiny.make_world(tmp_path)
    sections = ("rollout", "reference", "score", "eval")
    run = tiny.run_of(recipe | {"engine": dict.fromkeys(sections, "vllm")})
    other = run.anchor("brief", "pre")
    with Engines() as kept:
        first = kept.sampler(run, run.student, run.recipe.engine_of("rollout"), [[1]], 4)
        assert kept.sampler(run, run.student, run.recipe.engine_of("eval"), [[1]], 4) is first
        scorer = kept.scorer(run, run.student, run.recipe.engine_of("reference"))
        assert kept.scorer(run, run.student, run.recipe.engine_of("score")) is scorer
        kept.scorer(run, other, run.recipe.engine_of("score"))
        kept.scorer(run, other, run.recipe.engine_of("score"), "http://localhost:1")
    assert events == [
        "open student sampler",
        "close student sampler",
        "open student scorer",
        "close student scorer",
        "open brief-pre scorer",
        "close brief-pre scorer",
        "open brief-pre scorer",
        "close brief-pre scorer",
    ]


def test_engines_that_are_sent_to_another_process_are_its_own() -> None:
    sent = pickle.dumps(Engines(room=7))
    assert pickle.loads(sent) is pickle.loads(sent)
    assert pickle.loads(sent).room == 7


def test_room_is_made_for_the_longest_prompt_and_never_beyond_the_model(tmp_path: Path) -> None:
    student = Checkpoint(str(tiny.save_model(tmp_path / "student", "student", "qwen3", 1)))  # made for 256 tokens
    assert longest_context(student, [[1] * 5, [1] * 9], 40) == 49
    assert longest_context(student, [[1] * 250], 40) == 256
