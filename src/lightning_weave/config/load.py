"""From TOML files and `--set` to a checked recipe, with errors that name the key, its value and what is allowed."""

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lightning_weave.config.sections import Recipe
from lightning_weave.errors import InputError

# A later file replaces these tables whole: half of one set of weights and half of another is never meant.
WHOLE_TABLES = {"weights", "aliases"}


def load_recipe(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Recipe:
    """Read recipe files, merge them left to right, apply `key=value` overrides, and check the result."""
    merged: dict[str, Any] = {}
    for file in files:
        merged = merge_tables(merged, _read_toml(Path(file)))
    return check_recipe(merge_overrides(merged, overrides), where=" + ".join(str(file) for file in files))


def merge_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Apply `key=value` overrides from left to right."""
    merged = dict(data)
    for override in overrides:
        merged = merge_tables(merged, _parse_override(override))
    return merged


def check_recipe(data: Mapping[str, Any], where: str = "recipe") -> Recipe:
    """Validate a recipe given as plain data."""
    try:
        return Recipe.model_validate(data)
    except ValidationError as error:
        raise InputError(_explain(error, data, where)) from None


def dump_recipe(recipe: Recipe) -> str:
    """Write the resolved recipe as TOML, defaults included, so that a run says everything it was made with."""
    data = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    for composition in data["compositions"].values():
        if "kl_budget" in composition:  # which stands instead of alpha
            del composition["alpha"]
    return tomli_w.dumps(data)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe. Give the path of a TOML file such as recipes/demo.toml") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a directory; give the path of a recipe file (TOML)") from None
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


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one recipe over another; tables are merged, but for those that only make sense whole."""
    merged = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge_tables(merged[key], value) if both_tables and key not in WHOLE_TABLES else value
    return merged


def _explain(error: ValidationError, data: Mapping[str, Any], where: str) -> str:
    details = error.errors(include_url=False)
    first = _explain_one(details[0], data)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return f"{where}: {first}{more}"


def _explain_one(detail: ErrorDetails, data: Mapping[str, Any]) -> str:
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    key = ".".join(str(part) for part in loc)
    match detail["type"]:
        case "extra_forbidden":
            return f"unknown key {key}.{_nearest(loc)}"
        case "missing":
            return f"{key} is missing.{_describe(loc)}"
        case "model_type" | "dict_type":
            return f"{key} = {_show(detail['input'])}: must be a table"
        case "value_error":
            message = str(detail["ctx"]["error"])
            shown = _show(_lookup(data, loc))
            return message if not loc else f"{key} = {shown}: {message}"
        case _:
            message = detail["msg"].replace("Input should be", "must be")
            return f"{key} = {_show(detail['input'])}: {message[0].lower()}{message[1:]}"


def _lookup(data: Any, loc: Sequence[int | str]) -> Any:
    for part in loc:
        if isinstance(data, Mapping) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]  # type: ignore[index]
    return data


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _model_at(loc: Sequence[int | str]) -> type[BaseModel] | None:
    """Find the section that the key path leads into, through tables of named sections."""
    model: type[BaseModel] = Recipe
    parts = list(loc)
    while parts:
        field = model.model_fields.get(str(parts.pop(0)))
        if field is None:
            return None
        inner = [part for part in (field.annotation, *_nested_args(field.annotation)) if _is_section(part)]
        if not inner:
            return None
        if _is_table_of_sections(field.annotation) and parts:
            parts.pop(0)
        model = inner[0]
    return model


def _nested_args(annotation: Any) -> list[Any]:
    return [deep for arg in get_args(annotation) for deep in (arg, *_nested_args(arg))]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _is_table_of_sections(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is dict


def _nearest(loc: Sequence[int | str]) -> str:
    model = _model_at(loc[:-1])
    known = [field.alias or name for name, field in model.model_fields.items()] if model else []
    close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {'.'.join(str(part) for part in [*loc[:-1], close[0]])}?"
    return f" Known here: {', '.join(known)}" if known else ""


def _describe(loc: Sequence[int | str]) -> str:
    model = _model_at(loc[:-1])
    field = model.model_fields.get(str(loc[-1])) if model else None
    return f" It is {field.description}" if field and field.description else ""
