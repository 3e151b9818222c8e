"""What the paper claims, held against what came out: holds, does not hold, or within noise, with the figures.

Problems are resampled together for all policies, after each problem's figures were averaged over the training seeds. A
claim about a difference holds if its 95 % interval lies on the claimed side of zero, fails if it lies on the other
side, and is within noise otherwise. What each training seed gives by itself stands beside it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lightning_weave.bench.statistics import Contrast, Interval, ProblemMeans, compare, contrast
from lightning_weave.bench.summary import Summary
from lightning_weave.maths.metrics import pareto_front

Verdict = Literal["holds", "does not hold", "within noise", "not measured"]
Quantity = Literal["aes", "accuracy", "tokens"]
Policies = Mapping[str, Sequence[ProblemMeans]]
CLOSE = 0.1  # AES: how near "comparable" is
RESAMPLES = 4000


@dataclass(frozen=True)
class Difference:
    """A claim that one policy is above (or below, or close to) another in some quantity."""

    claim: str
    one: str
    two: str
    quantity: Quantity
    side: Literal["above", "below", "close"]


CLAIMS = (
    Difference("composition beats the accuracy anchor alone", "weave-50", "accuracy-only", "aes", "above"),
    Difference("composition beats the brevity anchor alone", "weave-50", "brevity-only", "aes", "above"),
    Difference("tilted beats naive, accuracy anchor", "accuracy-only", "naive-accuracy", "aes", "above"),
    Difference("tilted beats naive, brevity anchor", "brevity-only", "naive-brevity", "aes", "above"),
    Difference("tilted beats naive, composition", "weave-50", "naive-50", "aes", "above"),
    Difference("with five times the updates, naive loses accuracy", "naive-50-long", "naive-50", "accuracy", "below"),
    Difference("with five times the updates, tilted is where it was", "weave-50-long", "weave-50", "aes", "close"),
    Difference("with five times the updates, tilted beats naive", "weave-50-long", "naive-50-long", "aes", "above"),
    Difference("tilted is close to online, accuracy anchor", "accuracy-only", "online-accuracy", "aes", "close"),
    Difference("tilted is close to online, brevity anchor", "brevity-only", "online-brevity", "aes", "close"),
    Difference("tilted is close to online, composition", "weave-50", "online-50", "aes", "close"),
    Difference(
        "tilted is close to online with the exact KL, composition", "weave-50", "online-50-exact", "aes", "close"
    ),
    Difference("composition beats the data mixture", "weave-50", "mixture-50", "aes", "above"),
    Difference(
        "composition beats accuracy, then brevity, at its own dose",
        "weave-50",
        "accuracy-then-brevity-matched",
        "aes",
        "above",
    ),
    Difference(
        "composition beats brevity, then accuracy, at its own dose",
        "weave-50",
        "brevity-then-accuracy-matched",
        "aes",
        "above",
    ),
    Difference(
        "composition beats accuracy, then brevity, at twice its dose",
        "weave-50",
        "accuracy-then-brevity",
        "aes",
        "above",
    ),
    Difference(
        "composition beats brevity, then accuracy, at twice its dose",
        "weave-50",
        "brevity-then-accuracy",
        "aes",
        "above",
    ),
    Difference("twice the dose moves the composition up", "weave-50-alpha-1", "weave-50", "aes", "above"),
    Difference(
        "the last anchor of a sequence decides its length",
        "accuracy-then-brevity",
        "brevity-then-accuracy",
        "tokens",
        "below",
    ),
    Difference(
        "adding brevity to the two accuracy anchors shortens", "all-three", "accuracy-thorough", "tokens", "below"
    ),
    Difference(
        "adding a second accuracy anchor to the pair is more accurate", "all-three", "weave-50", "accuracy", "above"
    ),
    Difference(
        "adding accuracy to brevity and thoroughness is more accurate",
        "all-three",
        "brevity-thorough",
        "accuracy",
        "above",
    ),
    Difference(
        "composition is more accurate than the accuracy anchor", "weave-50", "accuracy-only", "accuracy", "above"
    ),
)
SWEEP = ("accuracy-only", "weave-25", "weave-37", "weave-50", "weave-62", "weave-75", "brevity-only")
SINGLES = ("accuracy-only", "brevity-only")


@dataclass(frozen=True)
class Finding:
    """One claim on one world."""

    claim: str
    verdict: Verdict
    figures: str


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


def check(policies: Policies, seeds: Sequence[Policies] = ()) -> list[Finding]:
    """Hold every claim against one world, whose figures are means over training seeds; `seeds` are the single ones."""
    found = [_check_difference(claim, policies, seeds) for claim in CLAIMS]
    return [*found, _check_monotone(policies), _check_undominated(policies)]


def _check_difference(claim: Difference, policies: Policies, seeds: Sequence[Policies]) -> Finding:
    if claim.one not in policies or claim.two not in policies:
        return Finding(claim.claim, "not measured", "")
    interval = _difference(claim, policies, RESAMPLES)
    form = "{:+.2f}" if claim.quantity == "aes" else "{:+.1f}"
    estimate, low, high = (form.format(value) for value in (interval.estimate, interval.low, interval.high))
    each = ", ".join(form.format(_difference(claim, seed, resamples=1).estimate) for seed in seeds)
    text = f"{claim.quantity} {estimate} [{low}, {high}]" + (f" ({each})" if each else "")
    return Finding(claim.claim, _verdict(interval, claim.side), text)


def _difference(claim: Difference, policies: Policies, resamples: int) -> Interval:
    return _of(contrast(policies[claim.one], policies[claim.two], policies["base"], resamples), claim.quantity)


def _of(found: Contrast, quantity: Quantity) -> Interval:
    return {"aes": found.aes, "accuracy": found.accuracy, "tokens": found.tokens}[quantity]


def _verdict(interval: Interval, side: Literal["above", "below", "close"]) -> Verdict:
    if math.isnan(interval.low):
        return "not measured"
    low, high = (-interval.high, -interval.low) if side == "below" else (interval.low, interval.high)
    if side == "close":
        if max(abs(low), abs(high)) <= CLOSE:
            return "holds"
        return "does not hold" if low > CLOSE or high < -CLOSE else "within noise"
    return "holds" if low > 0 else "does not hold" if high < 0 else "within noise"


def _check_monotone(policies: Policies) -> Finding:
    claim = "length falls as the brevity share grows"
    if not all(policy in policies for policy in SWEEP):
        return Finding(claim, "not measured", "")
    lengths = [float(np.mean([means.tokens.mean() for means in policies[policy]])) for policy in SWEEP]
    falls = all(after < before for before, after in pairwise(lengths))
    return Finding(
        claim, "holds" if falls else "does not hold", "tokens " + " > ".join(f"{length:.1f}" for length in lengths)
    )


def _check_undominated(policies: Policies) -> Finding:
    claim = "some composition is dominated by no single anchor"
    if not all(single in policies for single in SINGLES):
        return Finding(claim, "not measured", "")
    woven = [policy for policy in SWEEP if policy in policies and policy not in SINGLES]
    points = {policy: _point(policies[policy]) for policy in (*SINGLES, *woven) if policy in policies}
    free = [policy for policy in woven if 0 in pareto_front([points[policy], *(points[single] for single in SINGLES)])]
    return Finding(claim, "holds" if free else "does not hold", ", ".join(free))


def _point(means: Sequence[ProblemMeans]) -> tuple[float, float]:
    return float(np.mean([each.accuracy.mean() for each in means])), float(
        np.mean([each.tokens.mean() for each in means])
    )


def results_table(policies: Policies, seeds: Sequence[Policies] = ()) -> str:
    """Markdown of every policy's accuracy, tokens and AES with its interval, and of its AES in each training seed."""
    lines = ["| policy | accuracy | tokens | AES | 95 % | by seed |", "| --- | --- | --- | --- | --- | --- |"]
    for policy, means in policies.items():
        accuracy, tokens = _point(means)
        aes = compare(means, policies["base"], RESAMPLES).average.aes
        interval = "" if policy == "base" else f"{aes.low:.2f} to {aes.high:.2f}"
        own = [compare(seed[policy], seed["base"], 1).average.aes.estimate for seed in seeds if policy != "base"]
        each = ", ".join(f"{estimate:.2f}" for estimate in own)
        lines.append(f"| {policy} | {accuracy:.1f} | {tokens:.1f} | {aes.estimate:.2f} | {interval} | {each} |")
    return "\n".join(lines)


def claims_table(worlds: Mapping[str, Sequence[Finding]]) -> str:
    """Markdown of every claim on every world."""
    names = list(worlds)
    lines = [f"| claim | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for findings in zip(*worlds.values(), strict=True):
        cells = [f"**{found.verdict}** {found.figures}".strip() for found in findings]
        lines.append(f"| {findings[0].claim} | {' | '.join(cells)} |")
    return "\n".join(lines)
