"""The Python side of `lweave`: a run, its stages as methods, and their results as data.

The names of this module are those of `import lightning_weave as lw`. Methods that make something are the commands of
the same name, with the same checks, locks and logs; torch is imported when the first of them needs it.
"""

import html
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, overload

from rich.console import Console

from lightning_weave import run as runs
from lightning_weave.config import Recipe, check_recipe, load_recipe, merge_overrides
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from lightning_weave.cache.block import Cache, Targets
    from lightning_weave.stages.work import Executor
    from lightning_weave.train.data import TargetReader
    from lightning_weave.views.inspect import Decision

WIDTH = 120  # characters, of what is drawn as on a terminal
SHOWN = 50  # rows of a table, and no more than LONG characters of a cell: responses are long
LONG = 300
_PRE = '<pre style="line-height:1.3">{code}</pre>'


class Records(list[dict[str, Any]]):
    """Rows that `pandas.DataFrame(rows)` takes as they are; a notebook shows them as a table.

    >>> Records([{"policy": "base", "accuracy": 75.25}, {"policy": "a<b"}])._repr_html_()
    '<table><tr><th>policy</th><th>accuracy</th></tr><tr><td>base</td><td>75.25</td></tr><tr><td>a&lt;b</td><td></td></tr></table>'
    """

    @overload
    def __getitem__(self, place: SupportsIndex) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, place: slice) -> "Records": ...

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        item: Any = super().__getitem__(place)
        return Records(item) if isinstance(place, slice) else item

    def _repr_html_(self) -> str:
        def draw(tag: str, cells: Iterable[str]) -> str:
            return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

        def text(value: Any) -> str:
            shown = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            return shown if len(shown) <= LONG else f"{shown[: LONG - 1]}…"

        names = list(dict.fromkeys(name for row in self for name in row))
        rows = [draw("td", [text(row.get(name)) for name in names]) for row in self[:SHOWN]]
        rest = f"<p>{len(self) - SHOWN:,} more rows</p>" if len(self) > SHOWN else ""
        return f"<table>{draw('th', names)}{''.join(rows)}</table>{rest}"


