"""What was evaluated, as a table of results: read from a run, compared with the base, printed, and sent to trackers."""

import math
import os
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pandas as pd
from pandas import DataFrame
from rich.console import Console

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.statistics import contrast
from lightning_weave.bench.summary import (
    ASKED,
    SUMMARY,
    Metric,
    Summary,
    TaskResult,
    combine,
    difference,
    differing,
    named_differences,
    pool,
    pool_task,
    read_result,
    read_summary,
)
from lightning_weave.config import HARNESS, HELD_OUT, Joint, Sequential, Tags, replicate_of
from lightning_weave.directory import known_policies, older_stages
from lightning_weave.errors import InputError
from lightning_weave.progress import RUN_LOG
from lightning_weave.report import tables
from lightning_weave.report.tables import AVERAGE, benchmarks_of, tasks_of
from lightning_weave.run import ROLES, Run, is_wanted
from lightning_weave.stages.prompts import render_problems, tag_of
from lightning_weave.store import MANIFEST, Stage, differences, read_description
from lightning_weave.store.files import fingerprint
from lightning_weave.trackers import TrackedRun, open_trackers

REPORT = "report"  # the run of a tracker that has the figures
MODEL_ARGS = ("model", "model_args", "batch_size")  # of harness.args: how the model is loaded, not what it is asked
VARIANTS = {"online": "Online DOPD", "direct-opd": "Naive Offline", "tilted": "Tilted-Target (ours)"}
OWN_PROTOCOL = "protocol of the recipe"  # the group of a table that also has results by other protocols
PolicySummaries = dict[str, list[Summary]]  # policy -> its benchmarks
PolicyTasks = dict[str, dict[str, tuple[TaskResult, dict[str, Any]]]]  # policy -> task -> its result and protocol
Meaning = tuple[Any, ...]
LEVELS = "levels of "  # in the family of effort levels
Origins = dict[str, list[tuple[Run, str]]]  # policy of a report -> the runs that have it, and its name there


def summaries(run: Run, each_seed: bool = False) -> PolicySummaries:
    """Read the evaluations of every policy that has all benchmarks complete: means over its training seeds, or each."""
    finished, older = {}, set()
    for policy in known_policies(run):
        stages = [run.stage("eval", policy, name) for name in run.recipe.eval.benchmarks]
        if stages and all(stage.complete for stage in stages):
            finished[policy] = [_read_evaluation(run, policy, stage) for stage in stages]
            older |= set() if all(map(_is_of_inputs, stages)) else {policy}
    if each_seed:
        return finished
    # An evaluation of weights that have been trained again since is no seed among others.
    alone = {policy for policy in finished if policy != replicate_of(policy) and {policy, replicate_of(policy)} & older}
    return pool_seeds(run, {policy: results for policy, results in finished.items() if policy not in alone})


def _is_of_inputs(stage: Stage) -> bool:
    """Whether a stage was computed from its inputs as they are, under whatever name."""
    return {*(stage.manifest() or {}).get("inputs", {}).values()} == {one.fingerprint for one in stage.inputs}


def pool_seeds(run: Run, evaluated: PolicySummaries) -> PolicySummaries:
    """Average every policy over its training seeds, those that were asked the same."""
    pooled = {}
    for policy, results in evaluated.items():
        if policy == replicate_of(policy):
            others = [evaluated[other] for other in replicates(run, policy, evaluated)]
            same = [own for own in others if len(own) == len(results) and not any(map(differing, own, results))]
            pooled[policy] = [pool(seeds) for seeds in zip(results, *same, strict=True)]
    return pooled


def replicates(run: Run, policy: str, among: Iterable[str]) -> Iterator[str]:
    """Yield the replicates of a policy that differ by the seed of training alone: an older one may differ by more."""
    for other in among:
        if other != policy == replicate_of(other) and _differ_by_seed(run, policy, other):
            yield other


def _differ_by_seed(run: Run, policy: str, other: str) -> bool:
    if merged := run.recipe.merged(policy):
        parts = zip(merged, run.recipe.merged(other), strict=True)
        return all(one == two or _differ_by_seed(run, one, two) for one, two in parts)
    one, two = (run.stage("train", run.composition_of(name) or "") for name in (policy, other))
    inputs = [(stage.manifest() or {}).get("inputs") for stage in (one, two)]
    return inputs[0] == inputs[1] and dict(differences(one.settings, two.settings)).keys() <= {"train.seed"}


