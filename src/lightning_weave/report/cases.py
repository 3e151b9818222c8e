"""Responses side by side, chosen without reading them (appendix: Case Studies).

`choose` only sees ids, verdicts and lengths: a `SampleOutcome` has no text.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_weave.config import Case
from lightning_weave.report.grid import escape_latex

Place = tuple[str, str, int]  # benchmark, problem id, sample


@dataclass(frozen=True)
class SampleOutcome:
    """What a choice may depend on."""

    policy: str
    benchmark: str
    problem: str
    sample: int
    correct: bool
    tokens: int


@dataclass(frozen=True)
class Excerpt:
    """A response as printed: in full, or its exact beginning and end."""

    beginning: str
    end: str | None  # None: nothing is omitted
    tokens: int

    @property
    def omission(self) -> str:
        return f"[middle omitted; full response: {self.tokens:,} tokens]"


@dataclass(frozen=True)
class Shown:
    """One policy's response in a panel."""

    policy: str
    correct: bool
    answer: str | None
    tokens: int
    excerpt: Excerpt


@dataclass(frozen=True)
class Panel:
    """One problem with the responses of the named policies."""

    case: str
    benchmark: str
    problem: str
    sample: int
    question: str
    reference: str
    shown: tuple[Shown, ...]


def named_policies(case: Case) -> list[str]:
    """The policies of a panel, the shortest last as in the paper."""
    names = [*case.right, *case.wrong]
    return [name for name in names if name != case.shortest] + ([case.shortest] if case.shortest else [])


def choose(case: Case, outcomes: Iterable[SampleOutcome]) -> list[Place]:
    """Choose places that meet the criteria, by seed. The order of the outcomes does not matter."""
    by_place: dict[Place, dict[str, SampleOutcome]] = defaultdict(dict)
    named = set(named_policies(case))
    for outcome in outcomes:
        if outcome.policy in named and case.benchmark in (None, outcome.benchmark):
            by_place[outcome.benchmark, outcome.problem, outcome.sample][outcome.policy] = outcome
    fitting = [place for place, by_policy in by_place.items() if by_policy.keys() == named and _meets(case, by_policy)]
    chosen: list[Place] = []
    for place in sorted(fitting, key=lambda place: random_key(case.seed, place)):
        if place[:2] not in {other[:2] for other in chosen}:  # one sample of a problem is enough
            chosen.append(place)
    return chosen[: case.count]


def _meets(case: Case, by_policy: Mapping[str, SampleOutcome]) -> bool:
    right = {policy for policy, outcome in by_policy.items() if outcome.correct}
    if not right.issuperset(case.right) or not right.isdisjoint(case.wrong):
        return False
    shortest = min(outcome.tokens for outcome in by_policy.values())
    return case.shortest is None or by_policy[case.shortest].tokens == shortest


def random_key(seed: int, place: Place) -> bytes:
    """A random number that only depends on the seed and the place."""
    benchmark, problem, sample = place
    return hashlib.sha256(f"({seed}, {benchmark!r}, {problem!r}, {sample})".encode()).digest()


def excerpt(text: str, tokens: int, beginning: int, end: int) -> Excerpt:
    """Keep the exact beginning and end of a response."""
    if len(text) <= beginning + end:
        return Excerpt(text, None, tokens)
    return Excerpt(text[:beginning], text[-end:], tokens)


def latex_panels(panels: Sequence[Panel]) -> str:
    """Write panels as LaTeX; they only need the xcolor package."""
    return "\n".join(_latex_panel(panel) for panel in panels)


def _latex_panel(panel: Panel) -> str:
    lines = [
        r"\noindent\fbox{\begin{minipage}{0.965\linewidth}\footnotesize\raggedright",
        rf"\textbf{{{escape_latex(panel.case)}}}\hfill\textbf{{{escape_latex(panel.benchmark)}, "
        rf"{escape_latex(panel.problem)}, sample {panel.sample}}}\par\smallskip",
        rf"\textbf{{Question.}} {latex_text(panel.question)}\hfill\textbf{{Reference: {latex_text(panel.reference)}}}"
        r"\par\smallskip",
    ]
    for shown in panel.shown:
        word, colour = ("Correct", "green!40!black") if shown.correct else ("Incorrect", "red!70!black")
        answer = latex_text(shown.answer) if shown.answer is not None else r"\emph{no answer}"
        lines += [
            rf"\textbf{{{escape_latex(shown.policy)}}}\hfill\textcolor{{{colour}}}{{\textbf{{{word}: {answer}}}}}"
            rf"\hspace{{0.6em}}\textbf{{{shown.tokens:,} tokens}}\par",
            rf"{{\ttfamily {latex_text(shown.excerpt.beginning)}\par}}",
        ]
        if shown.excerpt.end is not None:
            omission = escape_latex(shown.excerpt.omission)
            lines.append(rf"\hfill\textcolor{{black!55}}{{\emph{{{omission}}}}}\par")
            lines.append(rf"{{\ttfamily {latex_text(shown.excerpt.end)}\par}}")
        lines.append(r"\smallskip")
    return "\n".join([*lines, r"\end{minipage}}", r"\par\medskip"]) + "\n"


def latex_text(text: str) -> str:
    r"""Escape text for LaTeX, preserving line breaks and runs of spaces and breaking up ligatures.

    >>> latex_text("a  b\n\nx -- $y$")
    'a\\ \\ b\\newline\n\\mbox{}\\newline\nx -{}- \\$y\\$'
    """
    lines = []
    for line in text.split("\n"):
        parts = re.split(r"( {2,}|^ | $)", line)
        latex = "".join(r"\ " * len(part) if part.strip() == "" else escape_latex_part(part) for part in parts)
        lines.append(latex or r"\mbox{}")
    return "\\newline\n".join(lines)


def escape_latex_part(text: str) -> str:
    """Escape a part of a line, preserving its spaces and breaking up ligatures."""
    escaped = " ".join(escape_latex(word) for word in text.split(" "))
    return re.sub(r"(?<=([-'`,<>!?]))(?=[-'`,<>])", "{}", escaped)
