"""`lweave report`: one page that opens from disk, with its figures, tables and points as files beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_weave import __version__
from lightning_weave.checks.findings import Finding
from lightning_weave.checks.watch import check_results, check_rollouts, check_scores
from lightning_weave.config import slug
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress, duration
from lightning_weave.report import across, anchors, costs, headline, read_cases, tables
from lightning_weave.report.cases import latex_panels
from lightning_weave.report.colours import Hues, policy_hues
from lightning_weave.report.examples import examples
from lightning_weave.report.page import Fact, Page, RunView, render
from lightning_weave.report.results import (
    PolicySummaries,
    other_protocols,
    policy_rows,
    summaries,
    tag_rows,
    track_figures,
)
from lightning_weave.report.setup import setup
from lightning_weave.report.tables import student_names
from lightning_weave.report.tasks import missing_rows, task_columns, task_results, with_tasks
from lightning_weave.report.writer import Writer
from lightning_weave.runs.caches import open_scored
from lightning_weave.runs.costs import read_spent
from lightning_weave.runs.costs import summary as cost_summary
from lightning_weave.runs.known import as_it_stands, differing, with_known
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.sweeps import with_sweep

OWN = "as the recipe says"  # where results by other protocols stand beside


def run(
    recipes: Sequence[Steps],
    progress: Progress,
    out: Path | None = None,
    benchmark: str | None = None,
    only: Sequence[str] | None = None,
) -> Path:
    """Write the report of one run, or of several: of one student on several domains, or of several students.

    With `only`, of these policies and the base.
    """
    selection = _only([with_known(with_sweep(steps)) for steps in recipes], only)
    changed = [differing(steps) for steps in selection]
    runs = [as_it_stands(steps) for steps in selection]
    folder = _folder(runs, out)
    for steps in runs:
        read_cases.check_cases(steps)
        anchors.check_students(steps)
    evaluated = {str(steps.store.run_dir): summaries(steps) for steps in runs}
    others = other_protocols(selection[0]) if len(runs) == 1 else {}
    main = ""
    shown = dict(evaluated)
    if others and not any(evaluated.values()):  # the page is of the protocol with the most policies
        main = max(others, key=lambda label: len(others[label]))
        shown = {str(runs[0].store.run_dir): others.pop(main)}
    students = across.students(runs, shown, _stale(runs, changed))
    labels = across.benchmark_labels([student.policies for student in students])
    tasks = [task_results(student.runs) for student in students]
    columns = task_columns(
        tasks, {task: metric for steps in runs for task, metric in steps.recipe.harness.metrics.items()}
    )
    students = [
        replace(student, rows=with_tasks(student.rows, by_policy, columns))
        for student, by_policy in zip(students, tasks, strict=True)
    ]
    several = len(students) > 1
    hues = policy_hues(policy for steps in runs for policy in steps.policies)
    hues |= policy_hues([*hues, *across.colours_of([student.policies for student in students])])
    writer = Writer(folder, hues, across.find_benchmark(benchmark, [student.policies for student in students]))
    group = main or (OWN if others else "")
    group = ": ".join(filter(None, (runs[0].recipe.mark, group)))
    rows = []
    for student, by_policy in zip(students, tasks, strict=True):
        name = student.name if several else group
        own = across.block(name, student.policies, student.rows, labels)
        rows += with_tasks([*own, *missing_rows(own, by_policy, labels, name)], by_policy, columns)
    beside = [
        row
        for label, policies in others.items()
        for row in policy_rows(policies, group=label, stale=_stale(runs, changed))
    ]
    rows += with_tasks([row for row in beside if rows and _columns(row) == _columns(rows[0])], {}, columns)
    results = [figure for student in students for figure in writer.figures_of(student, several)]
    if rows:
        writer.write_tables(rows, students)
    by_tag = [] if several else tag_rows(runs[0], students[0].whole)
    if by_tag:
        writer.table("tags", by_tag)
    writer.costs(students)
    writer.hyperparameters(dict(zip(across.run_names(runs), runs, strict=True)))
    cases = [
        case for steps in runs for case in read_cases.case_groups(steps, evaluated[str(steps.store.run_dir)], progress)
    ]
    views = [
        _run_view(
            steps,
            name if len(runs) > 1 else "",
            students[0].rows,
            list(evaluated[str(steps.store.run_dir)]),
            writer=writer,
            progress=progress,
            deep=not several,
        )
        for steps, name in zip(runs, across.run_names(runs), strict=True)
    ]
    if not rows and not any(view.loom or view.training_and_cost for view in views):
        raise InputError(
            f"{runs[0].store.run_dir}: there is nothing to report yet. Start with: {runs[0].command('run')}"
        )
    subject, result, lead = _headline(students, labels)
    page = Page(
        title=" + ".join(across.run_names(runs) if not several else (student.name for student in students))
        + f" ({runs[0].recipe.mark})" * bool(runs[0].recipe.mark and not several),
        subject=subject,
        headline=result,
        lead=lead,
        facts=_facts(runs),
        rows=rows,
        by_tag=by_tag,
        results=results,
        runs=views,
        cases=cases,
        notes=[*_rehearsed(runs), *_changes(selection, changed, main), *_missing(runs, shown, students, labels)],
        footer=_footer(runs),
        hues=hues,
    )
    writer.text("index.html", render(page))
    panels = [panel for case in cases for panel in case.panels]
    if panels:
        writer.text("tables/cases.tex", latex_panels(panels))
    writer.clear()
    path = writer.folder / "index.html"
    if len(runs) == 1:
        track_figures(runs[0], writer.folder)
    for note in page.notes:
        progress.say(f"report: {note}")
    progress.say(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return path


def _only(runs: Sequence[Steps], names: Sequence[str] | None) -> list[Steps]:
    """Leave out the compositions and policies that are not wanted."""
    if names is None:
        return list(runs)
    policies = list(dict.fromkeys(policy for steps in runs for policy in steps.policies))
    if unknown := [name for name in names if name not in policies]:
        raise InputError(f"--only {unknown[0]}: no such policy; there is {', '.join(policies)}")
    selection = []
    for steps in runs:
        update = {
            "compositions": {name: one for name, one in steps.recipe.compositions.items() if name in names},
            "policies": {name: one for name, one in steps.recipe.policies.items() if name in names},
        }
        selection.append(replace(steps, recipe=steps.recipe.model_copy(update=update)))
    return selection


def _folder(runs: Sequence[Steps], out: Path | None) -> Path:
    """Where a report goes: into its run, or of several into report/ beside them, so that it replaces no run's own."""
    folders = [steps.store.run_dir for steps in runs]
    if len({steps.recipe.rehearsal for steps in runs}) > 1:
        rehearsed = next(steps for steps in runs if steps.recipe.rehearsal)
        raise InputError(f"{rehearsed.store.run_dir} is a rehearsal, and others are not: report them apart")
    if twice := [str(folder) for folder in folders if folders.count(folder) > 1]:
        raise InputError(f"{twice[0]} is given twice; name each run once")
    folder = out or (folders[0] if len(runs) == 1 else across.shared_folder(runs)) / "report"
    others = [part for part in ("figures", "tables", "recipe.toml") if (folder / part).exists()]
    if others and not (folder / "index.html").exists():
        raise InputError(f"{folder} holds {others[0]} but no report; say where the report goes: --out DIR")
    return folder


