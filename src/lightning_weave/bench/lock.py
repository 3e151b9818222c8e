"""Hold a benchmark to the problems it had when it was first used.

The paper's LiveCodeBench windows are locked by release, first date and count when they are loaded; the ids themselves
are written down at the first use and compared at every later one, so a source that changes is noticed.
"""

from pathlib import Path
from typing import Any

from lightning_weave.bench.definitions import Benchmark, content_digest, ids_digest
from lightning_weave.errors import InputError
from lightning_weave.store.files import read_json, write_json


def check_lock(benchmark: Benchmark, path: Path) -> None:
    """Compare a benchmark with the lock file, or write it down there if it is new."""
    locked: dict[str, Any] = read_json(path) if path.exists() else {}
    found = {
        "ids": ids_digest(benchmark.problems),
        "content": content_digest(benchmark.problems),
        "problems": [problem.id for problem in benchmark.problems],
    }
    if benchmark.name not in locked:
        write_json(path, {**locked, benchmark.name: found})
    elif locked[benchmark.name] != found:
        raise InputError(
            f"benchmark {benchmark.name} now has {_change(locked[benchmark.name], found)} than {path} says, so its "
            f"numbers would not compare. Restore the source, or delete its entry there and evaluate every policy again."
        )


def _change(locked: dict[str, Any], found: dict[str, Any]) -> str:
    ids = sorted(set(locked["problems"]) ^ set(found["problems"]))
    if ids:
        return f"other problems ({', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''})"
    return "the problems in another order" if locked["content"] == found["content"] else "other questions or answers"
