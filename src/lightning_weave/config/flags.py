"""Compositions of earlier versions, which had a flag for every method.

A run's recipe.toml of that time has all of them and is read as what it meant. A recipe that a user writes is not: there
a flag is an unknown key.
"""

from collections.abc import Mapping
from typing import Any

FLAGS = ("online", "mixture", "teacher")
UNUSED = {"online": False, "mixture": False, "teacher": False, "sequence": [], "dose": "full", "resample": True}


def has_flags(table: Mapping[str, Any]) -> bool:
    """Tell whether an earlier version wrote this composition."""
    return UNUSED.keys() <= table.keys()


def read_flags(table: Mapping[str, Any]) -> dict[str, Any]:
    """Say the method instead, and leave out what is unused. Anything else stays, to be checked.

    >>> read_flags({**UNUSED, "online": True, "weights": {"a": 1.0}})
    {'method': 'online', 'weights': {'a': 1.0}}
    """
    method = table["method"] if "method" in table else _method_of(table)
    unused = dict(UNUSED)
    match method:
        case "online" | "mixture" | "teacher":
            unused[method] = True
        case "sequential":
            unused = dict.fromkeys(FLAGS, False)
        case "self":
            unused |= {"weights": {}} | {key: table[key] for key in ("normalize", "allow_negative") if key in table}
    if "method" in table:  # said over the flags
        unused |= {name: table[name] for name in FLAGS}
    rest = {key: value for key, value in table.items() if key not in unused or value != unused[key]}
    return {"method": method, **rest}


def _method_of(table: Mapping[str, Any]) -> str:
    for name in FLAGS:
        if table[name]:
            return name
    if table["sequence"]:
        return "sequential"
    return "self" if "sharpen" in table else "joint"
