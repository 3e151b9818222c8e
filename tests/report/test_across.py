"""Several runs in one report: policies join by what they are, students are blocks, ablations stand as in the paper."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.config import slug
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report import across, report
from lightning_weave.report.results import summaries
from lightning_weave.report.tables import BenchmarkScore, PolicyRow
from report.evaluated import write_evaluations
from tiny import make_world, save_prompts, steps_of

QUIET = Progress(quiet=True)


@pytest.fixture
def world(tmp_path: Path) -> dict[str, Any]:
    return make_world(tmp_path, prompts=2)


def test_what_a_policy_is_does_not_depend_on_names(world: dict[str, Any]) -> None:
    renamed = {
        **world,
        "name": "other",
        "anchors": {"right": world["anchors"]["acc"], "short": world["anchors"]["brief"]},
    }
    renamed["compositions"] = {
        "half": {"weights": {"short": 0.5, "right": 0.5}},
        "strong": {"weights": {"right": 0.5, "short": 0.5}, "alpha": 1.0},
        "naive": {"weights": {"right": 0.5, "short": 0.5}, "objective": "direct-opd"},
        "there": {"weights": {"right": 0.5, "short": 0.5}, "method": "sequential", "sequence": ["right", "short"]},
        "back": {"weights": {"right": 0.5, "short": 0.5}, "method": "sequential", "sequence": ["short", "right"]},
    }
    one, two = steps_of(world), steps_of(renamed)
    assert across.meaning(one, "both") == across.meaning(two, "half")
    assert across.meaning(one, "base") == across.meaning(two, "base")
    others = [across.meaning(two, name) for name in ("half", "strong", "naive", "there", "back")]
    assert len(set(others)) == 5
    assert across.meaning(one, "acc-only") not in others


def test_one_policy_under_two_names_in_a_run_is_two_rows(world: dict[str, Any], tmp_path: Path) -> None:
    """A composition that was renamed is still there under its old name; another run joins the first of them."""
    world["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / 'sums.jsonl', 3)}"]}
    world["compositions"] = {"old": {"weights": {"acc": 1.0}}, "new": {"weights": {"acc": 1.0}}}
    steps = steps_of(world)
    write_evaluations(steps, {"base": (0.5, 50.0), "old": (0.8, 50.0), "new": (0.8, 50.0)})
    found = summaries(steps)
    assert list(across.join([steps], [found])) == ["base", "old", "new"]
    more = {"base": [], "new": [replace(found["new"][0], label="more")]}
    joined = across.join([steps, steps], [found, more])
    assert {name: [one.label for one in results] for name, results in joined.items()} == {
        "base": ["sums"],
        "old": ["sums", "more"],
        "new": ["sums"],
    }


def test_contexts_rules_and_weights_by_tag_make_other_policies(world: dict[str, Any]) -> None:
    """One checkpoint in two contexts is two anchors, and what is added up by tag is no plain sum."""
    one = {"model": "student", "post_prompt": {"prefix": "a"}}
    other = {"model": "student", "post_prompt": {"prefix": "b"}}
    anchors = {"one": one, "other": other, "again": one, "clipped": {**one, "shift_clip": 1.0}}
    weights: dict[str, Any] = {name: {name: 1.0} for name in anchors}
    weights |= {"both": {"one": 1.0, "other": 1.0}, "there": {"x": {"one": 1.0}, "default": {"other": 1.0}}}
    weights["back"] = {"x": {"other": 1.0}, "default": {"one": 1.0}}
    compositions = {name: {"weights": value, "normalize": False} for name, value in weights.items()}
    steps = steps_of({**world, "anchors": anchors, "tags": {"rules": {"x": "1"}}, "compositions": compositions})
    found = {name: across.meaning(steps, name) for name in weights}
    assert found["one"] == found.pop("again")
    assert len(set(found.values())) == len(found)


@pytest.mark.slow
def test_students_and_domains_are_one_table(world: dict[str, Any], tmp_path: Path) -> None:
    files = {name: f"file:{save_prompts(tmp_path / f'{name}.jsonl', 8, seed=len(name))}" for name in ("sums", "code")}
    students = {"small": world["student"]["model"], "large": world["anchors"]["acc"]["pre"]}
    renamed = {"both": "even", "acc-only": "acc-only", "brief-only": "brief-only"}
    runs = []
    for student, model in students.items():
        for domain, file in files.items():
            own = {**world, "runs": str(tmp_path / domain), "name": student, "student": {"model": model}}
            own["eval"] = {"benchmarks": [file]}
            if domain == "code":  # the same compositions by other names
                own["compositions"] = {renamed[name]: one for name, one in world["compositions"].items()}
            policies = {"base": (0.5, 300), "acc-only": (0.7, 350), "both" if domain == "sums" else "even": (0.7, 200)}
            if domain == "sums":
                policies["brief-only"] = (0.4, 150)
            write_evaluations(steps_of(own), policies)
            runs.append(steps_of(own))
    page = report.run(runs, QUIET)
    assert page == tmp_path / "report" / "index.html"
    with (page.parent / "tables" / "results.csv").open() as file:
        header, *lines = list(csv.reader(file))
    assert header[:8] == [
        "Group",
        "Policy",
        "sums Acc.",
        "sums #Tok.",
        "code Acc.",
        "code #Tok.",
        "Average Acc.",
        "Average #Tok.",
    ]
    found = {(line[0], line[1]): line for line in lines}
    groups = [across.student_names([[steps]])[0] for steps in (runs[0], runs[2])]
    assert list(found) == [(group, name) for group in groups for name in ("base", "acc-only", "brief-only", "both")]
    assert all(found[group, "brief-only"][4:] == [""] * 7 for group in groups)
    tex = (page.parent / "tables" / "results.tex").read_text()
    for block in tex.split(r"\multicolumn{8}{l}")[1:]:
        assert r"\textbf{" in block.split("}}}", 1)[1]  # marks within each student
    points = json.loads((page.parent / "points.json").read_text())
    assert [(point["student"], point["policy"]) for point in points] == [key for key in found if key[1] != "brief-only"]
    names = {path.name for path in (page.parent / "figures").glob("frontier*.svg")}
    assert len(names) == 6  # for each student the average and two benchmarks
    curves = sorted((page.parent / "figures").glob("budgets*.svg"), key=lambda path: path.stem)
    assert [[name in path.read_text() for name in ("sums", "code")] for path in curves] == [
        [True, True], [False, True], [True, False]
    ] * 2  # fmt: skip
    text = page.read_text()
    assert text.count('class="group"') == 2
    assert "2 students on 2 benchmarks" in text
    one = report.run(runs, QUIET, tmp_path / "chosen", "code")
    assert one.read_text().count("On code. ") == 4  # frontier and budgets of each student
    (drawn,) = (one.parent / "figures").glob(f"budgets-{slug(groups[0])}.svg")
    assert "sums" not in drawn.read_text()
    with pytest.raises(InputError, match="--benchmark nothing: not evaluated on that; there is sums, code"):
        report.run(runs, QUIET, None, "nothing")
    with pytest.raises(InputError, match="is given twice"):
        report.run([runs[0], runs[0]], QUIET)


def test_ablations_stand_in_the_papers_blocks(world: dict[str, Any]) -> None:
    even = {"weights": {"acc": 0.5, "brief": 0.5}}
    single = {"weights": {"acc": 1.0}}
    world["compositions"] = {
        "acc": single,
        "acc-naive": {**single, "objective": "direct-opd"},
        "acc-online": {**single, "method": "online"},
        "both": even,
        "mixture": {**even, "method": "mixture"},
        "forth": {**even, "method": "sequential", "sequence": ["acc", "brief"]},
        "lonely": {"weights": {"brief": 1.0}},
    }
    steps = steps_of(world)
    rows = [PolicyRow(name, (BenchmarkScore("b", n, n),), n, n) for n, name in enumerate(steps.policies)]
    numbers = {row.policy: row.accuracy for row in rows}
    found = [(row.group, row.policy, row.accuracy) for row in across.ablation(steps, rows)]
    assert found == [
        ("", "Base", numbers["base"]),
        ("(a) Tilted-target correction: acc", "Online DOPD", numbers["acc-online"]),
        ("(a) Tilted-target correction: acc", "Naive Offline", numbers["acc-naive"]),
        ("(a) Tilted-target correction: acc", "Tilted-Target (ours)", numbers["acc"]),
        ("(b) Composition: acc + brief", "Data Mixture", numbers["mixture"]),
        ("(b) Composition: acc + brief", "acc → brief", numbers["forth"]),
        ("(b) Composition: acc + brief", "Tilted-Target (ours)", numbers["both"]),
    ]
    assert across.ablation(steps, rows[:2]) == []
