"""`lweave report` over a small run with real caches: what it writes, merges, refuses, and how it looks."""

import base64
import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from pandas import DataFrame, concat
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from lightning_weave.bench.definitions import load_benchmark
from lightning_weave.bench.samples import read_samples, to_line
from lightning_weave.cache.shifts import entropy
from lightning_weave.checks.watch import check_results, check_rollouts, check_scores
from lightning_weave.cli import app
from lightning_weave.config import Case, dump_recipe
from lightning_weave.errors import InputError
from lightning_weave.maths import aes
from lightning_weave.progress import Progress
from lightning_weave.report import cases, report
from lightning_weave.report.page import hyperparameters
from lightning_weave.report.survey import TRAJECTORIES, Vocabulary, draw_rows, loom_data, score_student, survey_cache
from lightning_weave.run import Run
from lightning_weave.stages.caches import open_scored
from lightning_weave.stages.run import make_students
from lightning_weave.stages.score import make_cache
from report.chromium import browsing, needs_chromium, open_page
from report.evaluated import HOSTILE, write_evaluations
from tiny import make_world, run_of, save_prompts

pytestmark = pytest.mark.slow
QUIET = Progress(quiet=True)
POLICIES = {"base": (0.55, 400), "acc-only": (0.85, 450), "brief-only": (0.5, 280), "both": (0.8, 250)}
TABLES = ("results", "cost", "hyperparameters")
CASE = {"wrong": ["brief-only"], "right": ["acc-only", "both"], "shortest": "both", "count": 2}


def vocabulary_of(run: Run) -> Vocabulary:
    return Vocabulary.from_tokenizer(run.student.tokenizer, run.student.stop_ids)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A small world with a whole cache, one trained composition, and evaluations of everything."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("report")
    made = make_world(root, prompts=8)
    made["eval"] = {"benchmarks": [f"file:{save_prompts(root / 'sums.jsonl', 14, seed=9)}"]}
    made["report"] = {"cases": {"accuracy-and-brevity": CASE}}
    run = run_of(made)
    make_cache(run, QUIET)
    make_students(run, QUIET, ["both"])
    write_evaluations(run, POLICIES)
    return made


@pytest.fixture(scope="module")
def page(recipe: dict[str, Any]) -> Path:
    return report.run([run_of(recipe)], QUIET)


def test_everything_is_written(page: Path) -> None:
    names = {path.relative_to(page.parent).as_posix() for path in page.parent.rglob("*") if path.is_file()}
    figures = [
        "frontier",
        "profile",
        "budgets",
        "kinds",
        "positions",
        "training-reverse_kl",
        "training-loss",
        "training-drift",
        "cost",
        "amortised",
    ]
    assert names == {
        "index.html", "points.json", "tables/cases.tex",
        *(f"tables/{name}.{suffix}" for name in TABLES for suffix in ("md", "tex", "csv")),
        *(f"figures/{name}.{suffix}" for name in figures for suffix in ("svg", "pdf", "png")),
    }  # fmt: skip
    assert page.stat().st_size < 5e6


def test_the_command_reports_only_the_policies_that_are_named(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(dump_recipe(run_of(recipe).recipe))
    command = ["report", str(tmp_path / "mine.toml"), "--only", "both", "--out", str(tmp_path / "report")]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "report" / "points.json").read_text())
    assert [point["policy"] for point in points] == ["base", "both"]


