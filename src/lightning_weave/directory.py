"""What a run directory holds beyond the stages of one recipe, and how a command holds it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_weave.config import anchors_of, check_recipe, dump_recipe
from lightning_weave.errors import CorruptData, InputError
from lightning_weave.progress import Progress, keep_log
from lightning_weave.published import fetch_published
from lightning_weave.ranks import check_ranks
from lightning_weave.run import DUMP, RESULTS, Run, explain_missing
from lightning_weave.store import MANIFEST, lock_run, read_json, read_manifest, write_atomic
from lightning_weave.store.files import HOLDER

RECIPE = "recipe.toml"  # the resolved recipe of the last command that computed something
MACHINE = "machine.json"
UNTOUCHED = {".lock", HOLDER, RECIPE, MACHINE, "log.txt"}  # all that is there before the first stage


@contextmanager
def writing(run: Run, command: str, keep_recipe: bool = False) -> Iterator[None]:
    """Hold the run directory and write the resolved recipe before anything else. Wrong input leaves no new directory.

    `command` goes to the log first. With `keep_recipe` the directory's recipe stays as it is: the command only looks.
    """
    check_ranks()
    run.check_trust()
    recipe = run.directory / RECIPE
    is_new = not run.directory.exists()
    before = recipe.read_bytes() if recipe.exists() else None
    try:
        with lock_run(run.directory), keep_log(run.directory / "log.txt", command):
            if not keep_recipe:
                write_atomic(recipe, dump_recipe(run.recipe).encode())
            fetch_published(run, getattr(run, "progress", Progress()))
            yield
            run.remember()
    except InputError:
        if is_new and run.directory.is_dir() and {path.name for path in run.directory.iterdir()} <= UNTOUCHED:
            shutil.rmtree(run.directory)
        elif before is not None:
            write_atomic(recipe, before)
        raise


def with_others(run: Run, complete: bool = False) -> Run:
    """Add the compositions and policies that other recipes computed in this directory.

    With `complete`, only those whose folders this recipe would use.
    """
    manifests = [*run.directory.glob(f"train/*@*/{MANIFEST}"), *run.directory.glob(f"eval/*/*@*/{MANIFEST}")]
    own = {stage.fingerprint for name in known_policies(run) for kind in RESULTS for stage in run.stages(kind, [name])}
    for path in sorted(manifests, key=lambda path: path.stat().st_mtime_ns, reverse=True):
        manifest = read_manifest(path.parent) or {}
        if manifest.get("fingerprint") in own:  # under an earlier name, perhaps
            continue
        definition = manifest.get("definition", {})
        others = [(part, *item) for part in ("compositions", "policies") for item in definition.get(part, {}).items()]
        for part, name, table in others:
            if name in run.policies:
                continue
            data = run.recipe.model_dump(**DUMP)
            data["anchors"] = {**data["anchors"], **definition.get("anchors", {}), **data["anchors"]}
            data[part] = {**data[part], name: table}
            try:
                longer = run.derive(recipe=check_recipe(data, RECIPE))
                folders = {stage.folder for kind in RESULTS for stage in longer.stages(kind, [name])}
            except InputError:  # it does not fit this recipe, or its models are gone and unknown
                continue
            if not complete or path.parent in folders:
                run = longer
    return run


def as_found(run: Run) -> Run:
    """Use the newest complete stages where the recipe's own are not there, and the compositions that they were."""
    found = run.derive(existing=True)
    data = run.recipe.model_dump(**DUMP)
    for name in run.recipe.written.keys() & known_policies(run):
        stage = found.stage("train", name)
        definition = (stage.manifest() or {}).get("definition", {}) if stage.found else {}
        for table in definition.get("compositions", {}).values():
            if anchors_of(table) <= run.recipe.anchors.keys():
                data["compositions"][name] = table
    return found.derive(recipe=check_recipe(data, RECIPE))


def older_stages(run: Run) -> dict[str, str]:
    """Name every stage of which only an older folder is complete, and what differs."""
    stages = {stage.path: stage for stage in run.everything() if not stage.complete}
    return {path: why for path, stage in stages.items() if stage.siblings() and (why := explain_missing(stage))}


def known_policies(run: Run) -> list[str]:
    """Name the policies whose models are known: no other can have results. A run remembers models that are gone."""
    known = []
    for policy in run.policies:
        with suppress(InputError):
            run.stages("eval", [policy])
            known.append(policy)
    return known


def size_of(path: Path) -> int:
    """Add up the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() and not path.is_symlink() else [path]
    return sum(file.lstat().st_size for file in files if file.is_file() or file.is_symlink())


def kept_threads(run: Run) -> int | None:
    """Read the count that was measured, if it was."""
    file = run.directory / MACHINE
    if not file.exists():
        return None
    match read_json(file):
        case {"threads": int(threads)} if threads > 0:
            return threads
    raise CorruptData(f"{file}: does not contain a number of threads. Remove it, or set machine.threads")
