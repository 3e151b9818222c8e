"""Cases: read verdicts and lengths, choose, and only then read the chosen texts."""

from collections.abc import Collection, Iterator, Sequence

from lightning_weave.bench.definitions import Problem, asked_benchmark
from lightning_weave.bench.samples import Sample, read_samples
from lightning_weave.config import Case, benchmark_folder
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.report.cases import Panel, Place, SampleOutcome, Shown, choose, excerpt, named_policies
from lightning_weave.report.page import CaseGroup
from lightning_weave.runs.steps import Steps

GONE = "The file of this benchmark's problems is not here any more."


def check_cases(steps: Steps) -> None:
    """Refuse cases that name a policy or a benchmark that the recipe does not have."""
    for name, case in steps.recipe.report.cases.items():
        if unknown := [policy for policy in named_policies(case) if policy not in steps.policies]:
            names = ", ".join(steps.policies)
            raise InputError(f"report.cases.{name} names the policy {unknown[0]!r}; this recipe has {names}")
        if case.benchmark is not None and case.benchmark not in steps.recipe.eval.benchmarks:
            names = ", ".join(steps.recipe.eval.benchmarks)
            raise InputError(f"report.cases.{name}.benchmark = {case.benchmark!r}; this recipe evaluates on {names}")


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
        choices = [(name, place, named_policies(case)) for place in places]
        groups.append(CaseGroup(name, rule(case), read_panels(steps, choices, case.beginning, case.end)))
    return groups


def rule(case: Case) -> str:
    """Describe the rule of a case."""
    parts = [f"{policy} right" for policy in case.right] + [f"{policy} wrong" for policy in case.wrong]
    if case.shortest is not None:
        parts.append(f"{case.shortest} the shortest of them")
    where = f" on {case.benchmark}" if case.benchmark else ""
    return f"Rule: {', '.join(parts)}{where}; {case.count} drawn with seed {case.seed}."


def outcomes(steps: Steps, case: Case) -> Iterator[SampleOutcome]:
    """Read what the choice of a case may depend on: ids, verdicts and lengths."""
    for policy in named_policies(case):
        yield from read_outcomes(steps, policy)


def read_outcomes(steps: Steps, policy: str) -> list[SampleOutcome]:
    """Read the ids, verdicts and lengths of everything that a policy answered."""
    return [
        SampleOutcome(policy, benchmark, sample.problem, sample.sample, correct=sample.correct, tokens=sample.tokens)
        for benchmark in steps.recipe.eval.benchmarks
        for sample in _samples(steps, policy, benchmark)
    ]


def read_panels(
    steps: Steps, wanted: Sequence[tuple[str, Place, Sequence[str]]], beginning: int, end: int
) -> list[Panel]:
    """Read what policies wrote at the chosen places, each a title, a place and policies; a file is read once."""
    places: dict[tuple[str, str], set[Place]] = {}  # policy and benchmark -> places
    for _, place, policies in wanted:
        for policy in policies:
            places.setdefault((policy, place[0]), set()).add(place)
    texts = {
        (policy, benchmark, sample.problem, sample.sample): _shown(policy, sample, beginning, end)
        for (policy, benchmark), some in places.items()
        for sample in _samples(steps, policy, benchmark)
        if (benchmark, sample.problem, sample.sample) in some
    }
    problems = {name: _problems(steps, name) for name in dict.fromkeys(place[0] for _, place, _ in wanted)}
    panels = []
    for title, place, policies in wanted:
        label, by_id = problems[place[0]]
        problem = by_id.get(place[1])
        shown = tuple(texts[(policy, *place)] for policy in policies)
        question = GONE if problem is None else problem.question
        answer = "" if problem is None else "passes every test" if problem.answer is None else problem.answer
        panels.append(Panel(title, label, place[1], place[2], question=question, reference=answer, shown=shown))
    return panels


def _samples(steps: Steps, policy: str, benchmark: str) -> Iterator[Sample]:
    return read_samples(steps.store.stage(steps.eval(policy, benchmark)).folder / "samples.jsonl")


def _problems(steps: Steps, name: str) -> tuple[str, dict[str, Problem]]:
    """Load a benchmark's label and problems; a report outlives the files of its questions."""
    try:
        benchmark = asked_benchmark(steps.recipe.eval, name)
    except WeaveError:
        return benchmark_folder(name), {}
    return benchmark.label, {problem.id: problem for problem in benchmark.problems}


def _shown(policy: str, sample: Sample, beginning: int, end: int) -> Shown:
    return Shown(
        policy=policy,
        correct=sample.correct,
        answer=None if sample.answer is None else sample.answer[:200],
        tokens=sample.tokens,
        excerpt=excerpt(sample.text, sample.tokens, beginning, end),
    )
