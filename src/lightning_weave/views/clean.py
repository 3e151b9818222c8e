"""`lweave clean`: list and remove what no recipe needs. Results that a recipe names, stale ones too, are left."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.runs.costs import cost_of
from lightning_weave.runs.discard import Doomed, agree, listing
from lightning_weave.runs.steps import Steps
from lightning_weave.runs.sweeps import with_sweep
from lightning_weave.store import ASIDE, MANIFEST, TEMPORARY, lock_run, read_json, recorded, remove
from lightning_weave.store.ledger import read_ledger


def run(recipes: Sequence[Steps], console: Console, yes: bool) -> list[Path]:
    """Remove what none of these recipes of one run directory needs, after asking; returns what was removed."""
    run_dir = recipes[0].store.run_dir
    if other := [steps for steps in recipes if steps.store.run_dir.resolve() != run_dir.resolve()]:
        raise InputError(f"{other[0].arguments} is a recipe of {other[0].store.run_dir}, not of {run_dir}")
    if not run_dir.is_dir():
        raise InputError(f"{run_dir}: there is no such run directory, so nothing to clean")
    with lock_run(run_dir):
        doomed = unneeded([with_sweep(steps) for steps in recipes])
        if not doomed:
            console.print(f"{run_dir}: nothing to remove.", soft_wrap=True, markup=False)
            return []
        lines = [f"No recipe given needs these in {run_dir}:", *listing(doomed, run_dir)]
        agree(lines, yes, "Nothing was removed. To remove them: --yes. To keep those of another recipe: --also RECIPE")
        for one in doomed:
            remove(one.path)
    console.print(f"{run_dir}: removed.", soft_wrap=True, markup=False)
    return [one.path for one in doomed]


def unneeded(recipes: Sequence[Steps]) -> list[Doomed]:
    """Find what can go, each with the reason; nothing that lies within another of them."""
    run_dir = recipes[0].store.run_dir
    ledger = read_ledger(run_dir)
    doomed = [Doomed(path, "no recipe names it", cost_of(path, run_dir, ledger)) for path in _unnamed(recipes)]
    doomed += [Doomed(path, "set aside while its stage is rerun") for path in run_dir.rglob(f"{ASIDE}*")]
    doomed += [Doomed(path, "left by a command that was stopped") for path in run_dir.rglob(f"{TEMPORARY}*")]
    doomed += [Doomed(path, "the student is finished") for path in _spent_checkpoints(run_dir)]
    doomed += [Doomed(path, "the evaluation is finished") for path in _merged_blocks(run_dir)]
    paths = {one.path for one in doomed}
    return [one for one in doomed if not paths.intersection(one.path.parents)]


def _unnamed(recipes: Sequence[Steps]) -> Iterator[Path]:
    """The folders of models, compositions and policies that are in no recipe."""
    run_dir = recipes[0].store.run_dir
    named = {
        "score": {name for steps in recipes for name in steps.score_names.values()},
        "train": {name for steps in recipes for name in steps.recipe.compositions},
        "eval": {name for steps in recipes for name in steps.policies},
        "preview": {name for steps in recipes for name in steps.policies},
    }
    for stage, names in named.items():
        folders = sorted(path for path in (run_dir / stage).glob("[!.]*") if path.is_dir())
        yield from (path for path in folders if path.name not in names)


def _spent_checkpoints(run_dir: Path) -> Iterator[Path]:
    """Checkpoints of trainings whose student is there: nothing will resume from them."""
    for folder in sorted((run_dir / "train").rglob("checkpoints")):
        manifest = recorded(folder.parent) if (folder.parent / MANIFEST).exists() else None
        positions = [read_json(path) for path in folder.glob("*/position.json")]
        ours = manifest is not None and all(
            position["fingerprint"] == manifest["fingerprint"] for position in positions
        )
        if ours and (folder.parent / "final").is_dir():
            yield folder


def _merged_blocks(run_dir: Path) -> Iterator[Path]:
    for folder in sorted((run_dir / "eval").glob("*/*/blocks-*")):
        if (folder.parent / MANIFEST).exists():
            yield folder
