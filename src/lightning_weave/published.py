"""`lweave push`, `lweave pull`, and anchors whose scores are published: anchors.NAME = { cache = "URL" }."""

import os
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_weave.config import Recipe, check_recipe, dump_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.models.checkpoint import Checkpoint, card_header
from lightning_weave.progress import Progress
from lightning_weave.ranks import is_main_process
from lightning_weave.run import DUMP, IDENTITIES, ROLES, Run, explain_change, resolved_recipe
from lightning_weave.store import MANIFEST, Stage, damaged_files, differences, read_description
from lightning_weave.store.files import (
    HOLDER,
    TEMPORARY,
    lock_run,
    plain_path,
    read_checked,
    sha256_file,
    write_atomic,
    write_checked,
)
from lightning_weave.store.remote import INDEX, Index, Remote, merge

PATIENCE = 2 * 3600.0  # seconds that other ranks wait for rank 0 to fetch
CARD = "README.md"
BATCH = 20  # files after which the index is written: a killed push repeats no more
# At the top of a run: of one machine, or part of the index.
KEPT_HERE = {".lock", ".lock-held", HOLDER, IDENTITIES, "recipe.toml", CARD, INDEX}


def push(run: Run, remote: Remote, progress: Progress, everything: bool = False, public: bool = False) -> None:
    """Copy the complete stages of the cache that the store lacks, each with its manifest last.

    With `everything`, the whole run, for another machine to continue. Which stages are there is written last.
    """
    cache = [run.stage("prompts"), run.stage("rollout"), run.stage("reference")]
    for stage in () if everything else cache:
        stage.require()
    stages = [stage for stage in (*cache, *run.stages("score")) if stage.complete]
    for stage in stages:
        for path, fault in damaged_files(stage.folder).items():
            raise InputError(f"{path}: {fault}; nothing was pushed. Remove it and run the stage again")
    index = _describe(run, stages)
    if everything:
        paths = [path for path in run.directory.rglob("*") if path.is_file() and not path.is_symlink()]
        index["links"] = _links(run.directory)
    else:
        paths = [stage.folder / one["file"] for stage in stages for one in stage.require()["shards"]]
        paths += [stage.manifest_path for stage in stages]
    files = {path.relative_to(run.directory).as_posix(): path for path in paths}
    names = [name for name in files.keys() - KEPT_HERE if TEMPORARY not in name]
    names.sort(key=lambda name: (name.endswith(MANIFEST), name))
    try:
        for name in (*names, *index["links"]):
            plain_path(name)
    except ValueError as error:
        raise InputError(f"{run.directory}: {error}. Rename it; nothing was pushed") from None
    remote.create(private=not public)
    before = remote.index()
    if before["recipe"].get("name", run.recipe.name) != run.recipe.name:
        raise InputError(f"{remote.url}: holds the run {before['recipe']['name']!r}, not {run.recipe.name!r}")
    check_student(before, [run.identity_of(run.student)], remote.url, f"student.model is {run.student}")
    with progress.bar("push", len(names), "file") as bar:
        for batch in (names[start : start + BATCH] for start in range(0, len(names), BATCH)):
            digests = {name: sha256_file(files[name]) for name in batch}
            if new := [name for name, digest in digests.items() if before["files"].get(name) != digest]:
                part = {**index, "stages": {}, "anchors": {}, "links": {}, "files": digests}
                remote.put({name: files[name] for name in new}, part, f"Add {len(new)} files")
            index["files"] |= digests
            bar.advance(len(batch))
    with TemporaryDirectory() as folder:
        card = Path(folder) / CARD
        card.write_text(data_card(merge(before, index), run, remote.url), encoding="utf-8")
        merged = remote.put({CARD: card}, index, "Describe it")
    read_index.cache_clear()
    copies = _read(run.directory / INDEX) | {name: [digest] for name, digest in index["files"].items()}
    write_checked(run.directory / INDEX, copies)
    progress.say(f"{remote.url}: {len(merged['files'])} files. Fetch them: lweave pull {remote.url}")


