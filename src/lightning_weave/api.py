"""The Python side of `lweave`: a run, its stages as methods, and what they made as data.

The names of this module are those of `import lightning_weave as lw`. Methods that make something are the commands of
the same name, with the same checks, locks and logs; torch is imported when the first of them needs it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_weave.config import Recipe, check_recipe, load_recipe, merge_overrides
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.records import Records, as_html
from lightning_weave.runs.steps import Steps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lightning_weave.cache.reader import Cache
    from lightning_weave.cache.targets import Targets
    from lightning_weave.views.inspect import Decision

Recipes = str | Path | Sequence[str | Path] | Mapping[str, Any] | Recipe


class Run:
    """One run of a recipe.

    `recipe` is a file, several that are merged, a dict, or a checked `Recipe`; `overrides` are as after `--set`:
    `Run("mine.toml", ["train.epochs=3"])`. Nothing is read or made before a method is called. `yes` discards what a
    changed recipe makes stale, as `--yes` does; without it that is refused. `trust` lets the Python files run that the
    recipe names, as `--trust` does.
    """

    def __init__(
        self,
        recipe: Recipes,
        overrides: Sequence[str] = (),
        *,
        quiet: bool = False,
        yes: bool = False,
        trust: bool = False,
    ) -> None:
        self.recipe = _check(recipe, overrides)
        self.steps = Steps(self.recipe, _named(recipe), trust)
        self.progress = Progress(quiet)
        self.yes = yes

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
        return cls(load_demo(World(), None, 0, list(overrides)).recipe, quiet=quiet, yes=yes, trust=trust)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.steps.store.run_dir

    # Making

    def run(self, force: bool = False) -> None:
        """Make all that is missing or stale, in order; `force` continues where a check would stop it."""
        from lightning_weave.pipeline import run as stage

        with self._writing("run"):
            stage.run(self.steps, self.progress, force=force, yes=self.yes)

    def rollout(self) -> None:
        """Sample the student's own trajectories."""
        from lightning_weave.pipeline.flow import make_rollouts

        with self._making("rollout"):
            make_rollouts(self.steps, self.progress)

    def reference(self) -> None:
        """Find the student's candidates on its own trajectories."""
        from lightning_weave.pipeline import reference as stage

        with self._making("reference"):
            stage.run(self.steps, self.progress)

    def score(self, *models: str) -> None:
        """Score the cached candidates under every anchor model, or under these."""
        from lightning_weave.pipeline import score as stage

        with self._making("score", models):
            stage.run(self.steps, self.progress, list(models) or None)

    def train(self, *compositions: str) -> None:
        """Fit the student to every composition, or to these."""
        from lightning_weave.pipeline.flow import make_students

        with self._making("train", compositions):
            make_students(self.steps, self.progress, list(compositions) or None)

    def eval(self, *policies: str) -> Records:
        """Sample, grade and summarise every policy, or these; returns the points."""
        from lightning_weave.pipeline import eval as stage

        with self._making("eval", policies):
            stage.run(self.steps, self.progress, list(policies) or None)
        return self.points()

    def harness(self, *policies: str) -> Records:
        """Run the tasks of [harness] alone, on every policy or on these; returns the points."""
        from lightning_weave.pipeline import eval as stage

        with self._making("harness", policies):
            stage.run_harness(self.steps, self.progress, list(policies) or None)
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
            raise InputError(f"{self.path}: nothing is cached yet. Call rollout() and reference() first")
        return cache

    def shifts(self, rows: Sequence[int]) -> "dict[str, NDArray[np.float32]]":
        """Give each scored anchor's shift of every candidate at every decision of these rows, (decisions, candidates).

        NaN where an anchor cannot express the candidate.
        """
        import numpy as np

        cache = self.cache
        block = cache.block(rows)
        return {name: np.where(block.mapped_KPC[k], block.r_KPC[k], np.nan) for k, name in enumerate(cache.names)}

    def target(self, composition: str, rows: Sequence[int]) -> "Targets":
        """Give behaviour and target of a composition at every decision of these rows."""
        from lightning_weave.train.targets import open_targets

        return open_targets(self.steps, composition)(rows)

    def decision(self, row: int, position: int) -> "Decision":
        """Give one decision as everything cached sees it."""
        from lightning_weave.views.inspect import look

        return look(self.steps, row, position)

    def points(self) -> Records:
        """Give every evaluated policy: weights, alpha, accuracy, tokens, AES with its interval."""
        from lightning_weave.report.results import points, result_rows, summaries

        return Records(points(self.steps, result_rows(self.steps, summaries(self.steps))))

    def samples(self, policy: str, benchmark: str) -> Records:
        """Give every graded response of a policy to a benchmark."""
        from lightning_weave.bench.samples import read_samples

        self._check("policy", policy, self.steps.policies)
        self._check("benchmark", benchmark, self.recipe.eval.benchmarks)
        stage = self.steps.store.stage(self.steps.eval(policy, benchmark))
        stage.require()
        return Records(map(asdict, read_samples(stage.folder / "samples.jsonl")))

    def _check(self, what: str, name: str, known: Sequence[str]) -> None:
        if name not in known:
            raise InputError(f"{name!r}: no such {what}; this recipe has {', '.join(known)}")

    def _writing(self, verb: str) -> AbstractContextManager[None]:
        from lightning_weave.runs.directory import writing

        return writing(self.steps, f"Run({self.steps.arguments}).{verb}()")

    @contextmanager
    def _making(self, verb: str, only: Sequence[str] = ()) -> Iterator[None]:
        """Hold the run directory, and discard nothing that was not agreed to."""
        from lightning_weave.pipeline.run import allow

        with self._writing(verb):
            allow(self.steps, verb, list(only) or None, self.yes)
            yield

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        from lightning_weave.views import status

        return as_html(lambda console: status.run(self.steps, console))


def _check(recipe: Recipes, overrides: Sequence[str]) -> Recipe:
    if isinstance(recipe, Mapping):
        return check_recipe(merge_overrides(recipe, overrides))
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, overrides)
    return check_recipe(merge_overrides(recipe.model_dump(mode="json", by_alias=True, exclude_none=True), overrides))


def _named(recipe: Recipes) -> str:
    """Name the recipe as a command would, for what messages say to type."""
    if isinstance(recipe, Mapping | Recipe):
        return "RECIPE"
    return str(recipe) if isinstance(recipe, str | Path) else " ".join(map(str, recipe))
