"""The paper's five benchmarks and users' own problem files (appendix: Evaluation Prompts and Answer Extraction)."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from lightning_weave.config import HELD_OUT, Columns, Recipe, benchmark_folder
from lightning_weave.config.fields import named_columns
from lightning_weave.errors import InputError
from lightning_weave.models.hub import explain_hub_error, go_offline_if_unreachable
from lightning_weave.prompts.build import PromptReport, hold_out, read_questions
from lightning_weave.store.tables import (
    ANSWER_NAMES,
    PROBLEM_NAMES,
    SUFFIXES,
    Row,
    checked_rows,
    plain_text,
    reference_answer,
)

BenchmarkKind = Literal["math", "code"]
SAMPLES: dict[BenchmarkKind, int] = {"math": 64, "code": 4}  # per problem, as in the paper
OWN_SAMPLES = 4  # of a user's own problems
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
    columns: dict[str, Any] = field(default_factory=dict)  # of a maths problem, for templates

    @property
    def kind(self) -> BenchmarkKind:
        return "math" if self.row is None else "code"


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


def load_eval_benchmark(recipe: Recipe, name: str) -> Benchmark:
    """Load a benchmark with the source and the number of problems that [eval] sets, or hold out a part of [prompts]."""
    section = recipe.eval
    if name != HELD_OUT:
        return load_benchmark(name, section.sources.get(name), section.columns).first(section.problems)
    answer = (recipe.prompts.columns.answer or "").split(".")[0]  # a template never sees it
    others = (named_columns(section.format) | {recipe.tags.column or ""}) - {answer}
    problems = tuple(
        Problem(one.id, one.messages[0]["content"], one.answer, columns=dict(one.columns))
        for one in hold_out(list(read_questions(recipe.prompts, others, PromptReport())))
    )
    if not problems:
        raise InputError(
            f"{HELD_OUT}: {recipe.prompts.source} has too few problems with answers to hold some out. Name other "
            "benchmarks, or set eval.benchmarks = []"
        )
    return Benchmark(name, name, "math", problems, OWN_SAMPLES, MAX_TOKENS["math"]).first(section.problems)


def benchmark_name(name: str) -> str:
    """Name a benchmark as a recipe does: a path to a file becomes `file:PATH`."""
    return f"file:{name}" if name not in KNOWN and Path(name).expanduser().exists() else name


def load_benchmark(name: str, source: str | None = None, columns: Columns | None = None) -> Benchmark:
    """Load one of the paper's benchmarks (from the hub, a file or a directory) or `file:PATH`, with these columns."""
    path = Path(name.removeprefix("file:")).expanduser()
    if name.startswith("file:"):
        if not path.exists():
            raise InputError(
                f"benchmark {name}: no such file (looked in {Path.cwd()}). Write one problem per line: "
                '{"id": "1", "problem": "1+1?", "answer": "2"} or a LiveCodeBench row.'
            )
        problems = _read_problems(chain.from_iterable(map(checked_rows, locate(str(path), ()))), None, columns)
        if not problems:
            raise InputError(f"benchmark {name}: the file has no problems.")
        label, samples = path.stem, OWN_SAMPLES
    elif name in KNOWN:
        entry = KNOWN[name]
        label, where, samples = entry.label, source or entry.repo, SAMPLES[entry.kind]
        try:
            problems = _read_problems(_known_rows(name, entry, where), entry.kind)
        except InputError as error:
            raise InputError(f"benchmark {name}: {error}") from error
        if len(problems) != entry.count:
            window = f" from {entry.since} on, of {', '.join(entry.files)} in {_LCB}" if entry.since else ""
            raise InputError(
                f"benchmark {name}: {where} has {len(problems)} problems, expected {entry.count}{window}. "
                f"Set eval.sources to a source with exactly these, or evaluate this one as file:PATH."
            )
    else:
        hint = f" Did you mean file:{name}?" if path.exists() else ""
        raise InputError(
            f"unknown benchmark {name!r}. Use one of {', '.join(KNOWN)}, or file:PATH for your own problems.{hint}"
        )
    kind = problems[0].kind
    return Benchmark(name, label, kind, problems, samples=samples, max_tokens=MAX_TOKENS[kind])


def _known_rows(name: str, entry: _Known, where: str) -> Iterable[Row]:
    """Read the rows of one of the paper's benchmarks.

    LiveCodeBench is gigabytes of tests. Its files are read newest first, up to the last problem of the window, whose
    size is known, so the older files are rarely needed.
    """
    names = (name, name.replace("-", "_"))
    if entry.since is None:
        return chain.from_iterable(map(checked_rows, locate(where, names)))
    files: Iterable[Path]
    if where == _LCB:
        files = _download(_LCB, entry.files)
    else:
        files = locate(where, names)
        by_name = {file.name: file for file in files}
        files = [by_name[file] for file in entry.files if file in by_name] or files
    rows: list[Row] = []
    for file in files:
        for row in checked_rows(file):
            value = row.values.get("contest_date")
            try:
                day = date.fromisoformat(str(value)[:10])
            except ValueError as error:
                message = f"{row.where}: contest_date is {value!r}, expected a date such as 2024-08-01."
                raise InputError(message) from error
            if day >= entry.since:
                rows.append(row)
        if len(rows) >= entry.count and file.name in entry.files:
            break
    return sorted(rows, key=lambda row: str(row.values.get("question_id")))  # the same order from any source


