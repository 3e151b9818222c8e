"""A world on disk: one Hugging Face directory per model, problems as JSONL, and `world.json` that describes it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from lightning_weave.errors import InputError
from lightning_weave.store import whole_directory, write_atomic
from lightning_weave.world.measure import Figures
from lightning_weave.world.plan import Size
from lightning_weave.world.task import Exercise

REPORT = "world.json"
PROMPTS = "prompts.jsonl"
BENCHMARKS = "benchmarks"


@dataclass(frozen=True)
class WorldReport:
    """What was built, how, and the measured figures of its models."""

    command: str
    seed: int
    size: Size
    figures: dict[str, dict[str, Figures]]  # model -> benchmark
    sampling: dict[str, float]  # that the figures were measured with
    environment: dict[str, str]
    seconds: float  # of the run that finished it, without the work of earlier, killed runs


def shipped_world() -> Path:
    """Locate the world that comes with the package."""
    return Path(str(files("lightning_weave.world") / "shipped"))


def read_report(directory: Path) -> WorldReport | None:
    """Read the report of a finished build; None before that."""
    content = _read_json(directory / REPORT)
    if "figures" not in content:
        return None
    figures = {
        model: {benchmark: Figures(**values) for benchmark, values in benchmarks.items()}
        for model, benchmarks in content.pop("figures").items()
    }
    return WorldReport(**content, figures=figures)


def write_report(directory: Path, report: WorldReport) -> None:
    """Mark a build as finished."""
    _write(directory / REPORT, json.dumps(asdict(report), indent=1) + "\n")


def claim(directory: Path, seed: int, size: Size) -> None:
    """Reserve a directory for one build; only the same build may resume in it."""
    existing = _read_json(directory / REPORT)
    settings = {"seed": seed, "size": size}
    if existing and {key: existing.get(key) for key in settings} != settings:
        raise InputError(
            f"{directory} holds a world of seed {existing.get('seed')} and size {existing.get('size')}, "
            f"not of seed {seed} and size {size}. Choose another directory"
        )
    if not existing:
        if directory.exists() and any(directory.iterdir()):
            raise InputError(f"{directory} is not empty and holds no world. Choose another directory")
        _write(directory / REPORT, json.dumps(settings) + "\n")


def write_problems(path: Path, prefix: str, problems: Iterable[Exercise]) -> None:
    """Write problems with their answers, one per line."""
    rows = (
        {"id": f"{prefix}-{number}", "problem": problem.text, "answer": problem.answer}
        for number, problem in enumerate(problems, start=1)
    )
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def save_checkpoint(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Save a model in float16; the directory appears only when it is complete."""
    with whole_directory(directory) as unfinished:
        model.to(torch.float16).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _write(path: Path, text: str) -> None:
    write_atomic(path, text.encode())
