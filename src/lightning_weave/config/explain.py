"""What is wrong with a recipe, for people: the key, its value and what is allowed."""

import difflib
import json
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lightning_weave.config.composition import METHODS
from lightning_weave.config.recipe import Recipe

Loc = tuple[int | str, ...]


def explain(error: ValidationError, data: Mapping[str, Any], where: str) -> str:
    """Explain the first error and name the others. A misspelt key comes before the one that is missing for it."""
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    first = _explain_one(details[0], data)
    others = dict.fromkeys(_dotted(_without_method(tuple(detail["loc"]))) for detail in details[1:])
    more = [key for key in others if key not in first]  # what a misspelt key was meant to be is named there
    return f"{where}: {first}" + f" (also wrong or missing: {', '.join(more)})" * bool(more)


def _explain_one(detail: ErrorDetails, data: Mapping[str, Any]) -> str:
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    path = _without_method(loc)
    key = _dotted(path)
    match detail["type"]:
        case "extra_forbidden":
            value = _show(detail["input"])
            refusal = _of_another_method(loc, _lookup(data, path[:-1]))
            return f"{key} = {value}: {refusal}" if refusal else f"unknown key {key}.{_nearest(loc)}"
        case "missing":
            return f"{key} is missing.{_describe(loc)}"
        case "model_type" | "model_attributes_type" | "dict_type":
            return f"{key} = {_show(detail['input'])}: must be a table"
        case "union_tag_invalid":
            *others, last = METHODS
            allowed = f"{', '.join(map(repr, others))} or {last!r}"
            return f"{key}.method = {_show(detail['input']['method'])}: must be {allowed}"
        case "value_error":
            message = str(detail["ctx"]["error"])
            shown = _show(_lookup(data, path))
            return message if not path else f"{key} = {shown}: {message}"
        case _:
            message = detail["msg"].replace("Input should be", "must be")
            return f"{key} = {_show(detail['input'])}: {message[0].lower()}{message[1:]}"


def _of_another_method(loc: Loc, composition: Mapping[str, Any]) -> str:
    """Say where a composition's unknown key belongs; nothing if no method has it."""
    if _section_at(loc[:-1]) not in METHODS.values():
        return ""
    key = str(loc[-1])
    if key in METHODS:  # such as online = true
        return f'write method = "{key}" instead' if composition[key] else "leave it out: method says it"
    having = [f'"{method}"' for method, section in METHODS.items() if key in section.model_fields]
    if not having:
        return ""
    method = loc[2]
    if method == "joint" and "method" not in composition:
        return f"add method = {having[0]}"
    remedy = "set alpha" if key == "kl_budget" else "leave it out"
    return f'method = "{method}" has no {key}, only {" and ".join(having)}: {remedy}'


def _without_method(loc: Loc) -> Loc:
    """Leave out the method, which pydantic puts after the name of a composition: it is no part of the key."""
    if loc[:1] != ("compositions",):
        return loc
    return (*loc[:2], *("weights" if part == "routes" else part for part in loc[3:]))  # tables of weights by tag


def _dotted(path: Loc) -> str:
    return ".".join(str(part) for part in path)


def _lookup(data: Any, path: Loc) -> Any:
    for part in path:
        if isinstance(data, Mapping) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]  # type: ignore[index]
    return data


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _section_at(loc: Loc) -> type[BaseModel] | None:
    """Find the section that the key path leads into, through tables of named sections and by the method."""
    if loc[:1] == ("compositions",):
        return METHODS[str(loc[2])] if len(loc) == 3 else None
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


def _nearest(loc: Loc) -> str:
    section = _section_at(loc[:-1])
    keys = _keys(section) if section else []
    alike = [key for method in METHODS.values() for key in _keys(method)] if section in METHODS.values() else keys
    close = difflib.get_close_matches(str(loc[-1]), alike, n=1, cutoff=0.6)
    if close:
        return f" Did you mean {_dotted((*_without_method(loc)[:-1], close[0]))}?"
    return f" Known here: {', '.join(keys)}" if keys else ""


def _keys(section: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in section.model_fields.items()]


def _describe(loc: Loc) -> str:
    section = _section_at(loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section else None
    return f" It is {field.description}" if field and field.description else ""