def other_protocols(run: Run, shown: Collection[Path] = ()) -> dict[str, PolicySummaries]:
    """Read the evaluations on the same benchmarks by other protocols than the recipe's, by what differs.

    Of each protocol, the policies that have all the benchmarks of the first. Folders in `shown` are left out.
    """
    protocols: dict[str, PolicySummaries] = {}
    for policy, name in product(known_policies(run), run.recipe.eval.benchmarks):
        stage = run.stage("eval", policy, name)
        inputs = {one.path: one.fingerprint for one in stage.inputs}
        for other in stage.siblings():
            changes = dict(differences(dict(stage.settings), dict(other.settings)))
            is_same = (other.manifest() or {}).get("inputs") == inputs and not changes.keys() & {"model", "benchmark"}
            if is_same and other.folder not in shown:
                words = [f"{key} {re.sub('(?s).* -> ', '= ', what)}" for key, what in changes.items()]
                label = ", ".join(words) or "another format"
                protocols.setdefault(label, {}).setdefault(policy, []).append(_read_evaluation(run, policy, other))
    for label, policies in protocols.items():
        names = [summary.benchmark for summary in next(iter(policies.values()))]
        whole = {policy: some for policy, some in policies.items() if [one.benchmark for one in some] == names}
        protocols[label] = pool_seeds(run, whole)
    return protocols


