import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lightning_weave.bench.definitions import Benchmark, Problem, ids_digest
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.summary import Summary, combine, read_summary, summarise, write_summary
from lightning_weave.errors import InputError, Mismatch
from lightning_weave.maths.metrics import mean_aes

SETTINGS = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 100, "samples": 4, "grading": "paper", "seed": 1}


def benchmark(name: str = "own", n: int = 6) -> Benchmark:
    problems = tuple(Problem(f"p{k}", f"question {k}", str(k)) for k in range(n))
    return Benchmark(name, name.upper(), "math", problems, 4, 100)


def draw(bench: Benchmark, seed: int, rate: float, count: int = 4) -> list[Sample]:
    rng = np.random.default_rng(seed)
    samples = []
    for problem in bench.problems:
        for number in range(count):
            tokens = int(rng.integers(5, 101))
            correct = bool(rng.random() < rate)
            answer = problem.answer if correct else rng.choice([None, "x"])
            finish = "length" if tokens == 100 else "stop"
            cuts = {50: 25} if tokens > 50 else {}
            samples.append(Sample(problem.id, number, 1, tokens, finish, "a" * tokens, answer, correct, "", cuts))
    return samples


def first_of_25(cut: list[tuple[Sample, str]]) -> list[bool]:
    return [len(text) == 25 and sample.sample == 0 for sample, text in cut]


def test_a_summary_states_every_number():
    bench = benchmark()
    samples = draw(bench, 0, 0.4)
    samples[3:5] = [replace(sample, official="open(0)") for sample in samples[3:5]]
    summary = summarise(bench, samples, SETTINGS, [50, 100], first_of_25)
    assert summary.official_differs == 2
    assert summary.samples == 4
    assert summary.accuracy == pytest.approx(100 * sum(s.correct for s in samples) / 24)
    assert summary.tokens == pytest.approx(sum(s.tokens for s in samples) / 24)
    assert summary.truncated == pytest.approx(sum(s.finish == "length" for s in samples) / 24)
    assert summary.no_answer == pytest.approx(sum(s.answer is None for s in samples) / 24)
    by_problem = [[s for s in samples if s.problem == problem.id] for problem in bench.problems]
    rates = [100 * sum(s.correct for s in own) / 4 for own in by_problem]
    assert summary.problem_accuracy == pytest.approx(rates)
    assert summary.accuracy_error == pytest.approx(np.std(rates, ddof=1) / math.sqrt(6))
    assert list(summary.pass_at) == [1, 2, 4]
    assert summary.pass_at[1] == pytest.approx(summary.accuracy)
    assert summary.pass_at[4] == pytest.approx(100 * np.mean([rate > 0 for rate in rates]))
    kept = [s.correct if s.tokens <= 50 else s.sample == 0 for s in samples]
    assert [point.accuracy for point in summary.budgets] == pytest.approx([100 * np.mean(kept), summary.accuracy])
    assert summary.ids == ids_digest(bench.problems)


def test_summary_json_round_trips_and_is_json(tmp_path):
    path = tmp_path / "summary.json"
    summary = summarise(benchmark(), draw(benchmark(), 0, 0.4), SETTINGS, [50], lambda cut: [True] * len(cut))
    write_summary(path, summary)
    assert read_summary(path) == summary
    old = {key: value for key, value in json.loads(path.read_text()).items() if key != "official_differs"}
    path.write_text(json.dumps(old))
    assert read_summary(path) == summary
    lonely = summarise(benchmark(n=1), draw(benchmark(n=1), 0, 0.4), SETTINGS)  # one problem has no standard error
    write_summary(path, lonely)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["accuracy_error"] is None
    assert math.isnan(read_summary(path).accuracy_error)
    path.write_text('{"accuracy": 1}')
    with pytest.raises(InputError, match=r"not a summary of this version .*Re-run eval"):
        read_summary(path)


def test_samples_of_other_problems_are_refused():
    samples = draw(benchmark(), 0, 0.5)
    with pytest.raises(Mismatch, match="not of its 6 problems"):
        summarise(
            benchmark(), [replace(sample, problem="q") if sample.problem == "p0" else sample for sample in samples], {}
        )
    with pytest.raises(Mismatch, match="not of its 6 problems"):
        summarise(benchmark(), samples[4:], {})
    with pytest.raises(Mismatch, match="3 of 4 samples"):
        summarise(benchmark(), samples[1:], {})


def pair(name: str, n: int) -> tuple[Summary, Summary]:
    bench = benchmark(name, n)
    return tuple(summarise(bench, draw(bench, seed, rate), SETTINGS) for seed, rate in ((1, 0.6), (2, 0.5)))


def test_averages_are_unweighted_over_benchmarks():
    (one, base_one), (two, base_two) = pair("one", 5), pair("two", 20)
    got = combine([one, two], [base_two, base_one], resamples=200)  # the base in any order
    assert got.accuracy == pytest.approx((one.accuracy + two.accuracy) / 2)
    assert got.tokens == pytest.approx((one.tokens + two.tokens) / 2)
    assert got.accuracy_error == pytest.approx(math.sqrt(one.accuracy_error**2 + two.accuracy_error**2) / 2)
    points = [[(s.accuracy, s.tokens) for s in side] for side in ((one, two), (base_one, base_two))]
    assert got.comparison.average.aes.estimate == pytest.approx(mean_aes(*points))
    assert combine([one]).comparison is None


def test_a_comparison_needs_the_same_protocol():
    one, base = pair("one", 5)
    with pytest.raises(InputError, match="not evaluated on one"):
        combine([one], [])
    shorter = replace(base, settings={**SETTINGS, "max_tokens": 50})
    with pytest.raises(InputError, match=r"one: .* max_tokens = 100 \(base: 50\)"):
        combine([one], [shorter])
    with pytest.raises(InputError, match=r"one: .* another content of the benchmark"):
        combine([one], [pair("one", 6)[1]])
    combine([one], [replace(base, settings={**SETTINGS, "seed": 9})], resamples=10)
    with pytest.raises(InputError, match="Run eval"):
        combine([])
