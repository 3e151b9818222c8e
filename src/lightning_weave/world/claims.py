"""The paper's claims, tested on the demo's results: holds, does not hold, or within noise, with the figures.

Every problem's figures are averaged over the training seeds, then problems are resampled together for all policies. A
claim about a difference holds if its 95 % interval lies on the claimed side of zero, fails if it lies on the other
side, and is within noise otherwise. The difference in each training seed is given in brackets.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_weave.bench.statistics import Interval, ProblemMeans, compare, contrast
from lightning_weave.bench.summary import Summary
from lightning_weave.maths.metrics import pareto_front

ClaimVerdict = Literal["holds", "does not hold", "within noise", "not measured"]
Policies = Mapping[str, Sequence[ProblemMeans]]
CLOSE = 0.1  # AES: the largest difference that counts as close
RESAMPLES = 4000


@dataclass(frozen=True)
class Difference:
    """A claim that one policy is above (>), below (<) or close to (~) another in AES, accuracy or tokens."""

    claim: str
    quantity: str
    one: str
    relation: str
    two: str


def differences(statements: Mapping[str, str]) -> tuple[Difference, ...]:
    """Read claims, each with a statement such as `aes weave-50 > brevity-only`."""
    return tuple(Difference(claim, *statement.split()) for claim, statement in statements.items())


CLAIMS = differences(
    {
        "composition beats the accuracy anchor alone": "aes weave-50 > accuracy-only",
        "composition beats the brevity anchor alone": "aes weave-50 > brevity-only",
        "tilted beats naive, accuracy anchor": "aes accuracy-only > naive-accuracy",
        "tilted beats naive, brevity anchor": "aes brevity-only > naive-brevity",
        "tilted beats naive, composition": "aes weave-50 > naive-50",
        "with five times the updates, naive loses accuracy": "accuracy naive-50-long < naive-50",
        "with five times the updates, tilted stays the same": "aes weave-50-long ~ weave-50",
        "with five times the updates, tilted beats naive": "aes weave-50-long > naive-50-long",
        "tilted is close to online, accuracy anchor": "aes accuracy-only ~ online-accuracy",
        "tilted is close to online, brevity anchor": "aes brevity-only ~ online-brevity",
        "tilted is close to online, composition": "aes weave-50 ~ online-50",
        "tilted is close to online with the exact KL, composition": "aes weave-50 ~ online-50-exact",
        "composition beats the data mixture": "aes weave-50 > mixture-50",
        "composition beats accuracy, then brevity, at its own dose": "aes weave-50 > accuracy-then-brevity-matched",
        "composition beats brevity, then accuracy, at its own dose": "aes weave-50 > brevity-then-accuracy-matched",
        "composition beats accuracy, then brevity, at twice its dose": "aes weave-50 > accuracy-then-brevity",
        "composition beats brevity, then accuracy, at twice its dose": "aes weave-50 > brevity-then-accuracy",
        "twice the dose moves the composition up": "aes weave-50-alpha-1 > weave-50",
        "the last anchor of a sequence decides its length": "tokens accuracy-then-brevity < brevity-then-accuracy",
        "adding brevity to the two accuracy anchors shortens": "tokens all-three < accuracy-thorough",
        "adding a second accuracy anchor to the pair is more accurate": "accuracy all-three > weave-50",
        "adding accuracy to brevity and thoroughness is more accurate": "accuracy all-three > brevity-thorough",
        "composition is more accurate than the accuracy anchor": "accuracy weave-50 > accuracy-only",
    }
)
REFRESH_CLAIMS = differences(  # not the paper's: at its dose, at four times the dose (alpha 0.5), and for longer
    {
        "at the paper's dose, two parts are close to offline": "aes refresh-2 ~ offline",
        "at the paper's dose, four parts are close to offline": "aes refresh-4 ~ offline",
        "at the paper's dose, online is close to offline": "aes online-exact ~ offline",
        "at four times the dose, two parts beat offline": "aes strong-refresh-2 > strong",
        "at four times the dose, four parts beat offline": "aes strong-refresh-4 > strong",
        "at four times the dose, online beats offline": "aes strong-online-exact > strong",
        "at four times the dose, four parts are close to online": "aes strong-refresh-4 ~ strong-online-exact",
        "at four times the dose, offline drifts with five times the updates": "aes strong-long < strong",
        "with five times the updates as well, two parts beat offline": "aes strong-long-refresh-2 > strong-long",
        "with five times the updates as well, four parts beat offline": "aes strong-long-refresh-4 > strong-long",
    }
)
SWEEP = ("accuracy-only", "weave-25", "weave-37", "weave-50", "weave-62", "weave-75", "brevity-only")
SINGLES = ("accuracy-only", "brevity-only")
SETS = (*SINGLES, "thorough-only", "weave-50", "accuracy-thorough", "brevity-thorough")  # beside all three
SURVIVING = 0.938  # the smallest share of positions that the paper reports


@dataclass(frozen=True)
class ClaimFinding:
    """One claim on one world."""

    claim: str
    verdict: ClaimVerdict
    figures: str = ""


def pooled(runs: Sequence[Mapping[str, Sequence[Summary]]]) -> dict[str, list[ProblemMeans]]:
    """Average every problem's figures over training seeds, for the policies that all seeds have."""
    shared = [policy for policy in runs[0] if all(policy in run for run in runs)]
    return {
        policy: [_average([run[policy][k] for run in runs]) for k in range(len(runs[0][policy]))] for policy in shared
    }


