"""`lweave compare`: a composition against what could be done instead, also at the same number of tokens."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.statistics import Interval, matched_difference
from lightning_weave.bench.summary import Summary, combine, differing
from lightning_weave.checks.preflight import preflight
from lightning_weave.checks.watch import say, warn
from lightning_weave.config import PLACEBOS, Composition, Joint, Recipe, check_recipe, replicate_of
from lightning_weave.errors import InputError
from lightning_weave.maths.metrics import pareto_front
from lightning_weave.progress import Progress
from lightning_weave.prompts.render import chat_template
from lightning_weave.report.results import summaries
from lightning_weave.run import DUMP, ROLES, Run
from lightning_weave.stages.costs import cost_of, read_spent
from lightning_weave.stages.decoding import final_text
from lightning_weave.stages.merge import check_policy
from lightning_weave.stages.prompts import render_problems
from lightning_weave.stages.run import make_everything, narrow, refuse
from lightning_weave.stages.work import LOCAL, Executor
from lightning_weave.store import read_json, write_json

FILE = "compare.json"
MERGES = ("linear", "task-arithmetic", "ties", "dare")


@dataclass(frozen=True)
class ComparePlan:
    """What a composition is compared with: a run that has all of it, and why something is left out."""

    run: Run
    composition: str
    frontier: list[str]  # policies, the base first
    others: list[str]
    left_out: dict[str, str]

    @property
    def narrowed(self) -> Run:
        """The run with what is compared, and nothing else."""
        return self.run.derive(recipe=narrow(self.run, [*self.frontier[1:], *self.others]))


@dataclass(frozen=True)
class ComparedPolicy:
    """One policy of a comparison."""

    policy: str
    on_frontier: bool  # a point of the line, which no other of its policies beats in both
    accuracy: float
    tokens: float
    aes: Interval | None
    difference: Interval | None  # accuracy minus the frontier's at the same tokens; None on it, or if it is shorter
    seconds: float | None  # to make it, given the cache
    models: int  # that are read for every token
    prompt_tokens: float  # more than the base's
    problems: int
    seeds: int  # of training


def plan_compare(
    run: Run, composition: str, also: Sequence[str] = (), only: Sequence[str] | None = None
) -> ComparePlan:
    """Add what could be done instead of a composition to the recipe; what cannot be built is left out, with why."""
    recipe = run.recipe
    joint = [name for name, one in recipe.written.items() if isinstance(one, Joint) and not one.is_placebo]
    if composition not in joint:
        raise InputError(
            f"--composition {composition}: must be one of {', '.join(joint) or 'none: this recipe has none'}"
        )
    policies = [name for name in run.policies if name == replicate_of(name)]  # a row is the mean of all seeds
    if unknown := [name for name in also if name not in policies]:
        raise InputError(f"--also {unknown[0]}: no such policy; this recipe has {', '.join(policies)}")
    if not recipe.eval.benchmarks:
        raise InputError("nothing to compare on: eval.benchmarks is empty. Add problems with answers")
    frontier = frontier_of(recipe, composition)
    found = [*alternatives(run, composition)]
    if unknown := [name for name in only or () if name not in [one for one, *_ in found]]:
        raise InputError(f"--only {unknown[0]}: no such alternative; there are {', '.join(one for one, *_ in found)}")
    plan = ComparePlan(run, composition, ["base", *frontier], [one for one in also if one not in frontier], {})
    for name, part, table in found:
        if only is None or name in only:
            plan = _add(plan, name, part, table)
    return plan


def _add(plan: ComparePlan, name: str, part: str, table: dict[str, Any]) -> ComparePlan:
    """Add one alternative, unless the recipe has it under this name or another."""
    tables = plan.run.recipe.model_dump(**DUMP)
    run = plan.run
    try:
        if "" in table.values():
            raise InputError("not yet: its budget is the composition's length, so it is made after that is evaluated")
        if name not in run.policies:
            run = run.derive(recipe=check_recipe({**tables, part: {**tables[part], name: table}}, "compare"))
            written = run.recipe.model_dump(**DUMP)[part]
            same = next(old for old, one in written.items() if one == written[name])
            name, run = same, (run if same == name else plan.run)
        if part == "compositions":
            run.recipe.refuse_rules(name)
        elif "merge" in table:
            check_policy(run, name)
        elif "budget" in table:
            final_text(run.recipe.eval, run.student.tokenizer)
    except InputError as error:
        why = str(error).removeprefix("compare: ").removeprefix(f"{part}.{name}.")
        return replace(plan, left_out={**plan.left_out, name: why})
    return replace(plan, run=run, others=list(dict.fromkeys([*plan.others, name])))


def frontier_of(recipe: Recipe, composition: str) -> list[str]:
    """The compositions over the same anchors that differ in their weights alone; or the levels of this one."""
    section = recipe.compositions[composition]
    if section.slots:
        return [composition, *(f"{composition}@{level}" for level in getattr(section, "levels", ()))]

    def dose(one: Composition) -> dict[str, Any]:
        return one.model_dump(exclude={"weights", "routes"})

    names = [name for name, one in recipe.written.items() if one.used.keys() <= section.used.keys()]
    return [name for name in names if dose(recipe.compositions[name]) == dose(section)]


def alternatives(run: Run, composition: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name what could be done instead, with its table in the recipe; an empty value is not known yet."""
    recipe = run.recipe
    section = recipe.compositions[composition]
    # Nothing but a joint composition has weights by tag: then there are prompts and teachers, no merges or mixture.
    weights = {} if section.routes else {anchor: weight for anchor, weight in section.weights.items() if weight}
    for method in MERGES if weights else ():
        yield f"{composition}-{method}", "policies", {"merge": method, "weights": weights}
    ends = {
        next(iter(one.used)): name
        for name in frontier_of(recipe, composition)
        if (one := recipe.compositions.get(name)) and len(one.used) == 1
    }
    if len(weights) > 1 and weights.keys() <= ends.keys():
        blend = {ends[anchor]: weight for anchor, weight in weights.items()}
        yield f"{composition}-blend", "policies", {"merge": "linear", "weights": blend}
    for anchor in section.used:
        system = recipe.anchors[anchor].post_prompt.system
        if system and recipe.anchor_model(anchor, "post") == recipe.anchor_model(anchor, "pre"):
            yield f"prompt-{anchor}", "policies", {"system": system}
    template = chat_template(run.student.tokenizer) if recipe.eval.chat else ""
    if recipe.eval.thinking and "enable_thinking" in template:
        yield "asked-without-thinking", "policies", {"thinking": False}
    if "reasoning_effort" in template:
        yield "asked-low-effort", "policies", {"template": {"reasoning_effort": "low"}}
    evaluated = summaries(run).get(composition, [])
    is_whole = [max(len(one.seeds), 1) for one in evaluated] == [recipe.train.seeds] * len(recipe.eval.benchmarks)
    budget = round(combine(evaluated).tokens) if is_whole else ""
    yield f"{composition}-capped", "policies", {"budget": budget}
    yield f"{composition}-decoded", "policies", {"decode": composition}
    own = section.model_dump(**DUMP)

    def trained(method: str, weights: dict[str, float], *keys: str) -> dict[str, Any]:
        """A composition that is trained as this one is."""
        same = {key: own[key] for key in ("alpha", "epochs", "seed", *keys) if key in own}
        return {"method": method, "weights": weights, **same}

    for anchor in section.used:
        yield f"teacher-{anchor}", "compositions", trained("teacher", {anchor: 1.0})
    if len(weights) > 1:
        mixed = trained("mixture", weights, "kl_budget", "objective", "normalize")
        yield f"{composition}-mixture", "compositions", mixed
    for rule, value in PLACEBOS.items():
        yield f"{composition}-{rule}", "compositions", {**own, rule: value}


