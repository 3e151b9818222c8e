"""Sections about evaluation: how policies are sampled and graded, what the report shows, and when a run stops."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lightning_weave.config.fields import (
    HELD_OUT,
    Count,
    Finite,
    GraderKind,
    Inline,
    Limit,
    Name,
    PromptFormat,
    Repeats,
    Seed,
    Source,
    Strict,
    Text,
    Threshold,
    benchmark_folder,
    execution,
    is_own_function,
    is_pattern,
    slug,
    unlisted,
)
from lightning_weave.config.sections import Asked, Columns


@dataclass(frozen=True)
class Grading:
    """How the answers to one benchmark are graded.

    >>> Grading.parse("regex:#### (.*)"), str(Grading.parse("numeric:0.01"))
    (Grading(kind='regex', tolerance=1e-06, pattern='#### (.*)', function=None), 'numeric:0.01')
    """

    kind: GraderKind
    tolerance: float = 1e-6  # numeric: largest relative or absolute error
    pattern: str | None = None  # regex: its last match is the answer, or the first group of it
    function: str | None = None  # python: my.py:grade, called with the response and the answer

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a grader as a recipe writes it."""
        kind, colon, rest = text.partition(":")
        if is_own_function(text):
            return cls("python", function=text)
        if kind == "regex":
            if not rest:
                raise ValueError('regex needs a pattern, such as "regex:Answer: (.*)"')
            return cls("regex", pattern=is_pattern(rest))
        if kind == "numeric" and colon:
            if not re.fullmatch(r"\d*\.?\d+(e-?\d+)?", rest):
                raise ValueError('numeric takes a tolerance, such as "numeric:0.01"')
            return cls("numeric", tolerance=float(rest))
        if kind not in get_args(GraderKind) or kind == "python" or colon:
            named = ", ".join(repr(name) for name in get_args(GraderKind) if name not in ("python", "regex"))
            raise ValueError(f"must be one of {named}, 'numeric:TOLERANCE', 'regex:PATTERN' or 'my.py:grade'")
        return cls(kind)  # type: ignore[arg-type]

    def __str__(self) -> str:
        if self.kind == "numeric" and self.tolerance != 1e-6:
            return f"numeric:{self.tolerance:g}"
        return self.function or (f"regex:{self.pattern}" if self.pattern else self.kind)


