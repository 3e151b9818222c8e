"""Results over several runs: students x domains, joined by what a policy is, in the blocks of the paper's tables."""

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_weave.bench.summary import Overall
from lightning_weave.cache.sources import ShiftRules
from lightning_weave.config import Joint, Sequential
from lightning_weave.errors import InputError
from lightning_weave.models.checkpoint import Checkpoint
from lightning_weave.report.results import PolicySummaries, overalls, policy_rows
from lightning_weave.report.tables import BenchmarkScore, PolicyRow, student_names
from lightning_weave.runs.scored import ROLES
from lightning_weave.runs.steps import Steps

Meaning = tuple[Any, ...]
VARIANTS = {"online": "Online DOPD", "direct-opd": "Naive Offline", "tilted": "Tilted-Target (ours)"}


@dataclass(frozen=True)
class StudentResults:
    """What was evaluated of one student, over all its runs."""

    name: str
    runs: Sequence[Steps]
    policies: PolicySummaries  # joined over runs; some may lack a benchmark
    whole: PolicySummaries  # those with every benchmark
    combined: Mapping[str, Overall]
    rows: Sequence[PolicyRow]  # of `whole`


def students(
    runs: Sequence[Steps], evaluated: Mapping[str, PolicySummaries], stale: Collection[str]
) -> list[StudentResults]:
    """Join what was evaluated, by student; `evaluated` is by run directory."""
    groups = by_student(runs)
    joined = [join(group, [evaluated[str(steps.store.run_dir)] for steps in group]) for group in groups]
    labels = benchmark_labels(joined)
    results = []
    for group, name, policies in zip(groups, student_names(groups), joined, strict=True):
        whole = complete(policies, labels)
        combined = overalls(whole)
        rows = policy_rows(whole, combined, stale=stale)
        results.append(StudentResults(name, group, policies, whole, combined=combined, rows=rows))
    return results


def by_student(runs: Sequence[Steps]) -> list[list[Steps]]:
    """Group runs by the content of their student."""
    students: dict[str, list[Steps]] = {}
    for steps in runs:
        students.setdefault(steps.identity_of(steps.student), []).append(steps)
    return list(students.values())


def run_names(runs: Sequence[Steps]) -> list[str]:
    """Name each run as its recipe does, or by its directory below what all share where two would be the same."""
    names = [steps.recipe.name for steps in runs]
    if len(set(names)) == len(names):
        return names
    folders = [steps.store.run_dir.resolve() for steps in runs]
    return [folder.relative_to(shared_folder(runs)).as_posix() for folder in folders]


def shared_folder(runs: Sequence[Steps]) -> Path:
    """The directory that holds all these runs."""
    return Path(os.path.commonpath([steps.store.run_dir.resolve() for steps in runs]))


def meaning(steps: Steps, policy: str) -> Meaning:
    """Say what a policy is, whatever it and its anchors are called: method, weights of pairs by content, alpha."""
    recipe = steps.recipe
    if policy in recipe.policies:
        section = recipe.policies[policy]
        return "checkpoint", steps.identity_of(Checkpoint.of(section)), section.system
    if policy not in recipe.compositions:
        return ("base",)
    composition = recipe.compositions[policy]
    settings = composition.model_dump(mode="json", exclude={"weights", "objective", "sequence"})
    order = [_pair(steps, anchor) for anchor in getattr(composition, "sequence", ())]
    by_tag = composition.by_tag or {"": composition.used}
    weights = sorted(
        (tag, _pair(steps, anchor), weight) for tag, shares in by_tag.items() for anchor, weight in shares.items()
    )
    tags = str(recipe.tags) if composition.by_tag else ""
    items = tuple(sorted((key, str(value)) for key, value in settings.items()))
    return steps.objective(policy), tuple(weights), tags, tuple(order), items


def _pair(steps: Steps, anchor: str) -> tuple[str, ...]:
    """Both sides of an anchor by content, what each reads, and the rules of its shift."""
    sides = [
        (steps.identity_of(steps.anchor(anchor, role)), str(steps.recipe.side(anchor, role).context)) for role in ROLES
    ]
    return (*sides[0], *sides[1], str(ShiftRules.of(steps.recipe.anchors[anchor])))


