"""The results of evaluation: the rows of the paper's table, one point per policy as JSON, and what trackers get."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from lightning_weave.bench.definitions import asked_benchmark
from lightning_weave.bench.summary import Overall, Summary, combine, read_summary
from lightning_weave.config import Tags
from lightning_weave.progress import SAID
from lightning_weave.report.tables import BenchmarkScore, PolicyRow, TaskScore, console, fits, plain
from lightning_weave.report.tasks import missing_rows, task_columns, task_results, with_tasks
from lightning_weave.runs.evaluation import asked_problems
from lightning_weave.runs.known import neighbours, tellable
from lightning_weave.runs.prompts import tag_of
from lightning_weave.runs.steps import Steps
from lightning_weave.store.identity import fingerprint
from lightning_weave.trackers import Tracked, open_trackers

REPORT = "report"  # the run of a tracker that has the figures
PolicySummaries = dict[str, list[Summary]]  # policy -> its benchmarks


def summaries(steps: Steps) -> PolicySummaries:
    """Read the evaluations of every policy that has all benchmarks done."""
    finished = {}
    for policy in tellable(steps):
        stages = [steps.store.stage(steps.eval(policy, name)) for name in steps.recipe.eval.benchmarks]
        if all(stage.state() == "done" for stage in stages):
            finished[policy] = [read_summary(stage.folder / "summary.json") for stage in stages]
    return finished


def other_protocols(steps: Steps) -> dict[str, PolicySummaries]:
    """Read the evaluations on the same benchmarks by other protocols than the recipe's, by what differs.

    Of each protocol, the policies that have all the benchmarks of the first.
    """
    protocols: dict[str, PolicySummaries] = {}
    for policy in tellable(steps):
        for name in steps.recipe.eval.benchmarks:
            stage = steps.store.stage(steps.eval(policy, name))
            for other, label in neighbours(stage):
                protocols.setdefault(label, {}).setdefault(policy, []).append(
                    read_summary(other.folder / "summary.json")
                )
    return {label: _rectangular(policies) for label, policies in protocols.items()}


def _rectangular(policies: PolicySummaries) -> PolicySummaries:
    names = [summary.benchmark for summary in next(iter(policies.values()))]
    return {
        policy: results for policy, results in policies.items() if [summary.benchmark for summary in results] == names
    }


def overalls(evaluated: PolicySummaries) -> dict[str, Overall]:
    """Average every policy over its benchmarks, and compare it with the base if that was evaluated."""
    return {policy: combine(results, evaluated.get("base")) for policy, results in evaluated.items()}


def policy_rows(
    evaluated: PolicySummaries,
    combined: Mapping[str, Overall] | None = None,
    group: str = "",
    stale: Collection[str] = (),
) -> list[PolicyRow]:
    """Make one row per policy, compared with the base if that was evaluated."""
    combined = overalls(evaluated) if combined is None else combined
    rows = []
    for policy, results in evaluated.items():
        overall = combined[policy]
        aes = overall.comparison.average.aes if overall.comparison else None
        rows.append(
            PolicyRow(
                policy=policy,
                scores=tuple(BenchmarkScore(one.label, one.accuracy, one.tokens, one.samples) for one in results),
                accuracy=overall.accuracy,
                tokens=overall.tokens,
                aes=aes.estimate if aes else None,
                aes_low=aes.low if aes and policy != "base" else None,
                aes_high=aes.high if aes and policy != "base" else None,
                group=group,
                stale=policy in stale,
            )
        )
    return rows


def points(steps: Steps, rows: Sequence[PolicyRow]) -> list[dict[str, Any]]:
    """Make points.json: a list of policies with weights, alpha, accuracy, tokens and AES with its interval."""
    return [_point(steps, row) for row in rows]


def tag_rows(steps: Steps, evaluated: PolicySummaries) -> list[PolicyRow]:
    """Make one row per policy with a column per tag, over the problems of all benchmarks; none without tags."""
    if steps.recipe.tags == Tags():
        return []
    section = steps.recipe.eval
    tags: dict[tuple[str, str], str] = {}
    for name in section.benchmarks:
        benchmark = asked_benchmark(section, name)
        problems = asked_problems(benchmark, steps.student.tokenizer, section)
        tags |= {(benchmark.name, one.prompt.id): tag_of(steps.recipe, one) for one in problems}
    rows = []
    for policy, results in evaluated.items():
        by_tag: dict[str, list[tuple[float, float]]] = {}
        for result in results:
            for problem, right, tokens in zip(
                result.problems, result.problem_accuracy, result.problem_tokens, strict=True
            ):
                by_tag.setdefault(tags[result.benchmark, problem], []).append((right, tokens))
        means = {tag: np.mean(values, axis=0).tolist() for tag, values in sorted(by_tag.items())}
        every = np.mean([value for values in by_tag.values() for value in values], axis=0).tolist()
        scores = tuple(BenchmarkScore(tag, right, tokens) for tag, (right, tokens) in means.items())
        group = steps.recipe.mark
        rows.append(PolicyRow(policy=policy, scores=scores, accuracy=every[0], tokens=every[1], group=group))
    return rows


def _point(steps: Steps, row: PolicyRow) -> dict[str, Any]:
    composition = steps.recipe.compositions.get(row.policy)
    tasks = {one.task: _task_point(one) for one in row.tasks if not math.isnan(one.value)}
    return {
        "policy": row.policy,
        "weights": (composition.by_tag or composition.weights) if composition else {},
        "alpha": steps.alpha(row.policy) if composition else None,
        "accuracy": _number(row.accuracy),
        "tokens": _number(row.tokens),
        "aes": _number(row.aes),
        "aes_low": _number(row.aes_low if row.policy != "base" else row.aes),
        "aes_high": _number(row.aes_high if row.policy != "base" else row.aes),
        "benchmarks": {
            one.benchmark: {"accuracy": _number(one.accuracy), "tokens": _number(one.tokens)} for one in row.scores
        },
        **({"tasks": tasks} if tasks else {}),
    }


def _task_point(score: TaskScore) -> dict[str, Any]:
    parts = asdict(score)
    return {key: parts[key] for key in ("metric", "value", "error", "difference", "difference_error")}


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value


def result_rows(steps: Steps, evaluated: PolicySummaries) -> list[PolicyRow]:
    """Make one row per policy, with what other harnesses found beside our own benchmarks."""
    tasks = task_results([steps])
    labels = [result.label for result in next(iter(evaluated.values()), [])]
    mark = steps.recipe.mark
    rows = policy_rows(evaluated, group=mark)
    columns = task_columns([tasks], steps.recipe.harness.metrics)
    return with_tasks([*rows, *missing_rows(rows, tasks, labels, mark)], tasks, columns)


def show_results(steps: Steps, out: Console) -> None:
    """Print the table of all policies evaluated so far."""
    evaluations = summaries(steps)
    rows = result_rows(steps, evaluations)
    if rows:
        SAID.info(plain(rows).rstrip())
        if out.is_terminal:
            out.print(console(rows, width=out.width))
            out.print("Bold: best. Underlined: second best. In brackets: 95 % interval.", highlight=False)
            count = len(rows[0].scores)
            if count > 1 and not fits(rows, out.width):
                out.print(f"Means over {count} benchmarks; a wider terminal, or | cat, shows each.", highlight=False)
        else:
            out.print(
                f"{plain(rows)}* best, + second best; in brackets: 95 % interval",
                soft_wrap=True,
                markup=False,
                highlight=False,
            )
        if by_tag := tag_rows(steps, evaluations):
            out.print(f"By tag of the problem:\n{plain(by_tag)}", soft_wrap=True, markup=False, highlight=False)
        for policy, results in evaluations.items():
            for result in results:
                if result.error:
                    text = f"error: {policy} on {result.label}: {result.error}"
                    out.print(text, style="red", soft_wrap=True, markup=False, highlight=False)
        out.print(f"Samples and summaries: {steps.store.run_dir / 'eval'}", soft_wrap=True, markup=False)


def track_evaluation(steps: Steps, policy: str) -> None:
    """Log what is known of a policy now, where its training was logged."""
    if not steps.recipe.train.trackers:
        return
    (row,) = [row for row in result_rows(steps, summaries(steps)) if row.policy == policy]
    figures = {f"eval/{score.benchmark}/accuracy": score.accuracy for score in row.scores}
    figures |= {f"eval/{score.benchmark}/tokens": score.tokens for score in row.scores}
    if row.scores:
        figures |= {"eval/accuracy": row.accuracy, "eval/tokens": row.tokens}
    figures |= {"eval/aes": row.aes} if row.aes is not None else {}
    figures |= {f"eval/{task.task}/{task.metric}": task.value for task in row.tasks}
    for tracker in open_trackers(steps.recipe, _tracked(steps, policy)):
        tracker.results({name: value for name, value in figures.items() if value == value})  # NaN: not measured
        tracker.close()


def track_figures(steps: Steps, folder: Path) -> None:
    """Log the figures of a report, in a run of its own."""
    files = sorted((folder / "figures").glob("*.png"))
    for tracker in open_trackers(steps.recipe, _tracked(steps, REPORT)) if files else ():
        tracker.images({file.stem: file for file in files})
        tracker.close()


def _tracked(steps: Steps, policy: str) -> Tracked:
    """The tracker's run of a policy: a composition's is that of its training."""
    if policy in steps.recipe.compositions:
        stage = steps.store.stage(steps.train(policy))
        return Tracked(policy, stage.folder, stage.step.fingerprint)
    folder = steps.store.run_dir / (policy if policy == REPORT else f"eval/{policy}")
    what = {"run": steps.recipe.name, "student": steps.identity_of(steps.student), "policy": policy}
    return Tracked(policy, folder, fingerprint(what))
