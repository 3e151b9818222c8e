"""Cases are chosen by verdicts, lengths and seed; what is printed is exact."""

import random
import re
from inspect import signature

import pytest
from pandas import DataFrame

from lightning_weave.bench.samples import Sample
from lightning_weave.config import Case, check_recipe
from lightning_weave.errors import InputError
from lightning_weave.report import cases
from lightning_weave.report.cases import (
    OUTCOME,
    Panel,
    choose,
    excerpt,
    latex_panels,
    latex_text,
    named_policies,
)

CASE = Case(wrong=["brief"], right=["acc", "both"], shortest="both", count=3)


def outcomes(seed: int = 1) -> DataFrame:
    draw = random.Random(seed)
    rows = [
        (policy, bench, f"p{problem}", sample, draw.random() < 0.6, draw.randrange(50, 90))
        for policy in ("acc", "brief", "both", "base")
        for bench in ("one", "two")
        for problem in range(12)
        for sample in range(4)
    ]
    return DataFrame(rows, columns=OUTCOME)


def test_a_choice_sees_no_text() -> None:
    assert set(OUTCOME) == {"policy", "benchmark", "problem", "sample", "correct", "tokens"}
    assert list(signature(choose).parameters) == ["case", "outcomes"]


def test_chosen_places_meet_the_rule_and_no_fitting_place_was_passed_over() -> None:
    known = {(one.policy, one.benchmark, one.problem, one.sample): one for one in outcomes().itertuples()}
    places = {key[1:] for key in known}

    def fits(place: tuple) -> bool:
        acc, brief, both = (known[policy, *place] for policy in ("acc", "brief", "both"))
        return acc.correct and both.correct and not brief.correct and both.tokens <= min(acc.tokens, brief.tokens)

    fitting = {place for place in places if fits(place)}
    chosen = choose(CASE, outcomes())
    assert len(chosen) == 3
    assert set(chosen) <= fitting
    everything = choose(CASE.model_copy(update={"count": 10_000}), outcomes())
    assert {place[:2] for place in everything} == {place[:2] for place in fitting}
    assert len({place[:2] for place in everything}) == len(everything)  # one sample of a problem


def test_same_seed_same_cases_in_whatever_order_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(CASE, outcomes().sample(frac=1, random_state=9)) == choose(CASE, outcomes())
    others = []
    for seed in range(5):
        monkeypatch.setattr(cases, "SEED", seed)
        others.append(choose(CASE, outcomes()))
    assert len({tuple(other) for other in others}) > 1


def test_a_policy_that_is_not_named_changes_nothing() -> None:
    others = outcomes()
    others["correct"] ^= others["policy"] == "base"
    assert choose(CASE, others) == choose(CASE, outcomes())


def test_only_the_benchmark_that_was_asked_for() -> None:
    places = choose(CASE.model_copy(update={"benchmark": "two", "count": 99}), outcomes())
    assert places
    assert {place[0] for place in places} == {"two"}


def test_a_place_that_one_policy_never_sampled_is_no_case() -> None:
    partial = outcomes().query("not (policy == 'acc' and benchmark == 'one')")
    assert {place[0] for place in choose(CASE.model_copy(update={"count": 99}), partial)} == {"two"}


def test_the_shortest_is_printed_last() -> None:
    assert named_policies(CASE) == ["acc", "brief", "both"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({}, "needs a policy that must be wrong or right"),
        ({"right": ["a"], "wrong": ["a"]}, "names 'a' twice"),
        ({"right": ["a"], "shortest": "b"}, "must also be named"),
        ({"right": ["a"], "count": 0}, "report.cases.x.count = 0"),
    ],
)
def test_wrong_cases_are_refused(case: dict, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        check_recipe({"name": "r", "student": {"model": "m"}, "report": {"cases": {"x": case}}})


@pytest.mark.parametrize("length", [0, 9, 10, 11, 500])
def test_beginning_and_end_are_exact(length: int) -> None:
    text = "".join(chr(33 + n % 90) for n in range(length))
    note = "[middle omitted; full response: 29,849 tokens]"
    sample = Sample("I-5", 22, 1, 29849, "stop", text, "7", True, "equal")
    assert excerpt(sample, 5) == ((text, "", "") if length <= 10 else (text[:5], note, text[-5:]))


def unescape(latex: str) -> str:
    """What LaTeX would print, for the commands that escaping uses."""
    names = {"textbackslash": "\\", "textasciitilde": "~", "textasciicircum": "^", "textless": "<", "textgreater": ">"}
    latex = latex.replace("\\mbox{}", "").replace("\\newline\n", "\n").replace("\\ ", " ")
    latex = re.sub(r"\\(text\w+)\{\}", lambda hit: chr(0xE000 + list(names).index(hit[1])), latex)
    latex = re.sub(r"(?<!\\)\{\}", "", latex)
    latex = re.sub(r"\\([&%$#_{}])", r"\1", latex)
    return "".join(list(names.values())[ord(c) - 0xE000] if 0xE000 <= ord(c) < 0xE005 else c for c in latex)


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        " two  spaces ",
        "a\n\n  b\n",
        r"\end{minipage} $x_1^2$ 50% {}",
        "-- --- ``q'' ?` <<>> ~#&",
        "x" * 50,
        "",
    ],
)
def test_latex_prints_the_text_as_it_is(text: str) -> None:
    written = latex_text(text)
    assert unescape(written) == text
    assert not re.search(r"--|''|``|\?`|<<", written)  # a ligature would print something else


def test_a_panel_in_latex_balances_and_says_everything() -> None:
    long = "I begin }" + "." * 900 + "{ \\boxed{7}"
    shown = {
        "acc-only": Sample("I-5", 22, 1, 29849, "stop", long, "7", True, "equal"),
        "brief_only": Sample("I-5", 22, 1, 12, "stop", "short \\end{minipage}", None, False, "no answer"),
    }
    latex = latex_panels([Panel("a_case", "AIME 2024", "I-5", 22, "Find $x$ & y.", "104", shown)])
    bare = re.sub(r"\\[{}]", "", latex)
    assert bare.count("{") == bare.count("}")
    assert latex.count(r"\begin{minipage}") == latex.count(r"\end{minipage}") == 1
    for words in (
        "AIME 2024",
        "sample 22",
        "Reference: 104",
        "Correct: 7",
        r"Incorrect: \emph{no answer}",
        "29,849 tokens",
        "[middle omitted; full response: 29,849 tokens]",
        r"brief\_only",
        r"Find \$x\$ \& y.",
    ):
        assert words in latex  # fmt: skip
