"""Cases: read verdicts and lengths, choose, and only then read the chosen texts."""

from collections.abc import Collection, Iterator

from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.samples import Sample, read_samples
from lightning_weave.config import Case
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.cases import Panel, Place, SampleOutcome, Shown, choose, excerpt, named_policies
from lightning_weave.report.page import CaseGroup
from lightning_weave.runs.steps import Steps


def check_cases(steps: Steps) -> None:
    """Refuse cases that name a policy or a benchmark that the recipe does not have."""
    for name, case in steps.recipe.report.cases.items():
        if unknown := [policy for policy in named_policies(case) if policy not in steps.policies]:
            known = ", ".join(steps.policies)
            raise InputError(f"report.cases.{name} names the policy {unknown[0]!r}; this recipe has {known}")
        if case.benchmark is not None and case.benchmark not in steps.recipe.eval.benchmarks:
            known = ", ".join(steps.recipe.eval.benchmarks)
            raise InputError(f"report.cases.{name}.benchmark = {case.benchmark!r}; this recipe evaluates on {known}")


def case_groups(steps: Steps, evaluated: Collection[str], progress: Progress) -> list[CaseGroup]:
    """Choose and read the samples of every case whose policies have all been evaluated."""
    groups = []
    for name, case in steps.recipe.report.cases.items():
        if not set(named_policies(case)) <= set(evaluated):
            progress.say(f"report: report.cases.{name} needs policies that have not been evaluated yet")
            continue
        places = choose(case, outcomes(steps, case))
        if not places:
            progress.say(f"report: no sample meets report.cases.{name} ({rule(case)})")
        groups.append(CaseGroup(name, rule(case), [_panel(steps, name, case, place) for place in places]))
    return groups


def rule(case: Case) -> str:
    """Describe the rule of a case."""
    parts = [f"{policy} right" for policy in case.right] + [f"{policy} wrong" for policy in case.wrong]
    if case.shortest is not None:
        parts.append(f"{case.shortest} the shortest of them")
    where = f" on {case.benchmark}" if case.benchmark else ""
    return f"Rule: {', '.join(parts)}{where}; {case.count} drawn with seed {case.seed}."


def outcomes(steps: Steps, case: Case) -> Iterator[SampleOutcome]:
    """Read what a choice may depend on: ids, verdicts and lengths."""
    for policy in named_policies(case):
        for benchmark in steps.recipe.eval.benchmarks:
            for sample in _samples(steps, policy, benchmark):
                yield SampleOutcome(
                    policy, benchmark, sample.problem, sample.sample, correct=sample.correct, tokens=sample.tokens
                )


def _samples(steps: Steps, policy: str, benchmark: str) -> Iterator[Sample]:
    return read_samples(steps.store.stage(steps.eval(policy, benchmark)).folder / "samples.jsonl")


def _panel(steps: Steps, name: str, case: Case, place: Place) -> Panel:
    benchmark_name, problem_id, number = place
    benchmark = load_benchmark(benchmark_name, steps.recipe.eval.sources.get(benchmark_name))
    problem = next(problem for problem in benchmark.problems if problem.id == problem_id)
    return Panel(
        case=name,
        benchmark=benchmark.label,
        problem=problem_id,
        sample=number,
        question=problem.question,
        reference="passes every test" if problem.answer is None else problem.answer,
        shown=tuple(_shown(steps, policy, place, case) for policy in named_policies(case)),
    )


def _shown(steps: Steps, policy: str, place: Place, case: Case) -> Shown:
    samples = _samples(steps, policy, place[0])
    sample = next(sample for sample in samples if (sample.problem, sample.sample) == place[1:])
    return Shown(
        policy=policy,
        correct=sample.correct,
        answer=None if sample.answer is None else sample.answer[:200],
        tokens=sample.tokens,
        excerpt=excerpt(sample.text, sample.tokens, case.beginning, case.end),
    )