def _average(summaries: Sequence[Summary]) -> ProblemMeans:
    first = summaries[0]
    assert all(summary.problems == first.problems for summary in summaries), "seeds share their problems"
    accuracy = np.mean([summary.problem_accuracy for summary in summaries], axis=0)
    tokens = np.mean([summary.problem_tokens for summary in summaries], axis=0)
    return ProblemMeans(first.benchmark, tuple(first.problems), accuracy, tokens)


def check(
    policies: Policies,
    seeds: Sequence[Policies] = (),
    evaluated: Sequence[Mapping[str, Sequence[Summary]]] = (),
    kept: Sequence[float] = (),
) -> list[ClaimFinding]:
    """Test every claim on one world. `policies` are means over training seeds; `seeds` are the single seeds.

    `evaluated` are the same as they were evaluated, for budgets; `kept` is the share of positions of `weave-50`.
    """
    return [
        *(check_difference(claim, policies, seeds) for claim in CLAIMS),
        _check_monotone(policies),
        _check_undominated(policies),
        _check_highest(policies),
        _check_everywhere(policies),
        _check_budgets(evaluated),
        _check_surviving(kept),
    ]


def check_difference(claim: Difference, policies: Policies, seeds: Sequence[Policies]) -> ClaimFinding:
    """Test one claim about two policies."""
    if claim.one not in policies or claim.two not in policies:
        return ClaimFinding(claim.claim, "not measured")
    interval = _difference(claim, policies, RESAMPLES)
    form = "{:+.2f}" if claim.quantity == "aes" else "{:+.1f}"
    estimate, low, high = (form.format(value) for value in (interval.estimate, interval.low, interval.high))
    by_seed = ", ".join(form.format(_difference(claim, seed, resamples=1).estimate) for seed in seeds)
    figures = f"{claim.quantity} {estimate} [{low}, {high}]" + (f" ({by_seed})" if by_seed else "")
    return ClaimFinding(claim.claim, _verdict(interval, claim.relation), figures)


def _difference(claim: Difference, policies: Policies, resamples: int) -> Interval:
    both = contrast(policies[claim.one], policies[claim.two], policies["base"], resamples)
    return {"aes": both.aes, "accuracy": both.accuracy, "tokens": both.tokens}[claim.quantity]


def _verdict(interval: Interval, relation: str) -> ClaimVerdict:
    if math.isnan(interval.low):
        return "not measured"
    # How far the worse and the better end of the interval lie on the claimed side, or within CLOSE.
    ends = {
        ">": (interval.low, interval.high),
        "<": (-interval.high, -interval.low),
        "~": (CLOSE - max(abs(interval.low), abs(interval.high)), CLOSE - max(interval.low, -interval.high)),
    }
    worst, best = ends[relation]
    return "holds" if worst > 0 else "does not hold" if best < 0 else "within noise"


def _check_monotone(policies: Policies) -> ClaimFinding:
    claim = "length falls as the brevity share grows"
    if not all(policy in policies for policy in SWEEP):
        return ClaimFinding(claim, "not measured")
    lengths = [_point(policies[policy])[1] for policy in SWEEP]
    falls = all(after < before for before, after in pairwise(lengths))
    figures = "tokens " + " > ".join(f"{length:.1f}" for length in lengths)
    return ClaimFinding(claim, "holds" if falls else "does not hold", figures)


def _check_undominated(policies: Policies) -> ClaimFinding:
    claim = "some composition is dominated by no single anchor"
    if not all(single in policies for single in SINGLES):
        return ClaimFinding(claim, "not measured")
    singles = [_point(policies[single]) for single in SINGLES]
    compositions = [policy for policy in SWEEP if policy in policies and policy not in SINGLES]
    undominated = [policy for policy in compositions if 0 in pareto_front([_point(policies[policy]), *singles])]
    return ClaimFinding(claim, "holds" if undominated else "does not hold", ", ".join(undominated))


