"""The results as figures and words: frontier, profile, token budgets, headline."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_weave.bench.summary import Overall, Summary
from lightning_weave.config import Joint, Recipe
from lightning_weave.report.figures import Kind, Point
from lightning_weave.report.plots import Bar, Line, lines, profile
from lightning_weave.report.results import PolicySummaries
from lightning_weave.report.tables import SHORT, PolicyRow
from lightning_weave.runs.steps import Steps


def frontier_points(steps: Steps, found: PolicySummaries, combined: Mapping[str, Overall]) -> list[Point]:
    """One point per policy; compositions of two anchors at one alpha are a family, ordered by their weights."""
    families = [_family(steps, policy) for policy in found]
    return [
        Point(
            name=policy,
            kind=kind_of(steps, policy),
            accuracy=combined[policy].accuracy,
            tokens=combined[policy].tokens,
            accuracy_error=_or_zero(combined[policy].accuracy_error),
            tokens_error=_or_zero(combined[policy].tokens_error),
            family=family[0] if _size(families, family) >= 3 else "",
            share=family[1],
        )
        for policy, family in zip(found, families, strict=True)
    ]


def kind_of(steps: Steps, policy: str) -> Kind:
    """Sort a policy: the student, one anchor, several, a baseline trained another way, another checkpoint."""
    if policy == "base":
        return "base"
    composition = steps.recipe.compositions.get(policy)
    if composition is None:
        return "other"
    if composition.method != "joint" or steps.objective(policy) != "tilted":
        return "baseline"
    return "single" if len(composition.used) == 1 else "composition"


def _family(steps: Steps, policy: str) -> tuple[str, float]:
    """Name the family of a composition, of the first two anchors only, and its place; single anchors are the ends."""
    if kind_of(steps, policy) not in ("single", "composition") or len(steps.recipe.anchors) < 2:
        return "", 0.0
    composition = steps.recipe.compositions[policy]
    assert isinstance(composition, Joint), composition.method
    pair = list(steps.recipe.anchors)[:2]
    weights = [composition.weights.get(anchor, 0.0) for anchor in pair]
    if not composition.used.keys() <= set(pair):
        return "", 0.0
    return f"{composition.alpha} {composition.kl_budget} {composition.epochs} {sum(weights):g}", weights[1]


def _size(families: Sequence[tuple[str, float]], family: tuple[str, float]) -> int:
    return sum(other[0] == family[0] for other in families) if family[0] else 0


def profile_figure(rows: Sequence[PolicyRow], found: PolicySummaries) -> Any:
    """AES and the accuracy on every benchmark, policy by policy."""
    columns: dict[str, list[Bar]] = {}
    if any(_is_known(row.aes) for row in rows):
        columns["AES"] = [_aes_bar(row) for row in rows]
    for place, first in enumerate(next(iter(found.values()))):
        results = [found[row.policy][place] for row in rows]
        columns[first.label] = [_accuracy_bar(result) for result in results]
    return profile([row.policy for row in rows], columns)


def _aes_bar(row: PolicyRow) -> Bar:
    value = row.aes if row.aes is not None else math.nan
    return Bar(value, value if row.aes_low is None else row.aes_low, value if row.aes_high is None else row.aes_high)


def _accuracy_bar(result: Summary) -> Bar:
    error = _or_zero(result.accuracy_error)
    return Bar(result.accuracy, result.accuracy - error, result.accuracy + error)


def budgets_figure(found: PolicySummaries) -> Any | None:
    """Accuracy when the same samples are cut at token budgets."""
    panels: dict[str, dict[str, Line]] = {}
    for policy, results in found.items():
        for result in results:
            if result.budgets:
                line = [(float(point.budget), point.accuracy) for point in result.budgets]
                panels.setdefault(result.label, {})[policy] = line
    return lines(panels, "token budget", "accuracy, %") if panels else None


def headline(recipe: Recipe, rows: Sequence[PolicyRow]) -> tuple[str, str, str]:
    """Say the result: a policy, what it does, and how sure that is. It is the trained one of the highest AES."""
    base = next((row for row in rows if row.policy == "base"), None)
    trained = [row for row in rows if row.policy in recipe.compositions]
    if not trained:
        return recipe.name, "", "No trained policy is evaluated yet."
    best = max(trained, key=lambda row: (row.aes if _is_known(row.aes) else -math.inf, row.accuracy, -row.tokens))
    digits = 1 if best.tokens < SHORT else 0
    first = f"answers {best.accuracy:.1f} % in {best.tokens:,.{digits}f} tokens"
    if base is None:
        return best.policy, f"{first}.", "The student as it was is not evaluated, so there is nothing to compare with."
    first += f"; the student alone {base.accuracy:.1f} % in {base.tokens:,.{digits}f}."
    if best.aes is None or not _is_known(best.aes):
        return best.policy, first, "AES is not defined here: the student had no correct answer on some benchmark."
    sure = f" (95 % interval {best.aes_low:.2f} to {best.aes_high:.2f})" if _is_known(best.aes_low) else ""
    among = f", the highest of {len(trained)} trained policies" if len(trained) > 1 else ""
    return best.policy, first, f"Accuracy-efficiency score {best.aes:+.2f}{sure}{among}."


def start_composition(recipe: Recipe, rows: Sequence[PolicyRow]) -> str | None:
    """The composition that the loom opens with: the most anchors, then the highest AES."""
    scores = {row.policy: row.aes for row in rows if row.aes is not None and _is_known(row.aes)}

    def worth(name: str) -> tuple[int, float]:
        return len(recipe.compositions[name].used), scores.get(name, -math.inf)

    woven = [name for name, composition in recipe.compositions.items() if composition.method == "joint"]
    return max(woven, key=worth, default=None)


def _is_known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
