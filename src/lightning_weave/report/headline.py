"""The results as figures and text: frontier, profile, token budgets, headline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_weave.bench.statistics import Interval
from lightning_weave.bench.summary import Overall, Summary
from lightning_weave.config import Joint, Recipe
from lightning_weave.report.colours import Hues
from lightning_weave.report.figures import OWN, FrontierPoint, PolicyKind, frontier_parts
from lightning_weave.report.plots import Line, lines, profile
from lightning_weave.report.results import PolicySummaries
from lightning_weave.report.tables import SHORT, PolicyRow
from lightning_weave.runs.steps import Steps


def frontier_points(steps: Steps, combined: Mapping[str, Overall], hues: Hues) -> list[FrontierPoint]:
    """Make one point per policy; compositions of two anchors at one alpha are a family, ordered by their weights."""
    families = [_family(steps, policy) for policy in combined]
    best = _best(steps, combined)
    return [
        FrontierPoint(
            name=policy,
            kind=kind_of(steps, policy),
            accuracy=overall.accuracy,
            tokens=overall.tokens,
            accuracy_error=_or_zero(overall.accuracy_error),
            tokens_error=_or_zero(overall.tokens_error),
            family=family if sum(other == family for other, _ in families) >= 3 else "",
            share=share,
            hue=hues[policy],
            best=policy == best,
        )
        for (policy, overall), (family, share) in zip(combined.items(), families, strict=True)
    ]


def _best(steps: Steps, combined: Mapping[str, Overall]) -> str | None:
    """The policy with the highest AES of those that compose shifts, if there are several."""
    scores = {
        policy: overall.comparison.average.aes.estimate
        for policy, overall in combined.items()
        if overall.comparison is not None and kind_of(steps, policy) in OWN
    }
    known = {policy: score for policy, score in scores.items() if not math.isnan(score)}
    return max(known, key=lambda policy: known[policy]) if len(known) > 1 else None


def frontier_caption(points: Sequence[FrontierPoint]) -> str:
    """Describe what a frontier shows, and nothing that it does not have."""
    parts = frontier_parts(points)
    sentences = [
        "Solid line: the policies trained here that no other policy beats in both." if parts.joined else "",
        "Hollow: another policy has more accuracy for as few tokens." if parts.dominated else "",
        "Dashed line: a sweep of weights." if parts.swept else "",
        "Star: the highest AES." if parts.starred else "",
        "Bars: one standard error, clustered by problem." if parts.errors else "",
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def kind_of(steps: Steps, policy: str) -> PolicyKind:
    """Classify a policy: the student, one anchor, several, a baseline with another method, another checkpoint."""
    if policy == "base":
        return "base"
    composition = steps.recipe.compositions.get(policy)
    if composition is None:
        return "other"
    if composition.method != "joint" or steps.objective(policy) != "tilted":
        return "baseline"
    return "single" if len(composition.used) == 1 else "composition"


def _family(steps: Steps, policy: str) -> tuple[str, float]:
    """Name the family of a composition of the first two anchors, and the share of the second; "" if it has none."""
    if kind_of(steps, policy) not in ("single", "composition") or len(steps.recipe.anchors) < 2:
        return "", 0.0
    composition = steps.recipe.compositions[policy]
    assert isinstance(composition, Joint), composition.method
    pair = list(steps.recipe.anchors)[:2]
    weights = [composition.weights.get(anchor, 0.0) for anchor in pair]
    if composition.routes or not composition.used.keys() <= set(pair):
        return "", 0.0
    return f"{composition.alpha} {composition.kl_budget} {composition.epochs} {sum(weights):g}", weights[1]


def profile_figure(rows: Sequence[PolicyRow], summaries: PolicySummaries, hues: Hues) -> Any:
    """Draw AES and the accuracy on every benchmark, policy by policy."""
    columns: dict[str, list[Interval]] = {}
    if any(_is_known(row.aes) for row in rows):
        columns["AES"] = [_aes(row) for row in rows]
    for place, first in enumerate(next(iter(summaries.values()))):
        columns[first.label] = [_accuracy(summaries[row.policy][place]) for row in rows]
    return profile([row.policy for row in rows], columns, hues)


def profile_caption(rows: Sequence[PolicyRow]) -> str:
    """Describe the bars of the profile."""
    aes = "AES with its 95 % interval; accuracies" if any(_is_known(row.aes) for row in rows) else "Accuracies"
    return f"{aes} with one standard error, clustered by problem."


def _aes(row: PolicyRow) -> Interval:
    aes = math.nan if row.aes is None else row.aes
    return Interval(aes, aes if row.aes_low is None else row.aes_low, aes if row.aes_high is None else row.aes_high)


def _accuracy(result: Summary) -> Interval:
    error = _or_zero(result.accuracy_error)
    return Interval(result.accuracy, result.accuracy - error, result.accuracy + error)


def budgets_figure(summaries: PolicySummaries, hues: Hues, benchmark: str | None = None) -> Any | None:
    """Draw the accuracy of the same samples cut at token budgets, on every benchmark or on one."""
    panels: dict[str, dict[str, Line]] = {}
    for policy, results in summaries.items():
        for result in results:
            if result.budgets and benchmark in (None, result.label):
                line = [(float(point.budget), point.accuracy) for point in result.budgets]
                panels.setdefault(result.label, {})[policy] = line
    return lines(panels, "token budget", "accuracy, %", hues) if panels else None


def headline(recipe: Recipe, rows: Sequence[PolicyRow]) -> tuple[str, str, str]:
    """Name the trained policy with the highest AES, and state its result and how certain that is."""
    base = next((row for row in rows if row.policy == "base"), None)
    trained = [row for row in rows if row.policy in recipe.compositions]
    if not trained:
        return recipe.name, "", "No trained policy has been evaluated yet."
    best = max(trained, key=lambda row: (row.aes if _is_known(row.aes) else -math.inf, row.accuracy, -row.tokens))
    digits = 1 if best.tokens < SHORT else 0
    result = f"reaches {best.accuracy:.1f}\u00a0% accuracy at {best.tokens:,.{digits}f} tokens"
    if base is None:
        return best.policy, f"{result}.", "The untrained student has not been evaluated, so there is no comparison."
    result += f"; the student alone, {base.accuracy:.1f}\u00a0% at {base.tokens:,.{digits}f}."
    if best.aes is None or not _is_known(best.aes):
        return best.policy, result, "AES is undefined: the student has no correct answer on some benchmark."
    interval = f" (95 % interval {best.aes_low:.2f} to {best.aes_high:.2f})" if _is_known(best.aes_low) else ""
    among = f", the highest of {len(trained)} trained policies" if len(trained) > 1 else ""
    return best.policy, result, f"Accuracy-efficiency score {best.aes:+.2f}{interval}{among}."


def start_composition(recipe: Recipe, rows: Sequence[PolicyRow]) -> str | None:
    """Choose the composition that the loom opens with: the most anchors, then the highest AES."""
    scores = {row.policy: row.aes for row in rows if row.aes is not None and _is_known(row.aes)}

    def worth(name: str) -> tuple[int, float]:
        return len(recipe.compositions[name].used), scores.get(name, -math.inf)

    joint = [name for name, composition in recipe.compositions.items() if composition.method == "joint"]
    return max(joint, key=worth, default=None)


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
