"""The tiny world of the demo on disk: one Hugging Face directory per model, problems as JSONL, and `world.json`.

`scripts/build-world` makes such a world from nothing.
"""

import shutil
from importlib.resources import files
from pathlib import Path

from lightning_weave.store import whole_directory

WORLD = "runs/demo-world"  # the folder that the recipes name


def shipped_world() -> Path:
    """Locate the world that comes with the package."""
    return Path(str(files("lightning_weave.world") / "shipped"))


def lay_out_world() -> None:
    """Copy the shipped world to the folder that the recipes name, unless it is there."""
    if not Path(WORLD).exists():
        with whole_directory(Path(WORLD)) as unfinished:
            shutil.copytree(shipped_world(), unfinished, dirs_exist_ok=True)
