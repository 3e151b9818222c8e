"""`lweave sweep`: a family of students from one cache, over the share of an anchor and over alpha."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from lightning_weave.config import ALPHA, DEFAULT_TAG, Composition, Joint, Recipe, check_recipe
from lightning_weave.errors import InputError
from lightning_weave.maths.metrics import pareto_front
from lightning_weave.progress import Progress, duration
from lightning_weave.report.results import results_table, summaries
from lightning_weave.report.tables import AVERAGE
from lightning_weave.run import Run, is_wanted
from lightning_weave.stages.costs import costs, offline_cost, read_spent
from lightning_weave.stages.eval import evaluate
from lightning_weave.stages.score import make_cache
from lightning_weave.stages.train import train
from lightning_weave.stages.work import LOCAL, Executor


@dataclass(frozen=True)
class Planned:
    """One setting of a sweep; `known` if the recipe has it already, under this name."""

    name: str
    composition: Composition
    known: bool


def plan_sweep(
    recipe: Recipe,
    shares: Sequence[float],
    anchor: str | None = None,
    alphas: Sequence[float] | None = None,
    tag: str | None = None,
) -> list[Planned]:
    """Name every setting: a share of one anchor, the rest of the weight in equal parts to the others, and an alpha.

    With a tag, only its weights vary, in the first composition that has weights by tag.
    """
    if not shares:
        raise InputError("--shares is empty; give numbers from 0 to 1, for example --shares 0.25,0.5,0.75")
    if wrong := [share for share in shares if not 0 <= share <= 1]:
        raise InputError(f"--shares {wrong[0]:g}: a share is a number from 0 to 1")
    if wrong := [alpha for alpha in alphas or () if not 0 < alpha < float("inf")]:
        raise InputError(f"--alphas {wrong[0]:g}: alpha must be greater than 0")
    if len(recipe.anchors) < 2:
        raise InputError(
            f"a sweep needs two anchors or more to divide the weight; this recipe has {len(recipe.anchors)}"
        )
    refuse_budgets(recipe)
    chosen = anchor if anchor is not None else list(recipe.anchors)[-1]
    if chosen not in recipe.anchors:
        raise InputError(f"--anchor {chosen}: no such anchor; this recipe has {', '.join(recipe.anchors)}")
    routed = next((one for one in recipe.compositions.values() if isinstance(one, Joint) and one.routes), None)
    if tag is not None and routed is None:
        raise InputError(f"--tag {tag}: no composition of this recipe has weights by tag")
    if tag is not None and routed is not None and tag not in routed.by_tag:
        raise InputError(f"--tag {tag}: no such tag in its weights; there are {', '.join(routed.by_tag)}")
    planned: dict[str, Planned] = {}
    for alpha in alphas or (usual_alpha(recipe),):
        for share in shares:
            others = [name for name in recipe.anchors if name != chosen]
            weights = {name: share if name == chosen else (1 - share) / len(others) for name in recipe.anchors}
            name = f"{chosen}-{_share_text(share)}" + f"-alpha-{alpha:g}" * bool(alphas)
            composition = Joint(weights=weights, alpha=float(alpha))
            if routed is not None and tag is not None:
                by_tag = {**routed.by_tag, tag: weights}
                plain = by_tag.pop(DEFAULT_TAG, {})
                composition = Joint(weights=plain, routes=by_tag, alpha=float(alpha))
                name = f"{tag}-{name}"
            same = next((old for old, one in recipe.compositions.items() if is_same(one, composition)), None)
            if same is not None:
                planned.setdefault(same, Planned(same, recipe.compositions[same], True))
            elif name in recipe.compositions or name in recipe.policies:
                raise InputError(f"{name} is the name of something else in this recipe; rename that")
            else:
                planned.setdefault(name, Planned(name, composition, False))
    return list(planned.values())


def refuse_budgets(recipe: Recipe) -> None:
    """Refuse to vary shares where the dose of an anchor does not depend on its share."""
    for name, section in recipe.anchors.items():
        if section.kl_budget is not None:
            raise InputError(f"anchors.{name}.kl_budget sets its dose, whatever its share: remove it to vary shares")


def usual_alpha(recipe: Recipe) -> float:
    """The alpha that all compositions share, else the paper's."""
    used = {one.alpha for one in recipe.compositions.values() if one.method == "joint" and one.alpha is not None}
    return used.pop() if len(used) == 1 else ALPHA


