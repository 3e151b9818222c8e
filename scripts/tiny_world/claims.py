"""Test the paper's claims on tiny worlds: holds, does not hold, or within noise, with the figures.

Every problem's figures are averaged over the training seeds, then problems are resampled together for all policies. A
claim about a difference holds if its 95 % interval lies on the claimed side of zero, fails if it lies on the other
side, and is within noise otherwise. The difference in each training seed is given in brackets.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console

from lightning_weave.bench.statistics import Interval, ProblemMeans, compare, contrast
from lightning_weave.bench.summary import Summary, combine
from lightning_weave.config import check_recipe, merge_overrides, merge_tables
from lightning_weave.maths.metrics import pareto_front
from lightning_weave.progress import Progress
from lightning_weave.report.results import summaries
from lightning_weave.run import Run
from lightning_weave.stages import preview
from lightning_weave.store import write_atomic
from lightning_weave.train.resampled import parts_of, schedule_of
from lightning_weave.world.layout import WORLD, lay_out_world
from tiny_world.build import build_world

ClaimVerdict = Literal["holds", "does not hold", "within noise", "not measured"]
Experiment = Literal["full", "refresh"]  # recipes/demo-full.toml or recipes/demo-refresh.toml
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


CLAIMS = tuple(
    Difference(claim, *statement.split())
    for claim, statement in {
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
    }.items()
)
REFRESH_CLAIMS = tuple(  # not the paper's: at its dose, at four times the dose (alpha 0.5), and for longer
    Difference(claim, *statement.split())
    for claim, statement in {
        "at the paper's dose, two parts are close to offline": "aes refresh-2 ~ offline",
        "at the paper's dose, four parts are close to offline": "aes refresh-4 ~ offline",
        "at the paper's dose, auto is close to offline": "aes auto ~ offline",
        "at the paper's dose, online is close to offline": "aes online-exact ~ offline",
        "at four times the dose, two parts beat offline": "aes strong-refresh-2 > strong",
        "at four times the dose, four parts beat offline": "aes strong-refresh-4 > strong",
        "at four times the dose, auto beats offline": "aes strong-auto > strong",
        "at four times the dose, online beats offline": "aes strong-online-exact > strong",
        "at four times the dose, auto is close to four parts": "aes strong-auto ~ strong-refresh-4",
        "at four times the dose, four parts are close to online": "aes strong-refresh-4 ~ strong-online-exact",
        "at four times the dose, offline drifts with five times the updates": "aes strong-long < strong",
        "with five times the updates as well, two parts beat offline": "aes strong-long-refresh-2 > strong-long",
        "with five times the updates as well, four parts beat offline": "aes strong-long-refresh-4 > strong-long",
    }.items()
)
SWEEP = ("accuracy-only", "weave-25", "weave-37", "weave-50", "weave-62", "weave-75", "brevity-only")
SINGLES = ("accuracy-only", "brevity-only")
SETS = (*SINGLES, "thorough-only", "weave-50", "accuracy-thorough", "brevity-thorough")  # compared with all three
SURVIVING = 0.938  # the smallest share of positions that the paper reports
PREVIEWED = ("accuracy-only", "weave-50", "brevity-only")


@dataclass(frozen=True)
class ClaimFinding:
    """One claim on one world."""

    claim: str
    verdict: ClaimVerdict
    figures: str = ""


@dataclass(frozen=True)
class World:
    """A world to test claims on: the one that comes with the package, or one built from a seed."""

    seed: int | None = None

    @property
    def folder(self) -> str:
        return WORLD if self.seed is None else f"{WORLD}-{self.seed}"

    @property
    def label(self) -> str:
        return "shipped world" if self.seed is None else f"world of seed {self.seed}"

    def lay_out(self, progress: Progress) -> None:
        """Put the checkpoints where the recipe expects them."""
        if self.seed is None:
            lay_out_world()
        else:
            build_world(Path(self.folder), self.seed, progress)


def load_experiment(world: World, experiment: Experiment, number: int, overrides: Sequence[str]) -> Run:
    """Load the recipe of an experiment for one world and one training seed."""
    text = (files("lightning_weave.recipes") / f"demo-{experiment}.toml").read_text("utf-8")
    changes = tomllib.loads(text.replace(WORLD, world.folder))
    return load_world(world, changes, number, overrides, own_compositions=experiment == "refresh")


def load_world(
    world: World, changes: Mapping[str, Any], number: int, overrides: Sequence[str], own_compositions: bool
) -> Run:
    """Load the recipe of the demo with changes, or with other compositions, for one world and one seed."""
    data = tomllib.loads(
        (files("lightning_weave.recipes") / "demo.toml").read_text("utf-8").replace(WORLD, world.folder)
    )
    if own_compositions:
        data = {section: value for section, value in data.items() if section not in ("compositions", "report")}
    data = merge_tables(data, dict(changes))
    for section, seed in (("rollout", 42), ("train", 1234), ("eval", 42)):
        data[section]["seed"] = seed + number
    data = merge_overrides(data, list(overrides))
    data["name"] += (f"-world-{world.seed}" if world.seed is not None else "") + (f"-{number}" if number else "")
    recipe = check_recipe(data, "demo")
    return Run(recipe, str(Path(recipe.runs) / recipe.name / "recipe.toml"))


def pool(runs: Sequence[Mapping[str, Sequence[Summary]]]) -> dict[str, list[ProblemMeans]]:
    """Average every problem's figures over training seeds, for the policies that all seeds have."""
    pooled: dict[str, list[ProblemMeans]] = {}
    for policy in runs[0]:
        if not all(policy in run for run in runs):
            continue
        pooled[policy] = []
        for seeds in zip(*(run[policy] for run in runs), strict=True):  # of one benchmark
            first = seeds[0]
            assert all(summary.problems == first.problems for summary in seeds), "seeds share their problems"
            accuracy = np.mean([summary.problem_accuracy for summary in seeds], axis=0)
            tokens = np.mean([summary.problem_tokens for summary in seeds], axis=0)
            pooled[policy].append(ProblemMeans(first.benchmark, tuple(first.problems), accuracy, tokens))
    return pooled


