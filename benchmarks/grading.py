"""Verdicts per second: the sandbox against plain subprocesses, in one run.

A plain subprocess is one interpreter per test, without limits or site packages: `bare`, or `plain` with the imports
that the official runner puts before every program and the sandbox always provides. Rounds alternate and medians are
shown. Goal: at most 1.5 times as long as plain.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lightning_weave.grading.code import grade_many, same_text
from lightning_weave.grading.driver import _MODULES, _STARRED
from lightning_weave.grading.sandbox import _FLAGS, _PYTHON, open_sandbox

PROGRAM = """
n = int(input())
xs = list(map(int, input().split()))
best = run = xs[0]
for x in xs[1:]:
    run = max(x, run + x)
    best = max(best, run)
print(best)
"""
PRELUDE = "".join(f"from {name} import *\n" for name in _STARRED) + "".join(f"import {name}\n" for name in _MODULES)
ROUNDS, PROGRAMS = 5, 16


def problem(tests: int) -> dict[str, Any]:
    cases = [{"input": f"2\n-1 {n}\n", "output": f"{n}\n", "testtype": "stdin"} for n in range(tests)]
    return {"question_id": "b", "public_test_cases": "[]", "private_test_cases": json.dumps(cases), "metadata": "{}"}


def grade_without_sandbox(source: str, row: dict[str, Any]) -> bool:
    """Grade with one process per test and no sandbox."""
    for test in json.loads(row["private_test_cases"]):
        command = [_PYTHON, *_FLAGS, "-c", source]
        done = subprocess.run(command, input=test["input"], capture_output=True, text=True, timeout=6, check=False)
        if done.returncode or not same_text(done.stdout, test["output"]):
            return False
    return True


def seconds(work: Callable[[], list[bool]]) -> float:
    begin = time.perf_counter()
    assert all(work())
    return time.perf_counter() - begin


def main() -> None:
    sandbox = open_sandbox()
    print(f"{sandbox.slots} slots, {PROGRAMS} programs a round, median of {ROUNDS} rounds; verdicts per second")
    print(f"{'tests each':>10} {'bare':>8} {'plain':>8} {'sandbox':>8} {'time against plain':>20}")
    with ThreadPoolExecutor(sandbox.slots) as pool:
        for tests in (1, 3, 20):
            row = problem(tests)
            variants: dict[str, Callable[[], list[bool]]] = {
                "bare": lambda row=row: list(pool.map(grade_without_sandbox, [PROGRAM] * PROGRAMS, [row] * PROGRAMS)),
                "plain": lambda row=row: list(
                    pool.map(grade_without_sandbox, [PRELUDE + PROGRAM] * PROGRAMS, [row] * PROGRAMS)
                ),
                "sandbox": lambda row=row: [v.correct for v in grade_many([(PROGRAM, row)] * PROGRAMS, sandbox)],
            }
            rounds = [{name: seconds(work) for name, work in variants.items()} for _ in range(ROUNDS)]
            taken = {name: statistics.median(times[name] for times in rounds) for name in variants}
            rates = " ".join(f"{PROGRAMS / taken[name]:8.1f}" for name in variants)
            print(f"{tests:10d} {rates} {taken['sandbox'] / taken['plain']:19.2f}x")


if __name__ == "__main__":
    main()
