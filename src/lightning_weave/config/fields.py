"""Types of recipe values: checked names and numbers, choices, and the base classes of all sections."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from functools import partial
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
EngineName = Literal["auto", "hf", "vllm"]
EngineStage = Literal["rollout", "reference", "score", "eval"]
Role = Literal["post", "pre"]
Option = bool | int | float | str
Decay = Literal["constant", "linear", "cosine"]
LoraBase = Literal["own", "nf4", "int8"]
MOST_CANDIDATES = 1024
OBJECTIVES = ("tilted", "reverse-kl", "reverse-kl-full", "direct-opd")
FORMATS = ("plain", "dapo", "question-answer", "boxed", "livecodebench")
GraderKind = Literal["paper", "math-verify", "exact", "numeric", "choice", "regex", "code", "python"]
HELD_OUT = "held-out"  # the benchmark that is a part of the prompts
HARNESS = "lm-eval-"  # prefix of the folders of lm-evaluation-harness tasks, next to those of benchmarks
KEPT_CHECKPOINTS = 2  # of training, the newest ones


def execution(default: Any = ..., description: str | None = None, **more: Any) -> Any:
    """Define a key, or a section, that no result depends on: how something is computed, checked or shown."""
    return Field(default, description=description, json_schema_extra={"execution": True}, **more)


def unlisted(default: Any, description: str, execution: bool = False, **more: Any) -> Any:
    """Define a key that works but that hardly anyone needs to know."""
    extra: dict[str, Any] = {"unlisted": True, "execution": execution}
    return Field(default, description=description, json_schema_extra=extra, **more)


def is_execution(field: FieldInfo) -> bool:
    """Whether a key is marked as one that no result depends on."""
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("execution"))


class Strict(BaseModel):
    """A frozen section that rejects unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)

    def settings(self, *without: str, exclude_none: bool = False) -> dict[str, Any]:
        """Write the keys that results may depend on, for a fingerprint."""
        marked = {name for name, field in type(self).model_fields.items() if is_execution(field)}
        return self.model_dump(mode="json", exclude={*without, *marked}, exclude_none=exclude_none)


class Inline(Strict):
    """A small table that is written in one line and listed as one key."""


def _is_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}", name) or ".." in name:
        raise ValueError(
            "must be a plain name of letters, digits, '.', '_', '+', '-', 100 at most (it becomes a folder)"
        )
    return name


def _is_source(text: str) -> str:
    if re.search("[\u200e\u200f\u202a-\u202e\u2066-\u2069]", text):
        raise ValueError("must not contain characters that change the direction of text")
    return text


def is_own_function(text: str) -> bool:
    """Whether a text names a Python function of the user, such as my.py:grade."""
    return re.fullmatch(r".+\.py:\w+", text) is not None


