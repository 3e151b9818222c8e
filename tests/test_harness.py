"""lm-evaluation-harness itself on policies of a run (`make test-peers`): the accuracy of our own evaluation."""

import json
import os
import sys
from pathlib import Path

import pytest
from rich.console import Console

from lightning_weave import Run
from lightning_weave.bench.summary import read_result, read_summary
from lightning_weave.report.results import show_results

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
TASK = r"""
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{problem}}}}\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<|end|>"], max_gen_toks: 60, do_sample: false}}
filter_list:
  - name: boxed
    filter:
      - {{function: regex, regex_pattern: "boxed\\{{(\\d+)\\}}", group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


def test_a_trained_student_has_the_accuracy_of_our_own_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "data"))
    problems = tmp_path / "sums.jsonl"
    overrides = [
        "prompts.take=32",
        "rollout.responses=2",
        "train.epochs=8",
        "train.prompts_per_round=16",
        f'eval.benchmarks=["file:{problems}"]',
        "eval.samples=1",
        "eval.temperature=0",
        "eval.max_tokens=60",
        "eval.budgets=[]",
        "machine.threads=1",
        f'harness.include="{tmp_path / "tasks"}"',
        'harness.tasks=["sums"]',
        "harness.args.apply_chat_template=false",
    ]
    recipe = Run.demo(quiet=True).recipe.model_dump(mode="json", by_alias=True, exclude_none=True)
    recipe["compositions"] = {"even": {"weights": {"accuracy": 0.75, "brevity": 0.25}}}
    recipe["report"]["cases"] = {}
    shipped = (tmp_path / "runs/demo-world/benchmarks/easy.jsonl").read_text().splitlines()
    problems.write_text("\n".join(shipped[:100]) + "\n")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(data=problems))

    run = Run(recipe, overrides, quiet=True, trust=True)  # a task's definition can name functions
    run.run()
    found = {}
    for policy in ("base", "even"):
        folder = run.path / "eval" / policy
        (metric,) = read_result(folder / "lm-eval-sums").metrics
        summary = read_summary(folder / "sums" / "summary.json")
        ours = dict(zip(summary.problems, summary.problem_accuracy, strict=True))
        ids = [json.loads(line)["id"] for line in shipped[:100]]
        theirs = {ids[int(key.split("/")[1])]: 100 * value for key, value in metric.values.items()}
        assert theirs == ours  # problem by problem
        assert 100 * metric.value == pytest.approx(summary.accuracy)
        assert metric.error is not None
        assert 40 < summary.accuracy < 100
        assert list((folder / "lm-eval-sums").glob("results_*.json"))
        assert list((folder / "lm-eval-sums").glob("samples_sums_*.jsonl"))
        found[policy] = metric
    assert found["base"].value != found["even"].value

    said = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show_results(run, said)
    assert "sums exact_match↑" in said.export_text()
    run.report()
    page = (run.path / "report" / "index.html").read_text()
    assert "exact_match ↑" in page
    points = {point["policy"]: point for point in json.loads((run.path / "report" / "points.json").read_text())}
    moved = points["even"]["tasks"]["sums"]
    assert moved["difference"] == pytest.approx(found["even"].value - found["base"].value)
    assert 0 < moved["difference_error"] < found["even"].error + found["base"].error


def test_a_task_that_it_does_not_have_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    from lightning_weave.errors import InputError

    monkeypatch.chdir(tmp_path)
    run = Run.demo(['harness.tasks=["ifevall"]', f'harness.python="{sys.executable}"'], quiet=True, trust=True)
    with pytest.raises(InputError, match=r"no task 'ifevall'\. Did you mean ifeval"):
        run.harness("base")
