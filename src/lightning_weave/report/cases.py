"""Responses of several policies to the same problem, chosen without reading them (appendix: Case Studies).

`choose` and `choose_examples` only see ids, verdicts and lengths (`OUTCOME`), no text.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from pandas import DataFrame

from lightning_weave.bench.definitions import Problem, load_eval_benchmark
from lightning_weave.bench.samples import Sample, read_samples
from lightning_weave.config import Case, benchmark_folder
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import Progress
from lightning_weave.report.tables import escape_latex
from lightning_weave.run import Run

SEED = 7  # of every choice of responses
Place = tuple[str, str, int]  # benchmark, problem id, sample
PLACE = ["benchmark", "problem", "sample"]
OUTCOME = ["policy", *PLACE, "correct", "tokens"]
UNAVAILABLE = "The file with the problems of this benchmark is no longer available."
RULE = (
    "Better: right where the base is wrong, or if there is none, both right with fewer tokens. Worse: wrong where the "
    "base is right, or both right with more tokens. Typical: of the most common pair of verdicts, the response whose "
    f"length relative to the base's is the median. Better and worse are drawn with seed {SEED}, not by their text."
)
LENGTH = 400  # characters before and after an omission


@dataclass(frozen=True)
class Panel:
    """One problem with the responses of the named policies."""

    case: str
    benchmark: str
    problem: str
    sample: int
    question: str
    reference: str
    shown: Mapping[str, Sample]  # by policy


@dataclass(frozen=True)
class CaseGroup:
    """A rule for choosing samples, and the panels that it chose."""

    name: str
    rule: str
    panels: Sequence[Panel]


def check_cases(run: Run) -> None:
    """Refuse cases that name a policy or a benchmark that the recipe does not have."""
    for name, case in run.recipe.report.cases.items():
        if unknown := [policy for policy in named_policies(case) if policy not in run.policies]:
            names = ", ".join(run.policies)
            raise InputError(f"report.cases.{name} names the policy {unknown[0]!r}; this recipe has {names}")
        if case.benchmark is not None and case.benchmark not in run.recipe.eval.benchmarks:
            names = ", ".join(run.recipe.eval.benchmarks)
            raise InputError(f"report.cases.{name}.benchmark = {case.benchmark!r}; this recipe evaluates on {names}")


def case_groups(run: Run, evaluated: Collection[str], progress: Progress) -> list[CaseGroup]:
    """Choose and read the samples of every case whose policies have all been evaluated."""
    groups = []
    for name, case in run.recipe.report.cases.items():
        policies = named_policies(case)
        if not set(policies) <= set(evaluated):
            progress.say(f"report: report.cases.{name} needs policies that have not been evaluated yet")
            continue
        words = [f"{policy} right" for policy in case.right] + [f"{policy} wrong" for policy in case.wrong]
        words += [f"{case.shortest} the shortest of them"] if case.shortest is not None else []
        where = f" on {case.benchmark}" if case.benchmark else ""
        rule = f"Rule: {', '.join(words)}{where}; {case.count} drawn with seed {SEED}."
        places = choose(case, pd.concat([read_outcomes(run, policy) for policy in policies]))
        if not places:
            progress.say(f"report: no sample meets report.cases.{name} ({rule})")
        groups.append(CaseGroup(name, rule, read_panels(run, [(name, place, policies) for place in places])))
    return groups


def example_groups(run: Run, evaluated: Sequence[str]) -> list[CaseGroup]:
    """Choose a better, a worse and a typical response of every policy, and only then read the chosen texts."""
    if "base" not in evaluated:
        return []
    base = read_outcomes(run, "base")
    chosen = {policy: choose_examples(base, read_outcomes(run, policy)) for policy in evaluated if policy != "base"}
    wanted = [(kind, place, ("base", policy)) for policy, places in chosen.items() for kind, place in places.items()]
    panels = iter(read_panels(run, wanted))
    return [CaseGroup(policy, RULE, [next(panels) for _ in places]) for policy, places in chosen.items() if places]


def named_policies(case: Case) -> list[str]:
    """The policies of a panel, the shortest last as in the paper."""
    names = [*case.right, *case.wrong]
    return [name for name in names if name != case.shortest] + ([case.shortest] if case.shortest else [])


def choose(case: Case, outcomes: DataFrame) -> list[Place]:
    """Choose places that meet the criteria, by seed. The order of the outcomes does not matter."""
    named = named_policies(case)
    known = outcomes[outcomes["policy"].isin(named)]
    if case.benchmark is not None:
        known = known[known["benchmark"] == case.benchmark]
    wide = known.pivot(index=PLACE, columns="policy", values=["correct", "tokens"]).reindex(
        columns=pd.MultiIndex.from_product([["correct", "tokens"], named])
    )
    wide = wide.dropna()  # places that every policy has
    correct, tokens = wide["correct"].astype(bool), wide["tokens"].astype(int)
    meets = correct[case.right].all(axis=1) & ~correct[case.wrong].any(axis=1)
    if case.shortest is not None:
        meets &= tokens[case.shortest] == tokens.min(axis=1)
    chosen: list[Place] = []
    for place in sorted(wide.index[meets], key=random_key):
        if place[:2] not in {other[:2] for other in chosen}:  # one sample of a problem is enough
            chosen.append(place)
    return chosen[: case.count]


def choose_examples(base: DataFrame, policy: DataFrame) -> dict[str, Place]:
    """Choose by the rule; each problem serves once. The order of the outcomes does not matter."""
    pairs = base.merge(policy, on=PLACE, suffixes=("_old", "_new")).set_index(PLACE).sort_index()
    old, new = pairs["correct_old"], pairs["correct_new"]
    longer = pairs["tokens_new"] - pairs["tokens_old"]
    rules = {
        "better": (new & ~old, new & old & (longer < 0)),
        "worse": (old & ~new, new & old & (longer > 0)),
    }
    chosen: dict[str, Place] = {}
    left = list(pairs.index)
    for kind, some in rules.items():
        fitting: list[Place] = []
        for rule in some:
            fitting = fitting or [place for place in left if rule[place]]
        if fitting:
            chosen[kind] = min(fitting, key=random_key)
            left = [place for place in left if place[:2] != chosen[kind][:2]]
    if left:  # the median length relative to the base's, among the most common pair of verdicts
        verdicts = Counter((old[place], new[place]) for place in left)
        common = max(verdicts, key=lambda verdict: (verdicts[verdict], verdict))
        ratios = (pairs["tokens_new"] / pairs["tokens_old"].clip(lower=1)).to_dict()
        same = [place for place in left if (old[place], new[place]) == common]
        order = sorted(same, key=lambda place: (ratios[place], random_key(place)))
        chosen["typical"] = order[(len(order) - 1) // 2]
    return chosen


def random_key(place: Place) -> bytes:
    """A random number that only depends on the seed and the place."""
    benchmark, problem, sample = place
    return hashlib.sha256(f"({SEED}, {benchmark!r}, {problem!r}, {sample})".encode()).digest()


def read_outcomes(run: Run, policy: str) -> DataFrame:
    """Read what a choice may depend on: the ids, verdicts and lengths of all answers of a policy."""
    rows = [
        (policy, benchmark, sample.problem, sample.sample, sample.correct, sample.tokens)
        for benchmark in run.recipe.eval.benchmarks
        for sample in read_samples(run.stage("eval", policy, benchmark).folder / "samples.jsonl")
    ]
    return DataFrame(rows, columns=OUTCOME)


def read_panels(run: Run, wanted: Sequence[tuple[str, Place, Sequence[str]]]) -> list[Panel]:
    """Read what policies wrote at the chosen places, each a title, a place and policies; a file is read once."""
    places: dict[tuple[str, str], set[Place]] = {}  # policy and benchmark -> places
    for _, place, policies in wanted:
        for policy in policies:
            places.setdefault((policy, place[0]), set()).add(place)
    texts = {}
    for (policy, benchmark), some in places.items():
        for sample in read_samples(run.stage("eval", policy, benchmark).folder / "samples.jsonl"):
            if (benchmark, sample.problem, sample.sample) in some:
                texts[policy, benchmark, sample.problem, sample.sample] = sample
    problems: dict[str, dict[str, Problem]] = {}
    labels = {}
    for name in dict.fromkeys(place[0] for _, place, _ in wanted):
        try:
            asked = load_eval_benchmark(run.recipe, name)
            labels[name], problems[name] = asked.label, {problem.id: problem for problem in asked.problems}
        except WeaveError:  # a report outlives the files with its questions
            labels[name], problems[name] = benchmark_folder(name), {}
    panels = []
    for title, place, policies in wanted:
        problem = problems[place[0]].get(place[1])
        responses = {policy: texts[(policy, *place)] for policy in policies}
        question = UNAVAILABLE if problem is None else problem.question
        answer = "" if problem is None else "passes every test" if problem.answer is None else problem.answer
        panels.append(Panel(title, labels[place[0]], place[1], place[2], question, answer, responses))
    return panels


def excerpt(sample: Sample, length: int = LENGTH) -> tuple[str, str, str]:
    """The exact beginning and end of a response with a note of the omission between, or all of it if it is short."""
    if len(sample.text) <= 2 * length:
        return sample.text, "", ""
    note = f"[middle omitted; full response: {sample.tokens:,} tokens]"
    return sample.text[:length], note, sample.text[-length:]


def latex_panels(panels: Sequence[Panel]) -> str:
    """Write panels as LaTeX; they only need the xcolor package."""
    texts = []
    for panel in panels:
        lines = [
            r"\noindent\fbox{\begin{minipage}{0.965\linewidth}\footnotesize\raggedright",
            rf"\textbf{{{escape_latex(panel.case)}}}\hfill\textbf{{{escape_latex(panel.benchmark)}, "
            rf"{escape_latex(panel.problem)}, sample {panel.sample}}}\par\smallskip",
            rf"\textbf{{Question.}} {latex_text(panel.question)}\hfill"
            rf"\textbf{{Reference: {latex_text(panel.reference)}}}\par\smallskip",
        ]
        for policy, shown in panel.shown.items():
            word, colour = ("Correct", "green!40!black") if shown.correct else ("Incorrect", "red!70!black")
            answer = latex_text(shown.answer[:200]) if shown.answer is not None else r"\emph{no answer}"
            beginning, omission, end = excerpt(shown)
            lines += [
                rf"\textbf{{{escape_latex(policy)}}}\hfill\textcolor{{{colour}}}{{\textbf{{{word}: {answer}}}}}"
                rf"\hspace{{0.6em}}\textbf{{{shown.tokens:,} tokens}}\par",
                rf"{{\ttfamily {latex_text(beginning)}\par}}",
            ]
            if omission:
                lines.append(rf"\hfill\textcolor{{black!55}}{{\emph{{{escape_latex(omission)}}}}}\par")
                lines.append(rf"{{\ttfamily {latex_text(end)}\par}}")
            lines.append(r"\smallskip")
        texts.append("\n".join([*lines, r"\end{minipage}}", r"\par\medskip"]) + "\n")
    return "\n".join(texts)


def latex_text(text: str) -> str:
    r"""Escape text for LaTeX, preserving line breaks and runs of spaces and breaking up ligatures.

    >>> latex_text("a  b\n\nx -- $y$")
    'a\\ \\ b\\newline\n\\mbox{}\\newline\nx -{}- \\$y\\$'
    """
    lines = []
    for line in text.split("\n"):
        parts = []
        for part in re.split(r"( {2,}|^ | $)", line):
            escaped = " ".join(escape_latex(word) for word in part.split(" "))
            escaped = re.sub(r"(?<=([-'`,<>!?]))(?=[-'`,<>])", "{}", escaped)
            parts.append(r"\ " * len(part) if part.strip() == "" else escaped)
        lines.append("".join(parts) or r"\mbox{}")
    return "\\newline\n".join(lines)
