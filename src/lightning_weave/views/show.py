"""`lweave show`: the resolved recipe, every value with where it came from."""

from collections.abc import Sequence

from lightning_weave.config import load_recipe
from lightning_weave.config.annotate import annotated_toml, sources_of
from lightning_weave.runs.settings import choose_engines


def run(files: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Write the recipe as TOML that means the same by itself, with a remark beside every value."""
    recipe = load_recipe(files, overrides)
    tables, sources = sources_of(recipe, files, overrides)
    for section, (engine, why) in choose_engines(recipe).items():
        sources[f"{section}.engine"] += f"; here {engine}: {why}"
    return annotated_toml(tables, sources)
