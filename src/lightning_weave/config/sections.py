"""The sections of a recipe. Omitted keys have the paper's values; unknown keys are errors."""

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lightning_weave.config.composition import DEFAULT_TAG
from lightning_weave.config.fields import (
    Count,
    Dtype,
    Engine,
    EvalFormat,
    GraderKind,
    Name,
    PromptFormat,
    Seed,
    Strict,
    Threshold,
    benchmark_folder,
    is_own_function,
    named_columns,
    slug,
    without_trust,
)


class Student(Strict):
    """The model that samples, is tilted and is trained."""

    model: str = Field(min_length=1, description="a directory or a hub name")
    revision: str | None = None
    trust_remote_code: bool = False


class Tags(Strict):
    """Kinds of prompts, for weights that differ by kind."""

    column: str | None = Field(None, min_length=1, description="column of the row that says the tag")
    rules: dict[Name, str] = Field(
        {}, description="tag -> regular expression; the first that is found in the user's turn gives the tag"
    )

    @field_validator("rules")
    @classmethod
    def _are_expressions(cls, rules: dict[str, str]) -> dict[str, str]:
        for tag, rule in rules.items():
            try:
                re.compile(rule)
            except re.error as error:
                raise ValueError(f"{tag} = {rule!r} is not a regular expression: {error}") from None
        return rules

    @model_validator(mode="after")
    def _is_one_of_them(self) -> Self:
        if self.column is not None and self.rules:
            raise ValueError("column and rules both say what a tag is: leave one of them out")
        return self

    def of(self, text: str, columns: Mapping[str, Any]) -> str:
        """The tag of one prompt."""
        if self.column is not None:
            return str(columns.get(self.column, DEFAULT_TAG))
        return next((tag for tag, rule in self.rules.items() if re.search(rule, text)), DEFAULT_TAG)


class Columns(Strict):
    """Which columns of the data hold what."""

    prompt: str = "prompt"
    answer: str | None = None
    id: str | None = None


class _Asked(Strict):
    """How a problem is put to a model, in [prompts] and [eval] alike."""

    template: str | None = Field(
        None, description="your own words instead of a format: {problem} is the problem, {name} a column of its row"
    )
    system: str | None = Field(None, min_length=1, description="a system prompt; needs chat = true")
    chat: bool = Field(True, description="render with the model's chat template")
    thinking: bool = Field(True, description="switch thinking on if the chat template supports it")

    @field_validator("template")
    @classmethod
    def _has_columns(cls, template: str | None) -> str | None:
        if template is not None and not named_columns(template):
            raise ValueError("needs {problem} or another column; double literal braces")
        return template

    @model_validator(mode="after")
    def _is_said_once(self) -> Self:
        format = getattr(self, "format", None)
        if (self.template is None) == (format == "template"):
            raise ValueError('format and template: set one of them (a template has format = "template" or none)')
        if self.system is not None and (not self.chat or format == "livecodebench"):
            raise ValueError("system needs chat = true and a format other than livecodebench")
        return self


class Prompts(_Asked):
    """Where prompts come from and which are taken."""

    source: str | None = Field(None, description="JSONL or Parquet file, dataset directory, or hub name")
    name: str | None = Field(None, description="configuration of a hub dataset")
    split: str = "train"
    revision: str | None = None
    columns: Columns = Columns()
    format: PromptFormat = Field("plain", description="default: boxed where columns.answer is named, else plain")
    max_tokens: Count = Field(1024, description="longest prompt, in student tokens")
    dedup: Literal["none", "exact", "normalised"] = "exact"
    take: Count | None = Field(3200, description="how many, drawn by seed")
    seed: Seed = 42
    screen_against: list[str] = Field([], description="problem files that no prompt may overlap with")


class _Engine(Strict):
    """What computes: transformers here, or vLLM in a process of its own."""

    engine: Engine = "hf"
    python: str | None = Field(None, description="Python executable of the engine's own environment")
    options: dict[str, bool | int | float | str] = Field(
        {}, description="for vLLM as they are, such as tensor_parallel_size or gpu_memory_utilization"
    )
    parity: float = Field(
        0.05, gt=0, description="largest mean difference of an engine's log-probs from the scorer's, in nats"
    )
    dtype: Dtype = "auto"


class Rollout(_Engine):
    """The student's own trajectories (appendix: Behavior trajectories)."""

    engine: Engine = "auto"
    responses: Count = 4
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: Count = 2048
    seed: Seed = 42
    from_: str | None = Field(
        None,
        alias="from",
        description="your own trajectories, as token ids or messages: JSONL, Parquet or directory",
    )
    prompts_per_shard: Count = 16
    batch_size: Count = 64


class Reference(_Engine):
    """The student's candidates on its own trajectories."""

    candidates: int = Field(16, ge=1, le=1024)
    token_budget: Count = 16384


class Score(_Engine):
    """Every anchor model's log-probabilities of those candidates."""

    token_budget: Count = 16384