class Eval(Asked):
    """How policies are sampled and graded (appendix: Evaluation Prompts and Answer Extraction)."""

    benchmarks: list[Source] = Field(
        [],
        description="names, or file:PATH; default: held-out, a tenth of the prompts if they have answers; []: none",
        examples=[["file:held-out.jsonl", "aime-2024"]],
    )
    columns: Columns | None = Field(
        None,
        description="columns of your files; default: by their names",
        examples=[{"prompt": "question", "answer": "solution"}],
    )
    sources: dict[str, Source] = Field(
        {},
        description="benchmark -> file, directory or hub name to read it from",
        examples=[{"aime-2024": "aime.jsonl"}],
    )
    problems: Count | None = Field(None, description="first problems of each benchmark; default: all", examples=[20])
    samples: Repeats | None = Field(
        None, description="per problem; default: 4; the paper's mathematics: 64", examples=[8]
    )
    temperature: Finite = Field(0.6, ge=0, description="sampling temperature; 0 takes the likeliest token")
    top_p: float = Field(0.95, gt=0, le=1, description="nucleus sampling: probability of the tokens to sample from")
    max_tokens: Count | None = Field(
        None, description="longest response; default: 32,768 (mathematics), 40,960 (code)", examples=[8192]
    )
    seed: Seed = unlisted(42, "random seed of sampling")
    format: PromptFormat = Field(
        "boxed", description="plain, boxed, question-answer or a template; default: as [prompts]"
    )
    profile: Literal["paper", "math-verify", "exact", "numeric", "choice"] | None = Field(
        None, description="grader; default: paper, and math-verify for your files", examples=["math-verify"]
    )
    graders: dict[str, str] = Field(
        {},
        description="benchmark -> grader: paper, math-verify, exact, choice, code, numeric:TOLERANCE, regex:PATTERN "
        "(last match or its first group), or your own my.py:grade (--trust)",
        examples=[{"gsm8k": "regex:#### (.*)"}],
    )
    unsafe_local: bool = execution(False, "run generated code without a sandbox; needs --trust")
    final: Text | None = unlisted(
        None,
        description="what policies.NAME.budget appends; default: the end of thinking, if it is still open, and "
        '"The final answer is", with \\boxed{ if format = "boxed"',
        examples=["\n#### "],
    )
    budgets: list[Count] = Field(
        [], description="also report accuracy within these many tokens", examples=[[1024, 4096]]
    )
    adapters: bool = unlisted(False, "with vLLM, evaluate LoRA students as adapters, not merged")
    block: Count = unlisted(64, "samples per file, the unit of resume")
    batch_size: Count = unlisted(64, "responses sampled at a time", execution=True)

    @field_validator("benchmarks")
    @classmethod
    def _have_different_folders(cls, benchmarks: list[str]) -> list[str]:
        folders = [benchmark_folder(name) for name in benchmarks]
        if len(set(folders)) < len(folders):
            raise ValueError("two benchmarks have the same name; rename one of the files")
        return benchmarks

    @field_validator("sources", "graders")
    @classmethod
    def _are_of_a_benchmark(cls, table: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        folders = [benchmark_folder(name) for name in info.data.get("benchmarks", list(table))]
        for name, value in table.items():
            if info.field_name == "sources" and name.startswith("file:"):
                raise ValueError(f"{name!r} already names its file; remove it here")
            if info.field_name == "sources" and name == HELD_OUT:
                raise ValueError(f"{name!r} is a part of prompts.source; remove it here")
            if benchmark_folder(name) not in folders:
                raise ValueError(
                    f"{name!r} is not in eval.benchmarks ({', '.join(folders)}); add it there or remove it here"
                )
            if info.field_name == "graders":
                try:
                    Grading.parse(value)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from None
        return table

    @field_validator("format")
    @classmethod
    def _can_be_graded(cls, format: str) -> str:
        if format in ("dapo", "livecodebench"):
            raise ValueError("must be 'plain', 'question-answer', 'boxed', or a template with {problem}")
        return format


class Harness(Strict):
    """Tasks of lm-evaluation-harness, run in a separate process and if needed in another environment."""

    tasks: list[str] = Field([], description="names of its tasks, for the table of results", examples=[["ifeval"]])
    python: Source | None = execution(None, "Python with lm_eval; needs --trust", examples=[".venv-lm-eval/bin/python"])
    include: Source | None = unlisted(
        None, description="directory of your own tasks; needs --trust", examples=["my-tasks"]
    )
    metrics: dict[str, str] = unlisted(
        {},
        "task -> metric to show; default: its first",
        examples=[{"gsm8k": "exact_match,flexible-extract"}],
        execution=True,
    )
    args: dict[str, Any] = Field(
        {},
        description="passed to lm_eval.simple_evaluate: num_fewshot, limit, gen_kwargs, model, model_args, ...",
        examples=[{"num_fewshot": 5, "limit": 100}],
    )

    @field_validator("tasks")
    @classmethod
    def _have_different_folders(cls, tasks: list[str]) -> list[str]:
        if len({slug(task) for task in tasks}) < len(tasks):
            raise ValueError("names a task twice")
        return tasks

    @field_validator("args")
    @classmethod
    def _leave_the_rest_to_us(cls, args: dict[str, Any]) -> dict[str, Any]:
        ours = {"tasks": "harness.tasks", "include_path": "harness.include", "device": "machine.device"}
        for name, key in ours.items():
            if name in args:
                raise ValueError(f"{name} is set by {key}; remove it here")
        if not isinstance(args.get("model_args", {}), Mapping):
            raise ValueError('model_args must be a table, such as { dtype = "float32" }')
        for name in ("pretrained", "trust_remote_code"):
            if name in args.get("model_args", {}):
                raise ValueError(f"model_args.{name} is set by the policy that is evaluated; remove it here")
        return args

    @property
    def engine(self) -> str:
        """Which of its models the harness loads a checkpoint with."""
        return str(self.args.get("model", "hf"))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of that model."""
        return dict(self.args.get("model_args", {}))


class Case(Inline):
    """Which responses the report prints side by side; a rule that is fixed before any response is read."""

    wrong: list[str] = Field([], description="policies whose answer must be wrong", examples=[["base"]])
    right: list[str] = Field([], description="policies whose answer must be right", examples=[["even"]])
    shortest: str | None = Field(None, description="the one that must have the fewest tokens", examples=["even"])
    benchmark: str | None = Field(None, description="only from this benchmark", examples=["aime-2024"])
    count: Count = Field(2, description="number of examples")

    @model_validator(mode="after")
    def _names_each_policy_once(self) -> Self:
        named = [*self.wrong, *self.right]
        if not named:
            raise ValueError("needs a policy that must be wrong or right")
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"names {twice[0]!r} twice; a response is either wrong or right")
        if self.shortest is not None and self.shortest not in named:
            raise ValueError(f"shortest = {self.shortest!r} must also be named in wrong or right")
        return self


class Report(Strict):
    """What the report shows in addition to the results."""

    students: list[str] | None = unlisted(None, "compositions in the loom; default: all", examples=[["even"]])
    cases: dict[Name, Case] = Field(
        {}, description="examples to print, by a name that you choose", examples=[{"fixed": {"wrong": ["base"]}}]
    )


class Checks(Strict):
    """Where `lweave run` stops because the next stage would be wasted. "warn": never stop; false: no warning either."""

    truncated: Limit = Field(0.9, description="share of responses cut off at max_tokens; warns above 0.5")
    unanswered: Limit = Field(0.95, description="share of responses without an answer; warns above 0.5 (empty: 0.05)")
    right: Limit = Field("warn", description="lowest share of right rollouts where answers are known; warns below 0.02")
    repeated: Limit = Field("warn", description="share of rollouts that repeat themselves; warns above 0.2")
    surviving: Limit = Field(0.001, description="lowest share of positions where a pair has a shift; warns below 0.5")
    swapped: Threshold = Field(
        0.35, description="AUC at equal length below which a pair prefers wrong responses: are post and pre swapped?"
    )
    kl_rise: Limit = Field("warn", description="KL to the target after training over that before; warns above 1.05")

    def levels(self, check: str, warn: float) -> tuple[Threshold, Threshold]:
        """Where a check warns and where it stops; `warn` is the level at which it warns unless switched off."""
        limit: Limit = getattr(self, check)
        return (False if limit is False else warn), (False if limit == "warn" else limit)
