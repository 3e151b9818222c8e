"""The cost table adds up what the ledger says, and the summary is the paper's arithmetic."""

from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.stages import cost
from lightning_weave.store import append_line
from tiny import make_world, steps_of

# GPU hours of the paper's Qwen3-4B with three anchors (tab. training-cost), as seconds
PAPER = {"rollout": 3.50, "reference": 0.62, "score": 4.95, "train": 2.48}


def row(stage: str, name: str, hours: float, **extra: object) -> dict:
    counts = {"tokens": 1000, "bytes": 2_000_000, "peak_memory": 3_000_000_000}
    return {"stage": stage, "name": name, "device_seconds": 3600 * hours, **counts, **extra}


def test_the_papers_own_costs_give_the_papers_ratios() -> None:
    rows = [row(stage, "", hours, method="joint") for stage, hours in PAPER.items()]
    rows.append(row("train", "live", 19.66, method="online"))
    lines = cost.summary(rows)
    assert lines[0] == "One composition: 11 h 33 m (9 h 04 m cache + 2 h 28 m training)"
    assert lines[1].startswith("Five sharing the cache: 21 h 28 m")
    assert "1.70 x offline for one, 4.58 x for five" in lines[2]


def test_rows_of_one_stage_are_added_up_and_baselines_do_not_count_as_the_method() -> None:
    rows = [row("score", "a", 1.0), row("score", "a", 0.5), row("score", "b", 2.0)]
    found = cost.costs(rows, "stage", "name")
    assert found[("score", "a")].seconds == 3600 * 1.5
    assert found[("score", "a")].tokens == 2000
    naive = [row("train", "joint", 1.0, method="joint"), row("train", "steps", 9.0, method="sequential")]
    assert cost.summary(naive)[0] == "One composition: 1 h 00 m (0 s cache + 1 h 00 m training)"


def test_the_table_is_printed_from_the_runs_ledger(tmp_path: Path) -> None:
    steps = steps_of(make_world(tmp_path))
    with pytest.raises(InputError, match=r"nothing measured yet. Start with: lweave run tiny\.toml"):
        cost.run(steps, Console(quiet=True))
    for stage, hours in PAPER.items():
        append_line(steps.store.run_dir / "ledger.jsonl", row(stage, "x", hours, method="joint"))
    out = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    cost.run(steps, out)
    text = out.export_text()
    out.file.close()
    assert "11 h 33 m" in text
    assert "3.00 GB" in text