class Grading(Strict):
    """How the answers to one benchmark are graded; a name alone stands for its kind."""

    kind: GraderKind
    tolerance: float = Field(1e-6, ge=0, allow_inf_nan=False, description="numeric: largest relative or absolute error")
    pattern: str | None = Field(None, description="regex: its last match is the answer, or the first group of it")
    function: str | None = Field(
        None, description="python: my.py:grade, called with the response and the answer; needs --trust"
    )

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, data: Any) -> Any:
        return {"kind": data} if isinstance(data, str) else without_trust(data)

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        keys = {"numeric": {"tolerance"}, "regex": {"pattern"}, "python": {"function"}}.get(self.kind, set())
        fields = self.model_fields_set & {"tolerance", "pattern", "function"}
        if foreign := sorted(
            key for key in fields - keys if getattr(self, key) != type(self).model_fields[key].default
        ):
            raise ValueError(f'kind = "{self.kind}" has no {foreign[0]}; leave it out')
        if self.kind == "regex":
            self._check_pattern()
        if self.kind == "python" and not is_own_function(self.function or ""):
            raise ValueError('kind = "python" needs function = "my.py:grade", a file and the name of a function in it')
        return self

    def _check_pattern(self) -> None:
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise ValueError(f"pattern is not a regular expression ({error})") from None
        if not self.pattern:
            raise ValueError('kind = "regex" needs a pattern, such as "Answer: (.*)"')


