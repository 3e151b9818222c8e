"""Imports point one way, and the light modules stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent
TIERS = [
    {"errors", "types", "config", "maths", "progress"},
    {"tokens", "store", "heads"},
    {"train", "models", "grading", "bench", "report", "world", "prompts", "plan"},
    {"stages"},
    {"cli"},
]
# Rooms of one tier that know each other, each with its reason.
NEIGHBOURS = {
    ("config", "errors"),  # a wrong recipe is a user's error
    ("maths", "errors"),
    ("train", "models"),  # an export starts from the student's own checkpoint
    ("world", "models"),  # the tiny world's anchors are post-trained on their own samples ...
    ("world", "grading"),  # ... that a verifier has checked
}


def tier(room: str) -> int:
    return next(number for number, rooms in enumerate(TIERS) if room in rooms)


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("lightning_weave.")}
    return rooms


def test_imports_point_one_way() -> None:
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        room = path.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for other in imported_rooms(path) - {room}:
            if tier(other) >= tier(room) and (room, other) not in NEIGHBOURS:
                wrong.append(f"{path.relative_to(ROOT)} imports {other}")
    assert wrong == []


def test_torch_distributed_is_named_in_one_file() -> None:
    files = [path for path in ROOT.rglob("*.py") if "torch.distributed" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(ROOT).as_posix() for path in files] in ([], ["train/parallel.py"])


def test_light_modules_do_not_import_torch() -> None:
    code = (
        "import sys, lightning_weave.cli, lightning_weave.config, lightning_weave.types, lightning_weave.errors,"
        " lightning_weave.progress\nassert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