def pull(url: str, runs: str, progress: Progress) -> Path:
    """Fetch a published run into a directory of runs.

    Files that were changed here since the last pull or push are kept. Complete stages are repaired.
    """
    read_index.cache_clear()
    index = read_index(url)
    recipe = check_recipe({**index["recipe"], "runs": runs}, url)
    directory = Path(runs) / recipe.name
    folders = (folder for name in ("rollout", "reference") for folder in directory.glob(f"{name}@*"))
    students = [read_description(folder).get("settings", {}).get("student") for folder in folders]
    check_student(index, students, url, f"{directory} is of another student. Pull into another directory: --runs DIR")
    with lock_run(directory):
        before = _read(directory / INDEX)  # the sha256 that files had when they were pulled or pushed
        known = {name: [*before.get(name, []), digest] for name, digest in index["files"].items()}
        fixed = {stage["folder"] for stage in index["stages"].values()}
        there = [name for name in known if name.rpartition("/")[0] not in fixed and (directory / name).is_file()]
        changed = [name for name in there if not _is_same(directory / name, known[name])]
        files = {name: index["files"][name] for name in known.keys() - KEPT_HERE - {*changed}}
        write_checked(directory / INDEX, before | known)  # a kill leaves some files as they were
        _fetch(Remote(url), {directory / name: name for name in files}, files, progress)
        write_checked(directory / IDENTITIES, index["identities"] | _read(directory / IDENTITIES))
        if not (directory / "recipe.toml").exists():
            write_atomic(directory / "recipe.toml", dump_recipe(recipe).encode())
        for link, target in index["links"].items():
            place, folder = directory / link, (directory / target).resolve()
            if not os.path.lexists(place) and folder.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(os.path.relpath(folder, place.parent.resolve()))
        write_checked(directory / INDEX, before | {name: [digest] for name, digest in files.items()})
    if changed:
        progress.say(f"{directory}: {len(changed)} files were changed here and are kept, such as {changed[0]}")
    progress.say(f"{directory}: pulled. Continue with: lweave run {directory}/recipe.toml")
    return directory


def _read(path: Path) -> dict[str, Any]:
    return read_checked(path) if path.exists() else {}


def _links(directory: Path) -> dict[str, str]:
    """The symlinks of a run that do not lead out of it, and what they lead to."""
    root = directory.resolve()
    links = [path for path in directory.rglob("*") if path.is_symlink() and path.exists()]
    ends = {path.relative_to(directory): path.resolve() for path in links}
    return {link.as_posix(): end.relative_to(root).as_posix() for link, end in ends.items() if root in end.parents}


def _fetch(remote: Remote, names: Mapping[Path, str], digests: Mapping[str, str], progress: Progress) -> None:
    """Fetch the files that are not here yet, by the names that they have there."""
    missing = [path for path, name in names.items() if not _is_same(path, [digests[name]])]
    missing.sort(key=lambda path: (path.name == MANIFEST, path))  # before that, a stage is not complete
    with progress.bar("pull", len(missing), "file") as bar:
        for path in missing:
            remote.get(names[path], digests[names[path]], path)
            bar.advance()


def _is_same(path: Path, digests: Sequence[str]) -> bool:
    return path.is_file() and sha256_file(path) in digests


