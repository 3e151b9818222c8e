"""Rules of the sources that no linter has."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import lightning_weave

ROOT = Path(lightning_weave.__file__).parent


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
    places.pop("T", None)
    assert {name: files for name, files in places.items() if len(files) > 1 and name[0] != "_"} == {
        "Run": ["api.py", "run.py"]  # the same, with the commands as methods
    }


def test_nothing_is_named_by_the_repr_of_an_object() -> None:
    wrong = [
        f"{file}:{node.lineno}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("sha256", "crc32", "fingerprint"))
        if "repr(" in ast.unparse(node)
    ]
    assert wrong == []
