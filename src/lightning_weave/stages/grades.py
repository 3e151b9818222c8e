"""Grades of the cached responses, computed once: a stage in the folder of the rollout."""

from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_weave.bench.definitions import CODE_COLUMNS, Benchmark, Problem
from lightning_weave.errors import InputError
from lightning_weave.grading.graders import Grader
from lightning_weave.progress import Progress
from lightning_weave.run import Run
from lightning_weave.stages.prompts import load_prompts
from lightning_weave.store import Stage
from lightning_weave.types import Rollouts

VALUES = (0.0, 1.0, np.nan)  # of a grade: wrong, right, no known answer
UNKNOWN = 2
TESTS = (*CODE_COLUMNS, "metadata", "starter_code")


@dataclass(frozen=True)
class Grades:
    """One shard of graded responses."""

    trajectory_R: NDArray[np.uint32]
    grade_R: NDArray[np.uint8]  # index into VALUES


def grade_rows(run: Run, progress: Progress) -> NDArray[np.float64] | None:
    """Grade every cached response: 1, 0, or NaN where the answer is not known. None if no answer is known.

    Resumable shard by shard. No lock is needed: whoever writes a shard writes the same bytes.
    """
    rollout = run.stage("rollout")
    shards = len(rollout.require()["shards"])
    is_code = run.recipe.prompts.format == "livecodebench"
    problems = []
    for prompt in load_prompts(run, TESTS if is_code else ()):
        tests = prompt.columns if is_code and prompt.columns and CODE_COLUMNS[-1] in prompt.columns else None
        problems.append(Problem(prompt.id, "", None if is_code else prompt.answer, tests))
    if not any(problem.row or problem.answer is not None for problem in problems):
        return None
    rule, grader_identity = run.grading
    stage = Stage(rollout.folder, "grades", {"grader": grader_identity}, (rollout,), run.command("forecast"))
    pending = stage.pending(shards)
    if pending:
        run.check_trust()
        benchmark = Benchmark("prompts", "prompts", "code" if is_code else "math", (), 1, 1)
        grader = Grader(benchmark, rule, run.recipe.eval.unsafe_local, run.trust)
        with progress.bar("grade", len(pending), "shard") as bar:
            for shard in pending:
                rows = rollout.open(Rollouts, shard).read()
                grade_R = np.full(len(rows.prompt_R), UNKNOWN, np.uint8)
                asked = []
                for row, problem in enumerate(problems[prompt] for prompt in rows.prompt_R):
                    decided = slice(None) if rows.decided is None else rows.decided[row]
                    ids = rows.response_ids[row][decided].tolist()  # what the student wrote
                    text = str(run.student.tokenizer.decode(ids, skip_special_tokens=True))
                    with suppress(InputError):  # an answer that the grader cannot read is not known
                        if grader.rule.kind in ("numeric", "choice") and problem.answer is not None:
                            grader.grade([(problem, "")])
                        if problem.row or problem.answer is not None:
                            asked.append((row, problem, text))
                found = grader.grade([(problem, text) for _, problem, text in asked])
                grade_R[[row for row, _, _ in asked]] = [one.correct for one in found]
                stage.write(shard, Grades(rows.trajectories(), grade_R))
                bar.advance()
    stage.finish(Grades, shards)
    graded = [stage.open(Grades, shard).read().grade_R for shard in range(shards)]
    return np.array(VALUES)[np.concatenate(graded)]