def join(runs: Sequence[Steps], evaluated: Sequence[PolicySummaries]) -> PolicySummaries:
    """Join the runs of one student: what is the same policy becomes one row over all benchmarks, by its first name.

    A policy that some run lacks keeps what it has. One that a run has under two names is two rows.
    """
    names: dict[Meaning, str] = {}
    joined: PolicySummaries = {}
    for steps, policies in zip(runs, evaluated, strict=True):
        taken: set[str] = set()
        for policy, results in policies.items():
            own = policy if policy not in joined else f"{policy} ({steps.recipe.name})"
            name = names.setdefault(meaning(steps, policy), own)
            name = own if name in taken else name
            taken.add(name)
            joined.setdefault(name, [])
            if twice := {one.label for one in joined[name]} & {one.label for one in results}:
                raise InputError(
                    f"{name} is evaluated on {sorted(twice)[0]} by two of the runs; a benchmark counts once. Leave "
                    "one of them out"
                )
            joined[name] += results
    return joined


def find_benchmark(wanted: str | None, students: Sequence[PolicySummaries]) -> str | None:
    """Take a benchmark by its name or by its label, and give the label."""
    names = {one.label: one.benchmark for policies in students for results in policies.values() for one in results}
    label = next((label for label, name in names.items() if wanted in (label, name)), None)
    if wanted is not None and label is None:
        raise InputError(f"--benchmark {wanted}: not evaluated on that; there is {', '.join(names) or 'nothing yet'}")
    return label


def benchmark_labels(students: Sequence[PolicySummaries]) -> list[str]:
    """All benchmarks, in the order in which they come."""
    return list(dict.fromkeys(one.label for policies in students for results in policies.values() for one in results))


def complete(policies: PolicySummaries, labels: Sequence[str]) -> PolicySummaries:
    """The policies that have every benchmark, each in this order."""
    by_label = {policy: {one.label: one for one in results} for policy, results in policies.items()}
    return {
        policy: [columns[label] for label in labels]
        for policy, columns in by_label.items()
        if set(labels) <= set(columns)
    }


def block(student: str, policies: PolicySummaries, rows: Sequence[PolicyRow], labels: Sequence[str]) -> list[PolicyRow]:
    """Make the block of one student: rows with every benchmark as they are, others without averages and AES."""
    by_policy = {row.policy: replace(row, group=student) for row in rows}
    return [by_policy.get(policy) or _partial(student, policy, results, labels) for policy, results in policies.items()]


def _partial(student: str, policy: str, results: Sequence[Any], labels: Sequence[str]) -> PolicyRow:
    by_label = {one.label: BenchmarkScore(one.label, one.accuracy, one.tokens, one.samples) for one in results}
    scores = tuple(by_label.get(label, BenchmarkScore(label, math.nan, math.nan)) for label in labels)
    return PolicyRow(policy, scores, math.nan, math.nan, group=student)


def ablation(steps: Steps, rows: Sequence[PolicyRow]) -> list[PolicyRow]:
    """Arrange the policies of one student as tab. ablation-summary: (a) objectives by anchors, (b) ways to compose.

    Only weights that several ways have in common are compared; the base comes first.
    """
    by_name = {row.policy: row for row in rows}
    same: dict[tuple[tuple[str, float], ...], dict[str, str]] = {}  # weights -> variant -> policy
    for name, composition in steps.recipe.compositions.items():
        if name in by_name:
            weights = tuple(sorted(composition.used.items()))
            same.setdefault(weights, {}).setdefault(_variant(steps, name), name)
    table = []
    for part, objectives in (("(a) Tilted-target correction", set(VARIANTS.values())), ("(b) Composition", None)):
        for weights, variants in same.items():
            others = [one for one in variants if one not in VARIANTS.values()]
            chosen = [one for one in VARIANTS.values() if one in variants] if objectives else others
            if not objectives and others and VARIANTS["tilted"] in variants:
                chosen = [*others, VARIANTS["tilted"]]
            if len(chosen) > 1:
                group = f"{part}: {' + '.join(anchor for anchor, _ in weights)}"
                table += [replace(by_name[variants[one]], policy=one, group=group) for one in chosen]
    base = [replace(by_name["base"], policy="Base", group=steps.recipe.mark)] if table and "base" in by_name else []
    return base + table


def _variant(steps: Steps, name: str) -> str:
    composition = steps.recipe.compositions[name]
    match composition:
        case Sequential():
            return " → ".join(composition.sequence)
        case Joint(refresh=parts) if parts > 1:
            return f"Refreshed ({parts} parts)"
        case _ if composition.method == "mixture":
            return "Data Mixture"
        case _ if composition.method == "online":
            return VARIANTS["online"]
        case _ if composition.method == "joint":
            return VARIANTS[steps.objective(name)] if steps.objective(name) in VARIANTS else steps.objective(name)
        case _:
            return composition.method


def colours_of(students: Sequence[Mapping[str, Any]]) -> list[str]:
    """The policies of all students, for their colours: the same name is the same colour everywhere."""
    return list(dict.fromkeys(policy for policies in students for policy in policies))
