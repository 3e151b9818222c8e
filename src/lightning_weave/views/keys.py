"""`lweave recipe`: the keys of a recipe as text, as docs/keys.md or as a JSON schema; and a recipe with its origins."""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from lightning_weave.config import Recipe, load_recipe
from lightning_weave.config.composition import ALPHA, METHODS
from lightning_weave.config.fields import Inline, is_execution
from lightning_weave.config.recipe import merge_overrides, read_toml, sections_in
from lightning_weave.errors import InputError

WIDEST = 60  # longest `key = value` with which remarks are aligned
WORDS = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any value"}
HEAD = """# Recipe keys

Written by `lweave recipe keys --markdown`. NAME stands for a name that you choose. An omitted key has its default; a
required key must be set where its table is used. Nothing is computed again after a change of a key that is "execution
only", or of [report] and [checks]. `lweave recipe keys train.lora` prints one section;
`lweave recipe keys --schema` prints a JSON schema for editors.
"""


@dataclass(frozen=True)
class Key:
    """One key of a recipe, for people to read."""

    name: str  # dotted; NAME stands for a name that users choose
    type: str
    default: str
    meaning: str
    example: str
    listed: bool = True

    @property
    def section(self) -> str:
        return self.name.rpartition(".")[0]


def show(files: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Write the resolved recipe as TOML, with a remark after every value: a file, --set, or the default."""
    from lightning_weave.run import choose_engines

    recipe = load_recipe(files, overrides)
    resolved = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    layers = [(str(file), read_toml(Path(file))) for file in files]
    layers += [("--set", merge_overrides({}, [override])) for override in overrides]
    written: dict[str, str] = {}
    for where, table in layers:
        written |= dict.fromkeys((key for text, key in _lines(table, "") if key and not text.startswith("[")), where)
    sources = {}
    for text, key in _lines(resolved, ""):
        if not key or text.startswith("["):
            continue
        prompts_key = key.replace("eval.", "prompts.", 1)  # [eval] asks as [prompts] does
        inherits = key in ("eval.format", "eval.system", "eval.chat", "eval.thinking") and prompts_key in written
        above = next((where for name, where in written.items() if key.startswith(f"{name}.")), "default")
        sources[key] = written.get(key) or (f"as {prompts_key}" if inherits else above)
    for stage, (engine, why) in choose_engines(recipe).items():
        sources[f"engine.{stage}"] += f"; here {engine}: {why}"
    return annotated_toml(resolved, sources)


def run(under: str | None) -> str:
    """Describe all keys, or those of one section."""
    keys = recipe_keys()
    matches = [key for key in keys if key.listed] if under is None else []
    if under is not None:
        entries = list(_keys_of(Recipe, "", open_inline=True))
        is_inline = any(key.name in (under, under.rpartition(".")[0]) for key in keys)  # or a plain key
        matches = [key for key in (entries if is_inline else keys) if f"{key.name}.".startswith(f"{under}.")]
        if not matches:
            names = sorted({part for key in entries for part in (key.name, key.section) if part})
            close = difflib.get_close_matches(under, names, n=1, cutoff=0.4)
            hint = f"Did you mean {close[0]}?" if close else "All keys: lweave recipe keys"
            raise InputError(f"{under}: no such key or section of a recipe. {hint}")
    return "\n".join(
        f"{key.name}  ({key.type}; {key.default if key.default == 'required' else f'default {key.default}'})\n"
        f"    {key.meaning}\n    {key.example}"
        for key in matches
    )


def markdown() -> str:
    """Write the page docs/keys.md."""
    parts = [HEAD]
    listed = [key for key in recipe_keys() if key.listed]
    for section in dict.fromkeys(key.section for key in listed):
        keys = [key for key in listed if key.section == section]
        cells = [(f"`{key.name}`", key.type, key.default, key.meaning, f"`{key.example}`") for key in keys]
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
        header = ["| key | type | default | meaning | example |", "| --- | --- | --- | --- | --- |"]
        title = f"## {section}" if section else "## The recipe"
        parts.append("\n".join([title, "", *header, *rows, ""]))
    unlisted = ", ".join(f"`{key.name}` ({key.meaning})" for key in recipe_keys() if not key.listed)
    return "\n".join([*parts, f"Rarely needed: {unlisted}.\n"])


def schema() -> str:
    """Describe recipes as a JSON schema."""
    return json.dumps(Recipe.model_json_schema(by_alias=True), indent=2)


def recipe_keys() -> list[Key]:
    """All keys, in the order of the sections; those that nobody needs to know are not listed."""
    return sorted(_keys_of(Recipe, ""), key=lambda key: key.section != "")  # plain keys come first


def _keys_of(section: type[BaseModel], prefix: str, open_inline: bool = False) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{field.alias or name}"
        inner = sections_in(field.annotation)
        if dotted == "compositions":
            yield from _composition_keys(f"{dotted}.NAME.")
        elif inner and (open_inline or not issubclass(inner[0], Inline)):
            named = "NAME." if get_origin(field.annotation) is dict else ""
            yield from _keys_of(inner[0], f"{dotted}.{named}", open_inline)
        else:
            yield _key(dotted, field, inner[0] if inner else None)


def _composition_keys(prefix: str) -> Iterator[Key]:
    """The keys of all methods, each with the methods that have it unless all do."""
    keys: dict[str, Key] = {}
    having: dict[str, list[str]] = {}
    for method, section in METHODS.items():
        for key in _keys_of(section, prefix):
            keys.setdefault(key.name, key)
            having.setdefault(key.name, []).append(method)
    for name, key in keys.items():
        if name == f"{prefix}routes":  # how tables in weights are stored
            continue
        if name == f"{prefix}method":
            choices = " | ".join(map(json.dumps, METHODS))
            meaning = "how the composition is trained: " + ", ".join(METHODS)
            yield replace(key, type=choices, default='"joint"', meaning=meaning, example='method = "joint"')
        elif name == f"{prefix}alpha":  # None in the model only with kl_budget
            yield replace(key, default=json.dumps(ALPHA))
        elif len(having[name]) < len(METHODS):
            yield replace(key, meaning=f"{key.meaning} (method {', '.join(having[name])})")
        else:
            yield key


def _key(dotted: str, field: FieldInfo, table: type[BaseModel] | None) -> Key:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = None if field.is_required() else field.default
    unset = "required" if field.is_required() else "unset"
    meaning = field.description or ""
    kind = "" if table else _type(field.annotation)
    if "string" in (extra.get("type") or ()):  # type: ignore[operator]
        kind = f"text or {kind}"
    if table is not None:
        default = {}
        kind = f"table: {', '.join(table.model_fields)}"
        entries = [f"{name} ({one.description})" for name, one in table.model_fields.items()]
        meaning = f"{meaning}: {', '.join(entries)}"
    meaning += "; execution only" * ("." in dotted and is_execution(field))
    shown = field.examples[0] if field.examples else default
    example = f"{dotted.rpartition('.')[2]} = {'?' if shown is None else toml_value(shown)}"
    text = unset if default is None else toml_value(default)
    return Key(dotted, kind, text, meaning, example, listed=not extra.get("unlisted"))


def _type(annotation: Any) -> str:
    origin = get_origin(annotation)
    inner = get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return " | ".join(map(json.dumps, inner))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in inner if part is not NoneType))
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        values = _type(inner[1])
        return "table" if values.count(" or ") > 1 else f"table of {values}"
    return WORDS[annotation]


def annotated_toml(tables: Mapping[str, Any], remarks: Mapping[str, str]) -> str:
    r"""Write tables as TOML with remarks; their dotted keys name values or whole tables.

    >>> print(annotated_toml({"a": 1, "t": {"b": [2], "c": {}}}, {"a": "one", "t": "two", "t.c": "none"}))
    a = 1   # one
    <BLANKLINE>
    [t]     # two
    b = [2]
    c = {}  # none
    <BLANKLINE>
    """
    lines = _lines(tables, "")
    widths = [len(text) for text, key in lines if key in remarks and len(text) <= WIDEST]
    width = max(widths, default=0)
    return "\n".join(f"{text:<{width}}  # {remarks[key]}" if key in remarks else text for text, key in lines) + "\n"


def _lines(tables: Mapping[str, Any], under: str) -> list[tuple[str, str]]:
    """The lines of a TOML file, each with its dotted key; plain values come before tables."""
    inner = {key: value for key, value in tables.items() if isinstance(value, Mapping) and value}
    lines = []
    for key, value in tables.items():
        if key not in inner:
            quoted = dotted_key(key)
            lines.append((f"{quoted} = {toml_value(value)}", f"{under}.{quoted}" if under else quoted))
    for key, table in inner.items():
        name = f"{under}.{dotted_key(key)}" if under else dotted_key(key)
        has_values = any(not (isinstance(value, Mapping) and value) for value in table.values())
        lines += [("", ""), (f"[{name}]", name)] if has_values else []
        lines += _lines(table, name)
    return lines


def dotted_key(*parts: str) -> str:
    """Join the parts of a key as TOML writes it.

    >>> dotted_key("anchors", "v1.5", "post")
    'anchors."v1.5".post'
    """
    return ".".join(tomli_w.dumps({part: 0}).rpartition(" = ")[0] for part in parts)


def toml_value(value: Any) -> str:
    """Write a value in one line, as written after `key = `.

    >>> toml_value({"post": "a", "v1.5": [0.5, True]})
    '{ post = "a", "v1.5" = [0.5, true] }'
    """
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{dotted_key(key)} = {toml_value(one)}" for key, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return tomli_w.dumps({"x": value}).partition("=")[2].strip()
