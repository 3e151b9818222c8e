"""From TOML files and `--set` to a checked recipe."""

import json
import tomllib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from lightning_weave.config.explain import explain
from lightning_weave.config.recipe import Recipe
from lightning_weave.errors import InputError

# A later file replaces these tables whole: half of one set of weights and half of another is never meant.
WHOLE_TABLES = frozenset({"weights", "aliases"})


def load_recipe(files: str | Path | Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """Read one recipe file or several, merge them left to right, apply `key=value` overrides, and check the result."""
    files = [files] if isinstance(files, str | Path) else files
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge_tables(merged, _read_toml(Path(file)))
    return check_recipe(merge_overrides(merged, overrides), where=" + ".join(str(file) for file in files))


def read_layers(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> list[tuple[str, dict[str, Any]]]:
    """Read what a recipe is made of, in the order in which it is merged, each part with its name."""
    return [
        *((str(file), _read_toml(Path(file))) for file in files),
        *(("--set", _parse_override(override)) for override in overrides),
    ]


def merge_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` overrides from left to right. One weight (`compositions.x.weights.a=0.7`) keeps the others."""
    merged = dict(data)
    for override in overrides:
        parsed = _parse_override(override)
        merged = merge_tables(merged, parsed, WHOLE_TABLES - _tables_entered(override))
    return merged


def _tables_entered(override: str) -> set[str]:
    """The tables that the dotted key of an override leads into: all its parts but the last."""
    inner: Any = tomllib.loads(f"{override.partition('=')[0].strip()} = 0")
    keys = []
    while isinstance(inner, dict):
        ((key, inner),) = inner.items()
        keys.append(key)
    return set(keys[:-1])


def check_recipe(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Validate a recipe given as plain data."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise InputError(explain(error, data, where)) from None


def dump_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as TOML, defaults included, so that a run says everything it was made with."""
    return tomli_w.dumps(recipe.model_dump(mode="json", by_alias=True, exclude_none=True))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe. Give the path of a TOML file (from here, or absolute)") from None
    except IsADirectoryError:
        such = f", such as {path / 'recipe.toml'}" if (path / "recipe.toml").is_file() else ""
        raise InputError(f"{path} is a directory; give the path of a recipe file (TOML){such}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start}); recipes are TOML") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        last = f"at line {len(text.splitlines())}"
        raise InputError(f"{path}: broken TOML: {str(error).replace('at end of document', last)}") from None


def _parse_override(override: str) -> dict[str, Any]:
    key, equals, value = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"--set {override}: must look like key=value, for example --set train.learning_rate=1e-5")
    for text in (value, json.dumps(value)):  # a TOML value, else a bare string
        try:
            return tomllib.loads(f"{key.strip()} = {text}")
        except tomllib.TOMLDecodeError:
            continue
    raise InputError(f"--set {override}: {key.strip()!r} is not a dotted key such as train.learning_rate")


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any], whole: Set[str] = WHOLE_TABLES) -> dict[str, Any]:
    """Lay one recipe over another; tables are merged, but for those that only make sense whole."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value, whole) if both_tables and key not in whole else value
    return merged