def judge(interval: Interval, relation: str) -> ClaimVerdict:
    """Decide whether a difference is above zero (>), below (<) or close to it (~)."""
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


def check_difference(claim: Difference, policies: Policies, seeds: Sequence[Policies]) -> ClaimFinding:
    """Test one claim about two policies."""
    if claim.one not in policies or claim.two not in policies:
        return ClaimFinding(claim.claim, "not measured")

    def measure(policies: Policies, resamples: int) -> Interval:
        both = contrast(policies[claim.one], policies[claim.two], policies["base"], resamples)
        return {"aes": both.aes, "accuracy": both.accuracy, "tokens": both.tokens}[claim.quantity]

    interval = measure(policies, RESAMPLES)
    form = "{:+.2f}" if claim.quantity == "aes" else "{:+.1f}"
    estimate, low, high = (form.format(value) for value in (interval.estimate, interval.low, interval.high))
    by_seed = ", ".join(form.format(measure(seed, resamples=1).estimate) for seed in seeds)
    figures = f"{claim.quantity} {estimate} [{low}, {high}]" + (f" ({by_seed})" if by_seed else "")
    return ClaimFinding(claim.claim, judge(interval, claim.relation), figures)


def check(
    policies: Policies,
    seeds: Sequence[Policies] = (),
    evaluated: Sequence[Mapping[str, Sequence[Summary]]] = (),
    kept: Sequence[float] = (),
) -> list[ClaimFinding]:
    """Test every claim on one world. `policies` are means over training seeds; `seeds` are the single seeds.

    `evaluated` are the summaries of each seed, for budgets; `kept` is the share of positions of `weave-50` by seed.
    """
    findings = [check_difference(claim, policies, seeds) for claim in CLAIMS]

    def add(claim: str, holds: bool | ClaimVerdict, figures: str = "") -> None:
        verdict = holds if isinstance(holds, str) else "holds" if holds else "does not hold"
        findings.append(ClaimFinding(claim, verdict, figures))

    claim = "length falls as the brevity share grows"
    if set(SWEEP) <= policies.keys():
        lengths = [_means(policies[policy])[1] for policy in SWEEP]
        falls = all(after < before for before, after in pairwise(lengths))
        add(claim, falls, "tokens " + " > ".join(f"{length:.1f}" for length in lengths))
    else:
        add(claim, "not measured")

    claim = "some composition is dominated by no single anchor"
    if set(SINGLES) <= policies.keys():
        singles = [_means(policies[single]) for single in SINGLES]
        compositions = [policy for policy in SWEEP if policy in policies and policy not in SINGLES]
        undominated = [policy for policy in compositions if 0 in pareto_front([_means(policies[policy]), *singles])]
        add(claim, bool(undominated), ", ".join(undominated))
    else:
        add(claim, "not measured")

    claim = "all three anchors have the highest AES of all sets"
    if {*SETS, "all-three"} <= policies.keys():
        aes = {name: compare(policies[name], policies["base"], 1).average.aes.estimate for name in SETS}
        best = max(aes, key=lambda name: aes[name])
        interval = contrast(policies["all-three"], policies[best], policies["base"], RESAMPLES).aes
        figures = f"aes {interval.estimate:+.2f} [{interval.low:+.2f}, {interval.high:+.2f}] against {best}"
        add(claim, judge(interval, ">"), figures)
    else:
        add(claim, "not measured")

    claim = "composition is more accurate than the data mixture on every benchmark, with fewer tokens"
    if {"weave-50", "mixture-50"} <= policies.keys():
        pairs = zip(policies["weave-50"], policies["mixture-50"], strict=True)
        gains = [np.subtract(_means([one]), _means([two])) for one, two in pairs]
        figures = ", ".join(f"{accuracy:+.1f} with {tokens:+.1f} tokens" for accuracy, tokens in gains)
        add(claim, all(accuracy > 0 > tokens for accuracy, tokens in gains), figures)
    else:
        add(claim, "not measured")

    claim = "composition is above both anchors at every token budget"
    curves: dict[str, dict[int, list[float]]] = {name: {} for name in ("weave-50", *SINGLES)}
    for name, curve in curves.items():
        for point in [point for run in evaluated for summary in run.get(name, ()) for point in summary.budgets]:
            curve.setdefault(point.budget, []).append(point.accuracy)
    if all(curves.values()):
        above = {
            budget: float(np.mean(values)) - max(float(np.mean(curves[single][budget])) for single in SINGLES)
            for budget, values in sorted(curves["weave-50"].items())
        }
        add(claim, min(above.values()) > 0, ", ".join(f"{gain:+.1f} at {budget}" for budget, gain in above.items()))
    else:
        add(claim, "not measured")

    claim = f"at least {SURVIVING:.1%} of positions survive the alignment of two anchors"
    add(claim, min(kept) >= SURVIVING if kept else "not measured", ", ".join(f"{share:.1%}" for share in kept))
    return findings


