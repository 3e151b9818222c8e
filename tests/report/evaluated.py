"""Evaluations that look like real ones, without a model: samples, verdicts and lengths drawn by seed."""

import random
from collections.abc import Mapping

from lightning_weave.bench.definitions import Benchmark, load_benchmark
from lightning_weave.bench.samples import Sample, to_line
from lightning_weave.bench.summary import summarise, write_summary
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic

HOSTILE = '<script>window.pwned=1</script></textarea><img src=x onerror="window.pwned=2">'
SETTINGS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 900, "grading": "paper"}
BUDGETS = (100, 200, 300)


def write_evaluations(steps: Steps, policies: Mapping[str, tuple[float, float]], samples: int = 6) -> None:
    """Finish the evaluation of each policy with about this accuracy (0 to 1) and these tokens."""
    for policy, (accuracy, tokens) in policies.items():
        for name in steps.recipe.eval.benchmarks:
            stage, benchmark = steps.store.stage(steps.eval(policy, name)), load_benchmark(name)
            drawn = draw_samples(benchmark, policy, accuracy, tokens, samples)
            stage.folder.mkdir(parents=True, exist_ok=True)
            paths = [stage.folder / "samples.jsonl", stage.folder / "summary.json"]
            write_atomic(paths[0], "".join(map(to_line, drawn)).encode())

            def cut_is_wrong(cut: list) -> list[bool]:
                return [False] * len(cut)

            write_summary(paths[1], summarise(benchmark, drawn, SETTINGS, BUDGETS, cut_is_wrong))
            stage.record(paths)


def draw_samples(benchmark: Benchmark, policy: str, accuracy: float, tokens: float, samples: int) -> list[Sample]:
    draw = random.Random(policy + benchmark.slug)  # not the file's path, which differs from run to run
    found = []
    for problem in benchmark.problems:
        for number in range(samples):
            correct, length = draw.random() < accuracy, max(8, int(draw.gauss(tokens, tokens / 4)))
            answer = str(problem.answer) if correct else "wrong"
            steps = " ".join(f"step {n}: carry {draw.randrange(10)}" for n in range(length // 4))
            text = f"{HOSTILE} {policy} thinks about {problem.question}\n{steps}\nso \\boxed{{{answer}}}"
            cuts = {budget: min(len(text), 5 * budget) for budget in BUDGETS if budget < length}
            why = "equal" if correct else "different"
            found.append(Sample(problem.id, number, 42, length, "stop", text, answer, correct, why, cuts))
    return found