def _describe(run: Run, stages: Sequence[Stage]) -> Index:
    """What another machine needs to know: recipe, identities of models and data, and what each stage is."""
    identities = {**run.remembered, **run.identities}
    models = {run.student}
    anchors: dict[str, Any] = {}
    for name, section in run.recipe.anchors.items():
        if {stage.fingerprint for stage in run.scores_of(name)} <= {stage.fingerprint for stage in stages}:
            sides = {role: run.anchor(name, role) for role in ROLES}
            models |= {*sides.values()}
            named = {role: str(model) for role, model in sides.items()}
            table = section.model_dump(**DUMP, exclude={"cache", *section.RULES})
            own = _identities_of({*named.values()} - {str(run.student)}, identities)
            anchors[name] = {"table": table, "models": own, "sides": named}
    described = {}
    for stage in stages:
        manifest = stage.require()
        described[stage.fingerprint] = {
            "path": stage.path,
            "folder": stage.folder.relative_to(run.directory).as_posix(),
            "bytes": sum(entry["bytes"] for entry in manifest["shards"]),
            "rows": manifest.get("rows"),
            "settings": manifest["settings"],
        }
    heads = {str(one): header for one in models if "license" in (header := card_header(one))}
    return {
        "recipe": run.recipe.model_dump(**DUMP, exclude={"runs"}),
        "identities": identities,
        "licences": {model: str(head.get("license_name", head["license"])) for model, head in heads.items()},
        "anchors": anchors,
        "stages": described,
        "files": {},
        "links": {},
    }


def _identities_of(models: Collection[str | None], identities: Mapping[str, str]) -> dict[str, str]:
    """Those of the models themselves, and of what else is known of them."""
    return {key: value for key, value in identities.items() if key.split(" of ")[-1] in models}


def data_card(index: Index, run: Run, url: str) -> str:
    """Name student, prompts, models with their licences, and sizes."""
    models = {"student": str(run.student)}
    for name, anchor in index["anchors"].items():
        models |= {f"{name}, {role}": model for role, model in anchor["sides"].items()}
    licences = index["licences"]
    rows = "\n".join(f"| {what} | `{one}` | {licences.get(one, 'not stated')} |" for what, one in models.items())
    stages = sorted(index["stages"].values(), key=lambda one: str(one["path"]))
    sizes = "\n".join(f"| {one['path']} | {one.get('rows') or ''} | {one['bytes'] / 1e6:,.1f} MB |" for one in stages)
    return f"""---
tags: [lightning-weave, distillation]
---
# {run.recipe.name}: responses of a student, scored by anchors

Responses of `{run.student}` to prompts of `{run.recipe.rollout.from_ or run.recipe.prompts.source}`, with
log-probabilities of its likeliest tokens under itself and under the models below. Made by `lweave push`. The licences
of models and prompts apply.

| | model | licence |
| --- | --- | --- |
{rows}

| stage | rows | size |
| --- | --- | --- |
{sizes}

Compose with it, without the weights of the anchors:

```toml
[anchors.{next(iter(index["anchors"]), "NAME")}]
cache = "{url}"
```
"""


@lru_cache(maxsize=16)
def read_index(url: str) -> Index:
    """Read what is published at a URL, once per process."""
    index = Remote(url).index()
    if not index["recipe"]:
        raise InputError(f"{url}: nothing is published there, or you may not read it")
    return index


def expand_recipe(recipe: Recipe) -> tuple[Recipe, dict[str, str], dict[str, str]]:
    """Fill in what published anchors are; returns also the identities of their models, and others to fall back on."""
    filled: dict[str, Any] = {}
    models, others = dict[str, str](), dict[str, str]()
    remembered = _read(Path(recipe.runs) / recipe.name / IDENTITIES)
    before = resolved_recipe(recipe).get("anchors", {}) if remembered else {}
    for name, section in recipe.anchors.items():
        if section.cache is None:
            continue
        table = before.get(name, {})
        if table.get("cache") == section.cache:  # as the run has it: the store is not asked again
            models |= _identities_of({table.get(key) for key in ("post", "pre", "model")}, remembered)
        else:
            try:
                index = read_index(section.cache)
            except WeaveError as error:
                if section.post or section.model:  # known without it; fetching names what is wrong
                    continue
                raise InputError(f"anchors.{name}.cache: {error}") from None
            there = index["anchors"]
            if name not in there and len(there) != 1:
                has = f"has no anchor of this name; it has {', '.join(there) or 'none'}"
                raise InputError(f"anchors.{name}.cache = {section.cache!r}: {has}")
            anchor = there.get(name) or next(iter(there.values()))
            table = anchor["table"]
            models |= anchor["models"]
            others |= index["identities"]
        if section.post is None and section.model is None:
            rules = section.model_dump(**DUMP, include={"cache", *section.RULES})
            filled[name] = {key: value for key, value in table.items() if key not in section.RULES} | rules
    local = [recipe.student, *(one for one in recipe.policies.values() if one.model)]
    own = {str(Checkpoint.from_section(one)) for one in local}
    own |= {model for one in recipe.anchors.values() if one.cache is None for model in (one.post, one.pre) if model}
    preferred = {key: value for key, value in models.items() if key not in _identities_of(own, models)}
    if filled:  # the compositions stay: a run of a part or a leg may have one that no file can name
        data = recipe.model_dump(**DUMP)
        checked = check_recipe({**data, "anchors": {**data["anchors"], **filled}}, "recipe")
        recipe = recipe.model_copy(update={"anchors": checked.anchors})
    return recipe, preferred, others


