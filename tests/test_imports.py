"""No import cycles, a core that knows nothing of the rest, and commands that start without torch."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent
CORE = {"errors", "types", "maths", "heads", "tokens", "devices", "ranks"}  # what the method itself needs


def modules() -> dict[str, Path]:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        ".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items() if str(name) != "__init__"
    }


def imports(path: Path) -> set[str]:
    """List the modules of the package that a file imports when it is imported itself."""
    known = set(modules())
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lightning_weave":
            source = (node.module or "").removeprefix("lightning_weave").removeprefix(".")
            submodules = {f"{source}.{alias.name}".lstrip(".") for alias in node.names} & known
            names |= submodules or {source}
    return names - {""}


def test_there_are_no_import_cycles() -> None:
    edges = {name: imports(path) - {name} for name, path in modules().items()}
    done: set[str] = set()
    while len(done) < len(edges):
        free = [name for name, others in edges.items() if name not in done and others <= done]
        assert free, f"a cycle among {sorted(set(edges) - done)}"
        done.update(free)


def test_the_core_imports_nothing_else() -> None:
    packages = {
        name: {other.split(".")[0] for other in imports(path)}
        for name, path in modules().items()
        if name.split(".")[0] in CORE
    }
    assert {name: others - CORE for name, others in packages.items() if others - CORE} == {}


@pytest.mark.parametrize("words", ["--help", "run --help", "recipe keys"])
def test_commands_that_need_no_model_do_not_import_torch(words: str) -> None:
    code = f"import sys\nfrom lightning_weave.cli import app\nsys.argv[1:] = {words.split()!r}\n"
    code += "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code\n"
    code += "assert not {'torch', 'matplotlib', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_rank_variables_are_read_in_one_file() -> None:
    variables = ('"RANK"', '"WORLD_SIZE"', '"LOCAL_RANK"')
    files = [path for path in ROOT.rglob("*.py") if any(name in path.read_text(encoding="utf-8") for name in variables)]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["ranks.py"]


def test_the_device_is_queried_in_one_file() -> None:
    allowed = {"devices.py", "config/sections.py"}  # config has the names that a recipe may use
    queries = re.compile(r"""cuda|["']mps["']|torch\.mps|torch\.accelerator""", re.IGNORECASE)
    files = {
        path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if queries.search(path.read_text("utf-8"))
    }
    assert files <= allowed
