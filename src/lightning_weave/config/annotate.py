"""A recipe as TOML with a remark beside every value: where it came from, or why it was chosen."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from lightning_weave.config.load import read_layers
from lightning_weave.config.recipe import Recipe

WIDEST = 60  # of a key and its value, up to which remarks are aligned


def annotated_toml(tables: Mapping[str, Any], remarks: Mapping[str, str]) -> str:
    r"""Write tables as TOML; `remarks` has dotted keys, of values and of whole tables.

    >>> print(annotated_toml({"a": 1, "t": {"b": [2], "c": {}}}, {"a": "one", "t": "two", "t.c": "none"}))
    a = 1   # one
    <BLANKLINE>
    [t]     # two
    b = [2]
    c = {}  # none
    <BLANKLINE>
    """
    lines = list(_lines(tables, ""))
    widths = [len(text) for text, key in lines if key in remarks and len(text) <= WIDEST]
    width = max(widths, default=0)
    return "\n".join(f"{text:<{width}}  # {remarks[key]}" if key in remarks else text for text, key in lines) + "\n"


def _lines(tables: Mapping[str, Any], under: str) -> list[tuple[str, str]]:
    """Give every line with the dotted key that it is about: values first, then the tables inside."""
    inner = {key: value for key, value in tables.items() if isinstance(value, Mapping) and value}
    lines = [
        (f"{_key(key)} = {_value(value)}", _dotted(under, key)) for key, value in tables.items() if key not in inner
    ]
    for key, table in inner.items():
        name = _dotted(under, key)
        own = any(not (isinstance(value, Mapping) and value) for value in table.values())
        lines += [("", ""), (f"[{name}]", name)] if own else []
        lines += _lines(table, name)
    return lines


def _dotted(under: str, key: str) -> str:
    return f"{under}.{_key(key)}" if under else _key(key)


def dotted_key(*parts: str) -> str:
    """Join the parts of a key as TOML writes it.

    >>> dotted_key("anchors", "v1.5", "post")
    'anchors."v1.5".post'
    """
    return ".".join(map(_key, parts))


def _key(key: str) -> str:
    """Quote a key where TOML wants it."""
    return tomli_w.dumps({key: 0}).rpartition(" = ")[0]


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).partition("=")[2].strip() if value != {} else "{}"


def sources_of(recipe: Recipe, files: Sequence[str | Path], overrides: Sequence[str] = ()) -> tuple[dict, dict]:
    """Give the resolved recipe as tables, and where each value came from: a file, --set, or the default."""
    resolved = recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    sources: dict[str, str] = {}
    for where, table in read_layers(files, overrides):
        sources |= dict.fromkeys(_leaves(table), where)
    return resolved, {key: sources.get(key) or _inherited(key, sources) for key in _leaves(resolved)}


def _inherited(key: str, sources: Mapping[str, str]) -> str:
    """Name where a default comes from: [eval] asks as [prompts] does."""
    section, _, name = key.partition(".")
    asks = section == "eval" and name in ("format", "template", "system", "chat", "thinking")
    return f"as prompts.{name}" if asks and f"prompts.{name}" in sources else "default"


def _leaves(tables: Mapping[str, Any]) -> list[str]:
    return [key for text, key in _lines(tables, "") if key and not text.startswith("[")]
