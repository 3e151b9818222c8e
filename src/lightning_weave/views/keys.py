"""`lweave keys`: every key of a recipe, as text, as the page docs/keys.md, or as a JSON schema for editors."""

import difflib
import json
from itertools import groupby

from lightning_weave.config import Recipe
from lightning_weave.config.keys import Key, recipe_keys
from lightning_weave.errors import InputError

HEAD = """# Recipe keys

Made by `lweave keys --markdown`. NAME stands for a name of your own. An omitted key has its default; a
required one must be given where its table is. `lweave keys train.lora` prints one section;
`lweave keys --schema` prints a JSON schema that editors can check recipes with.
"""


def run(under: str | None) -> str:
    """Describe all keys, or those of one section."""
    return "\n".join(
        f"{key.name}  ({key.type}; {_default(key)})\n    {key.meaning}\n    {key.example}" for key in _find(under)
    )


def markdown() -> str:
    """Write the page docs/keys.md."""
    parts = [HEAD]
    for section, keys in groupby(recipe_keys(), key=lambda key: key.section):
        rows = [_row(f"`{key.name}`", key.type, key.default, key.meaning, f"`{key.example}`") for key in keys]
        title = f"## {section}" if section else "## The recipe"
        parts.append(
            "\n".join(
                [
                    title,
                    "",
                    "| key | type | default | meaning | example |",
                    "| --- | --- | --- | --- | --- |",
                    *rows,
                    "",
                ]
            )
        )
    return "\n".join(parts)


def schema() -> str:
    """Describe recipes as a JSON schema."""
    return json.dumps(Recipe.model_json_schema(by_alias=True), indent=2)


def _find(under: str | None) -> list[Key]:
    keys = recipe_keys()
    matches = [key for key in keys if under is None or key.name == under or key.name.startswith(f"{under}.")]
    if not matches and under is not None:
        names = sorted({part for key in keys for part in (key.name, key.section) if part})
        close = difflib.get_close_matches(under, names, n=1, cutoff=0.4)
        hint = f"Did you mean {close[0]}?" if close else "All keys: lweave keys"
        raise InputError(f"{under}: no such key or section of a recipe. {hint}")
    return matches


def _default(key: Key) -> str:
    return key.default if key.default == "required" else f"default {key.default}"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
