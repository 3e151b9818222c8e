"""Lightning Weave: compose what post-trained models have learned into one student.

`import lightning_weave as lw`; `run = lw.Run("mine.toml")`. What is heavy is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_weave import heads, maths
    from lightning_weave.api import Run
    from lightning_weave.config import Recipe, load_recipe
    from lightning_weave.errors import InputError, WeaveError

__version__ = "0.1.0"
__all__ = ["InputError", "Recipe", "Run", "WeaveError", "heads", "load_recipe", "maths"]
_HOMES = {"Run": "api", "Recipe": "config", "load_recipe": "config", "InputError": "errors", "WeaveError": "errors"}


def __getattr__(name: str) -> Any:
    if name in ("maths", "heads"):
        return import_module(f"{__name__}.{name}")
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