def make(run: Run, progress: Progress, executor: Executor = LOCAL) -> None:
    """Compute what is missing of a comparison, after the checks of `lweave run`. Nothing stops for a bad result."""
    findings = preflight(run)
    refuse(findings, force=False)
    say(findings, progress)
    make_everything(run, progress, executor, warn)


def compare(
    run: Run,
    composition: str,
    progress: Progress,
    also: Sequence[str] = (),
    only: Sequence[str] | None = None,
    executor: Executor = LOCAL,
) -> tuple[ComparePlan, list[ComparedPolicy]]:
    """Make and evaluate a composition, its frontier and what could be done instead. Resumable."""
    plan = plan_compare(run, composition, also, only)
    if f"{composition}-capped" in plan.left_out:  # its budget is the composition's length
        make(replace(plan, others=[]).narrowed, progress, executor)
        plan = plan_compare(run, composition, also, only)
    make(plan.narrowed, progress, executor)
    rows = rows_of(plan)
    path = run.directory / FILE
    kept = {**read_json(path), composition: plan.others} if path.exists() else {composition: plan.others}
    write_json(path, kept)
    return plan, rows


def rows_of(plan: ComparePlan) -> list[ComparedPolicy]:
    """Tabulate everything that is compared."""
    run = plan.narrowed
    evaluated = summaries(run)
    ledger = read_spent(run.directory).kept
    lengths = {policy: _prompt_tokens(run, policy) for policy in evaluated}
    rows = []
    for name, place in measure(evaluated, plan.frontier, plan.others).items():
        merged = run.recipe.merged(name)
        made = [run.stage("merge", name)] if merged else []
        made += [run.stage("train", one) for one in map(run.composition_of, (name, *merged)) if one]
        costs = [cost_of(stage.folder, run.directory, ledger) for stage in made]
        seconds = None if None in costs else sum(cost.seconds for cost in costs if cost)
        policy = run.recipe.policies.get(name)
        used = run.recipe.compositions[policy.decode].used if policy and policy.decode else {}
        sides = {run.side(anchor, role) for anchor in used for role in ROLES}
        models = 1 + sum(side.reads_other_prompts or not run.is_student(side) for side in sides)
        rows.append(replace(place, seconds=seconds, models=models, prompt_tokens=lengths[name] - lengths["base"]))
    return rows