class Eval(_Asked, _Engine):
    """How policies are sampled and graded (appendix: Evaluation Prompts and Answer Extraction)."""

    engine: Engine = "auto"
    benchmarks: list[str] = Field(["aime-2024", "aime-2025", "hmmt-feb-2025"], min_length=1)
    sources: dict[str, str] = Field({}, description="benchmark -> file, directory or hub name, instead of the default")
    problems: Count | None = Field(None, description="only the first so many of each benchmark; default: all")
    samples: Count | None = Field(None, description="per problem; default: 64 for mathematics, 4 for code")
    temperature: float = Field(0.6, ge=0, allow_inf_nan=False)
    top_p: float = Field(0.95, gt=0, le=1)
    max_tokens: Count | None = Field(None, description="default: 32,768 for mathematics, 40,960 for code")
    seed: Seed = 42
    format: EvalFormat = Field("boxed", description="default: as [prompts] asks; boxed if it asks for no graded answer")
    profile: Literal["paper", "math-verify", "exact", "numeric", "choice"] | None = Field(
        None, description="grader of answers; default: the paper's for its benchmarks, math-verify for your files"
    )
    graders: dict[str, Grading] = Field({}, description="benchmark -> its grader, instead of the profile")
    unsafe_local: bool = Field(False, description="run generated code without a sandbox")
    budgets: list[Count] = Field([], description="also accuracy within so many tokens, from the same samples cut there")
    adapters: bool = Field(
        False, description="students trained with LoRA as adapters in the student's vLLM engine, instead of merged"
    )
    block: Count = Field(64, description="(problem, sample) pairs sampled as one batch: the unit of resume")
    batch_size: Count = 64

    @field_validator("benchmarks")
    @classmethod
    def _have_folders_of_their_own(cls, benchmarks: list[str]) -> list[str]:
        folders = [benchmark_folder(name) for name in benchmarks]
        if len(set(folders)) < len(folders):
            raise ValueError("two benchmarks have the same name; rename one of the files")
        return benchmarks

    @field_validator("sources")
    @classmethod
    def _are_used(cls, sources: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        benchmarks = info.data.get("benchmarks", list(sources))
        for name in sources:
            if name.startswith("file:"):
                raise ValueError(f"{name!r} is its own source; remove it here")
            if name not in benchmarks:
                names = ", ".join(benchmarks)
                raise ValueError(f"{name!r} is not in eval.benchmarks ({names}); add it there or remove its source")
        return sources

    @field_validator("graders")
    @classmethod
    def _grade_a_benchmark(cls, graders: dict[str, Grading], info: ValidationInfo) -> dict[str, Grading]:
        folders = [benchmark_folder(name) for name in info.data.get("benchmarks", list(graders))]
        for name in graders:
            if benchmark_folder(name) not in folders:
                raise ValueError(
                    f"{name!r} is not in eval.benchmarks ({', '.join(folders)}); add it there or remove it"
                )
        return graders


class Harness(Strict):
    """Tasks of lm-evaluation-harness, which runs them in a process, and if you like an environment, of its own."""

    tasks: list[str] = Field([], description="names of its tasks, such as ifeval; further columns of the table")
    python: str | None = Field(None, description="Python executable of an environment with lm_eval")
    include: str | None = Field(None, description="directory of task definitions of your own; needs --trust")
    metrics: dict[str, str] = Field(
        {}, description="task -> the metric in the table, as in its results; default: first"
    )
    chat: bool = Field(True, description="ask by the model's chat template, if it has one")
    fewshot: int | None = Field(None, ge=0, description="examples before each question; default: the task's own")
    limit: Count | None = Field(None, description="only so many questions of each task, to try it")
    generation: dict[str, bool | int | float | str] = Field(
        {}, description="how it samples, instead of the task's own, such as { do_sample = true, temperature = 0.6 }"
    )
    engine: Literal["hf", "vllm"] = Field("hf", description="which of its own models it loads the checkpoint with")
    options: dict[str, bool | int | float | str] = Field(
        {}, description="arguments of that model, such as enable_thinking or max_length"
    )
    batch_size: Count = 16
    dtype: Dtype = "auto"
    seed: Seed = 42

    @field_validator("tasks")
    @classmethod
    def _have_folders_of_their_own(cls, tasks: list[str]) -> list[str]:
        if len({slug(task) for task in tasks}) < len(tasks):
            raise ValueError("names a task twice")
        return tasks


class Policy(Strict):
    """Any other checkpoint that belongs on the tables and the frontier."""

    model: str = Field(min_length=1)
    revision: str | None = None
    trust_remote_code: bool = False
    system: str | None = Field(None, min_length=1, description="its own system prompt, in place of that of [eval]")


class Case(Strict):
    """Which responses to print side by side, fixed before any response is read."""

    wrong: list[str] = Field([], description="policies whose answer must be wrong")
    right: list[str] = Field([], description="policies whose answer must be right")
    shortest: str | None = Field(None, description="the policy that must have used the fewest tokens of all named")
    benchmark: str | None = Field(None, description="only from this one of eval.benchmarks")
    seed: Seed = 7
    count: Count = 2
    beginning: Count = Field(400, description="characters of a response shown before the omission")
    end: Count = Field(400, description="characters shown after it")

    @model_validator(mode="after")
    def _names_each_policy_once(self) -> Self:
        if not self.wrong + self.right:
            raise ValueError("needs a policy that must be wrong or right")
        named = [*self.wrong, *self.right]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise ValueError(f"names {twice[0]!r} twice; a response is either wrong or right")
        if self.shortest is not None and self.shortest not in named:
            raise ValueError(f"shortest = {self.shortest!r} must also be named in wrong or right")
        return self


class Report(Strict):
    """What the page shows beside the results."""

    trajectories: int = Field(40, ge=0, description="how many are embedded in the loom, drawn by seed")
    seed: Seed = 7
    megabytes: float = Field(2.0, gt=0, allow_inf_nan=False, description="of cached scores that the loom may embed")
    students: list[str] | None = Field(None, description="trained compositions shown in the loom; default: all")
    cases: dict[Name, Case] = Field({})


class Checks(Strict):
    """When a stage warns of what it has made, and when `lweave run` stops; false switches one off."""

    truncated_warn: Threshold = Field(0.5, description="share of responses cut off at max_tokens")
    truncated_stop: Threshold = Field(0.9, description="the same, where `lweave run` stops")
    unanswered_warn: Threshold = Field(0.5, description="share of responses without an answer that can be extracted")
    unanswered_stop: Threshold = Field(
        0.95, description="the same, where `lweave run` stops; of rollouts only if their prompts ask for a box"
    )
    right_warn: Threshold = Field(0.02, description="share of right rollouts, where answers are known; below is bad")
    right_stop: Threshold = Field(False, description="the same, where `lweave run` stops")
    repeated_warn: Threshold = Field(0.2, description="share of rollouts that repeat themselves")
    repeated_stop: Threshold = Field(False, description="the same, where `lweave run` stops")
    surviving_warn: Threshold = Field(0.5, description="share of positions where a pair has a shift; below is bad")
    surviving_stop: Threshold = Field(0.001, description="the same, where `lweave run` stops")
    separation_stop: Threshold = Field(
        0.35, description="AUC among responses of equal length, below which a pair prefers wrong ones: is it swapped?"
    )
    longer_stop: Threshold = Field(
        0.6, description="share of cases in which a pair prefers the longer of two responses, but no right ones"
    )
    kl_rise_warn: Threshold = Field(1.05, description="KL to the target at the end of training over that at its start")
    kl_rise_stop: Threshold = Field(False, description="the same, where `lweave run` stops")
    empty_warn: Threshold = Field(0.05, description="share of empty responses in an evaluation")
    empty_stop: Threshold = Field(0.95, description="the same, where `lweave run` stops")


class Machine(Strict):
    """Where it runs. Recorded, never part of a fingerprint but for tf32 = true, which rounds."""

    device: Literal["auto", "cpu", "cuda", "mps"] = Field("auto", description="auto: CUDA where it is, else the CPU")
    threads: Count | None = Field(None, description="CPU threads; default: measured once per run and kept")
    tf32: bool = Field(
        False, description="on a GPU, products in float32 with 10 bits of mantissa instead of 23: several times faster"
    )
    workers: Count | None = Field(None, description="on a Ray cluster: how many; default: as many as its GPUs or CPUs")
    gpus_per_worker: float = Field(1.0, ge=0, description="on a Ray cluster with GPUs")
