"""The paper's five benchmarks and users' own problem files (appendix: Evaluation Prompts and Answer Extraction)."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning_weave.bench.sources import download_files, locate
from lightning_weave.config import Eval, benchmark_folder
from lightning_weave.errors import InputError
from lightning_weave.store.tables import ANSWER_NAMES, PROBLEM_NAMES, Row, checked_rows, plain_text, reference_answer

BenchmarkKind = Literal["math", "code"]
SAMPLES: dict[BenchmarkKind, int] = {"math": 64, "code": 4}  # per problem
MAX_TOKENS: dict[BenchmarkKind, int] = {"math": 32_768, "code": 40_960}

ID_COLUMNS = ("id", "ID", "problem_idx", "unique_id", "question_id")
CODE_COLUMNS = ("question_id", "question_content", "public_test_cases", "private_test_cases")


@dataclass(frozen=True)
class Problem:
    """A question with its reference: an answer (maths) or a LiveCodeBench row with tests (code)."""

    id: str
    question: str
    answer: str | None = None
    row: dict[str, Any] | None = None
    columns: dict[str, Any] = field(default_factory=dict)  # of an answered problem, for templates


@dataclass(frozen=True)
class Benchmark:
    """Problems and the paper's sampling settings for them."""

    name: str
    label: str  # in tables and figures
    kind: BenchmarkKind
    problems: tuple[Problem, ...]
    samples: int
    max_tokens: int
    temperature: float = 0.6
    top_p: float = 0.95

    @property
    def slug(self) -> str:
        """Return the name of the benchmark's folder: `My-set` for `file:x/My set.jsonl`."""
        return benchmark_folder(self.name)

    def first(self, count: int | None) -> "Benchmark":
        """Take the first so many problems, or all."""
        return replace(self, problems=self.problems[:count])


@dataclass(frozen=True)
class _Known:
    """Where one of the paper's benchmarks comes from, and how many problems it must have."""

    label: str
    kind: BenchmarkKind
    count: int
    repo: str
    since: date | None = None  # LiveCodeBench: first contest date of the window
    files: tuple[str, ...] = ()  # LiveCodeBench: files of the release, newest first


_LCB = "livecodebench/code_generation_lite"
_V5 = ("test5.jsonl", "test4.jsonl", "test3.jsonl", "test2.jsonl", "test.jsonl")
KNOWN = {
    "aime-2024": _Known("AIME 2024", "math", 30, "HuggingFaceH4/aime_2024"),
    "aime-2025": _Known("AIME 2025", "math", 30, "MathArena/aime_2025"),
    "hmmt-feb-2025": _Known("HMMT 2025", "math", 30, "MathArena/hmmt_feb_2025"),
    "livecodebench-v5": _Known("LCB v5", "code", 279, _LCB, since=date(2024, 8, 1), files=_V5),
    "livecodebench-v6": _Known("LCB v6", "code", 131, _LCB, since=date(2025, 2, 1), files=("test6.jsonl", *_V5)),
}


def asked_benchmark(section: Eval, name: str) -> Benchmark:
    """Load a benchmark of a recipe, or as much of it as the recipe wants; what is left out is read and checked too."""
    return load_benchmark(name, section.sources.get(name)).first(section.problems)


def load_benchmark(name: str, source: str | None = None) -> Benchmark:
    """Load one of the paper's benchmarks (from the hub, a file or a directory) or `file:PATH`."""
    if name.startswith("file:"):
        return _load_file(name)
    if name not in KNOWN:
        hint = f" Did you mean file:{name}?" if Path(name).expanduser().exists() else ""
        raise InputError(
            f"unknown benchmark {name!r}. Use one of {', '.join(KNOWN)}, or file:PATH for your own problems.{hint}"
        )
    entry = KNOWN[name]
    where = source or entry.repo
    try:
        rows = _release_rows(name, entry, where) if entry.since else _rows(locate(where, _names(name)))
        problems = _problems(rows, entry.kind)
    except InputError as error:
        raise InputError(f"benchmark {name}: {error}") from error
    if len(problems) != entry.count:
        window = f" from {entry.since} on, of {', '.join(entry.files)} in {_LCB}" if entry.since else ""
        raise InputError(
            f"benchmark {name}: {where} has {len(problems)} problems, expected {entry.count}{window}. "
            f"Set eval.sources to a source with exactly these, or evaluate this one as file:PATH."
        )
    return _with_defaults(name, entry.label, entry.kind, problems)


