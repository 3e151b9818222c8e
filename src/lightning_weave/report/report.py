"""`lweave report`: one page that opens from disk, with its figures, tables and points as files beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_weave import __version__
from lightning_weave.bench.summary import Overall
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress, duration
from lightning_weave.report import anchors, costs, headline, read_cases, tables
from lightning_weave.report.cases import latex_panels
from lightning_weave.report.figures import frontier, inline, save
from lightning_weave.report.page import Fact, Figure, Page, RunView, render
from lightning_weave.report.results import (
    PolicySummaries,
    merge,
    other_protocols,
    overalls,
    points,
    policy_rows,
    summaries,
)
from lightning_weave.runs.caches import open_scored
from lightning_weave.runs.costs import read_spent
from lightning_weave.runs.costs import summary as cost_summary
from lightning_weave.runs.known import as_it_stands, differing, with_known
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.sweeps import with_sweep
from lightning_weave.store import write_atomic, write_json

OWN = "as the recipe says"  # where results by other protocols stand beside
FIGURES = {  # name -> title, caption, description
    "frontier": (
        "Accuracy against tokens",
        "Filled: policies on the frontier, joined by the solid line. Hollow and dashed: dominated by another policy. A "
        "dashed line joins a sweep of weights. Bars: one standard error, clustered by problem.",
        "Accuracy against mean response tokens.",
    ),
    "profile": (
        "AES and accuracy by benchmark",
        "AES with its 95 % interval; accuracies with one standard error, clustered by problem.",
        "Dot plot of AES and of the accuracy on every benchmark.",
    ),
    "budgets": (
        "Accuracy within a token budget",
        "The same samples, truncated at each budget and graded again.",
        "Accuracy of every policy when responses are truncated at token budgets.",
    ),
    "kinds": (
        "Size of each anchor's pull",
        "Mean over the cache, by the kind of the sampled token.",
        "Mean size of each anchor's pull by kind of token.",
    ),
    "positions": (
        "Kept and masked decisions",
        "An anchor keeps the decisions that it can score; a composition keeps what all its anchors keep.",
        "Share of decisions kept and masked, by anchor and reason, and kept by each composition.",
    ),
    "cost": (
        "Cost by stage",
        "Measured device time. The cache (rollout, reference, score) is made once.",
        "Stacked bars of device time by stage, for one composition and amortised.",
    ),
    "amortised": (
        "Cost per composition",
        "Rollouts and scores are shared, so another setting of the weights only costs its training.",
        "Cost per composition against the number of compositions that share a cache.",
    ),
    "training-reverse_kl": (
        "KL between student and target",
        "Running mean over the decisions of each update.",
        "Training curves of every composition: KL to the target by update.",
    ),
    "training-loss": (
        "Loss",
        "Running mean of the objective. It scales with alpha and the dose; the direct-opd loss can be negative.",
        "Training curves of every composition: loss by update.",
    ),
}


def run(recipes: Sequence[Steps], progress: Progress) -> Path:
    """Write the report of one run, or of several runs of one student, into the first run's folder."""
    given = [with_known(with_sweep(steps)) for steps in recipes]
    _check_one_student(given)
    changed = [differing(steps) for steps in given]
    runs = [as_it_stands(steps) for steps in given]
    for steps in runs:
        read_cases.check_cases(steps)
        anchors.check_students(steps)
    evaluated = [summaries(steps) for steps in runs]
    merged = merge(evaluated)
    others = other_protocols(given[0]) if len(runs) == 1 else {}
    main = ""
    if not merged and others:  # nothing by the recipe's own protocol: the page is of the one with the most policies
        main = max(others, key=lambda label: len(others[label]))
        merged = others.pop(main)
    writer = Writer(runs[0].store.run_dir / "report")
    combined = overalls(merged)
    stale = {policy for paths in changed for policy in merged if any(_is_of(policy, path) for path in paths)}
    rows = policy_rows(merged, combined, main or (OWN if others else ""), stale)
    beside = [row for label, found in others.items() for row in policy_rows(found, group=label, stale=stale)]
    tabled = [*rows, *(row for row in beside if _columns(row) == _columns(rows[0]))]
    results = writer.results(runs[0], merged, combined, tabled) if rows else []
    groups = [
        group
        for steps, policies in zip(runs, evaluated, strict=True)
        for group in read_cases.case_groups(steps, policies, progress)
    ]
    views = [_run_view(steps, rows, writer, progress, len(runs) > 1) for steps in runs]
    if not rows and not any(view.loom or view.training_and_cost for view in views):
        raise InputError(
            f"{runs[0].store.run_dir}: there is nothing to report yet. Start with: lweave run {runs[0].arguments}"
        )
    subject, result, lead = headline.headline(runs[0].recipe, rows)
    page = Page(
        title=" + ".join(steps.recipe.name for steps in runs),
        subject=subject,
        headline=result,
        lead=lead,
        facts=_facts(runs),
        rows=tabled,
        results=results,
        runs=views,
        cases=groups,
        notes=[*_changes(given, changed, main), *_missing(runs, evaluated, merged)],
        footer=_footer(runs),
    )
    writer.text("index.html", render(page))
    panels = [panel for group in groups for panel in group.panels]
    if panels:
        writer.text("tables/cases.tex", latex_panels(panels))
    writer.clear()
    path = writer.folder / "index.html"
    progress.say(f"report: {path} ({path.stat().st_size / 1e6:.1f} MB)")
    return path


