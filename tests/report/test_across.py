"""Several runs in one report: policies join by what they are, students are blocks, only like is compared with like."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_weave.bench.definitions import load_eval_benchmark
from lightning_weave.bench.summary import summarise
from lightning_weave.config import slug
from lightning_weave.errors import InputError
from lightning_weave.progress import Progress
from lightning_weave.report import report
from lightning_weave.report import results as across
from lightning_weave.report.report import compared_figures
from lightning_weave.report.results import describe, read_students, results_table, summaries
from lightning_weave.report.tables import AVERAGE, not_compared, student_names
from lightning_weave.stages.forecast import ForecastPoint, keep_points, measured_base
from lightning_weave.store import write_json
from report.evaluated import draw_samples, result_row, results_of, write_evaluations
from tiny import make_world, run_of, save_prompts

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
    one, two = run_of(world), run_of(renamed)
    assert across.meaning(one, "both") == across.meaning(two, "half")
    assert across.meaning(one, "base") == across.meaning(two, "base")
    others = [across.meaning(two, name) for name in ("half", "strong", "naive", "there", "back")]
    assert len(set(others)) == 5
    assert across.meaning(one, "acc-only") not in others


def test_one_policy_under_two_names_in_a_run_is_two_rows(world: dict[str, Any], tmp_path: Path) -> None:
    """A composition that was renamed is still there under its old name; another run joins the first of them."""
    world["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / 'sums.jsonl', 3)}"]}
    world["compositions"] = {"old": {"weights": {"acc": 1.0}}, "new": {"weights": {"acc": 1.0}}}
    run = run_of(world)
    write_evaluations(run, {"base": (0.5, 50.0), "old": (0.8, 50.0), "new": (0.8, 50.0)})
    found = summaries(run)
    assert list(across.join([(run, "tiny", found)])[0]) == ["base", "old", "new"]
    more = {"base": [], "new": [replace(found["new"][0], label="more")]}
    joined, _ = across.join([(run, "one", found), (run, "two", more)])
    assert {name: [one.label for one in results] for name, results in joined.items()} == {
        "base": ["sums"],
        "old": ["sums", "more"],
        "new": ["sums"],
    }


def test_each_run_of_a_student_draws_its_own_comparison(world: dict[str, Any], tmp_path: Path) -> None:
    """Its policies have the names and the benchmarks of its run."""
    runs = []
    for name, alpha, accuracy in (("sums", 2.0, 0.9), ("code", 1.0, 0.2)):
        own = {**world, "runs": str(tmp_path / "runs"), "name": name}
        own["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / f'{name}.jsonl', 8, seed=len(name))}"]}
        both = {**world["compositions"]["both"], "alpha": alpha}
        own["compositions"] = {"both": both, "placebo": {**both, "flip": True}}
        run = run_of(own)
        write_evaluations(run, {"base": (0.5, 300.0), "both": (accuracy, 200.0), "placebo": (0.5, 150.0)})
        write_json(run.directory / "compare.json", {"both": ["placebo"]})
        runs.append(run)
    (student,) = read_students(runs, [summaries(run) for run in runs])
    drawn = {figure.name: figure.alt for figure in compared_figures(student)}
    for run, (name, text) in zip(runs, drawn.items(), strict=True):
        (both,) = summaries(run)["both"]
        assert name == f"compare-both-{run.recipe.name}"
        assert f"both: {both.accuracy:.1f} %" in text


def test_forecasts_from_the_base_of_fewer_benchmarks_are_not_drawn(world: dict[str, Any], tmp_path: Path) -> None:
    """They are anchored at the base of their own run."""
    runs = []
    for name, accuracy in (("sums", 0.9), ("code", 0.2)):
        own = {**world, "runs": str(tmp_path / "runs"), "name": name}
        own["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / f'{name}.jsonl', 8, seed=len(name))}"]}
        run = run_of(own)
        write_evaluations(run, {"base": (accuracy, 300.0), "both": (accuracy, 200.0)})
        measured = measured_base(run)
        assert measured is not None
        figures = [value for value in measured for _ in range(3)]
        base = ForecastPoint("base", {}, None, *figures, 0, 0, 0, 0, 99, True, True)
        keep_points(run, [base, replace(base, policy="x", weights={"acc": 1.0}, alpha=2.0)])
        runs.append(run)
    for some, drawn in ((runs[:1], True), (runs[1:], True), (runs, False)):
        page = report.run(some, QUIET, out=tmp_path / str(len(some)) / some[0].recipe.name)
        assert ("Small diamonds" in page.read_text()) == drawn


def test_contexts_rules_and_weights_by_tag_make_other_policies(world: dict[str, Any]) -> None:
    """One checkpoint in two contexts is two anchors, and what is added up by tag is no plain sum."""
    one = {"model": "student", "post_prompt": {"prefix": "a"}}
    other = {"model": "student", "post_prompt": {"prefix": "b"}}
    anchors = {"one": one, "other": other, "again": one, "clipped": {**one, "shift": {"clip": 1.0}}}
    weights: dict[str, Any] = {name: {name: 1.0} for name in anchors}
    weights |= {"both": {"one": 1.0, "other": 1.0}, "there": {"x": {"one": 1.0}, "default": {"other": 1.0}}}
    weights["back"] = {"x": {"other": 1.0}, "default": {"one": 1.0}}
    compositions = {name: {"weights": value, "normalize": False} for name, value in weights.items()}
    run = run_of({**world, "anchors": anchors, "tags": {"rules": {"x": "1"}}, "compositions": compositions})
    found = {name: across.meaning(run, name) for name in weights}
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
            write_evaluations(run_of(own), policies)
            runs.append(run_of(own))
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
    groups = [student_names([[run]])[0] for run in (runs[0], runs[2])]
    assert list(found) == [(group, name) for group in groups for name in ("base", "acc-only", "brief-only", "both")]
    partial = {name: at for at, name in enumerate(header) if name.startswith(("code", "Average", "AES"))}
    assert len(partial) == 9
    assert all(found[group, "brief-only"][at] == "" for group in groups for at in partial.values())
    assert all(found[group, "brief-only"][header.index("sums problems")] == "8" for group in groups)
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


def test_ablations_have_the_papers_blocks(world: dict[str, Any]) -> None:
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
    run = run_of(world)
    results = results_of(*(result_row(name, {"b": (n, n)}, (n, n)) for n, name in enumerate(run.policies)))
    policies = describe({name: (run, name) for name in run.policies})
    numbers = {name: float(n) for n, name in enumerate(run.policies)}
    table = across.ablation(results, policies)
    assert [(*index, accuracy) for index, accuracy in table[AVERAGE, "accuracy"].items()] == [
        ("", "Base", numbers["base"]),
        ("(a) Tilted-target correction: acc", "Online DOPD", numbers["acc-online"]),
        ("(a) Tilted-target correction: acc", "Naive Offline", numbers["acc-naive"]),
        ("(a) Tilted-target correction: acc", "Tilted-Target (ours)", numbers["acc"]),
        ("(b) Composition: acc + brief", "Data Mixture", numbers["mixture"]),
        ("(b) Composition: acc + brief", "acc → brief", numbers["forth"]),
        ("(b) Composition: acc + brief", "Tilted-Target (ours)", numbers["both"]),
    ]
    assert across.ablation(results[:2], policies).empty


def test_controls_levels_and_refreshed_students_belong_to_no_sweep_and_no_ablation(world: dict[str, Any]) -> None:
    """A placebo is trained on other shifts, a level with others, and refreshed students on other responses."""
    levels = {"short": {"acc": 1.0}, "long": {"brief": 1.0}}
    sweep = {f"share-{share}": {"weights": {"acc": 1 - share, "brief": share}} for share in (0.25, 0.5, 0.75)}
    world["compositions"] = {
        "flipped": {"weights": {"acc": 1.0}, "flip": True},
        "dial": {"levels": levels, "default": "short", "control": {"prefix": "{level}:"}},
        "one": {"weights": {"acc": 1.0}, "alpha": 3.0},
        "naive": {"weights": {"acc": 1.0}, "objective": "direct-opd"},
        **sweep,
        "shuffled": {**sweep["share-0.5"], "shuffle": "states"},
        "refreshed": {**sweep["share-0.5"], "refresh": 2},
    }
    run = run_of(world)
    policies = describe({name: (run, name) for name in run.policies})
    family = policies.loc["share-0.5", "family"]
    assert list(policies.index[policies["family"] == family]) == list(sweep)
    assert policies.loc[["flipped", "shuffled"], ["kind", "variant"]].to_numpy().tolist() == [["baseline", ""]] * 2
    results = results_of(*(result_row(name, {"b": (n, n)}, (n, n)) for n, name in enumerate(run.policies)))
    table = across.ablation(results, policies)[AVERAGE, "accuracy"]
    assert {index: run.policies[int(place)] for index, place in table.items()} == {
        ("", "Base"): "base",
        ("(a) Tilted-target correction: acc", "Naive Offline"): "naive",
        ("(a) Tilted-target correction: acc", "Tilted-Target (ours)"): "one",
        ("(b) Composition: acc + brief", "Refreshed (2 parts)"): "refreshed",
        ("(b) Composition: acc + brief", "Tilted-Target (ours)"): "share-0.5",
    }


def test_only_names_levels_merges_and_targets(world: dict[str, Any], tmp_path: Path) -> None:
    """What a policy is made of is reported with it, and cases of others are left out."""
    world["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / 'sums.jsonl', 3)}"]}
    levels = {"short": {"acc": 1.0}, "long": {"brief": 1.0}}
    world["compositions"]["dial"] = {"levels": levels, "default": "short", "control": {"prefix": "{level}:"}}
    merge = {"merge": "linear", "weights": {"acc-only": 0.5, "brief-only": 0.5}}
    world["policies"] = {"blend": merge, "live": {"decode": "both"}}
    world["report"] = {"cases": {"one": {"wrong": ["brief-only"], "right": ["both"]}}}
    run = run_of(world)
    write_evaluations(run, dict.fromkeys(run.policies, (0.5, 50.0)))
    for name, shown in {
        "blend": ["acc-only", "brief-only", "blend"],
        "live": ["both", "live"],
        "dial@short": ["dial", "dial@short", "dial@long"],
    }.items():
        page = report.run([run], QUIET, tmp_path / name, only=[name])
        points = json.loads((page.parent / "points.json").read_text())
        assert [point["policy"] for point in points] == ["base", *shown]


def test_tags_are_those_of_all_runs(world: dict[str, Any], tmp_path: Path) -> None:
    runs = []
    for number, name in enumerate(("one", "two")):
        bench = f"file:{save_prompts(tmp_path / f'{name}.jsonl', 8, seed=number)}"
        runs.append(run_of({**world, "name": name, "tags": {"rules": {"any": "."}}, "eval": {"benchmarks": [bench]}}))
        write_evaluations(runs[-1], {"base": (0.5, 50.0)})
    (student,) = across.read_students(runs, [summaries(run) for run in runs])
    assert across.tag_table(runs, student.evaluated)["any", "problems"].tolist() == [16]


def test_runs_that_hold_out_different_problems_are_joined(world: dict[str, Any], tmp_path: Path) -> None:
    """With the same problems, a policy of both runs would count twice."""
    runs, found = [], []
    for number, name in enumerate(("one", "two", "again")):
        source = save_prompts(tmp_path / f"{name}.jsonl", 60, seed=number % 2)
        prompts = {**world["prompts"], "source": str(source)}
        runs.append(run_of({**world, "name": name, "prompts": prompts, "eval": {"benchmarks": ["held-out"]}}))
        benchmark = load_eval_benchmark(runs[-1].recipe, "held-out")
        samples = draw_samples(benchmark, "base", 0.5, 50.0, 2)
        found.append({"base": [summarise(benchmark, samples, {}, (), lambda cut: [])]})
    (student,) = across.read_students(runs[:2], found[:2])
    assert [one.label for one in student.evaluated["base"]] == ["held-out (one)", "held-out (two)"]
    assert student.results.loc[("", "base"), (AVERAGE, "accuracy")] == pytest.approx(
        sum(one["base"][0].accuracy for one in found[:2]) / 2
    )
    (alone,) = across.read_students(runs[:1], found[:1])
    assert [one.label for one in alone.evaluated["base"]] == ["held-out"]
    with pytest.raises(InputError, match=r"base is evaluated on held-out by two of the runs"):
        across.read_students([runs[0], runs[2]], [found[0], found[2]])


def in_two_runs(world: dict[str, Any], tmp_path: Path, other: dict[str, Any], **sections: Any) -> list[Any]:
    """The base is evaluated in one run, and a composition of the same name in another, which differs in something."""
    bench = f"file:{save_prompts(tmp_path / 'sums.jsonl', 6)}"
    one = {**world, "eval": {"benchmarks": [bench]}, "compositions": {"both": world["compositions"]["both"]}}
    two = {**one, "name": "two", "compositions": {"both": other}, **sections}
    two["eval"] = {"benchmarks": [bench], **sections.get("eval", {})}
    runs = [run_of(one), run_of(two)]
    write_evaluations(runs[0], {"base": (0.5, 50.0)})
    write_evaluations(runs[1], {"both": (0.8, 50.0)})
    return runs


ASKED = [
    ("format", "plain", "format = plain (base: question-answer)"),
    ("format", "Solve {prompt}", "format = Solve {prompt} (base: question-answer)"),
    ("thinking", False, "thinking"),
    ("temperature", 0.1, "temperature"),
    ("max_tokens", 7, "max_tokens"),
]


@pytest.mark.parametrize(("key", "value", "why"), ASKED, ids=[f"{key}-{value}" for key, value, _ in ASKED])
def test_policies_that_were_asked_otherwise_are_not_compared(
    world: dict[str, Any], tmp_path: Path, key: str, value: Any, why: str
) -> None:
    world["prompts"] = {**world["prompts"], "format": "question-answer"}
    runs = in_two_runs(world, tmp_path, world["compositions"]["both"], eval={key: value})
    (student,) = across.read_students(runs, [summaries(run) for run in runs])
    both = student.results.xs("both", level="policy")
    assert both["sums", "accuracy"].notna().all()
    assert both[AVERAGE, "accuracy"].notna().all()
    assert both[[("sums", "aes"), (AVERAGE, "aes")]].isna().all(axis=None)
    (note,) = not_compared(student.results)
    assert note.startswith("both on sums is not compared with the base: ")
    assert why in note


def test_another_content_of_a_benchmark_is_not_compared(world: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    other = f"file:{save_prompts(tmp_path / 'more' / 'sums.jsonl', 6, seed=6)}"
    runs = in_two_runs(world, tmp_path, world["compositions"]["both"], eval={"benchmarks": [other]})
    (student,) = across.read_students(runs, [summaries(run) for run in runs])
    assert student.results.xs("both", level="policy")[AVERAGE, "aes"].isna().all()
    assert not_compared(student.results) == [
        "both on sums is not compared with the base: another content of the benchmark."
    ]


def test_the_same_questions_in_another_file_are_compared(world: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    same = f"file:{save_prompts(tmp_path / 'more' / 'sums.jsonl', 6)}"
    runs = in_two_runs(world, tmp_path, world["compositions"]["both"], eval={"benchmarks": [same]})
    (student,) = across.read_students(runs, [summaries(run) for run in runs])
    assert student.results.xs("both", level="policy")[AVERAGE, "aes"].notna().all()
    assert not_compared(student.results) == []


def test_the_system_prompt_of_a_policy_is_part_of_the_policy(world: dict[str, Any], tmp_path: Path) -> None:
    world["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / 'sums.jsonl', 6)}"], "chat": True}
    world["policies"] = {"told": {"model": world["student"]["model"], "system": "Be brief."}}
    run = run_of(world)
    write_evaluations(run, {"base": (0.5, 50.0), "told": (0.5, 20.0)})
    table = results_table(summaries(run))
    assert table.xs("told", level="policy")[AVERAGE, "aes"].notna().all()
    assert not_compared(table) == []


def test_a_namesake_keeps_the_weights_and_alpha_of_its_run(world: dict[str, Any], tmp_path: Path) -> None:
    other = {"weights": {"acc": 0.1, "brief": 0.9}, "alpha": 0.5}
    runs = in_two_runs(world, tmp_path, other)
    write_evaluations(runs[0], {"both": (0.7, 60.0)})
    page = report.run(runs, QUIET, tmp_path / "joined")
    points = {point["policy"]: point for point in json.loads((page.parent / "points.json").read_text())}
    assert list(points) == ["base", "both", "both (two)"]
    assert (points["both"]["weights"], points["both"]["alpha"]) == ({"acc": 0.5, "brief": 0.5}, 2.0)
    assert (points["both (two)"]["weights"], points["both (two)"]["alpha"]) == (other["weights"], 0.5)


def test_namesakes_in_runs_of_one_name_stay_apart(world: dict[str, Any], tmp_path: Path) -> None:
    bench = f"file:{save_prompts(tmp_path / 'sums.jsonl', 3)}"
    runs = []
    for place, alpha in enumerate((1.0, 2.0, 3.0)):
        own = {**world, "runs": str(tmp_path / str(place)), "eval": {"benchmarks": [bench]}}
        own["compositions"] = {"both": {"weights": {"acc": 1.0}, "alpha": alpha}}
        runs.append(run_of(own))
        write_evaluations(runs[-1], {"both": (0.5, 50.0)})
    (student,) = across.read_students(runs, [summaries(run) for run in runs])
    assert [policy for _, policy in student.results.index] == ["both", "both (1/tiny)", "both (2/tiny)"]
    assert student.policies["alpha"].tolist() == [1.0, 2.0, 3.0]