def _headline(students: Sequence[across.StudentResults], labels: Sequence[str]) -> tuple[str, str, str]:
    """State the result of the best policy, or the best policy of each of several students."""
    if len(students) == 1:
        return headline.headline(students[0].runs[0].recipe, students[0].rows)
    parts = []
    for student in students:
        subject, _, _ = headline.headline(student.runs[0].recipe, student.rows)
        row = next((row for row in student.rows if row.policy == subject), None)
        if row is not None and row.aes is not None:
            parts.append(f"{student.name}: {row.policy} ({row.aes:+.2f})")
    lead = f"Highest AES: {'; '.join(parts)}." if parts else "No trained policy has every benchmark yet."
    return "", f"{len(students)} students on {len(labels)} benchmarks", lead


def _run_view(
    steps: Steps,
    name: str,
    rows: Sequence[tables.PolicyRow],
    evaluated: Sequence[str],
    *,
    writer: Writer,
    progress: Progress,
    deep: bool,
) -> RunView:
    """Make the parts of the page about one run; `deep` reads its cache too. A name tells it from other runs."""
    suffix = f"-{slug(name)}" if name else ""
    ledger = read_spent(steps.store.run_dir).kept
    drawings = {**costs.cost_figures(steps, ledger), **costs.training_figures(steps, writer.hues)}
    cache = open_scored(steps)
    complete = not steps.recipe.anchors or (cache is not None and len(cache.sources) == len(steps.recipe.anchors))
    next_step = f"The cache is not complete, so some anchors are not shown. Next: {steps.command('score')}"
    view = RunView(
        name=name,
        training_and_cost=writer.figures(drawings, suffix),
        cost_lines=cost_summary(steps, ledger),
        notes=[*([] if complete else [next_step]), *anchors.rule_notes(steps, cache)],
        setup=setup(steps, ledger),
        findings=_findings(steps),
        examples=examples(steps, evaluated),
    )
    if not deep or cache is None or not cache.sources:
        return view
    vocabulary = anchors.student_vocabulary(steps)
    survey = anchors.survey_cache(steps, cache, vocabulary, progress)
    drawings = {"kinds": anchors.kinds_figure(survey, writer.hues), "positions": anchors.positions_figure(survey)}
    start = headline.start_composition(steps.recipe, rows)
    return replace(
        view,
        loom=_with_colours(anchors.loom_data(steps, cache, vocabulary, start, progress), writer.hues),
        pairs=anchors.pair_views(survey),
        pushes=anchors.anchor_pushes(survey),
        anchor_figures=writer.figures(drawings, suffix),
    )


