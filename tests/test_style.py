"""Rules of the sources that no linter has."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent
MOST_POSITIONAL = 5


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_no_public_type_name_means_two_things() -> None:
    places = defaultdict(list)
    for file, tree in trees():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(file)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name[0].isupper() and not name.isupper():  # an alias of a type
                    places[name].append(file)
    allowed = {"T"}
    assert {
        name: files for name, files in places.items() if len(files) > 1 and name[0] != "_" and name not in allowed
    } == {}


def test_no_call_has_more_than_five_positional_arguments() -> None:
    wrong = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                given = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
                # A row of a table has as many cells as it has columns.
                is_row = isinstance(node.func, ast.Name | ast.Attribute) and ast.unparse(node.func) in ROWS
                if len(given) > MOST_POSITIONAL and not is_row:
                    wrong.append(f"{file}:{node.lineno} {ast.unparse(node.func)} {len(given)}")
    assert wrong == []


ROWS = {"Table", "table.add_row"}


def test_unrelated_things_are_assigned_on_lines_of_their_own() -> None:
    wrong = []
    for file, tree in trees():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Tuple)
                and isinstance(node.value, ast.Tuple)
            ):
                wrong.append(f"{file}:{node.lineno}")
    assert wrong == []


def test_nothing_is_named_by_the_repr_of_an_object() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("sha256", "crc32", "fingerprint"))
        if "repr(" in ast.unparse(node)
    ]
    assert wrong == []