def check_student(index: Index, students: Collection[str | None], about: str, here: str) -> None:
    """Refuse what belongs to none of these students, if it is known whose it is."""
    stages = [one for one in index["stages"].values() if one["path"] in ("rollout", "reference")]
    theirs = {one["settings"].get("student") for one in stages} - {None}
    if theirs and {*students} - {None} and theirs.isdisjoint(students):
        raise InputError(f"{about}: belongs to another student, {index['recipe']['student'].get('model')}; {here}")


def check_published(run: Run, anchor: str) -> list[Stage]:
    """The stages that an anchor's published scores belong to; the error names what differs from this recipe."""
    url = run.recipe.anchors[anchor].cache
    assert url is not None
    index = read_index(url)
    about = f"anchors.{anchor}.cache = {url!r}"
    cache = [run.stage("prompts"), run.stage("rollout"), run.stage("reference")]
    check_student(index, [run.identity_of(run.student)], about, f"student.model is {run.student}")
    for stage in (*cache, *run.scores_of(anchor)):
        if stage.fingerprint not in index["stages"]:
            kind = stage.path.split("/")[0]
            others = [one["settings"] for one in index["stages"].values() if one["path"].split("/")[0] == kind]
            if not others:
                raise InputError(f"{about}: its stage {kind} is not published")
            changes = min((dict(differences(one, dict(stage.settings))) for one in others), key=len)
            what = "; ".join(dict.fromkeys(explain_change(stage.path, *change) for change in changes.items()))
            raise InputError(
                f"{about}: its stage {kind} is not that of this recipe (published -> here): {what or 'other inputs'}"
            )
    return [*cache, *run.scores_of(anchor)]


def missing_stages(run: Run) -> dict[str, list[Stage]]:
    """The stages that this run lacks and that each published anchor brings."""
    published = [name for name, section in run.recipe.anchors.items() if section.cache is not None]
    lacking = [name for name in published if not all(stage.complete for stage in run.scores_of(name))]
    return {name: [stage for stage in check_published(run, name) if not stage.complete] for name in lacking}


def fetchable(run: Run) -> dict[str, str]:
    """The anchor with which the next command fetches each of these stages, by the stage's path."""
    try:
        return {stage.path: anchor for anchor, stages in missing_stages(run).items() for stage in stages}
    except WeaveError:  # that command names what is wrong
        return {}


def fetch_published(run: Run, progress: Progress) -> None:
    """Fetch the stages of published anchors that this run lacks. Rank 0 does it, and the others wait."""
    for anchor, missing in missing_stages(run).items():
        if not is_main_process():
            for stage in missing:
                stage.wait_until_complete(PATIENCE)
            continue
        url = str(run.recipe.anchors[anchor].cache)
        index = read_index(url)
        folders = {index["stages"][stage.fingerprint]["folder"]: stage.folder for stage in missing}
        places = [(*name.rpartition("/"), name) for name in index["files"]]
        names = {folders[folder] / file: name for folder, _, file, name in places if folder in folders}
        _fetch(Remote(url), names, index["files"], progress)
        for stage in missing:
            stage.link()