def _read_evaluation(run: Run, policy: str, stage: Stage) -> Summary:
    """Read one evaluation; its settings also say how the policy was asked. A policy's system prompt is part of it."""
    summary = read_summary(stage.folder / "summary.json")
    asked = {key: stage.settings.get(key) for key in ASKED}
    own = run.recipe.policies.get(policy)
    asked |= {
        key: getattr(run.recipe.eval, key) for key in ("system", "thinking") if own and getattr(own, key) is not None
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    return replace(summary, settings={**summary.settings, **asked})


def results_table(
    evaluated: PolicySummaries, group: str = "", older: Collection[str] = (), labels: Sequence[str] = ()
) -> DataFrame:
    """Tabulate every policy by benchmark and on average, compared with the base where both were asked the same.

    A policy that lacks a benchmark has no average. `labels` are the benchmarks, where others have more of them.
    """
    labels = labels or list(dict.fromkeys(one.label for results in evaluated.values() for one in results))
    base = {one.label: one for one in evaluated.get("base", [])}
    measures = ("accuracy", "accuracy_error", "tokens", "tokens_error", "aes", "aes_low", "aes_high")
    rows = []
    for policy, results in evaluated.items():
        row: dict[tuple[str, str], Any] = {("", "older"): policy in older}
        by_label = {one.label: one for one in results}
        differs = {name: differing(one, base[name]) for name, one in by_label.items() if name in base}
        comparable = [by_label[name] for name, why in differs.items() if not why]
        bases = [replace(base[one.label], benchmark=one.benchmark) for one in comparable]
        comparison = combine(comparable, bases).comparison if comparable else None
        measured: dict[str, Any] = {label: by_label[label] for label in labels if label in by_label}
        scores = {one.label: comparison.benchmarks[one.benchmark].aes for one in comparable} if comparison else {}
        if len(measured) == len(labels) and labels:
            measured[AVERAGE] = combine(results)
            if comparison is not None and len(comparable) == len(labels):
                scores[AVERAGE] = comparison.average.aes
        for part, one in measured.items():
            row |= {(part, key): getattr(one, key) for key in measures[:4]}
            if aes := scores.get(part):
                row[part, "aes"] = aes.estimate
                if policy != "base":
                    row |= {(part, "aes_low"): aes.low, (part, "aes_high"): aes.high}
        for label, one in by_label.items():
            row |= {(label, "problems"): len(one.problems), (label, "samples"): one.samples}
            row |= {(label, "seeds"): max(len(one.seeds), 1)} if policy != "base" else {}
            row[label, "differs"] = differs.get(label) or math.nan
        rows.append(row)
    further = ("problems", "samples", "seeds", "differs")
    columns = [("", "older"), *((label, key) for label in labels for key in (*measures, *further))]
    columns += [(AVERAGE, key) for key in measures] if labels else []
    index = pd.MultiIndex.from_tuples([(group, policy) for policy in evaluated], names=["group", "policy"])
    table = DataFrame.from_records(rows, index=index) if rows else DataFrame(index=index)
    return table.reindex(columns=pd.MultiIndex.from_tuples(columns))


def task_results(run: Run, each_seed: bool = False) -> PolicyTasks:
    """Read what another harness measured of the policies of a run, whichever command asked for it."""
    by_policy: PolicyTasks = {}
    for policy in known_policies(run):
        folders = []
        some = run.evaluation(policy, HARNESS, {}, "")  # tasks differ by what is asked, not by the checkpoint
        checkpoint = {one.path: one.fingerprint for one in some.inputs}, some.settings.get("model")
        for folder in sorted((run.directory / "eval" / policy).glob(f"{HARNESS}*")):
            found = read_description(folder)
            is_current = found and (found["inputs"], found["settings"].get("model")) == checkpoint
            if "@" not in folder.name and is_current and all((folder / name).exists() for name in (MANIFEST, SUMMARY)):
                folders.append(folder)
        own = [run.stage("harness", policy, task) for task in run.recipe.harness.tasks]  # of the recipe: they win
        for folder in [*folders, *(stage.folder for stage in own if stage.complete)]:
            result = read_result(folder)
            settings = (read_description(folder) or {})["settings"]
            protocol = {key: value for key, value in settings["args"].items() if key not in MODEL_ARGS}
            protocol |= {"harness": result.harness, "seed": settings["seed"], "include": settings.get("include")}
            by_policy.setdefault(policy, {})[result.task] = (result, protocol)
    if each_seed:
        return by_policy
    pooled: PolicyTasks = {}
    for policy, tasks in by_policy.items():
        for task, (result, protocol) in tasks.items() if policy == replicate_of(policy) else ():
            seeds = [by_policy[other].get(task) for other in replicates(run, policy, by_policy)]
            same = [one[0] for one in seeds if one and one[1] == protocol]
            pooled.setdefault(policy, {})[task] = (pool_task([result, *same]), protocol)
    return pooled


def with_tasks(
    results: DataFrame, tasks: PolicyTasks, chosen: Mapping[str, str], every: Sequence[PolicyTasks] = ()
) -> DataFrame:
    """Add a column for every task that another harness measured: of its metrics the recipe's choice or the first.

    `every` are the tasks of all students, which share the columns.
    """
    kinds: dict[str, Metric] = {}
    for result in [result for policies in every or [tasks] for one in policies.values() for result, _ in one.values()]:
        name = chosen.get(result.task)
        fitting = [one for one in result.metrics if name is None or name in (one.name, one.name.partition(",")[0])]
        if not fitting:
            names = ", ".join(metric.name for metric in result.metrics) or "none"
            raise InputError(f"harness.metrics.{result.task} = {name!r}: no such metric; there is {names}")
        kinds.setdefault(result.task, fitting[0])
    for task, kind in kinds.items():
        column = f"{kind.name.partition(',')[0]}{'↓' if kind.lower_is_better else '↑'}"
        rows: list[dict[str, Any]] = []
        for policy in results.index.get_level_values("policy"):
            row: dict[str, Any] = {}
            own, base = (tasks.get(name, {}).get(task) for name in (policy, "base"))
            found, from_base = (
                one and next((metric for metric in one[0].metrics if metric.name == kind.name), None)
                for one in (own, base)
            )
            if found:
                row |= {column: found.value, "error": found.error}
            if own and base and found and from_base and policy != "base":
                if differs := ", ".join(named_differences(sorted({**own[1], **base[1]}), own[1], base[1])):
                    row["task differs"] = differs
                else:
                    row["difference"], row["difference_error"] = difference(found, from_base)
            rows.append(row)
        for key in (column, "error", "difference", "difference_error", "task differs"):
            results[task, key] = [math.nan if row.get(key) is None else row[key] for row in rows]
    return results


def read_results(run: Run, each_seed: bool = False) -> DataFrame:
    """Tabulate all policies evaluated so far, with results of other harnesses: means over training seeds, or each."""
    evaluated, tasks = summaries(run, each_seed), task_results(run, each_seed)
    evaluated |= {policy: [] for policy in tasks if policy not in evaluated}
    return with_tasks(results_table(evaluated, run.recipe.mark), tasks, run.recipe.harness.metrics)


@dataclass(frozen=True)
class StudentResults:
    """What was evaluated of one student, over all its runs."""

    name: str
    runs: Sequence[Run]
    evaluated: PolicySummaries  # joined over runs
    results: DataFrame
    policies: DataFrame  # what each of them is

    @property
    def complete(self) -> DataFrame:
        """The results of the policies that have every benchmark."""
        has_average = (AVERAGE, "accuracy") in self.results
        return self.results[self.results[AVERAGE, "accuracy"].notna()] if has_average else self.results[:0]


def read_evaluations(
    selection: Sequence[Run], runs: Sequence[Run], evaluated: Sequence[PolicySummaries]
) -> tuple[list[StudentResults], DataFrame, list[str]]:
    """Read what was evaluated: by student, as one table with what has another protocol, and notes about it.

    `runs` are those of the selection with the newest complete stages that there are.
    """
    mark = runs[0].recipe.mark
    notes = [f"This is a {mark}. It shows that the recipe runs."] if mark else []
    others: dict[str, PolicySummaries] = {}
    protocol, is_other = "", False
    if len(runs) == 1:
        benchmarks = runs[0].recipe.eval.benchmarks
        shown = [policy for policy in runs[0].policies if is_wanted(policy, evaluated[0])]
        used = {runs[0].stage("eval", policy, name).folder for policy in shown for name in benchmarks}
        is_own = bool(summaries(selection[0]))
        others = other_protocols(selection[0], used if is_own else ())
        is_other = bool(others) and not is_own
        protocol = OWN_PROTOCOL if others else ""
        if is_other:  # the page is of the protocol with the most policies
            protocol = max(others, key=lambda label: len(others[label]))
            evaluated = [others.pop(protocol)]
            notes.append(f"Nothing is evaluated by this recipe's protocol. The table has another: {protocol}.")
    outdated = set()
    for run in selection:
        older = older_stages(run)
        policies = {path.split("/")[1] for path in older if path.startswith(("train/", "eval/"))}
        outdated |= policies.intersection(run.policies)
        reasons: dict[str, list[str]] = {}
        for path, why in older.items():
            reasons.setdefault(why, []).append(path)
        for why, stages in reasons.items():
            names = ", ".join(stages[:6]) + (f" and {len(stages) - 6} more" if len(stages) > 6 else "")
            notes.append(f"Older recipe: {names}. What differs: {why}. Next: {run.command('run')}")
    title = ": ".join(filter(None, (mark, protocol)))
    students = read_students(runs, evaluated, title, () if is_other else outdated)
    results = pd.concat([student.results for student in students])
    further = [results_table(policies, label) for label, policies in others.items()]
    further = [one for one in further if benchmarks_of(one) == benchmarks_of(results)]
    results = pd.concat([results, *further]) if further else results
    notes += tables.not_compared(results)
    if any(HELD_OUT in run.recipe.eval.benchmarks for run in runs):
        notes.append(f"{HELD_OUT} is a part of the run's own prompts that was not trained on.")
    for run, found in zip(runs, evaluated, strict=True):
        asked = run.recipe.eval.benchmarks or run.recipe.harness.tasks
        finished = {*found, *summaries(run, each_seed=True)}
        if asked and (waiting := [policy for policy in run.policies if policy not in finished]):
            notes.append(f"Not evaluated yet: {', '.join(waiting)}. Next: {run.command('eval')}")
        notes += [f"{policy} on {one.label}: {one.error}" for policy in found for one in found[policy] if one.error]
    for student in students:
        whole = student.complete.index.get_level_values("policy")
        if partial := [policy for policy, some in student.evaluated.items() if some and policy not in whole]:
            where = f" of {student.name}" if len(students) > 1 else ""
            count = len(benchmarks_of(results))
            notes.append(f"Not on all {count} benchmarks, so without an average{where}: {', '.join(partial)}.")
    return students, results, notes


def read_students(
    runs: Sequence[Run], evaluated: Sequence[PolicySummaries], group: str = "", older: Collection[str] = ()
) -> list[StudentResults]:
    """Group runs by the content of their student and tabulate what was evaluated of each; `evaluated` is by run."""
    tasks = {run: task_results(run) for run in runs}
    held_out = held_out_names(runs)
    by_student: dict[str, list[tuple[Run, str, PolicySummaries]]] = {}
    for run, name, found in zip(runs, run_names(runs), evaluated, strict=True):
        known: PolicySummaries = {policy: [] for policy in tasks[run]}
        for policy, results in found.items():
            known[policy] = [
                replace(one, benchmark=held_out[run], label=held_out[run]) if one.benchmark == HELD_OUT else one
                for one in results
            ]
        by_student.setdefault(run.identity_of(run.student), []).append((run, name, known))
    members = [[run for run, *_ in some] for some in by_student.values()]
    joined = [join(some) for some in by_student.values()]
    joined_tasks: list[PolicyTasks] = []
    for _, origins in joined:
        found_in = {name: [tasks[run].get(policy, {}) for run, policy in some] for name, some in origins.items()}
        joined_tasks.append({name: dict(ChainMap(*reversed(some))) for name, some in found_in.items()})
    labels = list(dict.fromkeys(one.label for some, _ in joined for found in some.values() for one in found))
    metrics = {task: metric for run in runs for task, metric in run.recipe.harness.metrics.items()}
    students = []
    each = zip(tables.student_names(members), members, joined, joined_tasks, strict=True)
    for name, own_runs, (policies, origins), own_tasks in each:
        results = results_table(policies, name if len(members) > 1 else group, older, labels)
        results = with_tasks(results, own_tasks, metrics, joined_tasks)
        facts = describe({policy: places[0] for policy, places in origins.items()})
        students.append(StudentResults(name, own_runs, policies, results, facts))
    return students


def held_out_names(runs: Sequence[Run]) -> dict[Run, str]:
    """Name the held-out benchmark of each run: with the run's name where the runs hold out different problems."""
    contents: dict[Run, str] = {}
    for run in runs:
        with suppress(InputError):  # its data is gone and unknown: then nothing is evaluated on it
            if HELD_OUT in run.recipe.eval.benchmarks:
                contents[run] = str(run.stage("eval", "base", HELD_OUT).settings["benchmark"])
    first = {content: run for run, content in reversed(contents.items())}  # one name for the same problems
    names = dict(zip(runs, run_names(runs), strict=True))
    several = len(first) > 1
    return {
        run: f"{HELD_OUT} ({names[first[contents[run]]]})" if several and run in contents else HELD_OUT for run in runs
    }


def run_names(runs: Sequence[Run]) -> list[str]:
    """Name each run as its recipe does, or by its directory below the shared one where two would be the same."""
    names = [run.recipe.name for run in runs]
    if len(set(names)) == len(names):
        return names
    folders = [run.directory.resolve() for run in runs]
    shared = os.path.commonpath(folders)
    return [folder.relative_to(shared).as_posix() for folder in folders]


def join(runs: Sequence[tuple[Run, str, PolicySummaries]]) -> tuple[PolicySummaries, Origins]:
    """Join the runs of one student: the same policy becomes one row over all benchmarks, by its first name.

    A policy that some run lacks keeps what it has. One that a run has under two names is two rows.
    """
    known: dict[Meaning, str] = {}
    joined: PolicySummaries = {}
    origins: Origins = {}
    for run, run_name, policies in runs:
        taken: set[str] = set()
        for policy, results in policies.items():
            own = policy if policy not in joined else f"{policy} ({run_name})"
            name = known.setdefault(meaning(run, policy), own)
            name = own if name in taken else name
            taken.add(name)
            origins.setdefault(name, []).append((run, policy))
            joined.setdefault(name, [])
            if twice := {one.label for one in joined[name]} & {one.label for one in results}:
                raise InputError(
                    f"{name} is evaluated on {sorted(twice)[0]} by two of the runs; a benchmark counts once. Leave "
                    "one of them out"
                )
            joined[name] += results
    return joined, origins


def meaning(run: Run, policy: str) -> Meaning:
    """What a policy is, regardless of its name and its anchors' names: method, weights of pairs by content, alpha."""
    recipe = run.recipe
    if policy in recipe.policies:
        asked = recipe.policies[policy].model_dump(exclude={"model", "merge", "weights", "density", "decode"})
        what: Meaning = ("checkpoint", run.identity_of(run.asked_model(policy)))
        if recipe.merged(policy):
            what = ("merge", run.stage("merge", policy).fingerprint)
        elif target := recipe.policies[policy].decode:
            what = ("decode", meaning(run, target))
        return *what, str(asked)
    trained = run.composition_of(policy)
    if trained is None:
        return ("base",)
    composition = recipe.compositions[trained]
    settings = composition.model_dump(mode="json", exclude={"weights", "objective", "sequence"})
    order = [pair_content(run, anchor) for anchor in getattr(composition, "sequence", ())]
    by_tag = composition.by_tag or {"": composition.used}
    weights = sorted(
        (tag, pair_content(run, anchor), weight) for tag, some in by_tag.items() for anchor, weight in some.items()
    )
    tags = str(recipe.tags) if composition.by_tag else ""
    items = tuple(sorted((key, str(value)) for key, value in settings.items()))
    return run.objective(trained), tuple(weights), tags, tuple(order), items, policy.partition("@")[2]


def tag_table(runs: Sequence[Run], evaluated: PolicySummaries) -> DataFrame:
    """Tabulate every policy by the tag of the problem, over all benchmarks of the runs; empty without tags."""
    tagged = [run for run in runs if run.recipe.tags != Tags()]
    if not tagged:
        return DataFrame()
    held_out = held_out_names(runs)
    tags: dict[tuple[str, str], str] = {}
    for run in tagged:
        section = run.recipe.eval
        for name in section.benchmarks:
            benchmark = load_eval_benchmark(run.recipe, name)
            problems = render_problems(benchmark, run.student.tokenizer, section, run.recipe.date)
            known = held_out[run] if name == HELD_OUT else benchmark.name
            tags |= {(known, one.id): tag_of(run.recipe, one) for one in problems}
    rows = []
    for policy, results in evaluated.items():
        for one in results:
            for problem, *values in zip(one.problems, one.problem_accuracy, one.problem_tokens, strict=True):
                if (one.benchmark, problem) in tags:
                    rows.append((policy, tags[one.benchmark, problem], *values))
    measured = DataFrame(rows, columns=["policy", "tag", "accuracy", "tokens"]).assign(problems=1)
    sums = {"accuracy": "mean", "tokens": "mean", "problems": "sum"}
    wide = measured.groupby(["policy", "tag"]).agg(sums).unstack("tag").swaplevel(axis=1).sort_index(axis=1, level=0)
    wide = wide.loc[[policy for policy in evaluated if policy in wide.index]]
    means = measured.groupby("policy").agg(sums)
    for tag in dict.fromkeys(tag for tag, _ in wide.columns):
        wide[tag, "samples"] = math.nan
    for measure in ("accuracy", "tokens", "aes", "aes_low", "aes_high"):
        wide[AVERAGE, measure] = means.get(measure, math.nan)
    index = [(runs[0].recipe.mark, policy) for policy in wide.index]
    return wide.set_axis(pd.MultiIndex.from_tuples(index, names=["group", "policy"]))


def describe(origins: Mapping[str, tuple[Run, str]]) -> DataFrame:
    """Tabulate what each policy is by the recipe of its run: kind, weights, alpha, family of a sweep, ablation."""
    rows = []
    for run, policy in origins.values():
        name = run.composition_of(policy) or ""
        composition = run.recipe.compositions.get(name)
        row: dict[str, Any] = {"kind": "base" if policy == "base" else "other", "weights": {}, "alpha": None}
        row |= {"used": (), "variant": "", "family": "", "share": 0.0}
        if composition is not None:
            objective = run.objective(name)
            is_own = composition.method == "joint" and objective == "tilted" and not composition.is_placebo
            kind = "single" if len(composition.used) == 1 else "composition"
            row |= {"kind": kind if is_own else "baseline", "alpha": run.alpha(name)}
            row["weights"] = composition.by_tag or composition.weights
            if not composition.slots:  # a student of several targets is compared with no other of one
                row["used"] = tuple(sorted(composition.used.items()))
            match composition:
                case Joint() if composition.is_placebo:
                    pass  # a control is no way to compose
                case Sequential():
                    row["variant"] = " → ".join(composition.sequence)
                case Joint(parts=parts) if parts > 1:
                    parts = (run.stage("train", name).manifest() or {}).get("parts", parts)  # auto: as many as it took
                    row["variant"] = f"Refreshed ({parts} part{'s' * (parts > 1)})"
                case Joint():
                    row["variant"] = VARIANTS.get(objective, objective)
                case _:
                    names = {"online": VARIANTS["online"], "mixture": "Data Mixture"}
                    row["variant"] = names.get(composition.method, composition.method)
            solved = (run.stage("train", name).manifest() or {}).get("levels", {})  # alphas by level
            for place, slot in enumerate(composition.slots):  # joined in the order of the levels
                if policy == (name if slot.level is None else f"{name}@{slot.level}"):
                    row |= {"weights": slot.weights, "alpha": solved.get(slot.level or "", slot.alpha)}
                    row |= {"family": f"{LEVELS}{name}", "share": place} if slot.level else {}
            pair = list(run.recipe.anchors)[:2]
            if is_own and not composition.routes and not composition.slots and composition.used.keys() <= set(pair):
                shares = [composition.weights.get(anchor, 0.0) for anchor in pair]
                of_share = {"weights", "routes", "objective", "seed", "normalize", "allow_negative"}
                same = (
                    *(pair_content(run, one) for one in pair),
                    sum(shares),
                    composition.model_dump(exclude=of_share),
                )
                row |= {"family": str(same), "share": shares[-1]}
        rows.append(row)
    table = DataFrame(rows, index=list(origins))
    if rows:
        sizes = table.groupby("family")["family"].transform("size")
        is_line = (sizes >= 3) | table["family"].str.startswith(LEVELS)  # a sweep has at least three points
        table["family"] = table["family"].where(is_line, "")
    return table


def ablation(results: DataFrame, policies: DataFrame, mark: str = "") -> DataFrame:
    """Arrange the policies of one student as tab. ablation-summary: (a) objectives by anchors, (b) ways to compose.

    Only weights that several ways have in common are compared; the base comes first.
    """
    places = {policy: place for place, (_, policy) in enumerate(results.index)}
    same: dict[Any, dict[str, str]] = {}  # weights -> variant -> policy
    for policy in places:
        variant, used = policies.loc[policy, ["variant", "used"]]
        if variant and used:
            same.setdefault(used, {}).setdefault(variant, policy)
    rows: list[tuple[str, str, int]] = []  # group, name, place
    for part in ("(a) Tilted-target correction", "(b) Composition"):
        for weights, variants in same.items():
            others = [one for one in variants if one not in VARIANTS.values()]
            chosen = [one for one in VARIANTS.values() if one in variants] if part[1] == "a" else others
            if part[1] == "b" and others and VARIANTS["tilted"] in variants:
                chosen = [*others, VARIANTS["tilted"]]
            if len(chosen) > 1:
                group = f"{part}: {' + '.join(anchor for anchor, _ in weights)}"
                rows += [(group, one, places[variants[one]]) for one in chosen]
    if rows and "base" in places:
        rows.insert(0, (mark, "Base", places["base"]))
    arranged = results.iloc[[place for *_, place in rows]]
    return arranged.set_axis(pd.MultiIndex.from_tuples([row[:2] for row in rows], names=results.index.names))


def pair_content(run: Run, anchor: str) -> tuple[str, ...]:
    """Both sides of an anchor by content, what each reads, and the rules of its shift."""
    section = run.recipe.anchors[anchor]
    sides = [(run.identity_of(run.anchor(anchor, role)), str(section.context(role))) for role in ROLES]
    return (*sides[0], *sides[1], str(run.recipe.rules_of(anchor)))


def points(results: DataFrame, policies: DataFrame) -> list[dict[str, Any]]:
    """Make points.json: a list of policies with weights, alpha, accuracy, tokens and AES with its interval."""

    def number(value: Any) -> Any:
        return None if value is None or math.isnan(value) else value

    found = []
    for (_, policy), row in results.iterrows():
        own = policies.loc[policy]
        average = {key: number(row.get((AVERAGE, key))) for key in ("accuracy", "tokens", "aes", "aes_low", "aes_high")}
        if policy == "base":
            average |= {"aes_low": average["aes"], "aes_high": average["aes"]}
        benchmarks = {
            name: {key: number(row[name, key]) for key in ("accuracy", "tokens")}
            | {key: None if math.isnan(row[name, key]) else int(row[name, key]) for key in ("problems", "samples")}
            for name in benchmarks_of(results)
        }
        tasks = {
            task: {"metric": metric[:-1], "value": row[task, metric]}
            | {key: number(row[task, key]) for key in ("error", "difference", "difference_error")}
            for task, metric in tasks_of(results)
            if not math.isnan(row[task, metric])
        }
        seeds = tables.seeds_of(results, policy)
        point = {"policy": policy, "weights": own["weights"], "alpha": number(own["alpha"]), **average}
        point |= {"seeds": seeds} if seeds > 1 else {}
        found.append({**point, "benchmarks": benchmarks, **({"tasks": tasks} if tasks else {})})
    return found


def run_points(run: Run) -> list[dict[str, Any]]:
    """The points of one run."""
    results = read_results(run)
    names = results.index.get_level_values("policy")
    return points(results, describe({policy: (run, policy) for policy in names}))


def show_results(run: Run, out: Console, base: str = "base") -> None:
    """Print the table of all policies evaluated so far; `base` is the label of the student itself."""
    evaluated = summaries(run)
    results = read_results(run).rename(index={"base": base}, level="policy")
    if results.empty:
        return
    table = tables.format_results(results)
    RUN_LOG.info(tables.plain(table).rstrip())
    exact: dict[str, Any] = {"soft_wrap": True, "markup": False, "highlight": False}
    if out.is_terminal:
        out.print(tables.console(table, width=out.width))
        out.print("Bold: best. Underlined: second best. In brackets: 95 % interval.", highlight=False)
        count = len(benchmarks_of(results))
        if count > 1 and not tables.fits(table, out.width):
            out.print(f"Means over {count} benchmarks; a wider terminal, or | cat, shows each.", highlight=False)
    else:
        out.print(f"{tables.plain(table)}* best, + second best; in brackets: 95 % interval", **exact)
    for line in filter(None, [tables.counts(results), *tables.not_compared(results)]):
        out.print(line, **exact)
    by_tag = tag_table([run], evaluated)
    if not by_tag.empty:
        out.print(f"By tag of the problem:\n{tables.plain(tables.format_results(by_tag))}", **exact)
    for levels, (accuracy, tokens, order) in level_steps(run, evaluated).iterrows():
        out.print(f"{levels}: accuracy {accuracy}, tokens {tokens}: {order}", **exact)
    for policy, result in [(policy, one) for policy, found in evaluated.items() for one in found if one.error]:
        out.print(f"error: {policy} on {result.label}: {result.error}", style="red", **exact)
    out.print(f"Samples and summaries: {run.directory / 'eval'}", soft_wrap=True, markup=False)


def level_steps(run: Run, evaluated: PolicySummaries) -> DataFrame:
    """Compare each effort level with the one before it, paired by problem: do accuracy and tokens move in their order?

    The order is that of the recipe, or of the numbers; its direction is that of the tokens of the first and the last.
    """
    rows = {}
    for name, composition in run.recipe.compositions.items():
        levels = [level for level in getattr(composition, "levels", ()) if f"{name}@{level}" in evaluated]
        found = [evaluated[f"{name}@{level}"] for level in levels]
        tokens = [combine(one).tokens for one in found]
        for (before, level), (old, new) in zip(pairwise(levels), pairwise(found), strict=True):
            reference = [one.means for one in old]
            change = contrast([one.means for one in new], reference, reference)
            direction = 1 if tokens[-1] > tokens[0] else -1
            cells, verdicts = [], []
            for figure, one in (("accuracy", change.accuracy), ("tokens", change.tokens)):
                low, high = sorted((direction * one.low, direction * one.high))
                cells.append(f"{one.estimate:+.1f} [{one.low:+.1f}, {one.high:+.1f}]")
                verdicts.append(f"{figure} {'in order' if low > 0 else 'REVERSED' if high < 0 else 'within noise'}")
            rows[f"{name}: {before} to {level}"] = [*cells, ", ".join(verdicts)]
    return DataFrame.from_dict(rows, orient="index", columns=["Accuracy", "Tokens", "Order"]).rename_axis("Levels")


def track_evaluation(run: Run, policy: str) -> None:
    """Log the results of a policy where its training was logged."""
    if not run.recipe.train.trackers:
        return
    results = read_results(run, each_seed=True)
    row = results.xs(policy, level="policy").iloc[0]
    figures: dict[str, float] = {}
    for part in [*benchmarks_of(results), *([AVERAGE] if benchmarks_of(results) else [])]:
        name = "eval" if part == AVERAGE else f"eval/{part}"
        figures |= {f"{name}/accuracy": row[part, "accuracy"], f"{name}/tokens": row[part, "tokens"]}
    figures |= {"eval/aes": row[AVERAGE, "aes"]} if benchmarks_of(results) else {}
    figures |= {f"eval/{task}/{metric[:-1]}": row[task, metric] for task, metric in tasks_of(results)}
    for tracker in open_trackers(run.recipe, _tracked(run, policy)):
        tracker.results({name: float(value) for name, value in figures.items() if value == value})  # NaN: not measured
        tracker.close()


def track_figures(run: Run, folder: Path) -> None:
    """Log the figures of a report, in a separate run of the tracker."""
    files = sorted((folder / "figures").glob("*.png"))
    for tracker in open_trackers(run.recipe, _tracked(run, REPORT)) if files else ():
        tracker.images({file.stem: file for file in files})
        tracker.close()


def _tracked(run: Run, policy: str) -> TrackedRun:
    """The tracker's run of a policy: a composition's is that of its training."""
    if policy in run.recipe.compositions:
        stage = run.stage("train", policy)
        return TrackedRun(policy, stage.folder, stage.fingerprint)
    folder = run.directory / (policy if policy == REPORT else f"eval/{policy}")
    what = {"run": run.recipe.name, "student": run.identity_of(run.student), "policy": policy}
    return TrackedRun(policy, folder, fingerprint(what))
