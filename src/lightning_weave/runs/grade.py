"""Grade responses of either kind, with a reason for every verdict."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_weave.bench.definitions import Benchmark, Problem
from lightning_weave.config import Eval, Grading
from lightning_weave.errors import InputError
from lightning_weave.grading.code import extract_code, grade_many
from lightning_weave.grading.graders import OwnGrader, grade_answer, grading_of, has_math_verify
from lightning_weave.grading.math import extract_boxed
from lightning_weave.grading.sandbox import open_sandbox
from lightning_weave.own import load_function


@dataclass(frozen=True)
class Graded:
    """What was answered, and whether it is right."""

    answer: str | None
    correct: bool
    why: str
    official: str | None = None  # why the official LiveCodeBench runner is known to judge otherwise


@dataclass(frozen=True)
class Grader:
    """The way to grade one benchmark."""

    benchmark: Benchmark
    rule: Grading
    unsafe_local: bool = False
    trust: bool = False  # whether a function of the user's own may run

    @classmethod
    def of(cls, benchmark: Benchmark, section: Eval, trust: bool = False) -> "Grader":
        """Choose the grader of a benchmark, and try it before anything is sampled."""
        grader = cls(benchmark, grading_of(section, benchmark.name), section.unsafe_local, trust)
        if benchmark.kind == "math":
            has_strict_answers = grader.rule.kind in ("numeric", "choice")
            tried = benchmark.problems if has_strict_answers else benchmark.problems[:1]
            grader.grade([(problem, "") for problem in tried])
        elif grader.rule.kind not in ("code", "paper", "math-verify"):  # these profiles are for mathematics
            key = "eval.profile" if grader.rule.kind == section.profile else f"eval.graders.{benchmark.slug}"
            raise InputError(f"{key} = {grader.rule.kind!r}: the benchmark has programs to run; leave its grader out")
        return grader

    @property
    def name(self) -> str:
        """Names the protocol: only policies graded alike may be compared."""
        parts = [self.rule.kind, self.rule.pattern, self.rule.function]
        return " ".join(filter(None, parts)) if self.benchmark.kind == "math" else "livecodebench"

    def is_strict_for_want_of_math_verify(self, section: Eval) -> bool:
        """Say whether a file of the user's own is graded by the paper's rule only because a package is missing."""
        own_file = self.benchmark.name.startswith("file:") and self.benchmark.kind == "math"
        return own_file and section.profile is None and self.rule.kind == "paper" and not has_math_verify()

    @cached_property
    def _own(self) -> OwnGrader | None:
        return load_function(self.rule.function, self.trust) if self.rule.function else None

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
        try:
            answer, correct = grade_answer(self.rule, text, reference, self._own)
        except InputError as error:
            raise InputError(f"{self.benchmark.name}, problem {problem.id}: {error}") from error
        except Exception as error:
            if self._own is None:
                raise
            what = f"{type(error).__name__}: {error}"
            raise InputError(f"{self.rule.function} failed on problem {problem.id} ({what}). Correct it") from error
        why = "equal" if correct else "no answer" if answer is None else "different"
        return Graded(answer, correct, why)
