"""The cost table adds up what the ledger says, and the summary is the paper's arithmetic."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave.errors import InputError
from lightning_weave.report import tables
from lightning_weave.stages import costs
from lightning_weave.store import append_line
from lightning_weave.views import status as cost
from tiny import make_world, run_of

# GPU hours of the paper's Qwen3-4B with three anchors (tab. training-cost), as seconds
PAPER = {"rollout": 3.50, "reference": 0.62, "score": 4.95, "train": 2.48}

EVEN = {"weights": {"acc": 0.5, "brief": 0.5}}


def row(stage: str, name: str, hours: float, **extra: object) -> dict:
    counts = {"tokens": 1000, "bytes": 2_000_000, "peak_memory": 3_000_000_000}
    return {"stage": stage, "name": name, "device_seconds": 3600 * hours, **counts, **extra}


def test_the_papers_own_costs_give_the_papers_ratios(tmp_path: Path) -> None:
    run = run_of({**make_world(tmp_path), "compositions": {"even": EVEN, "live": {**EVEN, "method": "online"}}})
    models = list(run.score_names.values())
    rows = [row(stage, "", PAPER[stage]) for stage in ("rollout", "reference")]
    rows += [row("score", model, PAPER["score"] / len(models)) for model in models]
    rows += [row("train", "even", PAPER["train"], method="joint"), row("train", "live", 19.66, method="online")]
    lines = cost.summary(run, rows)
    assert lines[0] == "One composition: 11 h 33 m (9 h 04 m cache + 2 h 28 m training)"
    assert lines[1].startswith("Five sharing the cache: 21 h 28 m")
    assert lines[2] == "Online (live): 19 h 39 m = 1.70 x offline for one, 4.58 x for five"


def test_online_is_compared_with_the_same_anchors_and_the_same_updates_offline(tmp_path: Path) -> None:
    compositions = {
        "one": {"weights": {"acc": 1.0}},
        "long": {"weights": {"acc": 1.0}, "epochs": 20},
        "run": {**EVEN, "method": "sequential", "sequence": ["acc", "brief"]},
        "live": {"weights": {"acc": 1.0, "brief": 0.0}, "method": "online"},
        "live-long": {"weights": {"acc": 1.0}, "method": "online", "epochs": 20},
    }
    run = run_of({**make_world(tmp_path), "compositions": compositions})
    rows = [row("rollout", "", 1.0), row("reference", "", 1.0)]
    rows += [row("score", name, {"acc": 0.5, "brief": 40.0}[name.split("-")[0]]) for name in run.score_names.values()]
    rows += [row("train", "one", 0.5, method="joint"), row("train", "one", 0.5, method="joint")]
    rows += [row("train", "long", 80.0, method="joint"), row("train", "live-long", 80.0, method="online")]
    rows += [row("train", "run/leg-1", 0.1, method="joint"), row("train", "run", 7.0, method="sequential")]
    rows += [row("train", "live", 8.0, method="online")]
    lines = cost.summary(run, rows)
    assert lines[0] == "One composition: 84 h 00 m (83 h 00 m cache + 1 h 00 m training)"
    assert lines[2:] == ["Online (live): 8 h 00 m = 2.00 x offline for one, 5.00 x for five"]


def test_naive_runs_are_not_the_offline_training_that_online_is_compared_with(tmp_path: Path) -> None:
    naive = {**EVEN, "objective": "direct-opd"}
    recipe = {
        **make_world(tmp_path),
        "compositions": {"even": EVEN, "naive": naive, "same": {**EVEN, "objective": "tilted"}},
    }
    rows = [row("rollout", "", 1.0), row("reference", "", 1.0), row("train", "even", 2.0, method="joint")]
    rows += [row("train", "naive", 50.0, method="joint"), row("train", "same", 4.0, method="joint")]
    rows += [row("train", "of-a-sweep", 6.0, method="joint")]
    offline = costs.offline_cost(run_of(recipe), rows)
    assert offline is not None
    assert (offline.train, offline.compositions) == (3600 * 4.0, 3)
    assert cost.summary(run_of({**recipe, "compositions": {"naive": naive}}), [rows[0], rows[3]]) == []
    all_naive = {**recipe, "train": {**recipe["train"], "objective": "direct-opd"}, "compositions": {"naive": EVEN}}
    assert costs.offline_cost(run_of(all_naive), [rows[0], rows[3]]) is not None


def test_rows_of_one_stage_are_added_up() -> None:
    rows = [row("score", "a", 1.0), row("score", "a", 0.5), row("score", "b", 2.0)]
    found = cost.costs(rows, "stage", "name")
    assert found[("score", "a")].seconds == 3600 * 1.5
    assert found[("score", "a")].tokens == 2000


def test_the_table_is_printed_from_the_runs_ledger(tmp_path: Path) -> None:
    run = run_of(make_world(tmp_path))
    with pytest.raises(InputError, match=r"nothing measured yet. Start with: lweave run tiny\.toml"):
        cost.cost([run], Console(quiet=True))
    (run.directory / "train" / "x").mkdir(parents=True)  # what is not there is counted apart
    for stage, hours in PAPER.items():
        append_line(run.directory / "ledger.jsonl", row(stage, "x", hours, method="joint"))
    out = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    cost.cost([run], out)
    text = out.export_text()
    out.file.close()
    assert "11 h 33 m" in text
    assert "3.00 GB" in text


def test_json_gives_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(make_world(tmp_path))
    append_line(run.directory / "ledger.jsonl", row("rollout", "", 1.0))
    cost.cost([run], Console(quiet=True), json=True)
    said = json.loads(capsys.readouterr().out)
    sizes = {"tokens": 1000, "written": 2_000_000, "peak_memory": 3_000_000_000}
    no_engine = {"starting": 0.0, "busy": 0.0, "idle": None}
    assert said["stages"] == [{"stage": "rollout", "name": "", "seconds": 3600.0, **sizes, **no_engine}]
    assert (said["seconds"], said["summary"]) == (3600.0, [])


def test_several_runs_make_the_papers_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = {"weights": {"acc": 1.0}}, {"weights": {"brief": 0.5, "acc": 0.5}}
    live = {"live-1": {**one, "method": "online"}, "live-2": {**two, "method": "online"}}
    ways = {"one": one, "two": two, "again": EVEN, **live}
    run = run_of({**make_world(tmp_path), "compositions": ways})
    small = run_of({**make_world(tmp_path), "name": "small", "compositions": {"two": two}})
    anchors = {"acc": 1.76, "brief": 1.17}  # Qwen3-4B of tab. training-cost
    rows = [row("rollout", "", 3.50), row("reference", "", 0.62)]
    rows += [row("score", name, anchors[name.split("-")[0]] / 2) for name in run.score_names.values()]
    rows += [row("train", "one", 2.43, method="joint"), row("train", "live-1", 15.49, method="online")]
    rows += [row("train", "two", 2.50, method="joint"), row("train", "again", 2.56, method="joint")]
    rows += [row("train", "live-2", 17.64, method="online")]
    for made in (run, small):
        for name in made.recipe.compositions:
            (made.directory / "train" / name).mkdir(parents=True)  # what is not there is counted apart
    for line in rows:
        append_line(run.directory / "ledger.jsonl", line)
    for line in (row("rollout", "", 1.0), row("train", "two", 2.0, method="joint")):
        append_line(small.directory / "ledger.jsonl", line)
    out = Console(record=True, width=140, file=(tmp_path / "out").open("w"))
    cost.cost([run, small], out)
    out.file.close()
    found = {line[:28].strip(): line[28:].split() for line in out.export_text().splitlines() if line.strip()}
    assert found["Number of anchors"] == ["1", "2", "2"]
    assert found["Online DOPD, h"] == ["15.49", "17.64", "–"]
    assert found["Lightning Weave, h"] == ["8.31", "9.58", "3.00"]
    assert found["Online/offline cost ratio"] == ["1.86", "1.84", "–"]
    assert found["Anchor scoring"] == ["1.76", "2.93", "0.00"]
    assert found["Student-only training"] == ["2.43", "2.53", "2.00"]
    table = tables.format_costs(tables.cost_table(run, rows, "Qwen_3"))
    assert "Qwen\\_3" in tables.latex(table)
    assert tables.markdown(table).splitlines()[1] == "| :--- | ---: | ---: |"
    assert tables.to_csv(table).splitlines()[2] == "Number of anchors,1,2"
    cost.cost([run, small], Console(quiet=True), json=True)
    found = json.loads(capsys.readouterr().out)
    assert [one["anchors"] for one in found] == [["acc"], ["acc", "brief"], ["acc", "brief"]]
    assert [one["online"] for one in found[1:]] == [17.64 * 3600, None]
    assert found[1]["parts"]["Student-only training"] == pytest.approx(2.53 * 3600)
    assert found[2]["ratio"] is None


def test_the_idle_share_of_engines_is_shown_where_there_are_any(tmp_path: Path) -> None:
    run = run_of(make_world(tmp_path))
    ledger = run.directory / "ledger.jsonl"
    append_line(ledger, row("reference", "", 1.0))
    for busy in (1200, 600):
        append_line(ledger, row("rollout", "", 0.5, engine={"starting": 360, "busy": busy}))
    console = Console(width=120, record=True, file=io.StringIO())
    cost.cost([run], console)
    assert "idle 30%, start 12 m" in " ".join(console.export_text().split())