def measure(
    evaluated: Mapping[str, Sequence[Summary]], frontier: Sequence[str], others: Sequence[str]
) -> dict[str, ComparedPolicy]:
    """Compare every policy with the frontier at its own mean length, over problems and training seeds.

    The frontier joins those of its policies, the base included, that no other of them beats in accuracy and tokens.
    """
    base = evaluated["base"]
    overall = {name: combine(evaluated[name], base) for name in (*frontier, *others) if name in evaluated}
    known = [name for name in frontier if name in overall]
    front = pareto_front([(overall[name].accuracy, overall[name].tokens) for name in known])
    line = [known[place] for place in front]
    best = [[one.means for one in evaluated[name]] for name in line]
    rows = {}
    for name, one in overall.items():
        comparable = not any(differing(*pair) for pair in zip(evaluated[name], base, strict=True))
        means = [each.means for each in evaluated[name]]
        difference = matched_difference(means, best) if comparable and name not in line else None
        aes = one.comparison.average.aes if one.comparison and name != "base" else None
        problems = sum(len(each.problems) for each in evaluated[name])
        seeds = min(max(len(each.seeds), 1) for each in evaluated[name])
        rows[name] = ComparedPolicy(
            name, name in line, one.accuracy, one.tokens, aes, difference, None, 1, 0.0, problems, seeds
        )
    return rows


def _prompt_tokens(run: Run, policy: str) -> float:
    """The mean length of the problems as a policy reads them."""
    lengths = []
    for name in run.recipe.eval.benchmarks:
        tokenizer = run.asked_model(policy).tokenizer
        asked = render_problems(
            load_eval_benchmark(run.recipe, name), tokenizer, run.recipe.asked(policy), run.recipe.date
        )
        lengths.append(fmean(len(one.token_ids) for one in asked))
    return fmean(lengths)


def read_compared(directory: Path) -> dict[str, list[str]]:
    """Read what compositions of a run directory were compared with."""
    path = directory / FILE
    return dict(read_json(path)) if path.exists() else {}


def records(plan: ComparePlan, rows: Sequence[ComparedPolicy]) -> list[dict[str, Any]]:
    """List every row as plain data, and after them what was left out."""

    def known(found: Interval | None) -> Interval | None:
        return None if found is None or isnan(found.estimate) else found

    rows = [replace(one, aes=known(one.aes), difference=known(one.difference)) for one in rows]
    return [*map(asdict, rows), *({"policy": name, "left_out": why} for name, why in plan.left_out.items())]
