"""Cases: read verdicts and lengths, choose, and only then read the texts that were chosen."""

from collections.abc import Collection, Iterator, Sequence

from lightning_weave.bench.definitions import Problem, load_benchmark
from lightning_weave.bench.samples import Sample, read_samples
from lightning_weave.config import Case
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report.cases import Outcome, Panel, Place, Shown, choose, excerpt, named_policies
from lightning_weave.report.page import CaseGroup
from lightning_weave.runs.steps import Steps


def check_cases(steps: Steps) -> None:
    """Refuse a case that names a policy or a benchmark which the recipe does not have."""
    for name, case in steps.recipe.report.cases.items():
        if unknown := [policy for policy in named_policies(case) if policy not in steps.policies]:
            known = ", ".join(steps.policies)
            raise InputError(f"report.cases.{name} names the policy {unknown[0]!r}; this recipe has {known}")
        if case.benchmark is not None and case.benchmark not in steps.recipe.eval.benchmarks:
            known = ", ".join(steps.recipe.eval.benchmarks)
            raise InputError(f"report.cases.{name}.benchmark = {case.benchmark!r}; this recipe evaluates on {known}")


def case_groups(steps: Steps, evaluated: Collection[str], progress: Progress) -> list[CaseGroup]:
    """Choose and read every case whose policies are all evaluated."""
    groups = []
    for name, case in steps.recipe.report.cases.items():
        if not set(named_policies(case)) <= set(evaluated):
            progress.say(f"report: report.cases.{name} waits for policies that are not evaluated yet")
            continue
        places = choose(case, outcomes(steps, case))
        if not places:
            progress.say(f"report: no sample meets report.cases.{name} ({rule(case)})")
        groups.append(CaseGroup(name, rule(case), _panels(steps, name, case, places)))
    return groups


def rule(case: Case) -> str:
    """Say in words what was looked for."""
    parts = [f"{policy} right" for policy in case.right] + [f"{policy} wrong" for policy in case.wrong]
    if case.shortest is not None:
        parts.append(f"{case.shortest} the shortest of them")
    where = f" on {case.benchmark}" if case.benchmark else ""
    return f"Rule: {', '.join(parts)}{where}; {case.count} drawn with seed {case.seed}."


def outcomes(steps: Steps, case: Case) -> Iterator[Outcome]:
    """Read what a choice may look at: ids, verdicts and lengths."""
    for policy in named_policies(case):
        for benchmark in steps.recipe.eval.benchmarks:
            for sample in _samples(steps, policy, benchmark):
                yield Outcome(policy, benchmark, sample.problem, sample.sample, sample.correct, sample.tokens)


def _samples(steps: Steps, policy: str, benchmark: str) -> Iterator[Sample]:
    return read_samples(steps.store.stage(steps.eval(policy, benchmark)).folder / "samples.jsonl")


def _panels(steps: Steps, name: str, case: Case, places: Sequence[Place]) -> list[Panel]:
    policies, panels = named_policies(case), []
    for benchmark_name, problem_id, number in places:
        benchmark = load_benchmark(benchmark_name, steps.recipe.eval.sources.get(benchmark_name))
        problem = next(one for one in benchmark.problems if one.id == problem_id)
        shown = tuple(
            _shown(policy, _find(steps, policy, (benchmark_name, problem_id, number)), case) for policy in policies
        )
        panels.append(Panel(name, benchmark.label, problem_id, number, problem.question, _reference(problem), shown))
    return panels


def _find(steps: Steps, policy: str, place: Place) -> Sample:
    benchmark, problem, number = place
    samples = _samples(steps, policy, benchmark)
    return next(sample for sample in samples if sample.problem == problem and sample.sample == number)


def _shown(policy: str, sample: Sample, case: Case) -> Shown:
    cut = excerpt(sample.text, sample.tokens, case.beginning, case.end)
    answer = None if sample.answer is None else excerpt(sample.answer, sample.tokens, 200, 1).beginning
    return Shown(policy, sample.correct, answer, sample.why, sample.tokens, cut)


def _reference(problem: Problem) -> str:
    return problem.answer if problem.answer is not None else "passes every test"
