"""The folder of a report: its figures, tables and points as files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_weave.config import slug
from lightning_weave.report import across, cost_table, grid, headline, tables
from lightning_weave.report.colours import Hues
from lightning_weave.report.figures import frontier, inline, save
from lightning_weave.report.page import Figure
from lightning_weave.report.results import overalls, points
from lightning_weave.report.setup import hyperparameter_lines
from lightning_weave.runs.costs import read_spent
from lightning_weave.runs.steps import Steps
from lightning_weave.store import write_atomic, write_json

FIGURES = {  # name -> title, caption (unless it depends on what is drawn), description
    "frontier": (
        "Accuracy against tokens",
        "",
        "Accuracy against mean response tokens.",
    ),
    "profile": (
        "AES and accuracy by benchmark",
        "",
        "Dot plot of AES and of the accuracy on every benchmark.",
    ),
    "budgets": (
        "Accuracy within a token budget",
        "The same samples, truncated at each budget and graded again.",
        "Accuracy of every policy when responses are truncated at token budgets.",
    ),
    "kinds": (
        "Size of each anchor's pull",
        "Pull on the sampled token, by its kind; mean over the cache.",
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
        "Rollouts and scores are shared, so another setting of the weights only costs its training. Circled: this run.",
        "Cost per composition against the number of compositions that share a cache.",
    ),
    "training-reverse_kl": (
        "KL between student and target",
        "Running mean over the decisions of each update.",
        "Training curves of every composition: KL to the target by update.",
    ),
    "training-loss": (
        "Loss",
        "Running mean of the objective. It scales with alpha and the dose.",
        "Training curves of every composition: loss by update.",
    ),
    "training-eval_accuracy": (
        "Accuracy during training",
        "A few problems of the first benchmark, one sample each: a trend, not a result.",
        "Accuracy of every composition on a few problems by update.",
    ),
    "training-eval_tokens": (
        "Tokens during training",
        "Mean length of the answers to the same few problems.",
        "Tokens of every composition on a few problems by update.",
    ),
}


class Writer:
    """The report folder: files of an earlier report that this one does not write are removed."""

    def __init__(self, folder: Path, hues: Hues, benchmark: str | None = None) -> None:
        self.folder = folder
        self.hues = hues
        self.benchmark = benchmark  # that the page's frontier is of; else of the average
        self.written: set[Path] = set()

    def text(self, name: str, text: str) -> None:
        write_atomic(self.folder / name, text.encode())
        self.written.add(self.folder / name)

    def figures(
        self, drawings: Mapping[str, Any], suffix: str = "", data: str = "", captions: Mapping[str, str] | None = None
    ) -> list[Figure]:
        """Save figures as files and prepare them for the page; `data` is added to their descriptions."""
        figures = []
        for name, drawing in drawings.items():
            title, usual, alt = FIGURES[name]
            caption = (captions or {}).get(name, usual)
            figures.append(Figure(f"{name}{suffix}", inline(drawing), title, caption, f"{alt} {data}".strip()))
            self._save(f"{name}{suffix}", drawing)
        return figures

    def _save(self, name: str, drawing: Any) -> None:
        self.written |= set(save(drawing, self.folder / "figures", name))

    def write_tables(self, rows: Sequence[tables.PolicyRow], students: Sequence[across.StudentResults]) -> None:
        """Write the results, and the ablation where there is one, as tables, and the policies as points."""
        self.table("results", rows)
        blocks = [row for student in students for row in across.ablation(student.runs[0], student.rows)]
        if blocks and len(students) == 1:
            self.table("ablation", blocks)
        write_json(self.folder / "points.json", [one for student in students for one in _points(student, students)])

    def table(self, name: str, rows: Sequence[tables.PolicyRow]) -> None:
        """Write a table in every form, with what explains its marks."""
        self.text(f"tables/{name}.md", f"{tables.markdown(rows)}\n{tables.legend(rows)}\n")
        self.text(f"tables/{name}.tex", f"% {tables.legend(rows)}\n{tables.latex(rows)}")
        self.text(f"tables/{name}.csv", tables.to_csv(rows))

    def costs(self, students: Sequence[across.StudentResults]) -> None:
        """Write the paper's cost table from the ledgers."""
        columns = [
            column
            for student in students
            for steps in student.runs
            for column in cost_table.cost_columns(steps, read_spent(steps.store.run_dir).kept, student.name)
        ]
        if columns:
            self._grid("cost", cost_table.table_lines(columns), cost_table.RULES)

    def hyperparameters(self, runs: Mapping[str, Steps]) -> None:
        """Write the hyperparameters of the runs that train something."""
        trained = {name: steps for name, steps in runs.items() if steps.recipe.compositions}
        if trained:
            mark = next(iter(trained.values())).recipe.mark
            self._grid("hyperparameters", hyperparameter_lines(trained, mark))

    def _grid(self, name: str, lines: grid.TextTable, rules: Sequence[int] = (1,)) -> None:
        self.text(f"tables/{name}.md", grid.markdown(lines))
        self.text(f"tables/{name}.tex", grid.latex(lines, rules))
        self.text(f"tables/{name}.csv", grid.to_csv(lines))

    def figures_of(self, student: across.StudentResults, several: bool) -> list[Figure]:
        """Draw the results of one student: frontier, profile, budgets; as files also those of each benchmark."""
        if not student.whole:
            return []
        steps = student.runs[0]
        suffix = f"-{slug(student.name)}" if several else ""
        by_benchmark = {
            result.label: overalls({policy: [results[at]] for policy, results in student.whole.items()})
            for at, result in enumerate(next(iter(student.whole.values())))
        }
        for label, combined in by_benchmark.items() if len(by_benchmark) > 1 else ():
            self._save(
                f"frontier{suffix}-{slug(label)}", frontier(headline.frontier_points(steps, combined, self.hues))
            )
            if (budgets := headline.budgets_figure(student.whole, self.hues, label)) is not None:
                self._save(f"budgets{suffix}-{slug(label)}", budgets)
        shown = student.combined if self.benchmark is None else by_benchmark[self.benchmark]
        drawn = headline.frontier_points(steps, shown, self.hues)
        drawings = {
            "frontier": frontier(drawn),
            "profile": headline.profile_figure(student.rows, student.whole, self.hues),
        }
        if (budgets := headline.budgets_figure(student.whole, self.hues, self.benchmark)) is not None:
            drawings["budgets"] = budgets
        where = f"On {self.benchmark}. " if self.benchmark else ""
        captions = {
            "frontier": where + headline.frontier_caption(drawn),
            "profile": headline.profile_caption(student.rows),
            "budgets": where + FIGURES["budgets"][1],
        }
        data = "; ".join(f"{row.policy}: {row.accuracy:.1f} % at {row.tokens:,.0f} tokens" for row in student.rows)
        figures = self.figures(drawings, suffix, data=f"{data}.", captions=captions)
        return [replace(one, title=f"{one.title}: {student.name}") for one in figures] if several else figures

    def clear(self) -> None:
        """Remove figures and tables of an earlier report that this one does not have."""
        for part in ("figures", "tables"):
            for path in (self.folder / part).glob("*"):
                if path not in self.written:
                    path.unlink()


def _points(student: across.StudentResults, students: Sequence[across.StudentResults]) -> list[dict[str, Any]]:
    rows = points(student.runs[0], student.rows)
    return [{"student": student.name, **point} for point in rows] if len(students) > 1 else rows
