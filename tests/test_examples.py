"""Every example in a docstring holds."""

import doctest
import importlib
from pathlib import Path

import pytest

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent
SHOWN = sorted(path for path in ROOT.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))
MODULES = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in SHOWN]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_the_docstrings_hold(module: str) -> None:
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed
