"""What the tests of evaluation share: a small recipe, and where its results are."""

import json
from pathlib import Path

from lightning_weave.store.ledger import read_ledger
from tiny import make_world, run_of


def evaluation_recipe(tmp_path: Path) -> dict:
    """Six sums, three samples of each, and two policies."""
    recipe = make_world(tmp_path)
    recipe |= {"anchors": {}, "compositions": {}, "policies": {"other": {"model": str(tmp_path / "brief-pre")}}}
    problems = [{"id": f"q{n}", "problem": f"{n}+1", "answer": str(n + 1)} for n in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    recipe["eval"] = {
        "benchmarks": [f"file:{tmp_path / 'sums.jsonl'}"],
        "samples": 3,
        "max_tokens": 14,
        "chat": False,
        "profile": "paper",
        "block": 4,
        "budgets": [5, 9],
    }
    return recipe


def folder_of(recipe: dict, policy: str = "base") -> Path:
    run = run_of(recipe)
    return run.stage("eval", policy, recipe["eval"]["benchmarks"][0]).folder


def sampled_tokens(recipe: dict) -> int:
    return sum(row["tokens"] for row in read_ledger(run_of(recipe).directory))
