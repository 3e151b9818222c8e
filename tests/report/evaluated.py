"""Evaluations that look like real ones, without a model: samples, verdicts and lengths drawn by seed."""

import math
import random
from collections.abc import Mapping
from typing import Any

import pandas as pd

from lightning_weave.bench.definitions import Benchmark, load_benchmark
from lightning_weave.bench.samples import Sample, to_line
from lightning_weave.bench.summary import summarise, write_summary
from lightning_weave.report.tables import AVERAGE
from lightning_weave.run import Run
from lightning_weave.store import write_atomic

HOSTILE = '<script>window.pwned=1</script></textarea><img src=x onerror="window.pwned=2">'
SETTINGS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 900, "grading": "paper"}
BUDGETS = (100, 200, 300)


def write_evaluations(run: Run, policies: Mapping[str, tuple[float, float]], samples: int = 6) -> None:
    """Finish the evaluation of each policy with about this accuracy (0 to 1) and these tokens."""
    for policy, (accuracy, tokens) in policies.items():
        for name in run.recipe.eval.benchmarks:
            stage, benchmark = run.stage("eval", policy, name), load_benchmark(name)
            drawn = draw_samples(benchmark, policy, accuracy, tokens, samples)
            stage.folder.mkdir(parents=True, exist_ok=True)
            paths = [stage.folder / "samples.jsonl", stage.folder / "summary.json"]
            write_atomic(paths[0], "".join(map(to_line, drawn)).encode())

            def cut_is_wrong(cut: list) -> list[bool]:
                return [False] * len(cut)

            settings = {**SETTINGS, **{key: stage.settings[key] for key in SETTINGS if key in stage.settings}}
            write_summary(paths[1], summarise(benchmark, drawn, settings, BUDGETS, cut_is_wrong))
            stage.record(paths)


def draw_samples(benchmark: Benchmark, policy: str, accuracy: float, tokens: float, samples: int) -> list[Sample]:
    draw = random.Random(policy + benchmark.slug)  # not the file's path, which differs from run to run
    found = []
    for problem in benchmark.problems:
        for number in range(samples):
            correct, length = draw.random() < accuracy, max(8, int(draw.gauss(tokens, tokens / 4)))
            answer = str(problem.answer) if correct else "wrong"
            run = " ".join(f"step {n}: carry {draw.randrange(10)}" for n in range(length // 4))
            text = f"{HOSTILE} {policy} thinks about {problem.question}\n{run}\nso \\boxed{{{answer}}}"
            cuts = {budget: min(len(text), 5 * budget) for budget in BUDGETS if budget < length}
            why = "equal" if correct else "different"
            found.append(Sample(problem.id, number, 42, length, "stop", text, answer, correct, why, cuts))
    return found


def result_row(policy: str, scores: Mapping[str, tuple], average: tuple, **more: Any) -> dict[str, Any]:
    """One row of a table of results: (accuracy, tokens, problems, samples) by benchmark, and averages with AES."""
    return {"policy": policy, "scores": scores, "average": average, "group": "", **more}


def results_of(*rows: dict[str, Any]) -> pd.DataFrame:
    """A table of results with these numbers; what is not given was not measured."""
    lines = []
    for row in rows:
        line = {("", "older"): row.get("older", False)}
        for part, values in [*row["scores"].items(), (AVERAGE, row["average"])]:
            accuracy, tokens, *rest = values
            aes = rest if part == AVERAGE else []
            counts = [] if part == AVERAGE else rest
            filled = [
                accuracy,
                tokens,
                0.0,
                0.0,
                *(*aes, *[math.nan] * 3)[:3],
                *(*counts, *[math.nan] * 2)[:2],
                math.nan,
            ]
            names = ("accuracy", "tokens", "accuracy_error", "tokens_error", "aes", "aes_low", "aes_high")
            line |= {
                (part, key): value
                for key, value in zip((*names, "problems", "samples", "differs"), filled, strict=True)
            }
        lines.append(line)
    index = pd.MultiIndex.from_tuples([(row["group"], row["policy"]) for row in rows], names=["group", "policy"])
    table = pd.DataFrame(lines, index=index)
    return table.set_axis(pd.MultiIndex.from_tuples(table.columns), axis=1)


def point(
    name: str,
    kind: str,
    accuracy: float,
    tokens: float,
    accuracy_error: float = 0.0,
    tokens_error: float = 0.0,
    family: str = "",
    share: float = 0.0,
) -> dict[str, Any]:
    """One policy of a frontier."""
    return {**locals()}