def test_hyperparameters_are_those_that_students_were_trained_with(recipe: dict[str, Any], page: Path) -> None:
    with (page.parent / "tables" / "hyperparameters.csv").open() as file:
        found = {row["Hyperparameter"]: row["Value"] for row in csv.DictReader(file)}
    made = run_of(recipe).stage("train", "both").require()
    assert found == {
        "Replay rounds": str(made["updates"] // 2),  # updates_per_round
        "Cached trajectories per round": "8",
        "Training epochs": "2",
        "Maximum response length": "12",
        "Rollout temperature": "1",
        "Rollout top-p": "1",
        "alpha": "2",
        "Global batch size": "4",
        "Learning rate": "0.001",
        "LR schedule": "constant",
        "Optimizer": "AdamW",
        "Adam betas": "0.9, 0.999",
        "Weight decay": "0.01",
        "Gradient clipping": "1",
    }
    other = run_of({**recipe, "train": {**recipe["train"], "learning_rate": 1e-4}})
    table = hyperparameters({"one": run_of(recipe), "two": other})
    assert list(table.columns) == ["one", "two"]
    assert table.loc["Learning rate"].tolist() == ["0.001", "0.0001"]


def test_points_are_what_was_evaluated(recipe: dict[str, Any], page: Path) -> None:
    points = json.loads((page.parent / "points.json").read_text())
    assert [point["policy"] for point in points] == list(POLICIES)
    run = run_of(recipe)
    measured = {}
    for policy in POLICIES:
        folder = run.stage("eval", policy, run.recipe.eval.benchmarks[0]).folder
        samples = list(read_samples(folder / "samples.jsonl"))
        right = 100 * sum(sample.correct for sample in samples) / len(samples)
        measured[policy] = (right, sum(sample.tokens for sample in samples) / len(samples))
    for point in points:
        assert (point["accuracy"], point["tokens"]) == pytest.approx(measured[point["policy"]])
        assert point["aes"] == pytest.approx(aes(*measured[point["policy"]], *measured["base"]))
        assert point["aes_low"] <= point["aes"] <= point["aes_high"]
    assert points[3]["weights"] == {"acc": 0.5, "brief": 0.5}
    assert points[0]["weights"] == {}
    assert {(one["benchmarks"]["sums"]["problems"], one["benchmarks"]["sums"]["samples"]) for one in points} == {
        (14, 6)
    }
    assert "14 problems, 6 samples each, with one training seed" in page.read_text()


def test_trained_students_in_the_loom_are_the_checkpoints(recipe: dict[str, Any]) -> None:
    run = run_of(recipe)
    cache = open_scored(run)
    assert cache is not None
    blocks = [cache.block([number]) for number in (0, 5, 11)]
    scored = score_student(run, "both", blocks, QUIET)
    folder = run.stage("train", "both").folder / "final"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    vocabulary = len(AutoTokenizer.from_pretrained(folder))
    for block, (logp_TC, mass_T) in zip(blocks, scored, strict=True):
        prompt_ids = block.rollouts.prompt_ids.flat
        ids = torch.from_numpy(np.concatenate([prompt_ids, block.sampled_P])).long()
        logits = model(ids[None]).logits[0, len(prompt_ids) - 1 : -1, :vocabulary]  # padding has no token
        candidates = torch.from_numpy(np.array(block.candidates.ids.flat)).long()
        expected = torch.log_softmax(logits, dim=-1).gather(1, candidates)
        np.testing.assert_allclose(logp_TC, expected.detach().numpy(), atol=1e-4)
        np.testing.assert_allclose(mass_T, expected.exp().sum(dim=1).detach().numpy(), atol=1e-4)


def test_the_loom_holds_no_more_than_it_may(recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_weave.report.survey.MEGABYTES", 0.004)
    run = run_of(recipe)
    cache = open_scored(run)
    assert cache is not None
    loom = loom_data(run, cache, vocabulary_of(run), None, QUIET)
    assert loom is not None
    arrays = [
        loom["ids"],
        loom["sampled"],
        loom["logp"],
        loom["other"],
        *loom["shifts"],
        *loom["students"]["both"].values(),
    ]
    assert sum(map(len, arrays)) <= 4000
    assert any(thread["shown"] < thread["tokens"] for thread in loom["threads"])


def test_a_composition_without_an_alpha_is_not_in_the_loom(recipe: dict[str, Any], tmp_path: Path) -> None:
    budget = {"weights": {"acc": 0.5, "brief": 0.5}, "kl_budget": 0.01}
    own = {**recipe, "runs": _copy(recipe, tmp_path), "report": {}}
    own["compositions"] = {"budget": budget, **recipe["compositions"]}
    run = run_of(own)
    cache = open_scored(run)
    assert cache is not None
    vocabulary = vocabulary_of(run)
    loom = loom_data(run, cache, vocabulary, "budget", QUIET)
    assert loom is not None
    assert [one["name"] for one in loom["settings"]] == ["acc-only", "brief-only", "both"]
    assert loom["start"] == "both"
    assert "budget" in survey_cache(run, cache, vocabulary, QUIET).kept
    alone = run_of({**own, "compositions": {"budget": budget}})
    assert loom_data(alone, cache, vocabulary, None, QUIET) is None

    make_students(run, QUIET, ["budget"])
    solved = run.stage("train", "budget").require()["alpha"]
    loom = loom_data(run, cache, vocabulary, "budget", QUIET)
    assert loom is not None
    assert loom["settings"][0] == {"name": "budget", "policy": "budget", "weights": [0.5, 0.5], "alpha": solved}
    assert loom["start"] == "budget"


def outcomes(run: Run, case: Case) -> DataFrame:
    return concat([cases.read_outcomes(run, policy) for policy in cases.named_policies(case)])


def test_cases_do_not_depend_on_what_was_written(recipe: dict[str, Any], tmp_path: Path) -> None:
    copied = {**recipe, "runs": str(tmp_path / "runs")}
    shutil.copytree(recipe["runs"], tmp_path / "runs")
    run = run_of(copied)
    case = run.recipe.report.cases["accuracy-and-brevity"]
    before = cases.choose(case, outcomes(run, case))
    assert len(before) == 2
    for path in (tmp_path / "runs").rglob("samples.jsonl"):
        rewritten = [
            to_line(type(one)(**{**vars(one), "text": one.text[::-1], "answer": "?"})) for one in read_samples(path)
        ]
        path.write_text("".join(rewritten))
    assert cases.choose(case, outcomes(run, case)) == before


def test_a_reader_finds_what_the_run_was_and_what_its_checks_found(recipe: dict[str, Any], page: Path) -> None:
    text = page.read_text()
    run = run_of(recipe)
    for model in (recipe["student"]["model"], recipe["anchors"]["acc"]["post"], recipe["anchors"]["brief"]["pre"]):
        assert model in text
    assert run.identity_of(run.student)[:12] in text
    assert re.search(r"<dt>train.learning_rate</dt><dd>[\d.e-]+</dd>", text)
    assert re.search(r"<th scope=.row.>reference</th><td>\d{4}-\d\d-\d\d \d\d:\d\d to", text)
    assert f"torch {torch.__version__}" in text
    for finding in [*check_rollouts(run), *check_scores(run), *check_results(run)]:
        assert str(escape(finding.text)) in text
        assert finding.bounds is None or finding.bounds.words in text
    assert {"rollout", "anchors.acc", "compositions.both", "eval base/sums"} <= set(
        re.findall(r"<tr class=.found-\w+.><th scope=.row.>([^<]*)</th>", text)
    )


def test_a_report_outlives_the_file_of_its_questions(recipe: dict[str, Any], page: Path, tmp_path: Path) -> None:
    runs = _copy(recipe, tmp_path)
    run_of({**recipe, "runs": runs}).remember()
    made = run_of({**recipe, "runs": runs})
    for policy in POLICIES:
        made.stage("eval", policy, made.recipe.eval.benchmarks[0])
    made.remember()
    questions = Path(recipe["eval"]["benchmarks"][0].removeprefix("file:"))
    hidden = questions.rename(tmp_path / "hidden.jsonl")
    try:
        text = report.run([run_of({**recipe, "runs": runs})], QUIET).read_text()
    finally:
        hidden.rename(questions)
    assert str(escape(cases.UNAVAILABLE)) in text
    assert (page.parent / "points.json").read_text() == (Path(runs) / "tiny" / "report" / "points.json").read_text()


def test_two_runs_of_one_student_are_one_row(recipe: dict[str, Any], page: Path, tmp_path: Path) -> None:
    code = {**recipe, "name": "code", "runs": str(tmp_path / "runs"), "report": {}}
    code["eval"] = {"benchmarks": [f"file:{save_prompts(tmp_path / 'more.jsonl', 9, seed=3)}"]}
    others = {"base": (0.5, 300), "both": (0.7, 200), "brief-only": (0.4, 150)}
    write_evaluations(run_of(code), others)
    merged = report.run([run_of({**recipe, "runs": _copy(recipe, tmp_path)}), run_of(code)], QUIET)
    rows = {point["policy"]: point for point in json.loads((merged.parent / "points.json").read_text())}
    assert list(rows) == ["base", "brief-only", "both"]  # in the order of the first recipe
    alone = {point["policy"]: point for point in json.loads((page.parent / "points.json").read_text())}
    lines = (merged.parent / "tables/results.csv").read_text().splitlines()
    assert lines[0].startswith("Group,Policy,sums Acc.,sums #Tok.,more Acc.,more #Tok.,Average")
    assert rows["both"]["accuracy"] != alone["both"]["accuracy"]
    assert "Not on all 2 benchmarks, so without an average: acc-only." in merged.read_text()
    partial = dict(
        zip(lines[0].split(","), next(line for line in lines if ",acc-only," in line).split(","), strict=True)
    )
    empty = {name for name, value in partial.items() if not value}
    assert empty == {"Group", *(name for name in partial if name.startswith(("more", "Average", "AES")))}
    assert merged.parent == tmp_path / "report"  # in the directory that has both: it replaces the page of neither
    assert {path.name for path in (merged.parent / "figures").glob("frontier*.pdf")} == {
        "frontier.pdf", "frontier-sums.pdf", "frontier-more.pdf"
    }  # fmt: skip


def test_a_benchmark_counts_once(recipe: dict[str, Any]) -> None:
    again = {**recipe, "name": "again"}
    write_evaluations(run_of(again), {"base": (0.5, 300)})
    with pytest.raises(InputError, match="a benchmark counts once"):
        report.run([run_of(recipe), run_of(again)], QUIET)


def _copy(recipe: dict[str, Any], folder: Path) -> str:
    shutil.copytree(recipe["runs"], folder / "copied")
    return str(folder / "copied")


def test_a_cache_without_evaluations_is_still_worth_a_page(recipe: dict[str, Any], tmp_path: Path) -> None:
    runs = _copy(recipe, tmp_path)
    shutil.rmtree(Path(runs) / "tiny" / "eval")
    shutil.rmtree(Path(runs) / "tiny" / "report", ignore_errors=True)
    text = report.run([run_of({**recipe, "runs": runs})], QUIET).read_text()
    assert "Not evaluated yet: base, acc-only, brief-only, both" in text
    assert "loom-data-1" in text


def test_an_interrupted_report_is_written_again_but_other_folders_are_refused(
    recipe: dict[str, Any], page: Path, tmp_path: Path
) -> None:
    runs = _copy(recipe, tmp_path)
    (Path(runs) / "tiny" / "report" / "index.html").unlink()
    assert report.run([run_of({**recipe, "runs": runs})], QUIET).exists()
    (tmp_path / "mine" / "figures").mkdir(parents=True)
    with pytest.raises(InputError, match="contains figures but no report"):
        report.run([run_of({**recipe, "runs": runs})], QUIET, tmp_path / "mine")


def test_nothing_to_report_says_where_to_start(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing to report yet. Start with: lweave run tiny\.toml"):
        report.run([run_of({**recipe, "runs": str(tmp_path)})], QUIET)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"cases": {"x": {"right": ["nobody"]}}}, "report.cases.x names the policy 'nobody'; this recipe has base"),
        ({"cases": {"x": {"right": ["both"], "benchmark": "aime-2024"}}}, "report.cases.x.benchmark = 'aime-2024'"),
        ({"students": ["nobody"]}, "report.students names 'nobody'"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused(recipe: dict[str, Any], section: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        report.run([run_of({**recipe, "report": section})], QUIET)


@needs_chromium
def test_the_page_in_a_browser(page: Path) -> None:
    with browsing() as browser:
        for width in (1440, 390):
            with open_page(browser, page, width) as opened:
                shown = opened.page
                assert shown.locator("figure svg").count() == 10
                for drawing in shown.locator("figure svg").all():
                    box = drawing.bounding_box()
                    assert box["width"] >= 250
                    assert box["height"] >= 60
                assert shown.locator("table.results tbody tr").count() == 4
                assert shown.locator("#cases .shown").count() == 6
                assert shown.locator("#cases .shown pre").first.inner_text().startswith(HOSTILE)
                assert shown.locator("#responses-1 .shown").count() == 18  # three of three policies, and the base's
                assert shown.locator("#responses-1 details[open]").count() == 1
                shown.locator(".weave .t").nth(2).click()
                assert shown.locator(".decision tbody tr").count() == 5
                heights = "[...document.querySelectorAll('svg text')].map((one) => one.getBoundingClientRect().height)"
                assert min(shown.evaluate(heights)) >= 9
                assert shown.evaluate("window.pwned") is None
                assert opened.overflow() <= 0
                assert opened.complaints == []
                assert opened.requests == [page.as_uri()]


def test_a_report_made_again_is_equal_bytes_and_clears_what_is_left_over(
    recipe: dict[str, Any], page: Path, tmp_path: Path
) -> None:
    runs = _copy(recipe, tmp_path)
    leftover = Path(runs) / "tiny" / "report" / "figures" / "old.svg"
    leftover.write_text("<svg/>")
    second = report.run([run_of({**recipe, "runs": runs})], QUIET)
    assert second.read_bytes() == page.read_bytes()
    assert not leftover.exists()


def test_results_by_the_tag_of_the_problem(recipe: dict[str, Any], tmp_path: Path) -> None:
    """Of every policy, the mean over the problems of a tag, on the page and as tables."""
    routed = {"weights": {"sum": {"acc": 1.0}, "default": {"brief": 1.0}}}
    compositions = {**recipe["compositions"], "routed": routed}
    tagged = run_of({**recipe, "tags": {"rules": {"sum": r"\+"}}, "compositions": compositions})
    page = report.run([tagged], QUIET, out=tmp_path / "report")
    assert '<section id="tags"' in page.read_text()
    assert re.search(r'"name": ?"routed \(sum\)", ?"policy": ?"routed"', page.read_text())
    with (page.parent / "tables" / "tags.csv").open() as lines:
        rows = {row["Policy"]: row for row in csv.DictReader(lines)}
    (name,) = recipe["eval"]["benchmarks"]
    questions = {problem.id: problem.question for problem in load_benchmark(name).problems}
    assert {"+" in question for question in questions.values()} == {True, False}
    for policy in POLICIES:
        samples = list(read_samples(tagged.stage("eval", policy, name).folder / "samples.jsonl"))
        for tag, found in {
            "sum": [one for one in samples if "+" in questions[one.problem]],
            "default": [one for one in samples if "+" not in questions[one.problem]],
        }.items():
            assert float(rows[policy][f"{tag} Acc."]) == pytest.approx(100 * np.mean([one.correct for one in found]))
            assert float(rows[policy][f"{tag} #Tok."]) == pytest.approx(np.mean([one.tokens for one in found]))


def test_the_loom_knows_what_the_rules_of_an_anchor_change(recipe: dict[str, Any]) -> None:
    """Against the shifts without rules: a clip changes what is larger, a floor of entropy masks what is surer."""
    plain = open_scored(run_of(recipe))
    at = plain.names.index("acc")
    blocks = [plain.block([number]) for number in draw_rows(len(plain), TRAJECTORIES, cases.SEED)]
    size_P = np.concatenate([np.abs(block.r_KPC[at]).max(axis=1) for block in blocks])
    sure_P = np.concatenate([entropy(block.candidates) for block in blocks])
    valid_P = np.concatenate([block.valid_KP[at] for block in blocks])
    rules = {"clip": float(f"{np.median(size_P):.2g}"), "only_above": float(f"{np.median(sure_P[valid_P]):.2g}")}
    sections = {**recipe["anchors"], "acc": {**recipe["anchors"]["acc"], "shift": rules}}
    run = run_of({**recipe, "anchors": sections, "report": {"students": []}})
    data = loom_data(run, open_scored(run), vocabulary_of(run), None, QUIET)
    assert data is not None
    changed = [np.frombuffer(base64.b64decode(one["changed"]), np.uint8) for one in data["rules"][at]]
    assert [one["rule"] for one in data["rules"][at]] == [f"{rule} = {value:g}" for rule, value in rules.items()]
    np.testing.assert_array_equal(changed[0], size_P > rules["clip"])
    np.testing.assert_array_equal(changed[1], valid_P & (sure_P < rules["only_above"]))
    assert all(0 < one.mean() < 1 for one in changed)
    assert data["rules"][1 - at] == []


def test_the_loom_comes_before_the_setup_and_its_menu_has_questions(recipe: dict[str, Any], page: Path) -> None:
    text = page.read_text()
    places = [text.index(f'id="{part}-1"') for part in ("loom", "anchors", "checks", "setup")]
    assert places == sorted(places)
    data = json.loads(text.partition('id="loom-data-1">')[2].partition("</script>")[0])
    questions = [json.loads(line)["problem"] for line in Path(recipe["prompts"]["source"]).read_text().splitlines()]
    assert all(any(question in thread["name"] for question in questions) for thread in data["threads"])


def test_the_headline_counts_problems_and_seeds(page: Path) -> None:
    text = page.read_text()
    assert "accuracy on 14 problems at" in text
    assert "Measured on 14 problems, 6 samples each, with one training seed." in text
    assert re.search(r"Accuracy: ±[\d.]+ points \(95 % interval\)", text)


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode != 0, reason="needs a mount namespace"
)
def test_a_full_disk_is_one_line(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(recipe)
    (run.directory / "recipe.toml").write_text(dump_recipe(run.recipe))
    (tmp_path / "small").mkdir()
    lweave = f"{sys.executable} -m lightning_weave.cli"
    command = f"mount -t tmpfs -o size=100k tmpfs small && {lweave} report {run.directory} --out small/report"
    ended = subprocess.run(["unshare", "-rm", "sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert re.search(r"^lweave: small/report/\S+: cannot be written \(No space left on device\)", ended.stderr, re.M)
    assert "Traceback" not in ended.stderr


def test_only_some_policies_need_no_cases_of_others(recipe: dict[str, Any], tmp_path: Path) -> None:
    page = report.run([run_of(recipe)], QUIET, tmp_path / "only", only=["both"])
    assert [point["policy"] for point in json.loads((page.parent / "points.json").read_text())] == ["base", "both"]
