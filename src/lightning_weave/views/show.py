"""`lweave show`: the resolved recipe, every value with where it came from."""

from collections.abc import Sequence

from lightning_weave.config import load_recipe
from lightning_weave.config.annotate import annotated_toml, sources_of


def run(files: Sequence[str], overrides: Sequence[str] = ()) -> str:
    """Write the recipe as TOML that means the same by itself, with a remark beside every value."""
    tables, sources = sources_of(load_recipe(files, overrides), files, overrides)
    return annotated_toml(tables, sources)
