"""What the sections of a recipe are made of: checked names and numbers, choices, and the strictness of them all."""

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Engine = Literal["auto", "hf", "vllm"]
Decay = Literal["constant", "linear", "cosine"]
LoraBase = Literal["own", "nf4", "int8"]
OBJECTIVES = ("tilted", "reverse-kl", "reverse-kl-full", "direct-opd")
PromptFormat = Literal["plain", "dapo", "question-answer", "boxed", "template", "livecodebench"]
EvalFormat = Literal["plain", "question-answer", "boxed", "template"]
GraderKind = Literal["paper", "math-verify", "exact", "numeric", "choice", "regex", "code", "python"]


def _is_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+-]*", name) or ".." in name:
        raise ValueError("must be a plain name of letters, digits, '.', '_', '+', '-' (it becomes a folder)")
    return name


def is_own_function(text: str) -> bool:
    """Whether a text names a function of the user's own, such as my.py:grade."""
    return re.fullmatch(r".+\.py:\w+", text) is not None


def _is_objective(text: str) -> str:
    if text not in OBJECTIVES and not is_own_function(text):
        names = ", ".join(map(repr, OBJECTIVES))
        raise ValueError(f"must be one of {names}, or a function of your own: 'my.py:loss'")
    return text


Objective = Annotated[str, AfterValidator(_is_objective)]
Name = Annotated[str, AfterValidator(_is_name)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Count = Annotated[int, Field(ge=1)]
Threshold = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Literal[False]  # false: none


class Strict(BaseModel):
    """A frozen section that rejects unknown keys and converts no types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)


def slug(model: str) -> str:
    """Turn a directory or hub name into a folder name.

    >>> slug("Qwen/Qwen3-8B-Base"), slug("./my models/run 7/")
    ('Qwen3-8B-Base', 'run-7')
    """
    last = re.split(r"[/\\]", model.rstrip("/\\"))[-1]
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", last).strip("-.") or "model"


HARNESS = "lm-eval-"  # begins the folders of another harness's tasks, beside those of benchmarks


def benchmark_folder(benchmark: str) -> str:
    """Name a benchmark's folder.

    >>> benchmark_folder("aime-2024"), benchmark_folder("file:data/My set.jsonl")
    ('aime-2024', 'My-set')
    """
    return slug(benchmark.removeprefix("file:").removesuffix(".jsonl"))


def named_columns(template: str) -> set[str]:
    """List what a template names in braces.

    >>> sorted(named_columns("{prompt} ({unit}) {{}}"))
    ['prompt', 'unit']
    """
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"{error}; double literal braces, such as \\boxed{{{{}}}}") from None
    if not all(re.fullmatch(r"\w+", name) for name in names):
        raise ValueError("names a column in braces, such as {problem}; double literal braces")
    return names


def without_trust(data: Any) -> Any:
    """Leave out a key of earlier recipes: a recipe cannot trust itself, only a command can (--trust)."""
    return {key: value for key, value in data.items() if key != "trust"} if isinstance(data, Mapping) else data
