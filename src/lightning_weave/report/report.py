"""`lweave report`: one page that opens from disk, with its figures, tables and points as files in the same folder."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd
from pandas import DataFrame

from lightning_weave import __version__
from lightning_weave.bench.summary import Summary, half_interval
from lightning_weave.checks.findings import Finding
from lightning_weave.checks.shifts import rule_effects
from lightning_weave.checks.watch import check_results, check_rollouts, check_scores
from lightning_weave.config import replicate_of, slug
from lightning_weave.directory import as_found, with_others
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress, duration
from lightning_weave.report import figures, tables
from lightning_weave.report.cases import case_groups, check_cases, example_groups, latex_panels
from lightning_weave.report.figures import Figure, Hues, inline, policy_hues, save
from lightning_weave.report.page import Page, RunView, hyperparameters, render, setup
from lightning_weave.report.results import (
    StudentResults,
    ablation,
    level_steps,
    points,
    read_evaluations,
    run_names,
    summaries,
    tag_table,
    track_figures,
)
from lightning_weave.report.survey import Vocabulary, loom_data, pack_forecasts, survey_cache
from lightning_weave.report.tables import AVERAGE, SHORT, benchmarks_of, seeds_of
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_scored
from lightning_weave.stages.compare import frontier_of, measure, read_compared
from lightning_weave.stages.costs import read_spent
from lightning_weave.stages.costs import summary as cost_summary
from lightning_weave.stages.forecast import belong_to, read_points
from lightning_weave.stages.realised import describe_realised, realise, realised_table
from lightning_weave.stages.run import narrow
from lightning_weave.store import write_atomic, write_json

RULE_ROWS = 256  # on which the effect of a rule is measured


@dataclass
class Folder:
    """The folder of a report: files of an earlier one that are not written again are removed."""

    path: Path
    written: set[Path] = field(default_factory=set)

    def text(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text.encode())
        self.written.add(self.path / name)

    def table(self, name: str, table: DataFrame, legend: str = "", rules: Sequence[int] = ()) -> None:
        """Write a table in every form; one of results with its legend."""
        is_results = table.columns.nlevels == 2
        shown = tables.format_results(table) if is_results else table
        self.text(f"tables/{name}.md", tables.markdown(shown) + (f"\n{legend}\n" if legend else ""))
        self.text(f"tables/{name}.tex", (f"% {legend}\n" if legend else "") + tables.latex(shown, rules))
        self.text(f"tables/{name}.csv", tables.to_csv(table))

    def figure(self, figure: Figure, suffix: str = "") -> Figure:
        """Save a figure and prepare it for the page."""
        named = replace(figure, name=f"{figure.name}{suffix}", svg=inline(figure.drawing))
        self.written |= set(save(named, self.path / "figures"))
        return named

    def clear(self) -> None:
        for part in ("figures", "tables"):
            for path in (self.path / part).glob("*"):
                if path not in self.written:
                    path.unlink()


def run(
    recipes: Sequence[Run],
    progress: Progress,
    out: Path | None = None,
    benchmark: str | None = None,
    only: Sequence[str] | None = None,
) -> Path:
    """Write the report of one run, or of several: of one student on several domains, or of several students.

    With `only`, of these policies and the base.
    """
    selection = _only([with_others(run) for run in recipes], only)
    runs = [as_found(run) for run in selection]
    folder = Folder(_check(runs, out))
    evaluated = [summaries(run) for run in runs]
    students, results, notes = read_evaluations(selection, runs, evaluated)
    hues = policy_hues(replicate_of(policy) for run in runs for policy in run.policies)
    hues |= policy_hues([*hues, *(policy for student in students for policy in student.evaluated)])
    named = dict(zip(run_names(runs), runs, strict=True))
    several = len(students) > 1
    drawn = result_figures(folder, students, hues, benchmark)
    by_tag = DataFrame() if several else tag_table(runs, students[0].evaluated)
    write_tables(folder, students, named, results, by_tag)
    cases = [case for run, found in zip(runs, evaluated, strict=True) for case in case_groups(run, found, progress)]
    views = []
    for name, run in named.items():
        scores = None if several else students[0].results
        views.append(run_view(folder, run, name if len(runs) > 1 else "", hues, progress, scores))
    if results.empty and not any(view.loom or view.training_and_cost for view in views):
        raise InputError(f"{runs[0].directory}: there is nothing to report yet. Start with: {runs[0].command('run')}")
    mark = f" ({runs[0].recipe.mark})" if runs[0].recipe.mark and not several else ""
    facts = [("Students" if several else "Student", ", ".join(student.name for student in students), "")]
    facts += [] if several else [fact for view in views for fact in view.facts]
    command = " --run ".join([runs[0].command("report"), *(str(run.arguments) for run in runs[1:])])
    caches = [
        f"{name}: cache {one.stage('reference').fingerprint}" for name, one in named.items() if one.recipe.anchors
    ]
    page = Page(
        " + ".join([student.name for student in students] if several else named) + mark,
        *state_result(students),
        views,
        facts=facts,
        results=results,
        by_tag=by_tag,
        figures=drawn,
        cases=cases,
        notes=notes,
        footer=[f"Lightning Weave {__version__}: {command}", *caches],
        hues=hues,
    )
    folder.text("index.html", render(page))
    if panels := [panel for case in cases for panel in case.panels]:
        folder.text("tables/cases.tex", latex_panels(panels))
    folder.clear()
    path = folder.path / "index.html"
    if len(runs) == 1:
        track_figures(runs[0], folder.path)
    for note in [*notes, f"{path} ({path.stat().st_size / 1e6:.1f} MB)"]:
        progress.say(f"report: {note}")
    return path


def _only(runs: Sequence[Run], names: Sequence[str] | None) -> list[Run]:
    """Leave out the compositions and policies that are neither wanted nor a part of what is."""
    if names is None:
        return list(runs)
    policies = list(dict.fromkeys(policy for run in runs for policy in run.policies))
    if unknown := [name for name in names if name not in policies]:
        raise InputError(f"--only {unknown[0]}: no such policy; there is {', '.join(policies)}")
    selection = []
    for run in runs:
        kept = narrow(run, [replicate_of(name) for name in names if name in run.policies])
        parts = {part: getattr(kept, part) for part in ("compositions", "policies", "report")}
        selection.append(run.derive(recipe=run.recipe.model_copy(update=parts)))
    return selection


def _check(runs: Sequence[Run], out: Path | None) -> Path:
    """Refuse what cannot be reported; return the folder: in the run, or of several in the directory that has them."""
    folders = [run.directory for run in runs]
    if len({run.recipe.rehearsal for run in runs}) > 1:
        rehearsed = next(run for run in runs if run.recipe.rehearsal)
        raise InputError(f"{rehearsed.directory} is a rehearsal, and others are not: report them separately")
    if twice := [str(folder) for folder in folders if folders.count(folder) > 1]:
        raise InputError(f"{twice[0]} is given twice; name each run once")
    shared = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    folder = out or (folders[0] if len(runs) == 1 else shared) / "report"
    others = [part for part in ("figures", "tables", "recipe.toml") if (folder / part).exists()]
    is_own = out is None and len(runs) == 1  # then they are left from a report that was interrupted
    if others and not is_own and not (folder / "index.html").exists():
        raise InputError(f"{folder} contains {others[0]} but no report. Choose another folder: --out DIR")
    for run in runs:
        check_cases(run)
        names = list(run.recipe.written)
        if unknown := sorted(set(run.recipe.report.students or ()) - set(names)):
            raise InputError(f"report.students names {unknown[0]!r}; this recipe has {', '.join(names) or 'none'}")
    return folder


def write_tables(
    folder: Folder, students: Sequence[StudentResults], runs: Mapping[str, Run], results: DataFrame, by_tag: DataFrame
) -> None:
    """Write the results, by tag too, the ablation of one student, the points; costs and the hyperparameters of runs."""
    student = students[0]
    compared = ablation(student.complete, student.policies, student.runs[0].recipe.mark)
    for name, table in (("results", results), ("tags", by_tag), ("ablation", compared)):
        if not table.empty and (len(students) == 1 or name == "results"):
            folder.table(name, table, " ".join([tables.legend(table), *tables.not_compared(table)]))
    found: list[dict[str, Any]] = []
    for student in students:
        of_student = {"student": student.name} if len(students) > 1 else {}
        found += [{**of_student, **point} for point in points(student.complete, student.policies)]
    if not results.empty:
        write_json(folder.path / "points.json", found)
    costs = [
        tables.cost_table(run, read_spent(run.directory).kept, student.name)
        for student in students
        for run in student.runs
    ]
    if costs := [cost for cost in costs if not cost.empty]:
        folder.table("cost", tables.format_costs(pd.concat(costs)), rules=tables.COST_RULES)
    if trained := {name: run for name, run in runs.items() if run.recipe.compositions}:
        folder.table("hyperparameters", hyperparameters(trained))


def result_figures(
    folder: Folder, students: Sequence[StudentResults], hues: Hues, benchmark: str | None = None
) -> list[Figure]:
    """Draw the results of each student: frontier, profile, budgets; as files also those of each benchmark."""
    labels = {one.label: one.benchmark for each in students for some in each.evaluated.values() for one in some}
    chosen = next((label for label, name in labels.items() if benchmark in (label, name)), None)
    if benchmark is not None and chosen is None:
        known = ", ".join(labels) or "nothing yet"
        raise InputError(f"--benchmark {benchmark}: not evaluated on that; there is {known}")
    drawn = []
    for student in students:
        results = student.complete.droplevel("group")
        if results.empty:
            continue
        suffix = f"-{slug(student.name)}" if len(students) > 1 else ""
        evaluated = {policy: student.evaluated[policy] for policy in results.index}
        own = benchmarks_of(results)
        for part in [*(own if len(own) > 1 else []), None]:  # last: what the page shows
            shown = part or chosen
            problems = int(results[[(name, "problems") for name in ([shown] if shown else own)]].max().sum())
            base = None if "base" not in results.index else tuple(results.loc["base", AVERAGE][["accuracy", "tokens"]])
            points_of_runs = [] if shown else [read_points(run) for run in student.runs]
            forecasts = [point for some in points_of_runs if belong_to(some, base) for point in some]
            seeds = {policy: seed_points(some, shown) for policy, some in evaluated.items()}
            table = results[shown or AVERAGE].join(student.policies)
            found = [figures.frontier(table, hues, problems, forecasts, seeds)]
            found += [figures.profile(results, hues)] if part is None else []
            found += compared_figures(student) if part is None else []
            found += [one for one in [figures.budgets(evaluated, hues, shown)] if one is not None]
            saved = [folder.figure(one, f"{suffix}-{slug(part)}" if part else suffix) for one in found]
        title = f": {student.name}" if len(students) > 1 else ""
        where = f"On {chosen}. " if chosen else ""
        drawn += [
            replace(one, title=one.title + title, caption=("" if "profile" in one.name else where) + one.caption)
            for one in saved
        ]
    return drawn


def seed_points(results: Sequence[Summary], benchmark: str | None) -> list[tuple[float, float]]:
    """Tokens and accuracy of each training seed of a policy, on one benchmark or on average; empty for one seed."""
    by_seed = zip(*(one.seeds for one in results if benchmark in (None, one.label)), strict=False)
    return [(fmean(one.tokens for one in some), fmean(one.accuracy for one in some)) for some in by_seed]


def compared_figures(student: StudentResults) -> list[Figure]:
    """Draw every composition that `lweave compare` has compared, with the policies and benchmarks of its run."""
    drawn = []
    for name, run in zip(run_names(student.runs), student.runs, strict=True):
        compared = read_compared(run.directory)
        evaluated = summaries(run) if compared else {}
        for composition, others in compared.items():
            frontier = ["base", *frontier_of(run.recipe, composition)] if composition in run.recipe.compositions else []
            known = [other for other in others if other in evaluated]
            if known and {"base", composition} <= evaluated.keys():
                figure = figures.compared([*measure(evaluated, frontier, known).values()], composition)
                if len(student.runs) > 1:
                    figure = replace(figure, name=f"{figure.name}-{slug(name)}", title=f"{name}: {figure.title}")
                drawn.append(figure)
    return drawn


def run_view(folder: Folder, run: Run, name: str, hues: Hues, progress: Progress, scores: DataFrame | None) -> RunView:
    """Make the parts of the page about one run; its cache is read unless `scores`, its results, is None."""
    suffix, prefix = (f"-{slug(name)}", f"{name}: ") if name else ("", "")
    ledger = read_spent(run.directory).kept
    cache = open_scored(run)
    facts = [(f"{prefix}Anchors", ", ".join(run.recipe.anchors), "")] if run.recipe.anchors else []
    notes = []
    if run.recipe.anchors and (cache is None or len(cache.sources) < len(run.recipe.anchors)):
        notes.append(f"The cache is not complete, so some anchors are not shown. Next: {run.command('score')}")
    if cache is not None:
        positions = cache.reference.require().get("positions", 0)
        facts.append((f"{prefix}Cache", f"{len(cache.rows):,}", f"trajectories, {positions:,} decisions"))
        rows = range(0, len(cache), max(1, len(cache) // RULE_ROWS))
        notes += [f"anchors.{one}: {effect}" for one in cache.names for effect in rule_effects(run, one, rows)]
    if seconds := sum(row["device_seconds"] for row in ledger):
        facts.append((f"{prefix}Device time", duration(seconds), "including evaluation"))
    try:
        findings: list[Finding] = [*check_rollouts(run), *check_scores(run), *check_results(run)]
    except InputError:  # its models are no longer available
        findings = check_results(run)
    drawings = [*figures.cost_figures(run, ledger), *figures.training_figures(run, hues)]
    forecasts = read_points(run)
    realised = realise(run, forecasts)
    evaluated = summaries(run)
    head, *lines = realised_table(realised) if realised else [[""]]
    view = RunView(
        name=name,
        facts=facts,
        steps=level_steps(run, evaluated),
        realised=DataFrame(lines, columns=head).set_index(head[0]),
        realised_lines=describe_realised(realised) if realised else (),
        training_and_cost=[folder.figure(one, suffix) for one in drawings],
        cost_lines=cost_summary(run, ledger),
        notes=notes,
        setup=setup(run, ledger),
        findings=findings,
        examples=example_groups(run, list(evaluated)),
    )
    if scores is None or cache is None or not cache.sources:
        return view
    vocabulary = Vocabulary.from_tokenizer(run.student.tokenizer, run.student.stop_ids)
    survey = survey_cache(run, cache, vocabulary, progress)
    aes = scores[AVERAGE, "aes"].droplevel("group").dropna() if (AVERAGE, "aes") in scores else {}
    joint = [(len(one.used), name) for name, one in run.recipe.written.items() if one.method == "joint"]
    start = max(joint, key=lambda one: (one[0], aes.get(one[1], -math.inf)), default=(0, None))[1]
    loom = loom_data(run, cache, vocabulary, start, progress)
    if loom is not None:  # a trained student has its policy's colour
        solved = [name for name, anchor in run.recipe.anchors.items() if anchor.kl_budget is not None]
        loom["forecasts"] = pack_forecasts(forecasts, cache.names, solved)
        loom["colours"] = {one["name"]: hues[one["policy"]].css for one in loom["settings"]}
    return replace(
        view,
        loom=loom,
        agreement=survey.agreement(),
        anchors=survey.anchors,
        pushes=survey.pushes(),
        anchor_figures=[folder.figure(one, suffix) for one in (figures.kinds(survey, hues), figures.positions(survey))],
    )


def state_result(students: Sequence[StudentResults]) -> tuple[str, str, str]:
    """Name the trained policy with the highest AES, its result, on how many problems and how certain that is."""
    best: list[tuple[StudentResults, str, Any, int]] = []  # student, policy, its row, number of trained policies
    for student in students:
        rows = {policy: row for (_, policy), row in student.complete.iterrows()}
        trained = [policy for policy in rows if student.policies.loc[policy, "variant"]]
        averages = {policy: rows[policy][AVERAGE].fillna(-math.inf) for policy in trained}
        worth = {policy: (one["aes"], one["accuracy"], -one["tokens"]) for policy, one in averages.items()}
        if trained:
            policy = max(trained, key=lambda policy: worth[policy])
            best.append((student, policy, rows[policy][AVERAGE], len(trained)))
    if len(students) > 1:
        parts = [
            f"{one.name}: {policy} ({row['aes']:+.2f})" for one, policy, row, _ in best if row["aes"] == row["aes"]
        ]
        lead = f"Highest AES: {'; '.join(parts)}." if parts else "No trained policy has every benchmark yet."
        return "", f"{len(students)} students on {len(benchmarks_of(students[0].results))} benchmarks", lead
    if not best:
        return students[0].runs[0].recipe.name, "", "No trained policy has been evaluated yet."
    student, policy, row, count = best[0]
    results = student.complete.droplevel("group")
    problems = [int(results.loc[policy, (name, "problems")]) for name in benchmarks_of(results)]
    samples = sorted({int(results.loc[policy, (name, "samples")]) for name in benchmarks_of(results)})
    digits = 1 if row["tokens"] < SHORT else 0
    size = f"{sum(problems):,} problem{'s' * (sum(problems) != 1)}"
    headline = f"reaches {row['accuracy']:.1f}\u00a0% accuracy on {size} at {row['tokens']:,.{digits}f} tokens"
    if len(problems) > 1:
        size += f" of {len(problems)} benchmarks"
    each = " to ".join(dict.fromkeys([str(samples[0]), str(samples[-1])]))
    count_of_seeds = seeds_of(student.complete, policy)
    words = "one training seed" if count_of_seeds == 1 else f"{count_of_seeds} training seeds"
    counted = f"Measured on {size}, {each} sample{'s' * (samples[-1] != 1)} each, with {words}."
    if not math.isnan(half := half_interval(student.evaluated[policy], "accuracy")):
        counted += f" Accuracy: ±{half:.1f} points (95 % interval)."
    if "base" not in results.index:
        return policy, f"{headline}.", f"The untrained student has not been evaluated: no comparison. {counted}"
    base = results.loc["base", AVERAGE]
    headline += f"; the untrained student, {base['accuracy']:.1f}\u00a0% at {base['tokens']:,.{digits}f}."
    if math.isnan(row["aes"]):
        asked = results.loc[policy, [(name, "differs") for name in benchmarks_of(results)]].notna().any()
        why = (
            "it was not evaluated like the student" if asked else "the student has no correct answer on some benchmark"
        )
        return policy, headline, f"AES is undefined: {why}. {counted}"
    interval = "" if math.isnan(row["aes_low"]) else f" (95 % interval {row['aes_low']:.2f} to {row['aes_high']:.2f})"
    among = f", the highest of {count} trained policies" if count > 1 else ""
    chance = " The interval includes 0: the difference may be chance." if row["aes_low"] <= 0 <= row["aes_high"] else ""
    return policy, headline, f"Accuracy-efficiency score {row['aes']:+.2f}{interval}{among}.{chance} {counted}"