def _read_problems(
    rows: Iterable[Row], kind: BenchmarkKind | None, columns: Columns | None = None
) -> tuple[Problem, ...]:
    """Read problems with unique ids, all of one kind."""
    problems: dict[str, Problem] = {}
    for number, row in enumerate(rows, start=1):
        values = row.values
        if all(column in values for column in CODE_COLUMNS):
            problem = Problem(str(values["question_id"]), str(values["question_content"]), row=values)
        else:
            present = {str(name).lower(): name for name, value in values.items() if value is not None}
            if columns is not None:
                present = {name: name for name in values}
            named: Sequence[str] = [columns.prompt] if columns else PROBLEM_NAMES
            question_column = next((present[name] for name in named if name in present), None)
            named = [columns.answer] if columns and columns.answer else ANSWER_NAMES
            answer_column = next((present[name] for name in named if name in present), None)
            if question_column is None or answer_column is None:
                has = f"{row.where}: has {', '.join(map(str, values)) or 'no fields'}; expected"
                if columns is not None:
                    raise InputError(f"{has} {columns.prompt} and {columns.answer or 'answer'}. Correct eval.columns.")
                raise InputError(
                    f"{has} problem and answer (or columns named like {', '.join(PROBLEM_NAMES[1:4])}; "
                    f"{', '.join(ANSWER_NAMES[1:])}), or a LiveCodeBench row ({', '.join(CODE_COLUMNS)}). "
                    'Name the columns: eval.columns = { prompt = "...", answer = "..." }'
                )
            question, answer = values[question_column], reference_answer(values[answer_column])
            if not isinstance(question, str) or not question.strip():
                raise InputError(f"{row.where}: its problem is {question!r}, expected text.")
            if answer is None:
                raise InputError(f"{row.where}: its answer is {values[answer_column]!r}, expected a number or text.")
            named = [columns.id] if columns and columns.id else ID_COLUMNS
            identity = next((values[name] for name in named if values.get(name) is not None), number)
            hidden = {answer_column.lower(), *ANSWER_NAMES[:2]}  # a template never sees the answer
            shown = {name: value for name, value in values.items() if name.lower() not in hidden}
            problem = Problem(plain_text(identity), question, answer, columns=shown)
        kind = kind or problem.kind
        if problem.kind != kind:
            raise InputError(f"{row.where}: a {problem.kind} problem among {kind} problems. Use one file for each.")
        if problem.id in problems:
            raise InputError(f"{row.where}: id {problem.id!r} occurs twice. Give every problem its own id.")
        problems[problem.id] = problem
    return tuple(problems.values())


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


def locate(source: str, names: tuple[str, ...]) -> list[Path]:
    """Find the data files of a source: a file, a directory, or `owner/name[@revision]` on the hub.

    In a directory, a file named after the benchmark (`names`) is preferred to all files together.
    """
    path = Path(source).expanduser()
    if not path.exists():
        is_hub_name = path.suffix not in SUFFIXES and re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w.-]+)?", source)
        if not is_hub_name:
            raise InputError(f"{source}: no such file or directory. Correct eval.sources.")
        (path,) = _download(source)
    if path.is_file():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    named = [file for file in files if file.stem in names and file.parent == path]
    if not files:
        raise InputError(f"{path}: no {', '.join(SUFFIXES)} file in this directory.")
    if len(named) > 1:
        names_found = " and ".join(file.name for file in named)
        raise InputError(f"{path}: {names_found} both match this benchmark. Set eval.sources to one of them.")
    return named or files


def _download(source: str, files: tuple[str, ...] = ()) -> Iterator[Path]:
    """Download a dataset repository from the hub, or some of its files one at a time, as they are needed."""
    from huggingface_hub import hf_hub_download, snapshot_download

    repo, _, revision = source.partition("@")
    go_offline_if_unreachable()
    try:
        for name in files:
            yield Path(hf_hub_download(repo, name, repo_type="dataset"))
        if not files:
            wanted = [f"*{suffix}" for suffix in SUFFIXES]
            folder = snapshot_download(repo, repo_type="dataset", revision=revision or None, allow_patterns=wanted)
            yield Path(folder)
    except Exception as error:  # offline, gated, misspelled: many exception classes, one remedy
        reason = explain_hub_error(error).split(". ")[0].rstrip(".")
        command = " ".join(["hf download --repo-type dataset", repo, *files])
        command += f" --revision {revision}" if revision else ""
        raise InputError(
            f"{source} cannot be read from the hub ({reason}). Where there is a network, run: "
            f"{command} --local-dir DIR, then set eval.sources to DIR."
        ) from error
