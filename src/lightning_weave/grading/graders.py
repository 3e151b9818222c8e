"""The graders of answers, one function each: what was answered, and whether it is right."""

import importlib.util
import math
import re
from collections.abc import Callable
from typing import assert_never

from lightning_weave.config import Eval, Grading, benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.grading.math import extract_boxed, grade, parse_answer, verify_answer

OwnGrader = Callable[[str, str], object]
Answered = tuple[str | None, bool]  # the answer as found in the response, and whether it is right

_ANSWER = re.compile(r"\banswer(?:\s+is\b|\s*:)[\s:*]*(.+)", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d)\.?)(?:[eE][-+]?\d+)?(?:\s*/\s*\d+)?")
_LETTER = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])")


def grading_of(section: Eval, benchmark: str) -> Grading:
    """Find how a benchmark is graded: as said for it, as said for all, the paper's own by its rule, others forgivingly.

    Without the package math-verify, files of one's own are graded by the paper's rule as well.
    """
    for name, rule in section.graders.items():
        if benchmark_folder(name) == benchmark_folder(benchmark):
            return rule
    forgiving = benchmark.startswith("file:") and has_math_verify()
    return Grading(kind=section.profile or ("math-verify" if forgiving else "paper"))


def grade_rollout(section: Eval, response: str, reference: str) -> Answered:
    """Grade the student's own response to a prompt: by the profile, else by the paper's rule.

    A reference that the grader cannot read, such as a word for numbers, is answered by nothing.
    """
    try:
        return grade_answer(Grading(kind=section.profile or "paper"), response, reference)
    except InputError:
        return None, False


def has_math_verify() -> bool:
    """Check whether the optional package is installed."""
    return importlib.util.find_spec("math_verify") is not None


def grade_answer(rule: Grading, response: str, reference: str, own: OwnGrader | None = None) -> Answered:
    """Grade one response; `own` is the user's function where the rule names one."""
    match rule.kind:
        case "paper":
            return extract_boxed(response), grade(response, reference)
        case "math-verify":
            return _by_math_verify(response, reference)
        case "exact":
            return _exact(response, reference)
        case "numeric":
            return _numeric(response, reference, rule.tolerance)
        case "choice":
            return _choice(response, reference)
        case "regex":
            return _regex(rule.pattern or "", response, reference)
        case "python":
            assert own is not None
            return response.strip() or None, bool(own(response, reference))
        case "code":
            raise InputError('the grader "code" needs LiveCodeBench rows with tests; choose another for answers')
        case _:
            assert_never(rule.kind)


def final_answer(text: str) -> str | None:
    r"""Find the final answer: the last box, else what the last "answer:" or "answer is" says, else the last line.

    >>> final_answer("so \\boxed{4}."), final_answer("The answer is **4**.\nBye"), final_answer("first\n4\n")
    ('4', '4', '4')
    """
    boxed = extract_boxed(text)
    answers = _ANSWER.findall(text)
    lines = text.strip().splitlines()
    answer = boxed if boxed is not None else answers[-1] if answers else lines[-1] if lines else ""
    return _bare(answer) or None


def _bare(text: str) -> str:
    return text.strip().strip("*$`").rstrip(".").strip("*$` ")


def _by_math_verify(response: str, reference: str) -> Answered:
    parsed = parse_answer(response)
    boxed = extract_boxed(response)
    return boxed if boxed is not None or not parsed else str(parsed[-1]), verify_answer(parsed, reference)


def _exact(response: str, reference: str) -> Answered:
    answer = final_answer(response)
    return answer, answer is not None and answer == _bare(reference)


def _numeric(response: str, reference: str, tolerance: float) -> Answered:
    expected = _last_number(reference)
    if expected is None:
        raise InputError(f"the answer {reference!r} is not a number; choose another grader than numeric")
    number = _last_number(final_answer(response) or "")
    if number is None:
        return None, False
    return number[0], math.isclose(number[1], expected[1], rel_tol=tolerance, abs_tol=tolerance)


def _last_number(text: str) -> tuple[str, float] | None:
    r"""Read the last number of a text, also as a fraction.

    >>> _last_number(r"about 1,024.5 m"), _last_number(r"\frac{1}{4}"), _last_number("none")
    (('1,024.5', 1024.5), ('1/4', 0.25), None)
    """
    matches = [match for match in _NUMBER.findall(re.sub(r"\\[dt]?frac\{(.+?)\}\{(.+?)\}", r"\1/\2", text)) if match]
    if not matches:
        return None
    over, _, under = matches[-1].replace(",", "").partition("/")
    return matches[-1], float(over) / float(under) if under and float(under) else float(over)


def _choice(response: str, reference: str) -> Answered:
    expected = _LETTER.findall(reference.strip().upper() if len(reference.strip()) == 1 else reference)
    if not expected:
        raise InputError(f"the answer {reference!r} is not the letter of a choice; choose another grader than choice")
    answer = final_answer(response) or ""
    letters = _LETTER.findall(answer.upper() if len(answer) == 1 else answer)
    return (letters[0], letters[0] == expected[0]) if letters else (None, False)


def _regex(pattern: str, response: str, reference: str) -> Answered:
    matches = list(re.finditer(pattern, response))
    if not matches:
        return None, False
    last = matches[-1]
    answer = (last[1] if last.re.groups else last[0]) or ""
    return answer.strip() or None, answer.strip() == reference.strip()
