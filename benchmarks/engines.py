"""Speed of sampling through the pipeline against bare engines, on a real checkpoint, and the error of vLLM's scores.

    LWEAVE_VLLM_PYTHON=.venv-vllm/bin/python LWEAVE_SMOLLM2=.real-models/smollm2 python benchmarks/engines.py
        [--prompts 12] [--tokens 128] [--repeats 3] [--json FILE]

- `lweave rollout` and `lweave eval` against one `LLM.generate` with the same requests, all at once: in turn, engines
  started before. Prompts ask for a word or for a paragraph, so that lengths vary.
- The transformers sampler with a batch that is refilled against batch after batch.
- Candidates scored by vLLM in float32 and bfloat16 against transformers in float32.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.config import check_recipe
from lightning_weave.models.sampler import HFSampler, RefillingSampler
from lightning_weave.models.scorer import Scorer
from lightning_weave.models.vllm import VLLMBody, request_seed
from lightning_weave.progress import Progress
from lightning_weave.prompts import read_prompts
from lightning_weave.run import Run
from lightning_weave.stages import eval as eval_stage
from lightning_weave.stages import prompts as prompts_stage
from lightning_weave.stages import rollout
from lightning_weave.stages.engines import Engines
from lightning_weave.stages.prompts import render_problems
from lightning_weave.types import Request, Rollouts, SamplingSettings

QUIET = Progress(quiet=True)
RESPONSES = 4
OPTIONS = {"enforce_eager": True, "enable_chunked_prefill": False}
THINGS = "rain, a bicycle, gold, the moon, bread, a bridge, salt, a clock, ice, a violin, tea, a map, wool, a kite"


def questions(count: int) -> list[str]:
    """Ask for long and short answers in turn."""
    things = [thing.strip() for thing in THINGS.split(",")]
    asked = ("In one word, what colour has {}?", "Explain in detail how people came to use {}.")
    return [asked[number % 2].format(things[number % len(things)]) + f" ({number})" for number in range(count)]


def make_run(folder: Path, name: str, arguments: argparse.Namespace) -> Run:
    """Write prompts, a benchmark of the same questions, and a recipe for both."""
    rows = [{"prompt": text, "answer": "1", "id": str(at)} for at, text in enumerate(questions(arguments.prompts))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = [{"problem": row["prompt"], "answer": "1", "id": row["id"]} for row in rows]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in problems))
    engine = {"rollout": "vllm", "eval": "vllm", "python": arguments.python, "options": OPTIONS, "dtype": "float32"}
    sampled = {"max_tokens": arguments.tokens, "temperature": 1.0}
    recipe = {
        "name": name,
        "runs": str(folder / "runs"),
        "student": {"model": arguments.model},
        "prompts": {"source": str(folder / "prompts.jsonl"), "format": "plain", "take": arguments.prompts},
        "engine": engine,
        "rollout": {**sampled, "responses": RESPONSES, "prompts_per_shard": 4},
        "eval": {
            **sampled,
            "top_p": 1.0,
            "benchmarks": [f"file:{folder / 'problems.jsonl'}"],
            "samples": RESPONSES,
            "block": 16,
            "profile": "exact",
            "format": "plain",
        },
        "machine": {"device": "cpu", "threads": 1},
    }
    return Run(check_recipe(recipe))


class Bare:
    """vLLM in a separate process, without this package."""

    def __init__(self, arguments: argparse.Namespace, longest: int) -> None:
        script = Path(__file__).with_name("parts") / "bare_vllm.py"
        self.process = subprocess.Popen(
            [arguments.python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ask({"model": arguments.model, "dtype": "float32", "max_model_len": longest, **OPTIONS})

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def as_job(requests: Sequence[Request], settings: SamplingSettings, stop: Sequence[int]) -> dict[str, Any]:
    """The same requests, as the bare engine reads them."""
    return {
        "prompts": [list(map(int, request.prompt_ids)) for request in requests],
        "seeds": [request_seed(settings.seed, request) for request in requests],
        "stop": sorted(stop),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_tokens": settings.max_tokens,
    }


def rate_of(tokens: Callable[[], int]) -> float:
    """Tokens per second of a function that returns how many it sampled."""
    start = time.perf_counter()
    count = tokens()
    return count / (time.perf_counter() - start)


def against_bare(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time the pipeline's sampling and the bare engine's in turn, each with its engine up."""
    run = make_run(folder, "warm", arguments)
    prompts_stage.build_prompts(run, QUIET)
    section = run.recipe.rollout
    asked = [prompt.token_ids for prompt in read_prompts(run.prompts_file)]
    problems = render_problems(
        load_eval_benchmark(run.recipe.eval, run.recipe.eval.benchmarks[0]),
        run.student.tokenizer,
        run.recipe.eval,
    )
    longest = max(map(len, [*asked, *(one.prompt.token_ids for one in problems)])) + section.max_tokens + 1
    settings = SamplingSettings(section.temperature, 1.0, section.max_tokens, section.seed)
    stop = [token for token in run.student.stop_ids if token < run.student.vocabulary]
    rollouts = [Request(ids, prompt, each) for prompt, ids in enumerate(asked) for each in range(RESPONSES)]
    evals = [Request(one.prompt.token_ids, at, each) for at, one in enumerate(problems) for each in range(RESPONSES)]
    rates: dict[str, list[float]] = {name: [] for name in ("rollout", "rollout bare", "eval", "eval bare")}
    bare = Bare(arguments, longest)
    try:
        with Engines(room=longest) as engines:
            engine = run.recipe.engine_of("rollout")
            engines.sampler(run, run.student, engine, asked, section.max_tokens)  # starts it, and compares
            for repeat in range(arguments.repeats):
                fresh = make_run(folder, f"run-{repeat}", arguments)
                prompts_stage.build_prompts(fresh, QUIET)
                rates["rollout"].append(rate_of(partial(_rollout, fresh, engines)))
                rates["rollout bare"].append(_rate(bare.ask(as_job(rollouts, settings, stop))))
                rates["eval"].append(rate_of(partial(_eval, fresh, engines)))
                rates["eval bare"].append(_rate(bare.ask(as_job(evals, settings, stop))))
    finally:
        bare.close()
    return rates


