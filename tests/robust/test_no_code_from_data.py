"""Nothing in the package turns data into code: every source file is read as a syntax tree, not as text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_weave

SOURCE = Path(lightning_weave.__file__).parent
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "code", "codeop",
    "yaml", "pty",
}  # fmt: skip
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp",
    "np.load", "numpy.load", "pd.read_pickle", "pandas.read_pickle",
}  # fmt: skip
ALLOWED = {
    ("grading/driver.py", "exec"): "runs the graded program; this file is only ever started inside the sandbox",
    ("grading/driver.py", "compile"): "the same",
    ("train/checkpoint.py", "pickle"): "reads the index of torch's own checkpoints, with an unpickler that knows its "
    "classes and no other",
}


def dotted(node: ast.expr) -> str:
    """Write `a.b.c` as such; anything that is not a plain name is a question mark."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def findings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] in MODULES:
                    yield module
                yield from (f"{module}.{name.name}" for name in names if f"{module}.{name.name}" in CALLS)
            case ast.Call():
                yield from findings_of_call(node)


def findings_of_call(call: ast.Call) -> Iterator[str]:
    name = dotted(call.func)
    given = {keyword.arg: keyword.value for keyword in call.keywords}

    def is_constant(argument: str, value: object) -> bool:
        return isinstance(given.get(argument), ast.Constant) and given[argument].value is value  # type: ignore[attr-defined]

    if name in BUILTINS or name in CALLS:
        yield name
    if name == "torch.load" and not is_constant("weights_only", True):
        yield "torch.load"
    if "shell" in given and not is_constant("shell", False):
        yield f"{name}(shell)"
    if "allow_pickle" in given:
        yield f"{name}(allow_pickle)"
    if is_constant("trust_remote_code", True):
        yield f"{name}(trust_remote_code=True)"
    if name.rpartition(".")[2] in {"Environment", "Template"} and not is_constant("autoescape", True):
        yield f"{name} without autoescape"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import pickle", ["pickle"]),
        ("def f():\n    from marshal import loads", ["marshal"]),
        ("import dill as json", ["dill"]),
        ("from os import system", ["os.system"]),
        ("eval('1')", ["eval"]),
        ("model.eval()", []),
        ("exec(compile(text, 'x', 'exec'))", ["exec", "compile"]),
        ("re.compile('x')", []),
        ("torch.load(path)", ["torch.load"]),
        ("torch.load(path, weights_only=False)", ["torch.load"]),
        ("torch.load(path, weights_only=True)", []),
        ("subprocess.run(text, shell=True)", ["subprocess.run(shell)"]),
        ("subprocess.run(words, shell=some)", ["subprocess.run(shell)"]),
        ("os.system('ls')", ["os.system"]),
        ("np.load(path, allow_pickle=True)", ["np.load", "np.load(allow_pickle)"]),
        ("load(path, trust_remote_code=True)", ["load(trust_remote_code=True)"]),
        ("load(path, trust_remote_code=section.trust_remote_code)", []),
        ("jinja2.Environment(loader=x)", ["jinja2.Environment without autoescape"]),
        ("Environment(autoescape=True)", []),
        ("import yaml", ["yaml"]),
    ],
)
def test_the_search_finds_what_it_is_for(code: str, found: list[str]) -> None:
    assert sorted(findings(ast.parse(code))) == sorted(found)


def test_no_source_file_runs_data() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    found = {
        (str(path.relative_to(SOURCE)), what)
        for path in files
        for what in findings(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(ALLOWED)
