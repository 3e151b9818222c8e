"""Grading beside sampling: a slow grader keeps no sampler waiting, and whatever ends either of them loses nothing."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

import tiny
from forked import Forked, kill_at
from lightning_weave.bench.definitions import Benchmark, Problem, load_benchmark
from lightning_weave.config import Grading, check_recipe, dump_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.grading.graders import Grader, GraderProcess
from lightning_weave.models.scorer import Sampler
from lightning_weave.progress import Progress
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages.engines import Engines
from lightning_weave.stages.eval import EvaluatedPolicy, eval_job
from lightning_weave.stages.work import run_jobs
from lightning_weave.types import Request, Response, SamplingSettings

QUIET = Progress(quiet=True)
PROBLEM = Problem("p", "2 + 2?", "4")
# Right is what has an even number of characters. Says who it is, and waits with every real answer until it may go on.
OWN = """
import os, pathlib, time
here = pathlib.Path(__file__).parent


def grade(response, answer):
    until = time.monotonic() + 600
    (here / "grader").write_text(str(os.getpid()))
    while response and not (here / "go").exists():
        assert time.monotonic() < until, "nobody said go"
        time.sleep(0.01)
    return len(response) % 2 == 0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> dict:
    """Six problems with two samples each, in blocks of four, and a grader that waits for the file `go`."""
    recipe = tiny.make_world(tmp_path) | {"anchors": {}, "compositions": {}, "policies": {}}
    problems = tiny.save_prompts(tmp_path / "problems.jsonl", 6, seed=9)
    (tmp_path / "own.py").write_text(OWN)
    recipe["eval"] = {
        "benchmarks": [f"file:{problems}"],
        "samples": 2,
        "max_tokens": 8,
        "chat": False,
        "block": 4,
        "graders": {"problems": f"{tmp_path / 'own.py'}:grade"},
    }
    return recipe


class Asked:
    """The policy's own sampler; says of every block that it was asked for it."""

    def __init__(self, inner: Sampler, on_block: Callable[[int], None] = lambda number: None) -> None:
        self.inner = inner
        self.on_block = on_block
        self.blocks: list[list[tuple[int, int]]] = []

    def sample(self, requests: Sequence[Request], settings: SamplingSettings) -> list[Response]:
        self.blocks.append([request.key for request in requests])
        self.on_block(len(self.blocks))
        return self.inner.sample(requests, settings)

    def close(self) -> None:
        self.inner.close()


def evaluate(recipe: dict, on_block: Callable[[int], None] = lambda number: None) -> Asked:
    """Evaluate the student with a sampler that tells what it is asked."""
    run = tiny.run_of(recipe, trust=True)
    section = run.recipe.eval
    benchmark = load_benchmark(section.benchmarks[0])
    with Engines() as engines:
        asked = Asked(engines.sampler(run, run.student, run.recipe.engine_of("eval"), [[1]], 8), on_block)
        policy = EvaluatedPolicy("base", run.student, engines, asked)
        stage = run.stage("eval", "base", section.benchmarks[0])
        job = eval_job(run, policy, benchmark, stage, QUIET)
        assert job is not None
        run_jobs([job], run, QUIET)
    return asked


def made(recipe: dict) -> list[bytes]:
    run = tiny.run_of(recipe, trust=True)
    folder = run.stage("eval", "base", recipe["eval"]["benchmarks"][0]).folder
    assert [path.name for path in folder.glob("blocks-*")] == []
    return [(folder / name).read_bytes() for name in ("samples.jsonl", "summary.json")]


def test_the_next_block_is_sampled_while_one_is_graded(recipe: dict, tmp_path: Path) -> None:
    """No block is graded before the last one is asked for."""
    asked = evaluate(recipe, lambda number: (tmp_path / "go").touch() if number == 3 else None)
    assert [len(block) for block in asked.blocks] == [4, 4, 4]
    elsewhere = {**recipe, "runs": str(tmp_path / "elsewhere")}
    eval_stage.evaluate(tiny.run_of(elsewhere, trust=True), QUIET, ["base"])  # and where nobody has to wait
    assert made(recipe) == made(elsewhere)
    verdicts = {json.loads(line)["correct"] for line in made(recipe)[0].splitlines()}
    assert verdicts == {True, False}


def test_what_was_sampled_and_not_yet_graded_survives_a_kill(recipe: dict, tmp_path: Path, forked: Forked) -> None:
    """Killed at the first response of the third block; the grader still waits with the first. It ends too."""
    file = tmp_path / "recipe.toml"
    file.write_text(dump_recipe(check_recipe(recipe)))
    killed = forked.lweave("eval", file, "--trust", **kill_at("write", r"/journal-0000\d\.jsonl", 9))
    assert killed.code == -signal.SIGKILL, killed.said
    assert not list(tmp_path.rglob("blocks-*/0*.jsonl"))
    wait_for_its_end(int((tmp_path / "grader").read_text()))
    (tmp_path / "go").touch()
    assert evaluate(recipe).blocks == [[(4, 0), (4, 1), (5, 0), (5, 1)]], "the third block alone"
    elsewhere = {**recipe, "runs": str(tmp_path / "elsewhere")}
    evaluate(elsewhere)
    assert made(recipe) == made(elsewhere)


def wait_for_its_end(process: int) -> None:
    while (state := Path(f"/proc/{process}/stat")).exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_an_error_of_the_sampler_does_not_wait_for_the_grader(recipe: dict, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 2:
            raise WeaveError("no more")

    with pytest.raises(WeaveError, match="no more"):
        evaluate(recipe, fail)
    (tmp_path / "go").touch()
    assert len(evaluate(recipe).blocks) == 2


def grader_of(tmp_path: Path, code: str) -> Grader:
    (tmp_path / "bad.py").write_text(code)
    benchmark = Benchmark("file:x", "x", "math", (PROBLEM,), 1, 8)
    return Grader(benchmark, Grading(kind="python", function=f"{tmp_path / 'bad.py'}:grade"), trust=True)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("raise KeyError(response)", InputError, r"bad\.py:grade failed on problem p \(KeyError: 'so'\)\. Correct it"),
        ("import os; os._exit(7)", WeaveError, "the grading process has exited with code 7"),
    ],
)
def test_a_grader_that_fails_is_said(tmp_path: Path, body: str, kind: type[Exception], message: str) -> None:
    grader = grader_of(tmp_path, f"def grade(response, answer):\n    {body}\n")
    with closing(GraderProcess(grader)) as process, pytest.raises(kind, match=message):
        process.grade([(PROBLEM, "so")])


def test_a_function_that_cannot_be_sent_is_loaded_there(tmp_path: Path) -> None:
    """What it imports is found there as here, and what it prints is no answer."""
    own = "import forked\nprint('loaded')\ngrade = lambda response, answer: bool(print(answer)) or len(response) > 2\n"
    grader = grader_of(tmp_path, own)
    responses = [(PROBLEM, text) for text in ("so", "and so")]
    here = grader.grade(responses)
    with closing(GraderProcess(grader)) as process:
        assert process.grade(responses) == here
    assert [one.correct for one in here] == [False, True]


def test_alarms_ring_there_and_interrupts_do_not(tmp_path: Path) -> None:
    """The time limits of math-verify are alarms of a main thread. Control-C goes to all processes of a session."""
    own = """
import os, threading
def grade(response, answer):
    return threading.current_thread() is threading.main_thread() and os.getsid(0) != int(response)
"""
    with closing(GraderProcess(grader_of(tmp_path, own))) as process:
        assert [one.correct for one in process.grade([(PROBLEM, str(os.getsid(0)))])] == [True]
