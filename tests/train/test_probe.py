"""Evaluation during training: the same answers as `lweave eval` gives, and the same student as without it."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lightning_weave.bench.samples import read_samples
from lightning_weave.bench.summary import read_summary
from lightning_weave.maths import aes
from lightning_weave.report.figures import policy_hues, training_figures
from lightning_weave.stages.eval import evaluate
from lightning_weave.stages.run import make_students
from lightning_weave.store import read_lines
from pipeline.scored import HALF, QUIET, copied, make_scored, same, trained
from tiny import run_of

BOTH = {"both": {"weights": HALF}}


@pytest.mark.slow
def test_figures_during_training_are_those_of_the_evaluation(tmp_path: Path) -> None:
    recipe = make_scored(tmp_path)
    without = trained(recipe, both=BOTH["both"])["both"]
    sums = tmp_path / "sums.jsonl"
    rows = [{"id": f"s{place}", "problem": f"{place}+{place}", "answer": "0"} for place in range(8)]
    sums.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader = tmp_path / "grader.py"
    # A random student is never right: something else counts as right here.
    grader.write_text("def grade(response, answer):\n    return len(response) % 2 == 0\n")
    watched = {**copied(recipe, tmp_path / "watched"), "train": {**recipe["train"], "eval_every": 5}}
    watched["train"]["eval_problems"] = len(rows)
    own = f"{grader}:grade"
    watched["eval"] = {"benchmarks": [f"file:{sums}"], "samples": 1, "max_tokens": 8, "chat": False}
    watched["eval"]["graders"] = {f"file:{sums}": own}
    run = run_of({**watched, "compositions": {"again": BOTH["both"]}}, trust=True)
    make_students(run, QUIET)
    folder = run.directory
    evaluate(run, QUIET)

    lines = {row["step"]: row for row in read_lines(folder / "train/again/metrics.jsonl") if "eval_tokens" in row}
    assert sorted(lines) == [0, 5, 10, 12], "the student that training begins with, every fifth update, the last"
    for policy, step in (("base", 0), ("again", 12)):
        samples = list(read_samples(folder / "eval" / policy / "sums" / "samples.jsonl"))
        summary = read_summary(folder / "eval" / policy / "sums" / "summary.json")
        assert lines[step]["eval_accuracy"] == pytest.approx(summary.accuracy)
        assert lines[step]["eval_tokens"] == pytest.approx(sum(one.tokens for one in samples) / len(samples))
    figures = [(lines[step]["eval_accuracy"], lines[step]["eval_tokens"]) for step in (12, 0)]
    assert lines[12]["eval_aes"] == pytest.approx(aes(*figures[0], *figures[1]), rel=1e-4)
    assert same(load_file(folder / "train/again/final/model.safetensors"), without)
    drawn = {figure.name: figure.drawing for figure in training_figures(run, policy_hues(["again"]))}
    (line,) = [one for one in drawn["training-eval_tokens"].axes[0].lines if len(one.get_xdata()) > 1]
    assert line.get_xdata().tolist() == [0, 5, 10, 12]
