"""`lweave report`: one page that opens from disk, with its figures, tables and points beside it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_weave import __version__
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress, duration
from lightning_weave.report import anchors as report_cache
from lightning_weave.report import costs as report_cost
from lightning_weave.report import headline as report_results
from lightning_weave.report import read_cases as report_cases
from lightning_weave.report import tables
from lightning_weave.report.cases import latex_panels
from lightning_weave.report.figures import frontier, inline, save
from lightning_weave.report.page import Fact, Figure, Page, RunView, render
from lightning_weave.report.results import PolicySummaries, merge, overalls, points, policy_rows, summaries
from lightning_weave.runs.caches import open_scored
from lightning_weave.runs.costs import summary as cost_summary
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.sweeps import with_sweep
from lightning_weave.store import write_atomic, write_json
from lightning_weave.store.ledger import read_ledger

TRAINING_WORDS = {
    "reverse_kl": (
        "How far each student is from its target",
        "KL of student and target on the decisions of each update, a running mean.",
        "Training curves of every composition: KL to the target by update.",
    ),
    "loss": (
        "Loss",
        "The objective itself, a running mean. It scales with alpha and the dose; that of direct-opd can be negative.",
        "Training curves of every composition: loss by update.",
    ),
}


def run(recipes: Sequence[Steps], progress: Progress) -> Path:
    """Write the report of one run, or of several runs of one student, into the first one's folder."""
    runs = [with_sweep(steps) for steps in recipes]
    _check_one_student(runs)
    for steps in runs:
        report_cases.check_cases(steps)
        report_cache.check_students(steps)
    found = [summaries(steps) for steps in runs]
    merged = merge(found)
    writer = Writer(runs[0].store.run_dir / "report")
    combined = overalls(merged)
    rows = policy_rows(merged, combined)
    results = writer.results(runs[0], merged, combined, rows) if rows else []
    groups = [
        group
        for steps, own in zip(runs, found, strict=True)
        for group in report_cases.case_groups(steps, own, progress)
    ]
    views = [_run_view(steps, rows, writer, progress, len(runs) > 1) for steps in runs]
    if not rows and not any(view.loom or view.cost or view.details for view in views):
        raise InputError(
            f"{runs[0].store.run_dir}: there is nothing to report yet. Start with: lweave run {runs[0].arguments}"
        )
    subject, headline, lead = report_results.headline(runs[0].recipe, rows)
    page = Page(
        title=" + ".join(steps.recipe.name for steps in runs),
        subject=subject,
        headline=headline,
        lead=lead,
        facts=_facts(runs),
        rows=rows,
        results=results,
        runs=views,
        cases=groups,
        notes=_missing(runs, found, merged),
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
    """The report folder: everything written now is new, and what an earlier report left is cleared."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[Path] = set()

    def text(self, name: str, text: str) -> None:
        write_atomic(self.folder / name, text.encode())
        self.written.add(self.folder / name)

    def figure(self, drawing: Any, name: str, title: str, caption: str, alt: str) -> Figure:
        """Save a figure as files and give it to the page."""
        svg = inline(drawing)
        self.written |= set(save(drawing, self.folder / "figures", name))
        return Figure(name, svg, title, caption, alt)

    def results(
        self, steps: Steps, found: PolicySummaries, combined: Any, rows: list[tables.PolicyRow]
    ) -> list[Figure]:
        """Write tables, points and the figures of the results."""
        self.text("tables/results.md", tables.markdown(rows))
        self.text("tables/results.tex", tables.latex(rows))
        self.text("tables/results.csv", tables.to_csv(rows))
        write_json(self.folder / "points.json", points(steps, rows))
        front = frontier(report_results.frontier_points(steps, found, combined))
        described = "; ".join(f"{row.policy}: {row.accuracy:.1f} % in {row.tokens:,.0f} tokens" for row in rows)
        figures = [
            self.figure(
                front,
                "frontier",
                "Accuracy against tokens",
                "Solid: policies that no other beats, joined by the front. Hollow and dashed: beaten by another on "
                "both counts. Bars are one standard error, clustered by problem. A dashed line joins a "
                "sweep of weights.",
                f"Accuracy against mean response tokens. {described}.",
            ),
            self.figure(
                report_results.profile_figure(rows, found),
                "profile",
                "AES and each benchmark",
                "AES with its 95 % interval; accuracies with one standard error, clustered by problem.",
                f"Dot plot of AES and accuracy per benchmark. {described}.",
            ),
        ]
        budgets = report_results.budgets_figure(found)
        if budgets is not None:
            caption = "The same samples, cut at each budget and graded again."
            alt = "Accuracy of every policy when responses are cut at token budgets."
            figures.append(self.figure(budgets, "budgets", "Accuracy within a token budget", caption, alt))
        return figures

    def clear(self) -> None:
        """Remove figures and tables that an earlier report left and this one does not have."""
        for part in ("figures", "tables"):
            for path in (self.folder / part).glob("*"):
                if path not in self.written:
                    path.unlink()


def _run_view(
    steps: Steps, rows: Sequence[tables.PolicyRow], writer: Writer, progress: Progress, several: bool
) -> RunView:
    """Everything that one run shows beside its results."""
    suffix = f"-{steps.recipe.name}" if several else ""
    cache = open_scored(steps)
    notes, why = [], []
    loom, pairs, wishes = None, [], []
    if cache is not None and cache.sources:
        vocabulary = report_cache.student_vocabulary(steps)
        survey = report_cache.survey_cache(steps, cache, vocabulary, progress)
        pairs, wishes = report_cache.pair_views(survey), report_cache.wishes(survey)
        why = _why_figures(survey, writer, suffix)
        start = report_results.start_composition(steps.recipe, rows)
        loom = report_cache.loom_data(steps, cache, vocabulary, start, progress)
    if steps.recipe.anchors and (cache is None or len(cache.sources) < len(steps.recipe.anchors)):
        notes.append(f"The cache is not complete, so not every anchor is shown. Next: lweave score {steps.arguments}")
    details = [
        writer.figure(drawing, f"training-{key}{suffix}", *TRAINING_WORDS[key])
        for key, drawing in report_cost.training_figures(steps).items()
    ]
    ledger = read_ledger(steps.store.run_dir)
    return RunView(
        name=steps.recipe.name,
        loom=loom,
        pairs=pairs,
        wishes=wishes,
        why=why,
        cost=_cost_figures(steps, ledger, writer, suffix),
        details=details,
        cost_lines=cost_summary(steps, ledger),
        notes=notes,
    )


def _why_figures(survey: Any, writer: Writer, suffix: str) -> list[Figure]:
    return [
        writer.figure(
            report_cache.kinds_figure(survey),
            f"kinds{suffix}",
            "How hard each anchor pulls",
            f"Mean over {survey.decisions:,} decisions, by the kind of token that was sampled.",
            "Mean size of each anchor's pull by kind of token.",
        ),
        writer.figure(
            report_cache.positions_figure(survey),
            f"positions{suffix}",
            "Where the decisions went",
            "A decision is kept for an anchor if it can score every candidate; a composition keeps what all its "
            "anchors keep.",
            "Share of decisions kept and masked, by anchor and reason, and kept by each composition.",
        ),
    ]


def _cost_figures(steps: Steps, ledger: list[dict[str, Any]], writer: Writer, suffix: str) -> list[Figure]:
    drawn = report_cost.cost_figures(steps, ledger)
    if drawn is None:
        return []
    words = (
        ("cost", "Cost per stage", "Device time as measured. The cache (rollout, reference, score) is made once.",
         "Stacked bars of device time by stage, for one composition and amortised."),
        ("amortised", "The more compositions, the cheaper each",
         "Rollouts and scores are shared, so another setting of the weights costs only its training.",
         "Cost per composition against the number of compositions that share a cache."),
    )  # fmt: skip
    return [
        writer.figure(drawing, f"{name}{suffix}", title, caption, alt)
        for drawing, (name, title, caption, alt) in zip(drawn, words, strict=True)
    ]


def _check_one_student(runs: Sequence[Steps]) -> None:
    for steps in runs[1:]:
        if steps.identity_of(steps.student) != runs[0].identity_of(runs[0].student):
            raise InputError(
                f"{runs[0].arguments} and {steps.arguments} have different students "
                f"({runs[0].recipe.student.model}, {steps.recipe.student.model}); report them apart"
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
        seconds = sum(row["device_seconds"] for row in read_ledger(steps.store.run_dir))
        if seconds:
            facts.append(Fact(f"{prefix}Device time", duration(seconds), "evaluation included"))
    return facts


def _missing(runs: Sequence[Steps], found: Sequence[PolicySummaries], merged: PolicySummaries) -> list[str]:
    """Say which policies are not on the page, and what to type."""
    notes = []
    for steps, own in zip(runs, found, strict=True):
        waiting = [policy for policy in steps.policies if policy not in own]
        if waiting:
            notes.append(f"Not evaluated yet: {', '.join(waiting)}. Next: lweave eval {steps.arguments}")
        left_out = [policy for policy in own if policy not in merged]
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