def _rate(answer: dict[str, Any]) -> float:
    return float(answer["tokens"] / answer["seconds"])


def _rollout(run: Run, engines: Engines) -> int:
    rollout.rollout(run, QUIET, watch=lambda *_: None, engines=engines)
    return int(sum(len(ids) for rows in _rollouts(run) for ids in rows.response_ids))


def _rollouts(run: Run) -> list[Rollouts]:
    stage = run.stage("rollout")
    return [stage.open(Rollouts, shard).read() for shard in range(len(stage.require()["shards"]))]


def _eval(run: Run, engines: Engines) -> int:
    eval_stage.evaluate_policy(run, "base", QUIET, engines, watch=lambda *_: None)
    folder = run.stage("eval", "base", run.recipe.eval.benchmarks[0]).folder
    return sum(json.loads(line)["tokens"] for line in (folder / "samples.jsonl").read_text().splitlines())


def refilled_or_not(folder: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Time the transformers sampler on one shard, batch after batch and refilled, in turn."""
    run = make_run(folder, "warm", arguments)
    student = run.student
    model = student.load(torch.float32, torch.device("cpu"))
    asked = [prompt.token_ids for prompt in read_prompts(run.prompts_file)]
    requests = [Request(ids, prompt, each) for prompt, ids in enumerate(asked) for each in range(RESPONSES)]
    settings = SamplingSettings(1.0, 1.0, arguments.tokens, 42)
    rates: dict[str, list[float]] = {"batch after batch": [], "refilled": []}
    for _ in range(arguments.repeats):
        for name, kind in (("batch after batch", HFSampler), ("refilled", RefillingSampler)):
            sampler = kind(model, student.stop_ids, student.vocabulary, arguments.batch)
            rates[name].append(rate_of(partial(_sample, sampler, requests, settings)))
    return rates


def _sample(sampler: HFSampler, requests: list[Request], settings: SamplingSettings) -> int:
    return sum(len(response.ids) for response in sampler.sample(requests, settings))


def score_gaps(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Compare candidates scored by vLLM, in two dtypes, with transformers in float32."""
    run = make_run(folder, "run-0", arguments)
    student = run.student
    rows = [(p, r) for shard in _rollouts(run) for p, r in zip(shard.prompt_ids, shard.response_ids, strict=True)][:8]
    ours = Scorer.from_model(student.load(torch.float32, torch.device("cpu")), student.vocabulary).candidates(rows, 16)
    ids = [ids_TC for ids_TC, *_ in ours]
    gaps = {}
    for dtype in ("float32", "bfloat16"):
        body = VLLMBody(
            student, torch.device("cpu"), dtype=dtype, python=arguments.python, options=OPTIONS, max_length=1024
        )
        engine = Scorer(body)
        try:
            theirs = engine.candidates(rows, 16, given=ids)
        finally:
            engine.close()
        gap = np.concatenate([np.abs(one[1] - other[1]).ravel() for one, other in zip(theirs, ours, strict=True)])
        gaps[dtype] = {"mean": float(gap.mean()), "largest": float(gap.max()), "log-probs": gap.size}
    return gaps


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=os.environ.get("LWEAVE_VLLM_PYTHON"), help="of an environment with vLLM")
    parser.add_argument("--model", default=os.environ.get("LWEAVE_SMOLLM2"), help="a checkpoint directory")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8, help="of the transformers sampler")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.python or not arguments.model:
        print("engines: skipped. Name the Python of vLLM and a checkpoint: LWEAVE_VLLM_PYTHON, LWEAVE_SMOLLM2")
        return
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rates = against_bare(Path(folder), arguments) | refilled_or_not(Path(folder), arguments)
        gaps = score_gaps(Path(folder), arguments)
    for name, found in rates.items():
        print(f"{name:20} {statistics.median(found):8.1f} tokens/s  ({', '.join(f'{rate:.1f}' for rate in found)})")
    pairs = (("rollout", "rollout bare"), ("eval", "eval bare"), ("refilled", "batch after batch"))
    for one, other in pairs:
        ratios = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        print(f"{one} / {other}: {statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    for dtype, gap in gaps.items():
        print(f"vLLM {dtype} against transformers float32: mean {gap['mean']:.1e}, largest {gap['largest']:.1e} nats")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rates": rates, "gaps": gaps}, indent=2))


if __name__ == "__main__":
    main()
