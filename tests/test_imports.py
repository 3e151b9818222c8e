"""Who may import whom, between rooms and inside them; and light modules stay light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent
BASE = {"errors", "types", "config", "ranks", "devices", "progress", "records", "own", "trackers", "hub"}
LIBRARIES = BASE | {"maths", "store", "tokens", "heads"}
MODELS = LIBRARIES | {"models", "prompts", "grading", "bench", "cache"}
# Room -> the rooms it may import. A room that is not listed beside another may not know it.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "types": set(),
    "ranks": {"errors"},
    "devices": {"errors", "ranks"},
    "progress": {"ranks"},
    "config": {"errors"},
    "records": set(),
    "own": {"errors"},
    "trackers": {"config", "errors"},
    "hub": {"errors"},
    "maths": set(),
    "heads": {"maths", "errors", "devices"},
    "tokens": {"errors"},
    "store": BASE,
    "models": LIBRARIES,
    "prompts": LIBRARIES,
    "grading": LIBRARIES,
    "bench": LIBRARIES,
    "cache": LIBRARIES,
    "plan": {"config", "errors", "bench", "hub"},
    "runs": MODELS,
    "cluster": MODELS | {"runs"},
    "train": MODELS | {"runs"},
    "checks": MODELS | {"runs", "plan"},
    "report": MODELS | {"runs", "checks"},
    "pipeline": MODELS | {"runs", "train", "checks", "report"},
    "views": MODELS | {"runs", "train", "checks", "report", "plan"},
    "world": MODELS | {"runs", "train", "report", "pipeline"},
    "rehearsal": MODELS | {"runs", "checks"},  # the commands that it calls are handed to it
    "api": MODELS | {"runs", "cluster", "train", "report", "pipeline", "views", "world"},
    "cli": {
        "api",
        "config",
        "errors",
        "ranks",
        "progress",
        "store",
        "models",
        "runs",
        "plan",
        "report",
        "pipeline",
        "views",
        "world",
        "rehearsal",
    },
}
# The files of verbs: none of them may import another.
VERBS = {
    "rollout": "pipeline.rollout",
    "reference": "pipeline.reference",
    "score": "pipeline.score",
    "train": "pipeline.train",
    "eval": "pipeline.eval",
    "run": "pipeline.run",
    "sweep": "pipeline.sweep",
    "preview": "pipeline.preview",
    "rehearse": "rehearsal.rehearse",
    "status": "views.status",
    "doctor": "views.doctor",
    "inspect": "views.inspect",
    "init": "views.init",
    "show": "views.show",
    "keys": "views.keys",
    "verify": "views.verify",
    "cost": "views.cost",
    "card": "views.card",
    "clean": "views.clean",
    "forget": "views.forget",
    "export": "views.export",
    "report": "report.report",
    "plan": "plan.plan",
    "interpolate": "models.interpolate",
    "demo": "world.demo",
}
ALSO = {"pipeline.prompts"}  # a stage without a command of its own
MOST_FILES = 25  # of a room


def modules() -> dict[str, Path]:
    paths = {path.relative_to(ROOT).with_suffix(""): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        ".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items() if str(name) != "__init__"
    }


def imported(path: Path) -> set[str]:
    """Every module of the package that a file imports, wherever in the file."""
    known = set(modules())
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            source = (node.module or "").removeprefix("lightning_weave").removeprefix(".")
            if (node.module or "").split(".")[0] == "lightning_weave":
                inner = {f"{source}.{alias.name}".lstrip(".") for alias in node.names}
                names |= (inner & known) or {source}
        elif isinstance(node, ast.Import):
            names |= {
                alias.name.removeprefix("lightning_weave.") for alias in node.names if "lightning_weave." in alias.name
            }
    return {name for name in names if name}


@pytest.mark.slow
def test_rooms_import_only_what_the_table_says() -> None:
    wrong = []
    for name, path in modules().items():
        room = name.split(".")[0]
        rooms = {other.split(".")[0] for other in imported(path)} - {room}
        wrong += [f"{name} imports {other}" for other in sorted(rooms - MAY_IMPORT[room])]
    assert wrong == []


def test_the_table_has_no_cycle_and_no_room_that_is_gone() -> None:
    assert {name.split(".")[0] for name in modules()} == set(MAY_IMPORT)
    order: list[str] = []
    while len(order) < len(MAY_IMPORT):
        free = [room for room, others in MAY_IMPORT.items() if room not in order and others <= {*order, room}]
        assert free, f"a cycle among {set(MAY_IMPORT) - set(order)}"
        order += free


def test_no_file_is_part_of_an_import_cycle() -> None:
    edges = {name: imported(path) - {name} for name, path in modules().items()}
    done: set[str] = set()
    while len(done) < len(edges):
        free = [name for name, others in edges.items() if name not in done and others <= done]
        assert free, f"a cycle among {sorted(set(edges) - done)}"
        done.update(free)


def test_no_verb_imports_another() -> None:
    files = set(VERBS.values()) | ALSO
    edges = {name: imported(modules()[name]) & files - {name} for name in sorted(files)}
    assert {name: others for name, others in edges.items() if others} == {}


def test_no_room_is_a_catch_all() -> None:
    rooms = [name.split(".")[0] for name, path in modules().items() if path.parent != ROOT]
    assert {room: rooms.count(room) for room in set(rooms) if rooms.count(room) > MOST_FILES} == {}


@pytest.mark.parametrize("verb", list(VERBS))
def test_one_word_names_command_file_and_test(verb: str) -> None:
    """The command, its file, its function and its tests share one name."""
    from lightning_weave import cli

    commands = {command.name or command.callback.__name__ for command in _commands(cli.app)}
    assert verb in commands
    assert VERBS[verb].rpartition(".")[2] == verb
    defined = {
        node.name for node in ast.parse(modules()[VERBS[verb]].read_text()).body if isinstance(node, ast.FunctionDef)
    }
    assert {"run", "interpolate"} & defined
    assert list(Path(__file__).parent.rglob(f"test_{verb}.py")), f"no tests called test_{verb}.py"


def test_every_command_is_in_the_table() -> None:
    from lightning_weave import cli

    commands = {command.name or command.callback.__name__ for command in _commands(cli.app)}
    assert commands == set(VERBS)


def _commands(app: object) -> list:
    inner = [one for group in app.registered_groups if not group.name for one in _commands(group.typer_instance)]  # type: ignore[attr-defined]
    return [*app.registered_commands, *inner]  # type: ignore[attr-defined]


def test_torch_distributed_is_named_in_one_file() -> None:
    files = [path for path in ROOT.rglob("*.py") if "torch.distributed" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["train/parallel.py"]


def test_ranks_are_read_in_one_file() -> None:
    variables = ('"RANK"', '"WORLD_SIZE"', '"LOCAL_RANK"')
    files = [path for path in ROOT.rglob("*.py") if any(name in path.read_text(encoding="utf-8") for name in variables)]
    assert [path.relative_to(ROOT).as_posix() for path in files] == ["ranks.py"]


def test_the_device_is_asked_about_in_one_file() -> None:
    allowed = {"devices.py", "config/sections.py"}  # config has the names that a recipe may give
    asks = re.compile(r"""cuda|["']mps["']|torch\.mps|torch\.accelerator""", re.IGNORECASE)
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if asks.search(path.read_text("utf-8"))}
    assert files <= allowed


def test_whether_code_may_run_is_decided_in_the_room_of_models() -> None:
    files = [path for path in ROOT.rglob("*.py") if "trust_remote_code" in path.read_text(encoding="utf-8")]
    rooms = {path.relative_to(ROOT).parts[0] for path in files}
    assert rooms <= {"models", "config", "runs"}  # a recipe sets it, runs/steps.py hands it to a Checkpoint


def test_light_modules_do_not_import_torch() -> None:
    code = (
        "import sys, lightning_weave.cli, lightning_weave.config, lightning_weave.types, lightning_weave.errors,"
        " lightning_weave.progress\nassert 'torch' not in sys.modules and 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