def is_pattern(text: str) -> str:
    """Refuse a text that is not a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression ({error})") from None
    return text


def _is_day(value: object) -> object:
    """Accept a date of TOML, or its text."""
    try:
        return date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError("must be a day, such as 2026-01-31") from None


def _one_of(names: Sequence[str], fits: Callable[[str], object], other: str) -> AfterValidator:
    """Accept some names, and another kind of text."""

    def check(text: str) -> str:
        if text not in names and not fits(text):
            raise ValueError(f"must be {', '.join(map(repr, names))}, or {other}")
        return text

    return AfterValidator(check)


def _is_limit(value: Any, words: tuple[Any, ...]) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
    if not is_number and not any(value is word or value == word != 0 for word in words):
        named = " or ".join({False: "false", "warn": "'warn'"}[word] for word in words)
        raise ValueError(f"must be a number of at least 0, or {named}")
    return value


Day = Annotated[str, BeforeValidator(_is_day)]
Pattern = Annotated[str, AfterValidator(is_pattern)]
Name = Annotated[str, AfterValidator(_is_name)]
Text = Annotated[str, Field(min_length=1)]
# A path or a name on a hub.
Source = Annotated[str, Field(min_length=1, max_length=1024), AfterValidator(_is_source)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32, description="random seed")]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Repeats = Annotated[int, Field(ge=1, le=10_000)]  # of everything: a larger number is a mistake
Threshold = Annotated[float | Literal[False], BeforeValidator(partial(_is_limit, words=(False,)))]  # false: none
Limit = Annotated[float | Literal["warn", False], BeforeValidator(partial(_is_limit, words=("warn", False)))]


# Options of vLLM and lm-evaluation-harness whose texts cannot name a class, a file or a host.
PLAIN_OPTIONS = {"quantization", "kv_cache_dtype", "dtype", "batch_size"}
PLAIN_OPTIONS |= {"gen_kwargs", "until", "system_instruction", "apply_chat_template"}


def code_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """List the options of another program by which it might run code: all texts that are not known to be harmless.

    >>> code_options({"dtype": "float16", "seed": 1, "worker_cls": "evil.Worker", "model_args": {"peft": "x"}})
    {'worker_cls': 'evil.Worker', 'model_args.peft': 'x'}
    """
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{inner}": one for inner, one in code_options(value).items()}
        elif name == "confirm_run_unsafe_code" or (
            isinstance(value, str | list) and name not in PLAIN_OPTIONS and (name, value) != ("model", "hf")
        ):
            found[name] = value
    return found


def split_revision(name: str) -> tuple[str, str | None]:
    """Split a hub name from the revision after `@`; a path is left unchanged.

    >>> split_revision("Qwen/Qwen3-4B@main"), split_revision("runs/mine/train/even@3f2a91c4")
    (('Qwen/Qwen3-4B', 'main'), ('runs/mine/train/even@3f2a91c4', None))
    """
    found = re.fullmatch(r"(\w[\w.-]*(?:/\w[\w.-]*)?)@([\w.-]+|refs/[\w/.-]+)", name)
    return (found[1], found[2]) if found else (name, None)


def slug(model: str) -> str:
    """Turn a directory or hub name into a folder name.

    >>> slug("Qwen/Qwen3-8B-Base"), slug("./my models/run 7/")
    ('Qwen3-8B-Base', 'run-7')
    """
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", last).strip("-.")[:100] or "model"


def replicate_of(policy: str) -> str:
    """Name the policy of which this is a replicate with another seed; the first is its own.

    >>> replicate_of("even~2"), replicate_of("effort~2@low"), replicate_of("even")
    ('even', 'effort@low', 'even')
    """
    return re.sub(r"~\d+", "", policy)


def benchmark_folder(benchmark: str) -> str:
    """Name a benchmark's folder.

    >>> benchmark_folder("aime-2024"), benchmark_folder("file:data/My set.jsonl")
    ('aime-2024', 'My-set')
    """
    return slug(benchmark.removeprefix("file:").removesuffix(".jsonl"))


def named_columns(template: str) -> set[str]:
    """List the columns that a template names in braces.

    >>> sorted(named_columns("{prompt} ({unit}) {{}}"))
    ['prompt', 'unit']
    """
    try:
        parts = [part for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise ValueError(f"{error}; double literal braces, such as \\boxed{{{{}}}}") from None
    if not all(re.fullmatch(r"\w+", name or "") and not spec and not how for _, name, spec, how in parts):
        raise ValueError("must have plain names in braces, such as {problem}; double literal braces")
    return {name for _, name, _, _ in parts if name}


Objective = Annotated[str, _one_of(OBJECTIVES, is_own_function, "your own function: 'my.py:loss'")]
EngineOrUrl = Annotated[str, _one_of(("hf", "vllm"), re.compile("https?://").match, "the URL of a vLLM server")]
_TEMPLATE = "a template with {problem} or another column in braces; double literal braces"
PromptFormat = Annotated[str, _one_of(FORMATS, named_columns, _TEMPLATE)]