class Writer:
    """The report folder: files of an earlier report that this one does not write are removed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[Path] = set()

    def text(self, name: str, text: str) -> None:
        write_atomic(self.folder / name, text.encode())
        self.written.add(self.folder / name)

    def figures(self, drawings: Mapping[str, Any], suffix: str = "", data: str = "") -> list[Figure]:
        """Save figures as files and prepare them for the page; `data` is added to their descriptions."""
        figures = []
        for name, drawing in drawings.items():
            title, caption, alt = FIGURES[name]
            figures.append(Figure(f"{name}{suffix}", inline(drawing), title, caption, f"{alt} {data}".strip()))
            self.written |= set(save(drawing, self.folder / "figures", f"{name}{suffix}"))
        return figures

    def results(
        self,
        steps: Steps,
        evaluated: PolicySummaries,
        combined: Mapping[str, Overall],
        tabled: Sequence[tables.PolicyRow],
    ) -> list[Figure]:
        """Write the tables, points and figures of the results; other protocols are in the tables only."""
        rows = tabled[: len(evaluated)]
        self.text("tables/results.md", tables.markdown(tabled))
        self.text("tables/results.tex", tables.latex(tabled))
        self.text("tables/results.csv", tables.to_csv(tabled))
        write_json(self.folder / "points.json", points(steps, rows))
        drawings = {
            "frontier": frontier(headline.frontier_points(steps, combined)),
            "profile": headline.profile_figure(rows, evaluated),
        }
        if (budgets := headline.budgets_figure(evaluated)) is not None:
            drawings["budgets"] = budgets
        data = "; ".join(f"{row.policy}: {row.accuracy:.1f} % at {row.tokens:,.0f} tokens" for row in rows)
        return self.figures(drawings, data=f"{data}.")

    def clear(self) -> None:
        """Remove figures and tables of an earlier report that this one does not have."""
        for part in ("figures", "tables"):
            for path in (self.folder / part).glob("*"):
                if path not in self.written:
                    path.unlink()


def _run_view(
    steps: Steps, rows: Sequence[tables.PolicyRow], writer: Writer, progress: Progress, several: bool
) -> RunView:
    """Make the parts of the page about one run."""
    suffix = f"-{steps.recipe.name}" if several else ""
    ledger = read_spent(steps.store.run_dir).kept
    drawings = {**costs.cost_figures(steps, ledger), **costs.training_figures(steps)}
    cache = open_scored(steps)
    complete = not steps.recipe.anchors or (cache is not None and len(cache.sources) == len(steps.recipe.anchors))
    next_step = f"The cache is not complete, so some anchors are not shown. Next: lweave score {steps.arguments}"
    view = RunView(
        name=steps.recipe.name,
        training_and_cost=writer.figures(drawings, suffix),
        cost_lines=cost_summary(steps, ledger),
        notes=[] if complete else [next_step],
    )
    if cache is None or not cache.sources:
        return view
    vocabulary = anchors.student_vocabulary(steps)
    survey = anchors.survey_cache(steps, cache, vocabulary, progress)
    drawings = {"kinds": anchors.kinds_figure(survey), "positions": anchors.positions_figure(survey)}
    start = headline.start_composition(steps.recipe, rows)
    return replace(
        view,
        loom=anchors.loom_data(steps, cache, vocabulary, start, progress),
        pairs=anchors.pair_views(survey),
        pushes=anchors.anchor_pushes(survey),
        anchor_figures=writer.figures(drawings, suffix),
    )


def _check_one_student(runs: Sequence[Steps]) -> None:
    for steps in runs[1:]:
        if steps.identity_of(steps.student) != runs[0].identity_of(runs[0].student):
            raise InputError(
                f"{runs[0].arguments} and {steps.arguments} have different students "
                f"({runs[0].recipe.student.model}, {steps.recipe.student.model}); report them separately"
            )
    names = [steps.recipe.name for steps in runs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two recipes are named {twice[0]!r}; give each run its own name")


def _facts(runs: Sequence[Steps]) -> list[Fact]:
    facts = [Fact("Student", runs[0].recipe.student.model.rstrip("/").split("/")[-1])]
    for steps in runs:
        prefix = f"{steps.recipe.name}: " if len(runs) > 1 else ""
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


def _is_of(policy: str, path: str) -> bool:
    return path == f"train/{policy}" or path.startswith(f"eval/{policy}/")


def _columns(row: tables.PolicyRow) -> list[str]:
    return [score.benchmark for score in row.scores]


def _changes(given: Sequence[Steps], changed: Sequence[Mapping[str, str]], main: str) -> list[str]:
    """Say what on the page is not what the recipe says now, what changed, and what makes it so."""
    notes = [f"Nothing is evaluated by this recipe's protocol. The table has another: {main}."] if main else []
    for steps, paths in zip(given, changed, strict=True):
        reasons: dict[str, list[str]] = {}
        for path, why in paths.items():
            reasons.setdefault(why, []).append(path)
        for why, stages in reasons.items():
            names = ", ".join(stages[:6]) + (f" and {len(stages) - 6} more" if len(stages) > 6 else "")
            notes.append(
                f"Stale, shown as it was made: {names}. Changed since: {why}. Next: lweave run {steps.arguments}"
            )
    return notes


def _missing(runs: Sequence[Steps], evaluated: Sequence[PolicySummaries], merged: PolicySummaries) -> list[str]:
    """Name the policies that are not on the page, and the command that evaluates them."""
    notes = []
    for steps, policies in zip(runs, evaluated, strict=True):
        waiting = [policy for policy in steps.policies if policy not in policies]
        if waiting:
            notes.append(f"Not evaluated yet: {', '.join(waiting)}. Next: lweave eval {steps.arguments}")
        left_out = [policy for policy in policies if policy not in merged]
        if left_out:
            notes.append(f"Only in {steps.recipe.name}, so not in the table: {', '.join(left_out)}.")
    return notes


def _footer(runs: Sequence[Steps]) -> list[str]:
    lines = [
        f"Made by Lightning Weave {__version__}: lweave report {' --run '.join(steps.arguments for steps in runs)}"
    ]
    for steps in runs:
        if steps.recipe.anchors:
            lines.append(f"{steps.recipe.name}: cache {steps.reference.fingerprint}")
    return lines
