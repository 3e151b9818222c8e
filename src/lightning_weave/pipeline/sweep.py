"""`lweave sweep`: a family of students from one cache, over the share of an anchor and over alpha."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from lightning_weave.maths.metrics import pareto_front
from lightning_weave.pipeline.flow import evaluate, make_cache, make_students
from lightning_weave.progress import Progress, duration
from lightning_weave.report.results import policy_rows, summaries
from lightning_weave.runs.costs import costs, offline_cost, read_spent
from lightning_weave.runs.discard import allow_discards
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.sweeps import Planned, extend, remember
from lightning_weave.runs.work import HERE, Workers


def run(
    steps: Steps,
    plan: Sequence[Planned],
    progress: Progress,
    out: Console,
    yes: bool = False,
    workers: Workers = HERE,
) -> None:
    """Train and evaluate what is missing of a sweep, one setting after the other. Resumable.

    `yes` discards what another recipe has made without asking.
    """
    extended = extend(steps, plan)
    names = [one.name for one in plan]
    cache = [step for verb in ("rollout", "reference", "score") for step in extended.made_by(verb)]
    policies = ["base", *names]
    all_steps = [*cache, *extended.made_by("train", names), *extended.made_by("eval", policies)]
    allow_discards(extended, all_steps, yes)
    remember(steps, plan)
    out.print("\n".join(forecast(extended, plan)), markup=False, soft_wrap=True)
    make_cache(extended, progress, workers.do, evaluates=True)
    evaluate(extended, progress, ["base"], workers)
    missing = [one.name for one in plan if not _is_evaluated(extended, one.name)]
    out.print("\n".join(running_front(extended, policies)), markup=False, soft_wrap=True)
    for name in missing:
        make_students(extended, progress, [name], workers=workers)
        evaluate(extended, progress, [name], workers)
        out.print("\n".join(running_front(extended, policies)), markup=False, soft_wrap=True)


def forecast(steps: Steps, plan: Sequence[Planned]) -> list[str]:
    """Say what is there already, what is missing and what that will cost, from what was measured."""
    to_train = [one.name for one in plan if steps.store.stage(steps.train(one.name)).state() != "done"]
    to_eval = [one.name for one in plan if not _is_evaluated(steps, one.name)]
    known_names = [one.name for one in plan if one.known]
    lines = [f"Sweep of {len(plan)}: {', '.join(one.name for one in plan)}"]
    if known_names:
        lines.append(f"Already in the recipe: {', '.join(known_names)}")
    rows = read_spent(steps.store.run_dir).kept
    offline = offline_cost(steps, rows)
    eval_cost = _mean_cost([{**row, "name": row["name"].split("/")[0]} for row in rows if row["stage"] == "eval"])
    lines.append(f"To train: {len(to_train)}, {_cost_words(len(to_train), offline.train if offline else None)}")
    lines.append(f"To evaluate: {len(to_eval)}, {_cost_words(len(to_eval), eval_cost)}")
    return lines


def _mean_cost(rows: list[dict[str, Any]]) -> float | None:
    by_name = [cost.seconds for cost in costs(rows, "name").values()]
    return sum(by_name) / len(by_name) if by_name else None


def _cost_words(count: int, each: float | None) -> str:
    if count == 0:
        return "nothing to spend"
    if each is None:
        return "cost unknown yet: none has been measured in this run"
    return f"about {duration(count * each)} of device time ({duration(each)} each, as measured)"


def _is_evaluated(steps: Steps, policy: str) -> bool:
    stages = [steps.store.stage(steps.eval(policy, name)) for name in steps.recipe.eval.benchmarks]
    return all(stage.state() == "done" for stage in stages)


def running_front(steps: Steps, policies: Sequence[str]) -> list[str]:
    """The frontier of what is evaluated so far, in tokens order; * is on the front."""
    evaluations = {policy: results for policy, results in summaries(steps).items() if policy in policies}
    rows = policy_rows(evaluations)
    front = {rows[index].policy for index in pareto_front([(row.accuracy, row.tokens) for row in rows])}
    lines = [f"Frontier, {len(rows)} of {len(policies)} evaluated:"]
    width = max(map(len, evaluations), default=0)
    for row in sorted(rows, key=lambda row: row.tokens):
        sign = "*" if row.policy in front else " "
        aes = "" if row.aes is None or row.aes != row.aes else f"  AES {row.aes:+.2f}"
        lines.append(f" {sign} {row.policy:<{width}}  {row.accuracy:6.2f} %  {row.tokens:>9,.1f} tokens{aes}")
    return lines