def _share_text(share: float) -> str:
    """Three digits, or as many as it takes to tell shares apart.

    >>> _share_text(0.25), _share_text(0.0625)
    ('0.250', '0.0625')
    """
    return f"{share:.3f}" if round(share, 3) == share else repr(share)


def is_same(one: Composition, two: Composition) -> bool:
    """Whether two compositions train the same student."""
    names = {*one.weights, *two.weights}
    if one.routes or two.routes:
        return one.model_dump() == two.model_dump()
    near = all(abs(one.weights.get(name, 0.0) - two.weights.get(name, 0.0)) < 1e-9 for name in names)
    return near and one.model_dump(exclude={"weights"}) == two.model_dump(exclude={"weights"})


def extend(run: Run, plan: Sequence[Planned]) -> Run:
    """Add the settings of a sweep to the recipe."""
    new = {one.name: one.composition.model_dump(mode="json", exclude_defaults=True) for one in plan if not one.known}
    data = run.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["compositions"] = {**data.get("compositions", {}), **new}
    return run.derive(recipe=check_recipe(data, "sweep"))


def sweep(
    run: Run,
    plan: Sequence[Planned],
    progress: Progress,
    out: Console,
    executor: Executor = LOCAL,
) -> None:
    """Train and evaluate what is missing of a sweep, one setting after the other. Resumable."""
    extended = extend(run, plan)
    names = [one.name for one in plan]
    policies = ["base", *names]
    out.print("\n".join(forecast(extended, plan)), markup=False, soft_wrap=True)
    make_cache(extended, progress, executor, evaluates=True)
    evaluate(extended, progress, ["base"], executor)
    missing = [name for name in names if not _is_evaluated(extended, name)]
    out.print("\n".join(running_front(extended, policies)), markup=False, soft_wrap=True)
    for name in missing:
        train(extended, progress, [name], executor=executor)
        evaluate(extended, progress, [name], executor)
        out.print("\n".join(running_front(extended, policies)), markup=False, soft_wrap=True)


def forecast(run: Run, plan: Sequence[Planned]) -> list[str]:
    """List what is there already, what is missing and what that will cost, from what was measured."""
    rows = read_spent(run.directory).kept
    offline = offline_cost(run, rows)
    evals = costs([{**row, "name": row["name"].split("/")[0]} for row in rows if row["stage"] == "eval"], "name")
    each = {
        "train": offline.train if offline else None,
        "evaluate": sum(cost.seconds for cost in evals.values()) / len(evals) if evals else None,
    }
    names = [one.name for one in plan]
    missing: dict[str, list[Any]] = {
        "train": [stage for stage in run.stages("train", names) if not stage.complete],
        "evaluate": [one for one in run.policies if is_wanted(one, names) and not _is_evaluated(run, one)],
    }
    lines = [f"Sweep of {len(plan)}: {', '.join(names)}"]
    if known := [one.name for one in plan if one.known]:
        lines.append(f"Already in the recipe: {', '.join(known)}")
    for verb, students in missing.items():
        cost = "cost unknown yet: none has been measured in this run"
        if (seconds := each[verb]) is not None:
            total = duration(len(students) * seconds)
            cost = f"about {total} of device time ({duration(seconds)} each, as measured)"
        lines.append(f"To {verb}: {len(students)}, {cost if students else 'nothing to spend'}")
    return lines


def _is_evaluated(run: Run, policy: str) -> bool:
    """Whether a policy is, with its replicates."""
    each = [one for one in run.policies if is_wanted(one, [policy])]
    return all(run.stage("eval", one, name).complete for one in each for name in run.recipe.eval.benchmarks)


def running_front(run: Run, policies: Sequence[str]) -> list[str]:
    """The frontier of what is evaluated so far, ordered by tokens; * is on the front."""
    evaluations = {policy: results for policy, results in summaries(run).items() if policy in policies}
    lines = [f"Frontier, {len(evaluations)} of {len(policies)} evaluated:"]
    if not evaluations:
        return lines
    rows = results_table(evaluations).droplevel("group")[AVERAGE]
    front = pareto_front(list(zip(rows["accuracy"], rows["tokens"], strict=True)))
    rows["sign"] = ["*" if place in front else " " for place in range(len(rows))]
    width = max(map(len, evaluations))
    for policy, row in rows.sort_values("tokens", kind="stable").iterrows():
        aes = "" if row["aes"] != row["aes"] else f"  AES {row['aes']:+.2f}"
        lines.append(f" {row['sign']} {policy:<{width}}  {row['accuracy']:6.2f} %  {row['tokens']:>9,.1f} tokens{aes}")
    return lines