def _with_colours(loom: dict[str, Any] | None, hues: Hues) -> dict[str, Any] | None:
    """Let the loom show a trained student in its policy's colour."""
    return loom and {**loom, "colours": {one["name"]: hues[one["policy"]].css for one in loom["settings"]}}


def _findings(steps: Steps) -> list[Finding]:
    """Look once more at everything that the stages' own checks look at."""
    try:
        return [*check_rollouts(steps), *check_scores(steps), *check_results(steps)]
    except InputError:  # its models are gone and were never known here
        return check_results(steps)


def _facts(runs: Sequence[Steps]) -> list[Fact]:
    names = student_names(across.by_student(runs))
    facts = [Fact("Student" if len(names) == 1 else "Students", ", ".join(names))]
    if len(names) > 1:
        return facts
    for steps, name in zip(runs, across.run_names(runs), strict=True):
        prefix = f"{name}: " if len(runs) > 1 else ""
        if steps.recipe.anchors:
            facts.append(Fact(f"{prefix}Anchors", ", ".join(steps.recipe.anchors)))
        cache = open_scored(steps)
        if cache is not None:
            positions = cache.reference.require().get("positions", 0)
            facts.append(Fact(f"{prefix}Cache", f"{len(cache.rows):,}", f"trajectories, {positions:,} decisions"))
        seconds = sum(row["device_seconds"] for row in read_spent(steps.store.run_dir).kept)
        if seconds:
            facts.append(Fact(f"{prefix}Device time", duration(seconds), "including evaluation"))
    return facts


def _stale(runs: Sequence[Steps], changed: Sequence[Mapping[str, str]]) -> set[str]:
    """The policies that were trained or evaluated by another recipe than the present one."""
    return {
        policy
        for steps, paths in zip(runs, changed, strict=True)
        for policy in steps.policies
        if any(_is_of(policy, path) for path in paths)
    }


def _is_of(policy: str, path: str) -> bool:
    return path == f"train/{policy}" or path.startswith(f"eval/{policy}/")


def _columns(row: tables.PolicyRow) -> list[str]:
    return [score.benchmark for score in row.scores]


def _changes(selection: Sequence[Steps], changed: Sequence[Mapping[str, str]], main: str) -> list[str]:
    """Say what on the page is not what the recipe says now, what changed, and what makes it so."""
    notes = [f"Nothing is evaluated by this recipe's protocol. The table has another: {main}."] if main else []
    for steps, paths in zip(selection, changed, strict=True):
        reasons: dict[str, list[str]] = {}
        for path, why in paths.items():
            reasons.setdefault(why, []).append(path)
        for why, stages in reasons.items():
            names = ", ".join(stages[:6]) + (f" and {len(stages) - 6} more" if len(stages) > 6 else "")
            notes.append(f"Stale, shown as it was made: {names}. Changed since: {why}. Next: {steps.command('run')}")
    return notes


def _rehearsed(runs: Sequence[Steps]) -> list[str]:
    """Say of a rehearsal what it is."""
    return [f"This is a {runs[0].recipe.mark}. It shows that the recipe goes through."] if runs[0].recipe.mark else []


def _missing(
    runs: Sequence[Steps],
    evaluated: Mapping[str, PolicySummaries],
    students: Sequence[across.StudentResults],
    labels: Sequence[str],
) -> list[str]:
    """Name the policies that are not on the page, the command that evaluates them, and those without an average."""
    notes = []
    for steps in runs:
        policies = evaluated[str(steps.store.run_dir)]
        waiting = [policy for policy in steps.policies if policy not in policies]
        if waiting:
            notes.append(f"Not evaluated yet: {', '.join(waiting)}. Next: {steps.command('eval')}")
        notes += [
            f"{policy} on {result.label}: {result.error}"
            for policy, results in policies.items()
            for result in results
            if result.error
        ]
    for student in students:
        partial = [policy for policy in student.policies if policy not in student.whole]
        if partial:
            where = f" of {student.name}" if len(students) > 1 else ""
            notes.append(f"Not on all {len(labels)} benchmarks, so without an average{where}: {', '.join(partial)}.")
    return notes


def _footer(runs: Sequence[Steps]) -> list[str]:
    command = " --run ".join([runs[0].command("report"), *(str(steps.arguments) for steps in runs[1:])])
    lines = [f"Made by Lightning Weave {__version__}: {command}"]
    for steps, name in zip(runs, across.run_names(runs), strict=True):
        if steps.recipe.anchors:
            lines.append(f"{name}: cache {steps.reference.fingerprint}")
    return lines
