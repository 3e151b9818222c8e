"""The Python side of `lweave`: a run, its stages as methods, and what they made as data.

The names of this module are those of `import lightning_weave as lw`. Methods that make something are the commands of
the same name, with the same checks, locks and logs; torch is imported when the first of them needs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_weave.config import Recipe, check_recipe, load_recipe, merge_overrides
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.records import Records, as_html
from lightning_weave.runs.steps import Steps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from lightning_weave.cache.reader import Cache
    from lightning_weave.cache.targets import Targets
    from lightning_weave.runs.work import Workers
    from lightning_weave.train.targets import TargetReader
    from lightning_weave.views.inspect import Decision

Recipes = str | Path | Sequence[str | Path] | Mapping[str, Any] | Recipe


class Run:
    """One run of a recipe.

    `recipe` is a file, several that are merged, a dict, or a checked `Recipe`; `overrides` are as after `--set`:
    `Run("mine.toml", ["train.epochs=3"])`. Nothing but the recipe is read before a method is called. `yes` discards
    what a changed recipe makes stale, as `--yes` does; without it that is refused. `trust` lets the Python files run
    that the recipe names, as `--trust` does. `cluster` and `address` say who does the work, as `--cluster ray` does.
    """

    def __init__(
        self,
        recipe: Recipes,
        overrides: Sequence[str] = (),
        *,
        quiet: bool = False,
        yes: bool = False,
        trust: bool = False,
        cluster: Literal["ray"] | None = None,
        address: str | None = None,
    ) -> None:
        self.steps = Steps(_check(recipe, overrides), None, trust)
        self.progress = Progress(quiet)
        self.yes = yes
        self.cluster = cluster
        self.address = address
        self.command: str | None = None  # what the log is to say, where a command called
        self._named = _named(recipe, overrides)
        self._targets: dict[str, TargetReader] = {}  # opened once, for loops over rows

    @classmethod
    def open(
        cls,
        directory: str | Path,
        overrides: Sequence[str] = (),
        *,
        quiet: bool = False,
        yes: bool = False,
        trust: bool = False,
    ) -> "Run":
        """Take a run directory by its own recipe.toml, wherever it stands now."""
        place = Path(directory).resolve()
        if not (place / "recipe.toml").is_file():
            raise InputError(f"{directory}: no recipe.toml here, so no run directory. Give runs/NAME")
        recipe = load_recipe(place / "recipe.toml").model_copy(update={"runs": str(place.parent), "name": place.name})
        return cls(recipe, overrides, quiet=quiet, yes=yes, trust=trust)

    @classmethod
    def demo(
        cls, overrides: Sequence[str] = (), *, quiet: bool = False, yes: bool = False, trust: bool = False
    ) -> "Run":
        """Lay the tiny world of `lweave demo` out in ./runs, and take its recipe."""
        from lightning_weave.world.demo import World, load_demo

        World().lay_out(Progress(quiet))
        return cls(load_demo(World(), None, 0, _check_overrides(overrides)).recipe, quiet=quiet, yes=yes, trust=trust)

    @property
    def recipe(self) -> Recipe:
        """The recipe as checked, with the engines that "auto" stands for here."""
        return self.steps.recipe

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.steps.store.run_dir

    # Making

    def run(self, force: bool = False) -> None:
        """Make all that is missing or stale, in order; `force` continues where a check would stop it."""
        from lightning_weave.pipeline import run as stage

        with self._writing("run"):
            stage.run(self.steps, self.progress, self.workers(), force, self.yes)

    def rollout(self, *, check: bool = False) -> None:
        """Sample the student's own trajectories.

        Here and below `check` first checks all that later stages need, as `run` does.
        """
        from lightning_weave.pipeline.flow import make_rollouts

        with self._making("rollout", check=check):
            make_rollouts(self.steps, self.progress, self.workers().do)

    def reference(self, *, check: bool = False) -> None:
        """Find the student's candidates on its own trajectories."""
        from lightning_weave.pipeline import reference as stage

        with self._making("reference", check=check):
            stage.run(self.steps, self.progress, self.workers().do)

    def score(self, *models: str, check: bool = False) -> None:
        """Score the cached candidates under every anchor model, or under these."""
        from lightning_weave.pipeline import score as stage

        with self._making("score", models, check):
            stage.run(self.steps, self.progress, models or None, self.workers().do)

    def train(self, *compositions: str, check: bool = False) -> None:
        """Fit the student to every composition, or to these."""
        from lightning_weave.pipeline.flow import make_students

        with self._making("train", compositions, check):
            make_students(self.steps, self.progress, compositions or None, workers=self.workers())

    def eval(self, *policies: str) -> Records:
        """Sample, grade and summarise every policy, or these; returns the points."""
        from lightning_weave.pipeline import eval as stage

        with self._making("eval", policies):
            stage.run(self.steps, self.progress, policies or None, self.workers().do)
        return self.points()

    def harness(self, *policies: str) -> Records:
        """Run the tasks of [harness] alone, on every policy or on these; returns the points."""
        from lightning_weave.pipeline import eval as stage

        with self._making("harness", policies):
            stage.run_harness(self.steps, self.progress, policies or None)
        return self.points()

    def sweep(
        self,
        shares: Sequence[float],
        anchor: str | None = None,
        alphas: Sequence[float] | None = None,
        tag: str | None = None,
        *,
        console: "Console | None" = None,
    ) -> Records:
        """Train and evaluate a range of shares of one anchor (the last, if none is named); returns the points.

        The frontier is printed as it grows, to `console` if there is one.
        """
        from lightning_weave.pipeline import sweep as stage
        from lightning_weave.runs.sweeps import plan_sweep

        plan = plan_sweep(self.recipe, shares, anchor, alphas, tag)
        with self._writing("sweep"):
            out = console or self.progress.console
            stage.run(self.steps, plan, self.progress, out, yes=self.yes, workers=self.workers())
        return self.points()

    def report(self) -> Path:
        """Draw the page; returns its path."""
        from lightning_weave.report import report as stage

        stage.run([self.steps], self.progress)
        return self.path / "report" / "index.html"

    def export(self, composition: str, out: str | Path) -> Path:
        """Write the targets of a composition as a Parquet data set; returns its directory."""
        from lightning_weave.views import export as stage

        return stage.run(self.steps, composition, Path(out), self.progress)

    # Looking

    def status(self) -> Records:
        """Say of every stage whether it is done, stale (and why) or missing."""
        from lightning_weave.views import status

        return Records({"stage": one.step.path, "state": one.state, "why": one.why} for one in status.look(self.steps))

    def doctor(self) -> Records:
        """Say before any GPU time whether models, data and anchors are usable."""
        from lightning_weave.views import doctor

        return Records(map(asdict, doctor.examine(self.steps)))

    @property
    def cache(self) -> "Cache":
        """All trajectories with the shifts of every scored anchor: `run.cache.block([0, 1])`."""
        from lightning_weave.runs.caches import open_scored

        cache = open_scored(self.steps)
        if cache is None:
            raise InputError(f"{self.path}: nothing is cached yet. Make it with: run.rollout(), run.reference()")
        return cache

    def shifts(self, rows: Sequence[int] | None = None) -> "dict[str, NDArray[np.float32]]":
        """Give each scored anchor's shift of every candidate at every decision of these rows, or of all.

        Arrays of (decisions, candidates); NaN where an anchor cannot express the candidate.
        """
        import numpy as np

        cache = self.cache
        if not cache.names:
            raise InputError(f"{self.path}: no anchor is scored yet. Make it with: {self.steps.command('score')}")
        block = cache.block(range(len(cache)) if rows is None else rows)
        return {name: np.where(block.mapped_KPC[k], block.r_KPC[k], np.nan) for k, name in enumerate(cache.names)}

    def target(self, composition: str, rows: Sequence[int] | None = None) -> "Targets":
        """Give behaviour and target of a composition at every decision of these rows, or of all."""
        from lightning_weave.train.targets import open_targets

        if composition not in self._targets:
            self._targets[composition] = open_targets(self.steps, composition)
        reader = self._targets[composition]
        return reader(range(len(reader.cache)) if rows is None else rows)

    def decision(self, row: int, position: int) -> "Decision":
        """Give one decision as everything cached sees it."""
        from lightning_weave.views.inspect import look

        return look(self.steps, row, position)

    def points(self) -> Records:
        """Give every evaluated policy: weights, alpha, accuracy, tokens, AES with its interval."""
        from lightning_weave.report.results import points, result_rows, summaries

        return Records(points(self.steps, result_rows(self.steps, summaries(self.steps))))

    def samples(self, policy: str, benchmark: str) -> Records:
        """Give every graded response of a policy to a benchmark, which is named as in the recipe or as in tables."""
        from lightning_weave.bench.samples import read_samples
        from lightning_weave.config import benchmark_folder

        self._check("policy", policy, self.steps.policies)
        names = {benchmark_folder(name): name for name in self.recipe.eval.benchmarks}
        if benchmark not in names.values():
            self._check("benchmark", benchmark, list(names))
        stage = self.steps.store.stage(self.steps.eval(policy, names.get(benchmark, benchmark)))
        stage.require()
        return Records(map(asdict, read_samples(stage.folder / "samples.jsonl")))

    def _check(self, what: str, name: str, names: Sequence[str]) -> None:
        if name not in names:
            raise InputError(f"{name!r}: no such {what}; this recipe has {', '.join(names)}")

    def workers(self) -> "Workers":
        """Say who makes the shards and trains: this process, or the nodes of a cluster."""
        if self.cluster is None:
            from lightning_weave.runs.work import HERE

            return HERE
        from lightning_weave.cluster.connect import connect

        return connect(self.address)

    def _writing(self, verb: str, only: Sequence[str] = ()) -> AbstractContextManager[None]:
        from lightning_weave.runs.directory import writing

        self._targets.clear()
        called = f"Run({self._named}).{verb}({', '.join(map(repr, only))})"
        return writing(self.steps, self.command or called)

    @contextmanager
    def _making(self, verb: str, only: Sequence[str] = (), check: bool = False) -> Iterator[None]:
        """Hold the run directory, and discard nothing that was not agreed to."""
        from lightning_weave.pipeline.run import allow

        with self._writing(verb, only):
            allow(self.steps, verb, only or None, self.yes, check)
            yield

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from lightning_weave.views import status

        return as_html(lambda console: status.run(self.steps, console))


def _check(recipe: Recipes, overrides: Sequence[str]) -> Recipe:
    overrides = _check_overrides(overrides)
    if isinstance(recipe, Mapping):
        return check_recipe(merge_overrides(recipe, overrides))
    if isinstance(recipe, Recipe):
        data = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
        return check_recipe(merge_overrides(data, overrides)) if overrides else recipe
    if not isinstance(recipe, str | Path | Sequence):
        raise InputError(f"recipe: must be a file, a list of files, a dict or a Recipe, got {recipe!r}")
    return load_recipe(recipe, overrides)


def _check_overrides(overrides: Sequence[str]) -> list[str]:
    if isinstance(overrides, str | Mapping):
        raise InputError(f'overrides: must be a list such as ["train.epochs=3"], got {overrides!r}')
    return list(overrides)


def _named(recipe: Recipes, overrides: Sequence[str]) -> str:
    """Name the recipe as the call did, for the log."""
    files = [recipe] if isinstance(recipe, str | Path) else recipe
    first = "..." if isinstance(files, Mapping | Recipe) else ", ".join(map(str, files))
    return f"{first}, {list(overrides)}" if overrides else first