def as_html(draw: Callable[[Console], object]) -> str:
    """Draw for a terminal, and return that as HTML."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)  # or it shows it, too
    draw(console)
    return console.export_html(inline_styles=True, code_format=_PRE)


Recipes = str | Path | Sequence[str | Path] | Mapping[str, Any] | Recipe


class Run(runs.Run):
    """One run of a recipe: `lightning_weave.run.Run` with the commands as methods.

    `recipe` is a file, several that are merged, a dict, or a checked `Recipe`; `overrides` are as after `--set`:
    `Run("mine.toml", ["train.epochs=3"])`. Nothing but the recipe is read before a method is called. `trust`
    allows the code and programs that the recipe names, as `--trust` does; `cluster` and `address` are as on the
    command line.
    """

    def __init__(
        self,
        recipe: Recipes,
        overrides: Sequence[str] = (),
        *,
        quiet: bool = False,
        trust: bool = False,
        cluster: Literal["ray"] | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(_check(recipe, overrides), None, trust)
        self.progress = Progress(quiet)
        self.cluster = cluster
        self.address = address
        self.typed: str | None = None  # what the log is to say, where a command called
        files = [recipe] if isinstance(recipe, str | Path) else recipe
        named = ["..."] if isinstance(files, Mapping | Recipe) else [*map(str, files)]
        self._named = ", ".join([*named, str(list(overrides))] if overrides else named)  # the call, for the log
        self._targets: dict[str, TargetReader] = {}  # opened once, for loops over rows

    @classmethod
    def open(
        cls, directory: str | Path, overrides: Sequence[str] = (), *, quiet: bool = False, trust: bool = False
    ) -> "Run":
        """Open a run directory by its own recipe.toml, with everything complete that it holds."""
        place = Path(directory).resolve()
        if not (place / "recipe.toml").is_file():
            raise InputError(f"{directory}: not a run directory (no recipe.toml). Give runs/NAME")
        recipe = load_recipe(place / "recipe.toml").model_copy(update={"runs": str(place.parent), "name": place.name})
        from lightning_weave.directory import with_others

        recipe = with_others(runs.Run(_check(recipe, overrides), trust=trust), complete=True).recipe
        return cls(recipe, quiet=quiet, trust=trust)

    @classmethod
    def demo(cls, overrides: Sequence[str] = (), *, quiet: bool = False, trust: bool = False) -> "Run":
        """Write the tiny models and data of `lweave demo` to ./runs, and load its recipe."""
        from lightning_weave.world.demo import load_demo
        from lightning_weave.world.layout import lay_out_world

        lay_out_world()
        return cls(load_demo(_check_overrides(overrides), trust).recipe, quiet=quiet, trust=trust)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory

    # Computing

    def run(self, force: bool = False, until: str = "eval", only: Sequence[str] = ()) -> None:
        """Compute all that is missing, in order, up to a stage, for all policies or `only` these.

        `force` continues where a check would stop it. The directory keeps the whole recipe.
        """
        from lightning_weave.stages.run import narrow, run_all

        chosen = self.derive(recipe=narrow(self, only)) if only else self
        with self._hold("run"):
            run_all(chosen, self.progress, self.executor(), force, until)

    def rollout(self) -> None:
        """Sample the student's own trajectories."""
        from lightning_weave.stages.rollout import rollout

        with self._hold("rollout"):
            rollout(self, self.progress, self.executor())

    def reference(self) -> None:
        """Find the student's candidates on its own trajectories."""
        from lightning_weave.stages.reference import reference

        with self._hold("reference"):
            reference(self, self.progress, self.executor())

    def score(self, *models: str) -> None:
        """Score the cached candidates under every anchor model, or under these."""
        from lightning_weave.stages.score import score

        with self._hold("score", models):
            score(self, self.progress, models or None, self.executor())

    def train(self, *compositions: str) -> dict[str, Path]:
        """Fit the student to every composition, or to these; returns the directory of each trained student."""
        from lightning_weave.stages.train import train

        with self._hold("train", compositions):
            train(self, self.progress, compositions or None, executor=self.executor())
        names = [name for name in self.recipe.compositions if runs.is_wanted(name, compositions or None)]
        return {name: self.stage("train", name).folder / "final" for name in names}

    def eval(self, *policies: str) -> Records:
        """Sample, grade and summarise every policy, or these; returns the points."""
        from lightning_weave.stages.eval import evaluate

        with self._hold("eval", policies):
            evaluate(self, self.progress, policies or None, self.executor())
        return self.points()

    def harness(self, *policies: str) -> Records:
        """Run the tasks of [harness] alone, on every policy or on these; returns the points."""
        from lightning_weave.stages.harness import run_tasks

        with self._hold("harness", policies):
            run_tasks(self, self.progress, policies or None)
        return self.points()

    def sweep(
        self,
        shares: Sequence[float] | None = None,
        anchor: str | None = None,
        alphas: Sequence[float] | None = None,
        tag: str | None = None,
        *,
        forecast: int | None = None,
        console: "Console | None" = None,
    ) -> Records:
        """Train and evaluate a range of shares of one anchor (the last, if none is named); returns the points.

        With `forecast`, only so many points of the range, or of a default grid of weights and alphas: those that the
        cache forecasts as best. The frontier is printed as it grows, to `console` if there is one.
        """
        from lightning_weave.stages.sweep import plan_sweep, sweep

        if forecast is None:
            plan = plan_sweep(self.recipe, shares or (), anchor, alphas, tag)
        else:
            from lightning_weave.stages.forecast import plan_promising
            from lightning_weave.stages.score import make_cache

            with self._hold("sweep"):
                make_cache(self, self.progress, self.executor())
            plan = plan_promising(self, forecast, shares, anchor, alphas, tag, self.progress)
        with self._hold("sweep"):
            sweep(self, plan, self.progress, console or self.progress.console, executor=self.executor())
        return self.points()

    def compare(
        self,
        composition: str,
        *also: str,
        only: Sequence[str] | None = None,
        console: "Console | None" = None,
    ) -> Records:
        """Compare a composition with what could be done instead: merges, prompts, a token cap, baselines, placebos.

        What is missing is trained and evaluated; `also` are further policies, `only` some of the alternatives. Returns
        a row for each policy, and one with `left_out` for each that cannot be built.
        """
        from lightning_weave.stages.compare import compare, records
        from lightning_weave.views.compare import show

        with self._hold("compare", (composition, *also)):
            plan, rows = compare(self, composition, self.progress, also, only, self.executor())
            show(plan, rows, console or self.progress.console)
        return Records(records(plan, rows))

    def forecast(
        self,
        shares: Sequence[float] | None = None,
        anchor: str | None = None,
        alphas: Sequence[float] | None = None,
        kl_budgets: Sequence[float] | None = None,
        tag: str | None = None,
        *,
        grid: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        compute: bool = False,
    ) -> Records:
        """Forecast accuracy, tokens and AES of the recipe's compositions and of a grid, from the cache alone.

        The grid: shares of an anchor as in a sweep, all weights in steps of 1 / `grid`, or the recipe's own weights, by
        `alphas` and `kl_budgets`. `compute` makes rollout, reference and scores if they are missing.
        """
        from lightning_weave.stages.forecast import Decoding, forecast, keep_points, plan_forecast
        from lightning_weave.stages.score import make_cache

        planned = plan_forecast(self.recipe, shares, anchor, alphas, kl_budgets, tag, grid)
        section = self.recipe.eval
        decoding = Decoding(
            section.temperature if temperature is None else temperature, section.top_p if top_p is None else top_p
        )
        if compute:
            with self._hold("forecast"):
                make_cache(self, self.progress, self.executor())
        points = forecast(self, planned, self.progress, decoding)
        if temperature is None and top_p is None:
            keep_points(self, points)
        return Records(point.to_dict() for point in points)

    def realised(self) -> Records:
        """Compare every trained composition with its target and its forecast; scores a few cached rows once."""
        from lightning_weave.stages.forecast import forecast, keep_points
        from lightning_weave.stages.realised import measure_all, realise

        measure_all(self, self.progress)
        points = forecast(self, progress=self.progress)
        keep_points(self, points)
        return Records(one.to_dict() for one in realise(self, points))

    def report(self) -> Path:
        """Draw the page; returns its path."""
        from lightning_weave.report import report as stage

        stage.run([self], self.progress)
        return self.path / "report" / "index.html"

    def export(self, composition: str, out: str | Path) -> Path:
        """Write the targets of a composition as a Parquet data set; returns its directory."""
        from lightning_weave.views import export as stage

        return stage.run(self, composition, Path(out), self.progress)

    def push(self, url: str, everything: bool = False, public: bool = False) -> None:
        """Publish the cache at a URL; with `everything`, the whole run, to continue it elsewhere."""
        from lightning_weave.directory import writing
        from lightning_weave.published import push
        from lightning_weave.store.remote import Remote

        remote = Remote(url)  # before the log has its URL
        with writing(self, self.typed or f"push({url!r})", keep_recipe=True):
            push(self, remote, self.progress, everything, public)

    # Looking

    def status(self) -> Records:
        """List every stage with its state: complete, partial or missing."""
        from lightning_weave.views import status

        return Records({"stage": one.path, "state": one.state, "why": one.why} for one in status.look(self))

    def doctor(self) -> Records:
        """Check models, data and anchors before any GPU time is spent."""
        from lightning_weave.views import doctor

        return Records(map(asdict, doctor.examine(self)))

    @property
    def cache(self) -> "Cache":
        """All trajectories with the shifts of every scored anchor: `run.cache.block([0, 1])`."""
        from lightning_weave.stages.caches import open_scored

        cache = open_scored(self)
        if cache is None:
            raise InputError(f"{self.path}: nothing is cached yet. Make it with: run.rollout(), run.reference()")
        return cache

    def shifts(self, rows: Sequence[int] | None = None) -> "dict[str, NDArray[np.float32]]":
        """Return each scored anchor's shift of every candidate at every decision of these rows, or of all.

        Arrays of (decisions, candidates); NaN where an anchor cannot express the candidate.
        """
        import numpy as np

        cache = self.cache
        if not cache.names:
            raise InputError(f"{self.path}: no anchor is scored yet. Make it with: {self.command('score')}")
        block = cache.block(range(len(cache)) if rows is None else rows)
        return {name: np.where(block.mapped_KPC[k], block.r_KPC[k], np.nan) for k, name in enumerate(cache.names)}

    def target(self, composition: str, rows: Sequence[int] | None = None) -> "Targets":
        """Return behaviour and target of a composition at every decision of these rows, or of all."""
        from lightning_weave.train.data import open_targets

        if composition not in self._targets:
            self._targets[composition] = open_targets(self, composition)
        reader = self._targets[composition]
        return reader(range(len(reader.cache)) if rows is None else rows)

    def decision(self, row: int, position: int) -> "Decision":
        """Return one decision with its candidates, shifts and targets."""
        from lightning_weave.views.inspect import look

        return look(self, row, position)

    def points(self) -> Records:
        """Return every evaluated policy: weights, alpha, accuracy, tokens, AES with its interval."""
        from lightning_weave.directory import as_found, with_others
        from lightning_weave.report.results import run_points

        return Records(run_points(as_found(with_others(self))))

    def samples(self, policy: str, benchmark: str) -> Records:
        """Return every graded response of a policy to a benchmark, named as in the recipe or as in tables."""
        from lightning_weave.bench.samples import read_samples
        from lightning_weave.config import benchmark_folder

        folders = {benchmark_folder(name): name for name in self.recipe.eval.benchmarks}
        if policy not in self.policies:
            raise InputError(f"{policy!r}: no such policy; this recipe has {', '.join(self.policies)}")
        if benchmark not in {*folders, *folders.values()}:
            raise InputError(f"{benchmark!r}: no such benchmark; this recipe has {', '.join(folders)}")
        stage = self.stage("eval", policy, folders.get(benchmark, benchmark))
        stage.require()
        return Records(map(asdict, read_samples(stage.folder / "samples.jsonl")))

    def executor(self) -> "Executor":
        """Where shards are computed and students trained: in this process, or on the nodes of a cluster."""
        if self.cluster is None:
            from lightning_weave.stages.work import LOCAL

            return LOCAL
        from lightning_weave.cluster import connect

        return connect(self.address)

    @contextmanager
    def _hold(self, verb: str, only: Sequence[str] = ()) -> Iterator[None]:
        """Hold the run directory, and log the call."""
        from lightning_weave.directory import writing

        self._targets.clear()
        called = f"Run({self._named}).{verb}({', '.join(map(repr, only))})"
        with writing(self, self.typed or called):
            yield

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from lightning_weave.views import status

        return as_html(lambda console: status.run(self, console))


def _check(recipe: Recipes, overrides: Sequence[str]) -> Recipe:
    overrides = _check_overrides(overrides)
    if isinstance(recipe, Mapping):
        return check_recipe(merge_overrides(recipe, overrides))
    if isinstance(recipe, Recipe):
        return check_recipe(merge_overrides(recipe.model_dump(**runs.DUMP), overrides)) if overrides else recipe
    if not isinstance(recipe, str | Path | Sequence):
        raise InputError(f"recipe: must be a file, a list of files, a dict or a Recipe, got {recipe!r}")
    return load_recipe(recipe, overrides)


def _check_overrides(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str | Mapping):
        raise InputError(f'overrides: must be a list such as ["train.epochs=3"], got {overrides!r}')
    return list(overrides)