def _means(benchmarks: Sequence[ProblemMeans]) -> tuple[float, float]:
    """Mean accuracy and tokens over benchmarks."""
    accuracy = np.mean([means.accuracy.mean() for means in benchmarks])
    return float(accuracy), float(np.mean([means.tokens.mean() for means in benchmarks]))


def results_table(policies: Policies, seeds: Sequence[Policies] = ()) -> str:
    """Markdown of every policy's accuracy, tokens and AES with its interval, and of its AES in each training seed."""
    lines = ["| policy | accuracy | tokens | AES | 95 % | by seed |", "| --- | --- | --- | --- | --- | --- |"]
    for policy, means in policies.items():
        accuracy, tokens = _means(means)
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


def write_claims(
    worlds: Mapping[World, Sequence[Run]], experiment: Experiment, command: str, progress: Progress
) -> Path:
    """Test the claims of an experiment on every world and write the results as Markdown.

    "full" adds previews of three targets, "refresh" the number of trajectories that each composition samples.
    """
    findings = {}
    parts = []
    for world, runs in worlds.items():
        evaluated = [summaries(run) for run in runs]
        policies = pool(evaluated)
        seeds = [pool([seed]) for seed in evaluated]
        column = f"{world.label}, {len(runs)} seed{'s' * (len(runs) > 1)}"
        results = results_table(policies, seeds)
        if experiment == "refresh":
            findings[column] = [check_difference(claim, policies, seeds) for claim in REFRESH_CLAIMS]
            parts.append(f"### Refreshed states in the {world.label}\n\n{results}\n")
            continue
        # The share of positions where both anchors have a shift, at the last update.
        kept = [float(run.stage("train", "weave-50").require()["kept"]) for run in runs]
        findings[column] = check(policies, seeds, evaluated, kept)
        rows = ["| target | accuracy | tokens |", "| --- | --- | --- |"]
        for name, previewed in preview.preview(runs[0], progress, Console(quiet=True), 50, PREVIEWED).items():
            overall = combine(previewed)
            rows.append(f"| {name} | {overall.accuracy:.1f} | {overall.tokens:.1f} |")
        parts.append(
            f"## The {world.label}\n\nMeans over {len(runs)} training seeds.\n\n{results}\n\n"
            "Sampled from the targets themselves, with live anchors and no training, 50 problems of each benchmark:\n\n"
            + "\n".join(rows)
            + "\n"
        )
    first = next(iter(worlds.values()))[0]
    tables = [claims_table(findings), *([work_table(first)] if experiment == "refresh" else [])]
    text = f"Made by `{command}`.\n\n" + "\n\n".join(tables) + "\n\n" + "\n".join(parts)
    path = first.directory / "report" / ("refresh.md" if experiment == "refresh" else "claims.md")
    write_atomic(path, text.encode())
    return path


def work_table(run: Run) -> str:
    """Markdown of the updates of every composition, and of the trajectories that it samples and scores."""
    lines = ["| composition | updates | trajectories sampled and scored |", "| --- | ---: | ---: |"]
    for name, composition in run.recipe.compositions.items():
        schedule = schedule_of(run, name)
        if composition.method == "online":
            sampled = sum(len(schedule.rows(update)) for update in range(len(schedule)))
        else:
            parts = [part for part in parts_of(run, name) if part.number == 1 or part.samples]
            sampled = sum(len(part.groups) for part in parts) * schedule.responses
        lines.append(f"| {name} | {len(schedule):,} | {sampled:,} |")
    return "\n".join(lines)