def _check_highest(policies: Policies) -> ClaimFinding:
    claim = "all three anchors have the highest AES of all sets"
    if not all(policy in policies for policy in (*SETS, "all-three")):
        return ClaimFinding(claim, "not measured")
    aes = {name: compare(policies[name], policies["base"], 1).average.aes.estimate for name in SETS}
    best = max(aes, key=lambda name: aes[name])
    interval = contrast(policies["all-three"], policies[best], policies["base"], RESAMPLES).aes
    figures = f"aes {interval.estimate:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}] against {best}"
    return ClaimFinding(claim, _verdict(interval, ">"), figures)


def _check_everywhere(policies: Policies) -> ClaimFinding:
    claim = "composition is more accurate than the data mixture on every benchmark, with fewer tokens"
    if not {"weave-50", "mixture-50"} <= policies.keys():
        return ClaimFinding(claim, "not measured")
    pairs = zip(policies["weave-50"], policies["mixture-50"], strict=True)
    gains = [(_point([one])[0] - _point([two])[0], _point([one])[1] - _point([two])[1]) for one, two in pairs]
    figures = ", ".join(f"{accuracy:+.1f} with {tokens:+.1f} tokens" for accuracy, tokens in gains)
    everywhere = all(accuracy > 0 > tokens for accuracy, tokens in gains)
    return ClaimFinding(claim, "holds" if everywhere else "does not hold", figures)


def _check_budgets(evaluated: Sequence[Mapping[str, Sequence[Summary]]]) -> ClaimFinding:
    claim = "composition is above both anchors at every token budget"
    curves = {name: _curve([run[name] for run in evaluated if name in run]) for name in ("weave-50", *SINGLES)}
    if not all(curves.values()):
        return ClaimFinding(claim, "not measured")
    gains = {
        budget: accuracy - max(curves[single][budget] for single in SINGLES)
        for budget, accuracy in curves["weave-50"].items()
    }
    figures = ", ".join(f"{gain:+.1f} at {budget}" for budget, gain in gains.items())
    return ClaimFinding(claim, "holds" if min(gains.values()) > 0 else "does not hold", figures)


def _curve(runs: Sequence[Sequence[Summary]]) -> dict[int, float]:
    """Mean accuracy over seeds and benchmarks within each budget."""
    points = [point for results in runs for result in results for point in result.budgets]
    by_budget: dict[int, list[float]] = {}
    for point in points:
        by_budget.setdefault(point.budget, []).append(point.accuracy)
    return {budget: float(np.mean(values)) for budget, values in sorted(by_budget.items())}


def _check_surviving(shares: Sequence[float]) -> ClaimFinding:
    claim = f"at least {SURVIVING:.1%} of positions survive the alignment of two anchors"
    if not shares:
        return ClaimFinding(claim, "not measured")
    figures = ", ".join(f"{share:.1%}" for share in shares)
    return ClaimFinding(claim, "holds" if min(shares) >= SURVIVING else "does not hold", figures)


def _point(benchmarks: Sequence[ProblemMeans]) -> tuple[float, float]:
    """Mean accuracy and tokens over benchmarks."""
    accuracy = np.mean([means.accuracy.mean() for means in benchmarks])
    return float(accuracy), float(np.mean([means.tokens.mean() for means in benchmarks]))


def results_table(policies: Policies, seeds: Sequence[Policies] = ()) -> str:
    """Markdown of every policy's accuracy, tokens and AES with its interval, and of its AES in each training seed."""
    lines = ["| policy | accuracy | tokens | AES | 95 % | by seed |", "| --- | --- | --- | --- | --- | --- |"]
    for policy, means in policies.items():
        accuracy, tokens = _point(means)
        aes = compare(means, policies["base"], RESAMPLES).average.aes
        interval = "" if policy == "base" else f"{aes.low:.2f} to {aes.high:.2f}"
        estimates = [compare(seed[policy], seed["base"], 1).average.aes.estimate for seed in seeds if policy != "base"]
        by_seed = ", ".join(f"{estimate:.2f}" for estimate in estimates)
        lines.append(f"| {policy} | {accuracy:.1f} | {tokens:.1f} | {aes.estimate:.2f} | {interval} | {by_seed} |")
    return "\n".join(lines)


def claims_table(worlds: Mapping[str, Sequence[ClaimFinding]]) -> str:
    """Markdown of every claim on every world."""
    lines = [f"| claim | {' | '.join(worlds)} |", "| --- |" + " --- |" * len(worlds)]
    for findings in zip(*worlds.values(), strict=True):
        cells = [f"**{finding.verdict}** {finding.figures}".strip() for finding in findings]
        lines.append(f"| {findings[0].claim} | {' | '.join(cells)} |")
    return "\n".join(lines)
