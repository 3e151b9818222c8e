"""Detect a benchmark whose problems have changed since its first use.

The paper's LiveCodeBench windows are pinned by release, first date and count when they are loaded. The ids themselves
are recorded at the first use and compared at every later one.
"""

from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark, content_digest, ids_digest
from lightning_weave.errors import InputError
from lightning_weave.store.files import read_json, write_json


def check_lock(benchmark: Benchmark, path: Path) -> None:
    """Compare a benchmark with its entry in the lock file, or add the entry if there is none."""
    locked: dict[str, Any] = read_json(path) if path.exists() else {}
    current = {
        "ids": ids_digest(benchmark.problems),
        "content": content_digest(benchmark.problems),
        "problems": [problem.id for problem in benchmark.problems],
    }
    if benchmark.name not in locked:
        write_json(path, {**locked, benchmark.name: current})
    elif locked[benchmark.name] != current:
        raise InputError(
            f"benchmark {benchmark.name} now has {_change(locked[benchmark.name], current)} than {path} records, "
            f"so results are not comparable. Restore the source, or delete its entry there and re-run every evaluation."
        )


def _change(locked: dict[str, Any], current: dict[str, Any]) -> str:
    ids = sorted(set(locked["problems"]) ^ set(current["problems"]))
    if ids:
        return f"other problems ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
    return "the problems in another order" if locked["content"] == current["content"] else "other questions or answers"
