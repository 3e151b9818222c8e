import json
import math
import statistics
from dataclasses import replace

import numpy as np
import pytest

from lightning_weave.bench.definitions import Benchmark, Problem, ids_digest
from lightning_weave.bench.samples import Sample
from lightning_weave.bench.summary import (
    Metric,
    Summary,
    TaskResult,
    combine,
    difference,
    half_interval,
    pool,
    pool_task,
    read_summary,
    summarise,
    write_summary,
)
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


def test_a_policy_of_several_seeds_is_their_mean_and_its_error_has_both_kinds_of_chance(tmp_path):
    bench = benchmark()
    seeds = [summarise(bench, draw(bench, 5 + seed, 0.5), SETTINGS, [50], first_of_25) for seed in range(3)]
    pooled = pool(seeds)
    for key in ("accuracy", "tokens", "truncated", "no_answer"):
        assert getattr(pooled, key) == pytest.approx(statistics.mean(getattr(one, key) for one in seeds))
    by_problem = [statistics.mean(some) for some in zip(*(one.problem_accuracy for one in seeds), strict=True)]
    assert pooled.problem_accuracy == pytest.approx(by_problem)
    assert pooled.budgets[0].accuracy == pytest.approx(statistics.mean(one.budgets[0].accuracy for one in seeds))
    assert pooled.budgets[0].budget == 50
    assert pooled.pass_at[4] == pytest.approx(statistics.mean(one.pass_at[4] for one in seeds))
    problems = statistics.stdev(by_problem) / math.sqrt(6)
    between = statistics.stdev(one.accuracy for one in seeds) / math.sqrt(3)
    assert pooled.accuracy_error == pytest.approx(math.hypot(problems, between))
    half = math.hypot(1.96 * problems, 4.3027 * between)  # t of two degrees of freedom
    assert half_interval([pooled], "accuracy") == pytest.approx(half, rel=1e-4)
    assert half_interval(seeds[:1], "accuracy") == pytest.approx(1.96 * seeds[0].accuracy_error)
    assert combine([pooled]).accuracy_error == pytest.approx(pooled.accuracy_error)
    base = summarise(bench, draw(bench, 9, 0.3), SETTINGS)
    found, narrow = (combine([one], [base]).comparison for one in (pooled, replace(pooled, seeds=())))
    assert found.average.accuracy.estimate == narrow.average.accuracy.estimate
    assert found.average.accuracy.low < narrow.average.accuracy.low
    assert pool(seeds[:1]) is seeds[0]
    write_summary(tmp_path / "summary.json", seeds[0])
    assert "seeds" not in json.loads((tmp_path / "summary.json").read_text())


def test_a_task_of_another_harness_is_averaged_over_seeds_question_by_question():
    def task(*values):
        own = {f"q{place}": value for place, value in enumerate(values)}
        return TaskResult("sums", "lm-eval 1", [Metric("acc,none", sum(values) / 4, 0.2, False, own)])

    pooled = pool_task([task(1.0, 1.0, 0.0, 0.0), task(1.0, 0.0, 0.0, 0.0), task(1.0, 1.0, 1.0, 0.0)]).metrics[0]
    assert pooled.value == pytest.approx(0.5)
    assert list(pooled.values.values()) == pytest.approx([1.0, 2 / 3, 1 / 3, 0.0])
    between = 0.25 / math.sqrt(3)
    problems = statistics.stdev(pooled.values.values()) / 2
    assert pooled.error == pytest.approx(math.hypot(problems, between))
    base = task(0.0, 1.0, 0.0, 0.0).metrics[0]
    paired = statistics.stdev([1.0, -1 / 3, 1 / 3, 0.0]) / 2
    assert difference(pooled, base) == pytest.approx((0.25, math.hypot(paired, between)))
