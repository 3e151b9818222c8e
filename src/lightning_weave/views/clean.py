"""`lweave clean`: list and remove what no recipe needs. The only command that deletes."""

import glob
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal as file_size

from lightning_weave.config import load_recipe
from lightning_weave.directory import RECIPE, size_of
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.progress import duration
from lightning_weave.ranks import is_single_process
from lightning_weave.run import Run
from lightning_weave.stages.costs import cost_of
from lightning_weave.store import FOLDER, MANIFEST, TEMPORARY, lock_run, remove
from lightning_weave.store.ledger import read_ledger

NAMED = ("train", "merge", "eval", "preview")  # stages with a folder per policy


def run(recipes: Sequence[Run], console: Console, yes: bool) -> list[Path]:
    """Remove what none of these recipes of one run directory needs, after asking; returns what was removed."""
    directory = recipes[0].directory
    if other := [run for run in recipes if run.directory.resolve() != directory.resolve()]:
        raise InputError(f"{other[0].arguments} is a recipe of {other[0].directory}, not of {directory}")
    if not directory.is_dir():
        raise InputError(f"{directory}: no such run directory")
    with lock_run(directory):
        unneeded = [*unneeded_folders(recipes), *leftovers(directory)]
        unneeded = [path for path in unneeded if not set(unneeded).intersection(path.parents)]
        if not unneeded:
            console.print(f"{directory}: nothing to remove.", soft_wrap=True, markup=False)
            return []
        confirm(unneeded, directory, yes, "To keep those of another recipe: --also RECIPE")
        for path in unneeded:
            remove(path)
        _remove_dangling_links(directory)
    console.print(f"{directory}: removed.", soft_wrap=True, markup=False)
    return unneeded


def unneeded_folders(recipes: Sequence[Run]) -> list[Path]:
    """Find the stage folders that none of these recipes and not the directory's own recipe.toml names.

    A student of another recipe, such as a sweep's, and a preview are needed as long as their plain name points at them.
    """
    directory = recipes[0].directory
    recorded = directory / RECIPE
    runs = list(recipes)
    if recorded.exists():
        place = directory.resolve()
        recipe = load_recipe([str(recorded)]).model_copy(update={"runs": str(place.parent), "name": place.name})
        runs.append(Run(recipe))
    needed: set[Path] = set()
    for one in runs:
        try:
            needed |= {stage.folder.resolve() for stage in one.everything()}
        except WeaveError:  # a model or a file is gone: keep what its folders' names point at
            needed |= {path.resolve() for path in directory.rglob("*") if path.is_symlink()}
    own = {name for one in runs for name in (*one.policies, *one.score_names.values())}
    for stage in NAMED:
        links = [path for path in (directory / stage).glob("*") if stage == "preview" or path.name not in own]
        needed |= {link.resolve() for path in links for link in (path, *path.glob("*")) if link.is_symlink()}
    named = [path for path in sorted(directory.rglob("*@*")) if FOLDER.search(path.name)]
    folders = [path for path in named if path.is_dir() and not path.is_symlink()]
    outer = [path for path in folders if not FOLDER.search(path.parent.relative_to(directory).as_posix())]
    needed |= {parent for folder in needed for parent in folder.parents}  # a level may be named like a fingerprint
    return [path for path in outer if path.resolve() not in needed and not path.name.startswith(TEMPORARY)]


def leftovers(directory: Path) -> list[Path]:
    """Find what finished or killed commands left: temporary files, checkpoints of finished students, merged blocks."""
    done = [path.parent for path in directory.rglob(MANIFEST)]
    inside = [path for folder in done for path in (folder / "checkpoints", *folder.glob("blocks-*")) if path.is_dir()]
    return [*directory.rglob(f"{TEMPORARY}*"), *inside]


def forget(run: Run, policy: str, console: Console, yes: bool) -> None:
    """Remove what was computed for one policy, by any recipe, after asking. The recipe may still name it."""
    directory = run.directory
    name = glob.escape(policy)
    each = (name, f"{name}~*", f"{name}@*") if policy else ()  # with its replicates and effort levels
    folders = [path for kind in ("train", "merge") for one in each for path in (directory / kind).glob(f"{one}@*")]
    folders += [path for stage in ("eval", "preview") for one in each for path in (directory / stage).glob(one)]
    folders = [path for path in folders if path.is_dir()]
    if not folders:
        names = {path.name.partition("@")[0] for stage in NAMED for path in (directory / stage).glob("[!.]*")}
        known = ", ".join(sorted(name for name in names if not name.endswith(".json"))) or "none"
        raise InputError(f"--policy {policy}: no such policy in {directory}, which has {known}")
    with lock_run(directory):
        confirm(folders, directory, yes)
        for folder in folders:
            remove(folder)
        _remove_dangling_links(directory)
    console.print(f"{directory}: {policy} is removed.", soft_wrap=True, markup=False)


def confirm(paths: Sequence[Path], directory: Path, yes: bool, hint: str = "") -> None:
    """List what would be removed with its size and cost, and continue if the user agrees."""
    ledger = read_ledger(directory)
    lines = [f"This removes from {directory}:"]
    for path in paths:
        cost = cost_of(path, directory, ledger)
        spent = f", {duration(cost.seconds)} of device time" if cost is not None else ""
        lines.append(f"  {path.relative_to(directory)}  {file_size(size_of(path))}{spent}")
    text = "\n".join([*lines, f"Total: {file_size(sum(map(size_of, paths)))}."])
    if yes:
        print(text, file=sys.stderr)
        return
    if not (is_single_process() and sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError(f"{text}\nNothing was removed. To remove them: --yes. {hint}".rstrip())
    print(text, "Continue? [y/N] ", sep="\n", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError("nothing was removed")


def _remove_dangling_links(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_symlink() and not path.exists():
            path.unlink()
