"""The program as people meet it: its help, its version, and what it does not import."""

import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w

from tiny import make_world

LIGHT = """
import sys
from lightning_weave.cli import main
sys.argv = ["lweave", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    assert end.code in (0, None), end.code
assert not {"torch", "transformers", "datasets", "matplotlib"} & sys.modules.keys()
"""


def lweave(*words: str, cwd: Path | None = None, code: int = 0) -> str:
    """Run the program; returns what it said."""
    command = [sys.executable, "-m", "lightning_weave.cli", *words]
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("commands")
    data = make_world(root)
    ledger = root / "runs" / "tiny" / "ledger.jsonl"
    ledger.parent.mkdir(parents=True)
    ledger.write_text(
        '{"stage": "rollout", "name": "", "device_seconds": 1, "tokens": 1, "bytes": 1, "peak_memory": 1}\n'
    )
    file = root / "tiny.toml"
    file.write_text(tomli_w.dumps(data))
    return file


@pytest.mark.parametrize("verb", ["status", "cost", "verify"])
def test_looking_at_a_run_imports_neither_torch_nor_transformers(recipe: Path, verb: str) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, verb, str(recipe)], check=True)
