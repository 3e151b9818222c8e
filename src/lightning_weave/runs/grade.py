"""Grade responses of either kind, with a reason for every verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.grading.code import extract_code, grade_many
from lightning_weave.grading.math import extract_boxed, grade_with
from lightning_weave.grading.sandbox import open_sandbox


@dataclass(frozen=True)
class Graded:
    """What was answered, and whether it is right."""

    answer: str | None
    correct: bool
    why: str
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


@dataclass(frozen=True)
class Grader:
    """The paper's way to grade one benchmark."""

    benchmark: Benchmark
    profile: Literal["paper", "math-verify"] = "paper"
    unsafe_local: bool = False

    @property
    def name(self) -> str:
        """Names the protocol: only policies graded alike may be compared."""
        return self.profile if self.benchmark.kind == "math" else "livecodebench"

    def grade(self, responses: Sequence[tuple[Problem, str]]) -> list[Graded]:
        """Grade responses; code runs in a sandbox, on all cores."""
        if self.benchmark.kind == "math":
            return [self._grade_maths(problem, text) for problem, text in responses]
        programs = [extract_code(text) for _, text in responses]
        jobs = [(code, problem.row or {}) for code, (problem, _) in zip(programs, responses, strict=True)]
        with open_sandbox(self.unsafe_local) as sandbox:
            verdicts = list(grade_many(jobs, sandbox))
        return [
            Graded(code or None, verdict.correct, verdict.reason, verdict.official)
            for code, verdict in zip(programs, verdicts, strict=True)
        ]

    def _grade_maths(self, problem: Problem, text: str) -> Graded:
        assert problem.answer is not None, "a mathematics problem has an answer"
        reference = extract_boxed(problem.answer) or problem.answer  # some data box it, as a response does
        answer = extract_boxed(text)
        correct = grade_with(self.profile, text, reference)
        why = "equal" if correct else "no answer" if answer is None else "different"
        return Graded(answer, correct, why)