def _load_file(name: str) -> Benchmark:
    path = Path(name.removeprefix("file:")).expanduser()
    if not path.exists():
        raise InputError(
            f"benchmark {name}: no such file (looked in {Path.cwd()}). Write one problem per line: "
            '{"id": "1", "problem": "1+1?", "answer": "2"} or a LiveCodeBench row.'
        )
    problems = _problems(_rows(locate(str(path), ())), None)
    if not problems:
        raise InputError(f"benchmark {name}: the file has no problems.")
    return _with_defaults(name, path.stem, "code" if problems[0].row is not None else "math", problems)


def _with_defaults(name: str, label: str, kind: BenchmarkKind, problems: list[Problem]) -> Benchmark:
    return Benchmark(name, label, kind, tuple(problems), samples=SAMPLES[kind], max_tokens=MAX_TOKENS[kind])


def _names(name: str) -> tuple[str, ...]:
    return name, name.replace("-", "_")


def _rows(files: Iterable[Path]) -> Iterator[Row]:
    return chain.from_iterable(map(checked_rows, files))


def _release_rows(name: str, entry: _Known, where: str) -> list[Row]:
    """Read a LiveCodeBench window, newest file first, and stop at its last problem.

    The release is gigabytes of tests. The size of the window is known, so the older files are rarely needed.
    """
    rows: list[Row] = []
    for file in _release_files(name, entry, where):
        rows += [row for row in checked_rows(file) if _contest_date(row) >= (entry.since or date.min)]
        if len(rows) >= entry.count and file.name in entry.files:
            break
    return sorted(rows, key=lambda row: str(row.values.get("question_id")))  # the same order from any source


def _release_files(name: str, entry: _Known, where: str) -> Iterable[Path]:
    if where == _LCB:
        return download_files(_LCB, entry.files)
    files = locate(where, _names(name))
    by_name = {file.name: file for file in files}
    return [by_name[file] for file in entry.files if file in by_name] or files


def _contest_date(row: Row) -> date:
    value = row.values.get("contest_date")
    try:
        return date.fromisoformat(str(value)[:10])
    except ValueError as error:
        raise InputError(f"{row.where}: contest_date is {value!r}, expected a date such as 2024-08-01.") from error


def _problems(rows: Iterable[Row], expected: BenchmarkKind | None) -> list[Problem]:
    problems: dict[str, Problem] = {}
    for number, row in enumerate(rows, start=1):
        problem = _problem(row, number)
        kind: BenchmarkKind = "code" if problem.row is not None else "math"
        expected = expected or kind
        if kind != expected:
            raise InputError(f"{row.where}: a {kind} problem among {expected} problems. Use one file for each.")
        if problem.id in problems:
            raise InputError(f"{row.where}: id {problem.id!r} occurs twice. Give every problem its own id.")
        problems[problem.id] = problem
    return list(problems.values())


def _problem(row: Row, number: int) -> Problem:
    values = row.values
    if all(column in values for column in CODE_COLUMNS):
        return Problem(str(values["question_id"]), str(values["question_content"]), row=values)
    question_column = _column(values, PROBLEM_NAMES)
    answer_column = _column(values, ANSWER_NAMES)
    if question_column is None or answer_column is None:
        raise InputError(
            f"{row.where}: has {', '.join(map(str, values)) or 'no fields'}; expected problem and answer (or columns "
            f"named like {', '.join(PROBLEM_NAMES[1:4])}; {', '.join(ANSWER_NAMES[1:])}), "
            f"or a LiveCodeBench row ({', '.join(CODE_COLUMNS)})."
        )
    question = values[question_column]
    answer = values[answer_column]
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"{row.where}: its problem is {question!r}, expected text.")
    reference = reference_answer(answer)
    if reference is None:
        raise InputError(f"{row.where}: its answer is {answer!r}, expected a number or text.")
    identity = next((values[name] for name in ID_COLUMNS if values.get(name) is not None), number)
    hidden = {answer_column.lower(), *ANSWER_NAMES[:2]}  # a template never sees what is asked for
    shown = {name: value for name, value in values.items() if name.lower() not in hidden}
    return Problem(plain_text(identity), question, reference, columns=shown)


def _column(values: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Find the first of the names, in whatever case, that a row has a value for."""
    own = {str(name).lower(): name for name, value in values.items() if value is not None}
    return next((own[name] for name in names if name in own), None)


def ids_digest(problems: Iterable[Problem]) -> str:
    """Hash the problems' ids, independent of their order."""
    return hashlib.sha256("\n".join(sorted(problem.id for problem in problems)).encode()).hexdigest()


def content_digest(problems: Iterable[Problem]) -> str:
    """Hash everything about the problems that is asked or graded, tests included."""
    digest = hashlib.sha256()
    for problem in sorted(problems, key=lambda problem: problem.id):
        fields = [problem.id, problem.question, problem.answer, problem.row]
        digest.update(json.dumps(fields, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()
