"""Three responses of every policy beside the base's to the same problem: one better, one worse, one typical.

`choose_examples` only sees ids, verdicts and lengths: a `SampleOutcome` has no text.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from lightning_weave.report.cases import Place, SampleOutcome, random_key
from lightning_weave.report.page import CaseGroup
from lightning_weave.report.read_cases import read_outcomes, read_panels
from lightning_weave.runs.steps import Steps

RULE = (
    "Better: right where the base is wrong, or if there is none, both right with fewer tokens. Worse: wrong where the "
    "base is right, or both right with more tokens. Typical: of the most common pair of verdicts, the response whose "
    "length relative to the base's is the median. Better and worse are drawn with seed {seed}; no text is read for it."
)
LENGTH = 400  # characters before and after an omission
Pair = tuple[SampleOutcome, SampleOutcome]  # of the base and the policy, at one place


def choose_examples(base: Sequence[SampleOutcome], policy: Sequence[SampleOutcome], seed: int) -> dict[str, Place]:
    """Choose by the rule; each problem serves once. The order of the outcomes does not matter."""
    pairs = _paired(base, policy)
    chosen: dict[str, Place] = {}
    kinds: dict[str, Sequence[Callable[[SampleOutcome, SampleOutcome], bool]]] = {
        "better": (
            lambda old, new: new.correct and not old.correct,
            lambda old, new: new.correct and old.correct and new.tokens < old.tokens,
        ),
        "worse": (
            lambda old, new: old.correct and not new.correct,
            lambda old, new: new.correct and old.correct and new.tokens > old.tokens,
        ),
    }
    for kind, rules in kinds.items():
        for rule in rules:
            fitting = [place for place, pair in pairs.items() if rule(*pair) and _is_new(place, chosen)]
            if fitting:
                chosen[kind] = min(fitting, key=lambda place: random_key(seed, place))
                break
    rest = {place: pair for place, pair in pairs.items() if _is_new(place, chosen)}
    if rest:
        chosen["typical"] = _typical(rest, seed)
    return chosen


def _paired(base: Sequence[SampleOutcome], policy: Sequence[SampleOutcome]) -> dict[Place, Pair]:
    of_base = {(one.benchmark, one.problem, one.sample): one for one in base}
    of_policy = {(one.benchmark, one.problem, one.sample): one for one in policy}
    return {place: (of_base[place], of_policy[place]) for place in sorted(of_base.keys() & of_policy.keys())}


def _is_new(place: Place, chosen: Mapping[str, Place]) -> bool:
    return place[:2] not in {other[:2] for other in chosen.values()}


def _typical(pairs: Mapping[Place, Pair], seed: int) -> Place:
    """Take the median length relative to the base's among the most common pair of verdicts."""
    verdicts = Counter((old.correct, new.correct) for old, new in pairs.values())
    common = max(verdicts, key=lambda verdict: (verdicts[verdict], verdict))
    ratios = {
        place: new.tokens / max(old.tokens, 1)
        for place, (old, new) in pairs.items()
        if (old.correct, new.correct) == common
    }
    order = sorted(ratios, key=lambda place: (ratios[place], random_key(seed, place)))
    return order[(len(order) - 1) // 2]


def examples(steps: Steps, evaluated: Sequence[str]) -> list[CaseGroup]:
    """Choose for every policy that was evaluated, and only then read the chosen texts."""
    if "base" not in evaluated:
        return []
    base = read_outcomes(steps, "base")
    chosen = {
        policy: choose_examples(base, read_outcomes(steps, policy), steps.recipe.report.seed)
        for policy in evaluated
        if policy != "base"
    }
    choices = [(kind, place, ("base", policy)) for policy, places in chosen.items() for kind, place in places.items()]
    panels = iter(read_panels(steps, choices, LENGTH, LENGTH))
    rule = RULE.format(seed=steps.recipe.report.seed)
    return [CaseGroup(policy, rule, [next(panels) for _ in places]) for policy, places in chosen.items() if places]
