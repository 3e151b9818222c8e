"""What a run directory knows beside the recipe: every composition and policy that any command made in it."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w

from lightning_weave.config import Composition, anchors_of, check_recipe
from lightning_weave.errors import InputError, WeaveError
from lightning_weave.runs.changes import cause
from lightning_weave.runs.steps import Steps
from lightning_weave.store import Stage, differences, write_atomic

FILE = "made.toml"  # anchors, compositions and policies of every command; a recipe, to be given after another
SWEEP = "sweep.toml"  # the compositions of sweeps
NAMED = ("anchors", "compositions", "policies")


def remember(steps: Steps) -> None:
    """Keep what this recipe names; what other commands named stays, unless it has the same name."""
    run_dir = steps.store.run_dir
    own = steps.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    before = _tables(run_dir, ("recipe.toml", FILE))  # sweeps have a file of their own
    tables = {part: {**entries, **own[part]} for part, entries in before.items()}
    write_atomic(run_dir / FILE, tomli_w.dumps(tables).encode())


def forget(run_dir: Path, policy: str) -> None:
    """Drop a composition or policy from what is kept; its anchors stay, since others may use them."""
    for name in (FILE, SWEEP):
        table = read_table(run_dir / name)
        rest = {part: {key: one for key, one in named.items() if key != policy} for part, named in table.items()}
        if rest != table:
            write_atomic(run_dir / name, tomli_w.dumps(rest).encode())


def with_known(steps: Steps) -> Steps:
    """Add the compositions and policies that other commands have made here and that are still there."""
    run_dir = steps.store.run_dir
    tables = _tables(run_dir)
    for part in ("compositions", "policies"):
        for name, one in tables[part].items():
            if name not in steps.policies and any((run_dir / stage / name).is_dir() for stage in ("train", "eval")):
                steps = _with(steps, part, name, one, tables["anchors"])
    return steps


def _with(steps: Steps, part: str, name: str, one: Mapping[str, Any], anchors: Mapping[str, Any]) -> Steps:
    """Add one of them, unless it does not fit this recipe or its models cannot be told any more."""
    data = steps.recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    for anchor in anchors_of(one):
        if anchor in anchors:
            data["anchors"].setdefault(anchor, anchors[anchor])
    data[part] = {**data[part], name: one}
    try:
        longer = replace(steps, recipe=check_recipe(data, FILE))
        longer.made_by("eval", [name])
    except InputError:
        return steps
    return longer


def tellable(steps: Steps) -> list[str]:
    """Name the policies whose models are known: no other can have results. A run remembers models that are gone."""

    def is_known(policy: str) -> bool:
        try:
            steps.made_by("eval", [policy])
        except InputError:
            return False
        return True

    return [policy for policy in steps.policies if is_known(policy)]


def as_it_stands(steps: Steps) -> Steps:
    """Take what is finished as it was made, whatever the recipe says now: stages, and the weights of compositions."""
    standing = replace(steps, standing=True)
    compositions = {name: _as_trained(standing, name) for name in steps.recipe.compositions}
    return replace(standing, recipe=steps.recipe.model_copy(update={"compositions": compositions}))


def _as_trained(standing: Steps, name: str) -> Composition:
    composition = standing.recipe.compositions[name]
    settings = standing.train(name).settings
    same_method = settings.get("method", "joint") == composition.method
    known = settings["weights"].keys() <= standing.recipe.anchors.keys()
    if not (same_method and known) or composition.routes or "routes" in settings:
        return composition
    weights = {} if settings["weights"] == dict(composition.used) else {"weights": settings["weights"]}
    return composition.model_copy(update={**weights, "alpha": settings["alpha"]})


def differing(steps: Steps) -> dict[str, str]:
    """Say of every finished stage that is not what the recipe says, by its path, what changed."""
    causes = {}
    for step in steps.everything():
        stage = steps.store.stage(step)
        if stage.state() == "stale" and stage.manifest() is not None:
            causes[step.path] = cause(stage)
    return causes


def neighbours(stage: Stage) -> list[tuple[Stage, str]]:
    """The finished evaluations of the same policy on the same benchmark by other protocols, and how those differ."""
    name = Path(stage.step.path).name
    folders = [path for path in sorted(stage.folder.parent.glob(f"{name}*")) if path.name.partition("@")[0] == name]
    others = [Stage(folder, stage.step) for folder in folders if folder != stage.folder]
    standing = [Stage(other.folder, other.standing()) for other in others]
    return [(other, _protocol(stage, other)) for other in standing if other.state() == "done" and other.manifest()]


def _protocol(own: Stage, other: Stage) -> str:
    """Say what is particular to a protocol: `samples = 4, max_tokens = 8192`."""
    changes = differences(dict(own.step.settings), dict(other.step.settings))
    parts = [
        f"{key} = {what.rpartition(' -> ')[2]}" if "->" in what else f"{key} {what}"
        for key, what in changes
        if key not in own.step.subject
    ]
    return ", ".join(parts) or "another format"


def _tables(run_dir: Path, names: Sequence[str] = ("recipe.toml", SWEEP, FILE)) -> dict[str, dict[str, Any]]:
    """What is kept; of a run that an earlier version made, its last recipe and its sweeps."""
    tables = [read_table(run_dir / name) for name in names]
    return {part: {name: one for table in tables for name, one in table.get(part, {}).items()} for part in NAMED}


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file of the run directory; empty if it is not there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WeaveError(f"{path}: broken TOML ({error}). Remove it: what was trained is kept") from None
